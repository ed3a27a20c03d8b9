"""Find where sentences begin, in text of any language and in Markdown.

    sentence_starts("Dr. Smith came. He left.")   # [0, 16]

    text → blocks (`_blocks`) → marks within each (`_END`) → those that end a sentence (`_is_end`)

A block is a paragraph, list item, heading, table row or fenced code, and begins a sentence. Within
paragraphs and list items, a sentence also begins after a mark that ends one. These are rules of our
own because no library splits Markdown; docs/development.md compares them with five libraries.

Place in the flow: text → **beginnings of sentences** → units and statements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_OPENING = r"\"'“‘„«‹»(\[*_~¿¡>「『（《【"
_CLOSING = r"\"'”’“‘»›«‹)\]*_~」』）》】"
_EMOJI = r"[\U0001F1E6-\U0001FAFF\u2600-\u26FF\u2705\u2728\u2764\uFE0F\u200D]"
_CJK = r"[\u3040-\u30FF\u3400-\u9FFF\uF900-\uFAFF]"
_SPACELESS = "。｡！？।॥۔؟։።፧፨။។៕᙮᠃᠉꓿"
"""Marks of other scripts, which end a sentence also without a space behind them."""

_END = re.compile(
    rf"""
      # Marks and closing quotes before a space. “. . .” is one mark.
    (?<![.!?…]) (?P<mark> \.(?:\ \.)+ | [.!?…]+) (?:\ ?» | [{_CLOSING}])*
      # A citation or emoji behind the mark belongs to the sentence before.
      (?:\ ?\[\d+(?:[,–-]\ ?\d+)*\] | \ ?【[^】\n]{{1,40}}】 | [¹²³⁰⁴-⁹])* (?:\ ?{_EMOJI})*
      (?: \s+ | (?<=[!?]) (?={_CJK}) )
      # Marks of other scripts; in “３．５” there is none.
    | (?:[{_SPACELESS}] | ．(?!\d))+ (?P<quoted>[\"'”’»)\]*_~」』）》】]*) \s*
      # Emoji in place of a mark.
    | (?<=\w\w) \ ?{_EMOJI}+ \s+ (?=[^\W\d_])
      # A forgotten space: “the end.Next comes”.
    | (?<=[a-z][a-z]|\d\d) (?P<joined>[.!?]) (?=[A-Z][a-z]*(?:['’][a-z]+)?(?:[\s,] | [.!?]$))
    """,
    re.X | re.M,
)
"""A mark that may end a sentence, up to where the next one would begin."""

# What stands around such a mark.
_NEXT_WORD = re.compile(rf"[{_OPENING}]*(?P<word>\w*)(?P<behind>.?)", re.S)
_LETTER_AHEAD = re.compile(r"[^\w\n]*[^\W_]")
_REMARK = re.compile(r"\([^()\n]{0,200}\)[.,;:]")
"""“(Smith, 2020).” cites for the sentence before."""

_SPEAKER = re.compile(r"[とって、，,]|[^，。！？]{0,3}[说說道问問喊答]")
"""“he said”, behind a quotation in Chinese or Japanese."""

_MARKER_ALONE = re.compile(r"\W*(?:\d{1,3}|[^\W\d_])?\W*")
"""“1.” or “(a)”."""

_DOTTED = re.compile(r"(?:[^\W\d_]{1,2}\.)*[^\W\d_]|(?:[^\W\d_]{1,2}\.)+[^\W\d_]{2}")
"""Initials and such, without the last dot: “J”, “U.S”, “Ph.D”."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Abbreviations in lower case, without their last dot, by what may follow them.
_MONTHS = _words("jan feb mar apr jun jul aug sep sept oct nov dec")
_ENDS_NONE = _words(
    "adv approx bzw ca cf d.h e.g ggf evtl hrsg i.e p.ej viz vgl vs z.b т.е т.д ул им डॉ"
)
"""Their dots end no sentence."""

_TITLES = _words(
    "adj adm bros bijv capt cmdr col dept dhr dipl dott dr dra drs ed eds est gen gov hon hr lt "
    "maj mevr mgr mlle mme mmes mr mrs ms mt mx prof prop rep rev sen sgt sig sra srta st"
)
"""Their dots end no sentence: a name follows. In lower case, where some are words ("he did one
rep."), they are as `_ENDS_BEFORE_BEGINNER`."""

_ENDS_BEFORE_BEGINNER = (
    _words(
        "al assn ave blvd bldg co corp ct esq etc inc jr llc ltd ph.d rd sr usw "
        "mon tue tues wed thu thur thurs fri"
    )
    | _MONTHS
)
"""Their dots end a sentence if the next word is one of `_BEGINNERS`."""

_ENDS_NONE_BEFORE_NUMBER = (
    _words("abs art ch chap eq fig figs n no nos nr num p par para pp pt sec seq tab vol vols")
    | _MONTHS
)
"""Their dots end no sentence before a number: “Fig. 3”, “Oct. 5”. “He said no.” ends one."""

_GERMAN_MONTHS = _words(
    "Januar Februar März April Mai Juni Juli August September Oktober November Dezember"
)
"""In German, “3. Oktober” has an ordinal number."""

_BEGINNERS = _words(
    "A After All Also Although An And Are As At Because Before Both But By Can Could Did Do Does "
    "Each For From Had Has Have He Her Here His How However I If In Is It Its Many Most My No "
    "Nobody Not Now Of On Once Or Our She Should Since So Some Such That The Their Then There "
    "These They This Those To Until Was We Were What When Where While Who Why With Would Yes You "
    "Your"
)
"""Words that often begin a sentence and are rarely part of a name."""

# How blocks begin.
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
    # Marks inside of inline code end no sentence. The length stays, so that indices hold.
    masked = re.sub(r"(`{1,3})(?!`)[^\n]+?\1", lambda code: "`" * len(code[0]), text)
    # In text without capitals, a small letter does not say that a sentence goes on.
    has_no_case = text.lower() == text
    starts: list[int] = []
    for block in _blocks(text):
        starts.append(block.start)
        for match in _END.finditer(masked, block.words_start, block.end):
            is_inside = match.end() < block.end
            if is_inside and _is_end(masked, match, block.words_start, starts[-1], has_no_case):
                starts.append(match.end())
    return starts


def _is_end(
    text: str, match: re.Match[str], words_start: int, sentence_start: int, has_no_case: bool
) -> bool:
    """Return whether a mark ends a sentence, by what stands around it.

    `words_start`: where the words of the block begin, behind the marker of a list item;
    `sentence_start`: where the sentence begins that the mark may end."""
    next_start = match.end()
    following = _NEXT_WORD.match(text, next_start)
    assert following is not None
    next_word = following["word"]
    if not next_word and not _LETTER_AHEAD.match(text, next_start):
        return False  # no words follow on this line
    # “1.” of a list that `_blocks` did not take for one would be a sentence by itself.
    is_short = next_start - sentence_start < _LONGEST_MARKER
    if is_short and _MARKER_ALONE.fullmatch(text, sentence_start, next_start):
        return False
    if _REMARK.match(text, next_start):
        return False

    word = _word_before(text, words_start, match.start())
    if match["joined"]:
        # “the end.Next comes”, but not “Node.Js” or “A.Py”.
        before_joined = r"[a-z]+|\d+" if match["joined"] == "." else r"\w+"
        return re.fullmatch(before_joined, word) is not None
    mark = match["mark"]
    if mark is None:
        return _other_mark_is_end(text, match, words_start)

    continues_in_small_letters = next_word[:1].islower() and not has_no_case
    # A small letter goes on with the sentence, unless a full stop ended the line before.
    is_at_line_end = mark == "." and "\n" in match[0]
    if continues_in_small_letters and not is_at_line_end:
        return False
    if mark != ".":
        return True
    return _dot_is_full_stop(word, next_word, following["behind"])


_LONGEST_MARKER = 12
"""Characters of a marker of a list, with spaces and stars around it."""


def _other_mark_is_end(text: str, match: re.Match[str], words_start: int) -> bool:
    """Return whether a mark of another script, or an emoji, ends a sentence: not within a title
    (《…》), nor where “he said” follows a quotation."""
    next_start = match.end()
    recent = text[max(words_start, next_start - 80) : next_start]
    is_in_title = recent.rfind("《") > recent.rfind("》")
    is_quoted_speech = bool(match["quoted"]) and _SPEAKER.match(text, next_start) is not None
    return not is_in_title and not is_quoted_speech


def _word_before(text: str, words_start: int, mark_start: int) -> str:
    """Return the word that ends at a mark, without opening quotes and brackets."""
    words = text[max(words_start, mark_start - 40) : mark_start].split()
    return re.sub(rf"^[{_OPENING}]+", "", words[-1]) if words else ""


def _dot_is_full_stop(word: str, next_word: str, behind_next: str) -> bool:
    """Return whether the dot behind a word ends a sentence, and not just an abbreviation.
    `behind_next`: the character behind the next word."""
    abbreviation = word.lower()
    if abbreviation in _ENDS_NONE:
        return False
    if word.isdecimal() and len(word) < 3 and next_word in _GERMAN_MONTHS:
        return False
    if abbreviation in _ENDS_NONE_BEFORE_NUMBER and re.match(r"\d|[IVXLC]{2,}\b", next_word):
        return False
    if abbreviation in _TITLES and not word.islower():
        return False
    if abbreviation in _TITLES | _ENDS_BEFORE_BEGINNER or _DOTTED.fullmatch(word):
        # “J. A. Smith”: the A begins no sentence.
        return next_word in _BEGINNERS and behind_next != "."
    return True


def _item_marker(line: str, may_be_number: bool) -> re.Match[str] | None:
    """Return the bullet or number of a list item at the beginning of a line."""
    bullet = _BULLET.match(line)
    if bullet is not None or not may_be_number:
        return bullet
    return _NUMBER.match(line)


@dataclass(frozen=True)
class _Block:
    """A stretch of text that begins a sentence, in characters."""

    start: int
    words_start: int
    """Where marks that end sentences are looked for: behind the marker of a list item. At the end
    of the block, there is one sentence."""

    end: int


def _blocks(text: str) -> Iterator[_Block]:
    """Yield the blocks of a text, in order."""
    # The block that the lines so far belong to, while `is_open`.
    block_start = 0
    words_start = 0
    is_open = False  # whether it may go on in the next line
    is_item = False  # whether it is a list item
    fence = ""  # the beginning of the line that closes fenced code, inside of it
    line_above = ""
    line_end = 0
    for line in text.splitlines(keepends=True):
        line_start = line_end
        line_end += len(line)
        content = line.strip()
        if fence:
            if content.startswith(fence):
                yield _Block(block_start, line_end, line_end)  # no sentence begins inside of code
                is_open = False
                fence = ""
            continue
        if not content or _RULE.fullmatch(content):
            if is_open:
                yield _Block(block_start, words_start, line_start)
            is_open = False
            line_above = content
            continue
        begins_quote = content.startswith(">") and not line_above.startswith(">")
        begins_block = begins_quote or not is_open
        is_whole = False  # whether the line is a block by itself
        # A number begins an item only where one may: not in “It opened in\n1921. It closed.”
        may_be_number = not is_open or is_item or line_above[-1:] in ".:;!?…。：*"
        marker = _item_marker(line, may_be_number)
        if content.startswith(_FENCE):
            fence = content[:3]
            begins_block = True
        elif _HEADING_OR_ROW.match(line):
            is_whole = True
            begins_block = True
        if begins_block or marker:
            if is_open:
                yield _Block(block_start, words_start, line_start)
            block_start = line_start + len(line) - len(line.lstrip())
            words_start = line_start + marker.end() if marker else line_start
            is_item = marker is not None
            is_open = not is_whole
            if is_whole:
                yield _Block(block_start, line_end, line_end)
        line_above = content
    if is_open:
        yield _Block(block_start, line_end if fence else words_start, line_end)
