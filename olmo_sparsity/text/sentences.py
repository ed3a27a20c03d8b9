"""Find where sentences begin, in text of any language and in Markdown.

    sentence_starts("Dr. Smith came. He left.")   # [0, 16]

    text → blocks (text_blocks.py) → marks within each (`END`) → those that end a sentence

A block is a paragraph, list item, heading, table row or fenced code, and begins a sentence. Within
paragraphs and list items, a sentence also begins after a mark that ends one. Whether a mark does is
decided by the text around it (`_is_end`), and for a dot also by the word before it
(abbreviations.py). These are rules of our own because no library splits Markdown;
docs/development.md compares them with five libraries.

Place in the flow: text → **beginnings of sentences** → units and statements.
"""

from __future__ import annotations

import re

from olmo_sparsity.text.abbreviations import dot_is_full_stop
from olmo_sparsity.text.text_blocks import split_blocks

# --- marks that may end a sentence ----------------------------------------------------------------

# Contents of character classes of regular expressions.
OPENING = r"\"'“‘„«‹»(\[*_~¿¡>「『（《【"
CLOSING = r"\"'”’“‘»›«‹)\]*_~」』）》】"

EMOJI = r"[\U0001F1E6-\U0001FAFF\u2600-\u26FF\u2705\u2728\u2764\uFE0F\u200D]"
CJK = r"[\u3040-\u30FF\u3400-\u9FFF\uF900-\uFAFF]"
"""Letters of Chinese and Japanese, which have no space between sentences."""

SPACELESS = "。｡！？।॥۔؟։።፧፨။។៕᙮᠃᠉꓿"
"""Marks of other scripts, which end a sentence also without a space after them."""

# Regular expressions below are verbose: white space in them is ignored, and `\ ` is a space.

CITATION = r"(?: \ ?\[\d+(?:[,–-]\ ?\d+)*\] | \ ?【[^】\n]{1,40}】 | [¹²³⁰⁴-⁹] )"
"""“[1, 2]”, “【3】”, “²”: after a mark, it belongs to the sentence before."""

MARK_BEFORE_SPACE = rf"""
    (?<![.!?…]) (?P<mark> \.(?:\ \.)+ | [.!?…]+)  # “. . .” is one mark.
    (?:\ ?» | [{CLOSING}])*
    {CITATION}* (?:\ ?{EMOJI})*
    (?: \s+ | (?<=[!?]) (?={CJK}) )
"""
MARK_OF_ANOTHER_SCRIPT = rf"""
    (?:[{SPACELESS}] | ．(?!\d))+  # In “３．５” there is none.
    (?P<quoted>[\"'”’»)\]*_~」』）》】]*) \s*
"""
EMOJI_AS_MARK = rf"(?<=\w\w) \ ?{EMOJI}+ \s+ (?=[^\W\d_])"
FORGOTTEN_SPACE = r"""  # “the end.Next comes”
    (?<=[a-z][a-z]|\d\d) (?P<joined>[.!?]) (?=[A-Z][a-z]*(?:['’][a-z]+)?(?:[\s,] | [.!?]$))
"""

END = re.compile(
    "|".join((MARK_BEFORE_SPACE, MARK_OF_ANOTHER_SCRIPT, EMOJI_AS_MARK, FORGOTTEN_SPACE)),
    re.VERBOSE | re.MULTILINE,
)
"""A mark that may end a sentence, up to where the next one would begin. Each kind of mark sets
another group: `mark`, `quoted` or `joined`. An emoji sets none of them."""

# --- what stands around a mark --------------------------------------------------------------------

NEXT_WORD = re.compile(rf"[{OPENING}]*(?P<word>\w*)(?P<after>.?)", re.DOTALL)
"""The word after a mark, without opening quotes, and the character after it."""

LETTER_AHEAD = re.compile(r"[^\w\n]*[^\W_]")
"""A letter or digit later in the line."""

CITING_REMARK = re.compile(r"\([^()\n]{0,200}\)[.,;:]")
"""“(Smith, 2020).”, which cites for the sentence before."""

SPEAKER = re.compile(r"[とって、，,]|[^，。！？]{0,3}[说說道问問喊答]")
"""“he said”, after a quotation in Chinese or Japanese."""

MARKER_ALONE = re.compile(r"\W*(?:\d{1,3}|[^\W\d_])?\W*")
"""“1.” or “(a)”."""

LONGEST_MARKER = 12
"""The largest number of characters of a list's marker, with spaces and stars around it.
`MARKER_ALONE` is tried on no longer text, as long runs of marks would take quadratic time."""

LONGEST_WORD = 40
"""The number of characters before a mark in which the last word is looked for."""

LONGEST_TITLE = 80
"""The number of characters before a mark in which “《”, the beginning of a title, is looked for."""


def sentence_starts(text: str) -> list[int]:
    """Return the index of each sentence's first character, which is not white space."""
    # Marks inside of inline code end no sentence. The length stays, so that indices hold.
    masked = re.sub(r"(`{1,3})(?!`)[^\n]+?\1", lambda code: "`" * len(code[0]), text)
    # In text without capitals, a small letter does not say that a sentence goes on.
    has_no_case = text.lower() == text
    starts: list[int] = []
    for block in split_blocks(text):
        starts.append(block.start)
        for mark in END.finditer(masked, block.words_start, block.end):
            is_inside = mark.end() < block.end
            if is_inside and _is_end(masked, mark, block.words_start, starts[-1], has_no_case):
                starts.append(mark.end())
    return starts


def _is_end(
    text: str, match: re.Match[str], words_start: int, sentence_start: int, has_no_case: bool
) -> bool:
    """Return whether a mark ends a sentence, judged by the text around it.

    Args:
        match: The mark, as `END` matches it.
        words_start: Where the words of the block begin, after the marker of a list item.
        sentence_start: Where the sentence begins that the mark may end.
        has_no_case: Whether the text has no capitals.
    """
    next_start = match.end()
    following = NEXT_WORD.match(text, next_start)
    assert following is not None  # It also matches nothing.
    next_word = following["word"]
    has_words_ahead = next_word or LETTER_AHEAD.match(text, next_start)
    if not has_words_ahead:
        return False
    if _is_marker_alone(text, sentence_start, next_start) or CITING_REMARK.match(text, next_start):
        return False

    word_before = _word_before(text, words_start, match.start())
    if match["joined"]:
        return _joined_mark_is_end(match["joined"], word_before)
    mark = match["mark"]
    if mark is None:
        return _other_mark_is_end(text, match, words_start)

    # A small letter goes on with the sentence, unless a full stop ended the line before.
    continues_in_small_letters = next_word[:1].islower() and not has_no_case
    is_at_line_end = mark == "." and "\n" in match[0]
    if continues_in_small_letters and not is_at_line_end:
        return False
    if mark != ".":
        return True
    return dot_is_full_stop(word_before, next_word, following["after"])


def _is_marker_alone(text: str, sentence_start: int, next_start: int) -> bool:
    """Return whether the sentence would be a marker such as “1.” alone, in a list that
    `split_blocks` did not take for one."""
    is_short = next_start - sentence_start < LONGEST_MARKER
    return is_short and MARKER_ALONE.fullmatch(text, sentence_start, next_start) is not None


def _joined_mark_is_end(mark: str, word_before: str) -> bool:
    """Return whether a mark without a space after it ends a sentence: in “the end.Next comes”, but
    not in “Node.Js” or “A.Py”."""
    sentence_end = r"[a-z]+|\d+" if mark == "." else r"\w+"
    return re.fullmatch(sentence_end, word_before) is not None


def _other_mark_is_end(text: str, match: re.Match[str], words_start: int) -> bool:
    """Return whether a mark of another script, or an emoji, ends a sentence: not within a title
    (《…》), nor where “he said” follows a quotation."""
    next_start = match.end()
    text_before = text[max(words_start, next_start - LONGEST_TITLE) : next_start]
    is_in_title = text_before.rfind("《") > text_before.rfind("》")
    is_quoted_speech = bool(match["quoted"]) and SPEAKER.match(text, next_start) is not None
    return not is_in_title and not is_quoted_speech


def _word_before(text: str, words_start: int, mark_start: int) -> str:
    """Return the word that ends at a mark, without opening quotes and brackets."""
    words = text[max(words_start, mark_start - LONGEST_WORD) : mark_start].split()
    return re.sub(rf"^[{OPENING}]+", "", words[-1]) if words else ""
