"""Find where sentences begin, in text of any language and in Markdown.

Place in the flow: text → **beginnings of sentences** → units and statements.

A block is a paragraph, list item, heading, table row or fenced code, and begins a sentence. Within
paragraphs and list items, a sentence also begins after a mark that ends one. These are rules of our
own because no library splits Markdown; docs/development.md compares them with five libraries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_OPENING = r"\"'“‘„«‹»(\[*_~¿¡>「『（《【"
_CLOSING = r"\"'”’“‘»›«‹)\]*_~」』）》】"
_EMOJI = r"[\U0001F1E6-\U0001FAFF\u2600-\u26FF\u2705\u2728\u2764\uFE0F\u200D]"
_CJK = r"[\u3040-\u30FF\u3400-\u9FFF\uF900-\uFAFF]"
_SPACELESS = "。｡！？।॥۔؟։።፧፨။។៕᙮᠃᠉꓿"
"""Marks of other scripts, which end a sentence also without a space behind them."""

_END = re.compile(
    rf"""
    (?<![.!?…]) (?P<mark> \.(?:\ \.)+ | [.!?…]+) (?:\ ?» | [{_CLOSING}])*
      # A citation or emoji behind the mark belongs to the sentence before.
      (?:\ ?\[\d+(?:[,–-]\ ?\d+)*\] | \ ?【[^】\n]{{1,40}}】 | [¹²³⁰⁴-⁹])* (?:\ ?{_EMOJI})*
      (?: \s+ | (?<=[!?]) (?={_CJK}) )
    | (?:[{_SPACELESS}] | ．(?!\d))+ (?P<quoted>[\"'”’»)\]*_~」』）》】]*) \s*
    | (?<=\w\w) \ ?{_EMOJI}+ \s+ (?=[^\W\d_])
    | (?<=[a-z][a-z]|\d\d) (?P<joined>[.!?]) (?=[A-Z][a-z]*(?:['’][a-z]+)?(?:[\s,] | [.!?]$))
    """,
    re.X | re.M,
)
"""A mark that may end a sentence, up to where the next one would begin."""

_NEXT_WORD = re.compile(rf"[{_OPENING}]*(?P<word>\w*)(?P<behind>.?)", re.S)
_LETTER_AHEAD = re.compile(r"[^\w\n]*[^\W_]")
_REMARK = re.compile(r"\([^()\n]{0,200}\)[.,;:]")  # (Smith, 2020). cites for the sentence before
_SPEAKER = re.compile(r"[とって、，,]|[^，。！？]{0,3}[说說道问問喊答]")
_MARKER_ALONE = re.compile(r"\W*(?:\d{1,3}|[^\W\d_])?\W*")
_DOTTED = re.compile(r"(?:[^\W\d_]{1,2}\.)*[^\W\d_]|(?:[^\W\d_]{1,2}\.)+[^\W\d_]{2}")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Abbreviations in lower case, without their last dot.
_MONTHS = _words("jan feb mar apr jun jul aug sep sept oct nov dec")
_ENDS_NONE = _words(
    "adv approx bzw ca cf d.h e.g ggf evtl hrsg i.e p.ej viz vgl vs z.b т.е т.д ул им डॉ"
)
_TITLES = _words(
    "adj adm bros bijv capt cmdr col dept dhr dipl dott dr dra drs ed eds est gen gov hon hr lt "
    "maj mevr mgr mlle mme mmes mr mrs ms mt mx prof prop rep rev sen sgt sig sra srta st"
)
"""They end no sentence, or in lower case, where some are words, as the next ones."""

_ENDS_BEFORE_BEGINNER = (
    _words(
        "al assn ave blvd bldg co corp ct esq etc inc jr llc ltd ph.d rd sr usw "
        "mon tue tues wed thu thur thurs fri"
    )
    | _MONTHS
)
_ENDS_NONE_BEFORE_NUMBER = (
    _words("abs art ch chap eq fig figs n no nos nr num p par para pp pt sec seq tab vol vols")
    | _MONTHS
)
_GERMAN_MONTHS = _words(
    "Januar Februar März April Mai Juni Juli August September Oktober November Dezember"
)
_BEGINNERS = _words(
    "A After All Also Although An And Are As At Because Before Both But By Can Could Did Do Does "
    "Each For From Had Has Have He Her Here His How However I If In Is It Its Many Most My No "
    "Nobody Not Now Of On Once Or Our She Should Since So Some Such That The Their Then There "
    "These They This Those To Until Was We Were What When Where While Who Why With Would Yes You "
    "Your"
)
"""Words that often begin a sentence and are rarely part of a name."""

_FENCE = ("```", "~~~")
_BULLET = re.compile(r"[ \t>]*(?:[-*+•‣◦▪●○·–—]|\[[ xX]\])[ \t]+(?=\S)")
_NUMBER = re.compile(
    r"[ \t>]*(?:\*\*)?(?:\(?\d{1,3}[.)]{1,2}|\(?(?:[A-Za-z]|[ivxIVX]{1,4})\)|\[\d+\]:?)(?:\*\*)?"
    r"[ \t]+(?=\S)"
)
_HEADING_OR_ROW = re.compile(r"\s*(?:#{1,6}[ \t]|\|.*\|\s*$|(?:\*\*|__)[^*_]+(?:\*\*|__):?\s*$)")
_RULE = re.compile(r"[-=_*~]{3,}|(?=.*-)(?=.*\|)[ \t:|+-]+")
"""A line below a heading or the head of a table, or between sections."""


def sentence_starts(text: str) -> list[int]:
    """Return where each sentence begins: the index of its first character, no white space."""
    masked = re.sub(r"(`{1,3})(?!`)[^\n]+?\1", lambda code: "`" * len(code[0]), text)
    has_no_case, starts = text.lower() == text, list[int]()
    for first, inside, end in _blocks(text):
        starts.append(first)
        for match in _END.finditer(masked, inside, end):
            at = match.end()
            if at < end and _is_end(masked, match, inside, starts[-1], has_no_case):
                starts.append(at)
    return starts


def _is_end(text: str, match: re.Match[str], inside: int, last: int, has_no_case: bool) -> bool:
    """`inside`: where the block's words begin; `last`: where the sentence does."""
    at, mark = match.end(), match["mark"]
    following = _NEXT_WORD.match(text, at)
    assert following is not None
    word = following["word"]
    if not word and not _LETTER_AHEAD.match(text, at):
        return False
    if at - last < 12 and _MARKER_ALONE.fullmatch(text, last, at):
        return False
    if _REMARK.match(text, at):
        return False
    head = text[max(inside, match.start() - 40) : match.start()].split()
    before = re.sub(rf"^[{_OPENING}]+", "", head[-1]) if head else ""
    if match["joined"]:
        return re.fullmatch(r"[a-z]+|\d+" if match["joined"] == "." else r"\w+", before) is not None
    if mark is None:
        near = text[max(inside, at - 80) : at]
        in_title = near.rfind("《") > near.rfind("》")
        return not in_title and not (match["quoted"] and _SPEAKER.match(text, at))
    goes_on = word[:1].islower() and not has_no_case
    if goes_on and (mark != "." or "\n" not in match[0]):
        return False
    if mark != ".":
        return True
    short = before.lower()
    if short in _ENDS_NONE or (before.isdecimal() and len(before) < 3 and word in _GERMAN_MONTHS):
        return False
    if short in _ENDS_NONE_BEFORE_NUMBER and re.match(r"\d|[IVXLC]{2,}\b", word):
        return False
    if short in _TITLES and not before.islower():
        return False
    if short in _TITLES | _ENDS_BEFORE_BEGINNER or _DOTTED.fullmatch(before):
        return word in _BEGINNERS and following["behind"] != "."
    return True


def _blocks(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield the first character of each block, where its sentences are looked for, and its end."""
    first = inside = at = 0
    is_open, is_item, fence, above = False, False, "", ""
    for line in text.splitlines(keepends=True):
        begin, at, bare = at, at + len(line), line.strip()
        if fence:
            if bare.startswith(fence):
                yield first, at, at
                is_open, fence = False, ""
            continue
        whole, opens = False, not is_open or (bare.startswith(">") and not above.startswith(">"))
        marker = _BULLET.match(line)
        if marker is None and (not is_open or is_item or above[-1:] in ".:;!?…。：*"):
            marker = _NUMBER.match(line)
        if not bare or _RULE.fullmatch(bare):
            if is_open:
                yield first, inside, begin
            is_open, above = False, bare
            continue
        if bare.startswith(_FENCE):
            fence, opens = bare[:3], True
        elif _HEADING_OR_ROW.match(line):
            whole = opens = True
        if opens or marker:
            if is_open:
                yield first, inside, begin
            first, is_open = begin + len(line) - len(line.lstrip()), not whole
            inside, is_item = begin + marker.end() if marker else begin, marker is not None
            if whole:
                yield first, at, at
        above = bare
    if is_open:
        yield first, at if fence else inside, at
