"""Divide a text into blocks, each of which begins a sentence: paragraphs and Markdown.

    We need:            a paragraph
    - bread             a list item
    - two eggs          another
                        (an empty line, or a rule such as ---, ends a block)
    ## Later            a heading; a row of a table, or a line in bold, is a block, too
    ```                 fenced code: one block, in which no sentence begins
    x = a.b()
    ```

Place in the flow: text → **blocks** (`split_blocks`) → sentences.py, which finds sentences within
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

FENCES = ("```", "~~~")
"""How fenced code begins. It ends with a line that begins in the same way."""

BULLET = re.compile(r"[ \t>]*(?:[-*+•‣◦▪●○·–—]|\[[ xX]\])[ \t]+(?=\S)")
"""“- ”, “* ”, “[x] ” at the beginning of a list item."""

NUMBER = re.compile(
    r"[ \t>]*(?:\*\*)?(?:\(?\d{1,3}[.)]{1,2}|\(?(?:[A-Za-z]|[ivxIVX]{1,4})\)|\[\d+\]:?)(?:\*\*)?"
    r"[ \t]+(?=\S)"
)
"""“1. ”, “(2) ”, “a) ”, “iv) ”, “[3]: ” at the beginning of a list item."""

HEADING_OR_ROW = re.compile(r"\s*(?:#{1,6}[ \t]|\|.*\|\s*$|(?:\*\*|__)[^*_]+(?:\*\*|__):?\s*$)")
"""A line that is a block by itself: a heading, the row of a table, a line in bold."""

RULE = re.compile(r"[-=_*~]{3,}|(?=.*-)(?=.*\|)[ \t:|+-]+")
"""A line below a heading or the head of a table, or between sections."""

BEFORE_NUMBERED_ITEM = ".:;!?…。：*"
"""Ends of a line after which a number may begin a list item. After other lines it is a number of
the sentence: “It opened in\\n1921. It closed.”"""


@dataclass(frozen=True)
class Block:
    """A stretch of text that begins a sentence. Its bounds are indices of characters."""

    start: int
    words_start: int
    """From here on, marks that end sentences are looked for: after the marker of a list item. Equal
    to `end` for a block that is one sentence, such as a heading."""

    end: int


class _LineKind(Enum):
    """What a line is, whatever is around it."""

    GAP = auto()
    """An empty line or a rule, which ends a block and is in none."""

    CODE = auto()
    """The first line of fenced code."""

    WHOLE_BLOCK = auto()
    """A heading, the row of a table, or a line in bold."""

    TEXT = auto()
    """A line of a paragraph or of a list item, which may begin it or go on with it."""


class _Line(NamedTuple):
    """A line of a text. Its bounds are indices of characters of the text."""

    start: int
    raw: str
    """The line with its white space and its line break."""

    content: str
    """The line without white space around it."""

    @property
    def content_start(self) -> int:
        """Return the index at which the content begins."""
        return self.start + len(self.raw) - len(self.raw.lstrip())

    @property
    def end(self) -> int:
        return self.start + len(self.raw)

    @property
    def is_quote(self) -> bool:
        return self.content.startswith(">")


@dataclass(frozen=True)
class _OpenBlock:
    """A paragraph or a list item that may go on in the next line."""

    start: int
    words_start: int
    is_item: bool

    def ended_at(self, end: int) -> Block:
        return Block(self.start, self.words_start, end)


def split_blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a text, in order."""
    lines = _lines(text)
    open_block: _OpenBlock | None = None
    line_above = _Line(0, "", "")
    for line in lines:
        kind = _kind_of(line)
        marker = None
        if kind is _LineKind.TEXT:
            marker = _item_marker(line.raw, _may_be_number(open_block, line_above.content))
            begins_quote = line.is_quote and not line_above.is_quote
            if open_block is not None and marker is None and not begins_quote:
                # The next line of the open block: nothing begins or ends here.
                line_above = line
                continue
        line_above = line

        # Any other line ends the block above it …
        if open_block is not None:
            yield open_block.ended_at(line.start)
            open_block = None
        # … and is a block, begins one, or is a gap between two.
        if kind is _LineKind.CODE:
            end = _end_of_code(line, lines)  # takes its lines from the loop
            yield Block(line.content_start, words_start=end, end=end)
        elif kind is _LineKind.WHOLE_BLOCK:
            yield Block(line.content_start, words_start=line.end, end=line.end)
        elif kind is _LineKind.TEXT:
            words_start = line.start + marker.end() if marker else line.start
            open_block = _OpenBlock(line.content_start, words_start, is_item=marker is not None)
    if open_block is not None:
        yield open_block.ended_at(len(text))


def _lines(text: str) -> Iterator[_Line]:
    """Yield the lines of a text."""
    start = 0
    for raw in text.splitlines(keepends=True):
        yield _Line(start, raw, raw.strip())
        start += len(raw)


def _kind_of(line: _Line) -> _LineKind:
    """Return what a line is, whatever is around it."""
    # In this order: `|---|---|`, below the head of a table, is a rule, and looks like a row.
    if not line.content or RULE.fullmatch(line.content) is not None:
        return _LineKind.GAP
    if line.content.startswith(FENCES):
        return _LineKind.CODE
    if HEADING_OR_ROW.match(line.raw) is not None:
        return _LineKind.WHOLE_BLOCK
    return _LineKind.TEXT


def _end_of_code(first_line: _Line, lines: Iterator[_Line]) -> int:
    """Take the lines of fenced code from `lines`, and return the index at which it ends. Code that
    is not closed goes on to the end of the text."""
    fence = first_line.content[:3]
    end = first_line.end
    for line in lines:
        end = line.end
        if line.content.startswith(fence):
            break
    return end


def _may_be_number(open_block: _OpenBlock | None, content_above: str) -> bool:
    """Return whether a number at the beginning of a line may begin a list item. Within a paragraph
    it may do so only after the end of a sentence: “It opened in\\n1921.” has no list."""
    if open_block is None or open_block.is_item:
        return True
    return content_above[-1:] in BEFORE_NUMBERED_ITEM


def _item_marker(line: str, may_be_number: bool) -> re.Match[str] | None:
    """Return the match of the bullet or number at the beginning of a line; None if the line does
    not begin a list item."""
    bullet = BULLET.match(line)
    if bullet is not None or not may_be_number:
        return bullet
    return NUMBER.match(line)
