r"""Find the passages that a message of the user holds, by a tag or a regular expression.

Place in the flow: the last message of the user → **`split_at_passages`** → messages.py, which makes
the passages sources. What is between passages *stays in view*: no decoy ever replaces it. With the
tag `document`, and with the regular expression `\[\d+\] (?P<name>.+)\n(?P<text>.+)`, these messages
have one passage:

    <document title="faq.md">Tickets cost 4 euros.</document>     [1] faq.md
                                                                  Tickets cost 4 euros.
    What do tickets cost?                                         What do tickets cost?

    stays in view   <document title="faq.md">                     [1] faq.md
    Passage         Tickets cost 4 euros.                         Tickets cost 4 euros.
    stays in view   </document> What do tickets cost?             What do tickets cost?

`warnings_about` warns of expressions that match more than a user usually means. A tag or an
expression is called a *marker* here; users pass it as `passages`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import shorten
from typing import NamedTuple

from olmo_sparsity.base.errors import ConfigError, printable

NAME_ATTRIBUTES = ("title", "name", "source", "id", "index")
"""Attributes of a passage's tag that name it. If a tag has several, the first of these does: a
title says more than a number."""

ATTRIBUTE = re.compile(
    r"""(?<![\w:.-])(?P<key>[\w:.-]+)\s*=\s*(?:"(?P<a>[^"<]*)"|'(?P<b>[^'<]*)')"""
)
"""An attribute of a tag. Its value ends at the quotation mark with which it began, so that it may
hold the other one: `title="Bob's notes"`."""

ATTRIBUTES = r"""(?:=\s*"[^"<]*"|=\s*'[^'<]*'|[^>])*+"""
"""All that stands between the name of a tag and the `>` at its end. A value in quotation marks may
hold a `>`: `title="a > b"`."""

UNNAMED_PASSAGE = "passage"
"""What a passage without a name is called, with its number."""

NAMED_GROUPS = {"name", "text"}
"""The groups that have a meaning in a user's regular expression."""

QUESTION_MARKS = ("?", "？", "؟")


class Passage(NamedTuple):
    """A text of a message that is a source."""

    text: str
    own_name: str
    """The name that the message gives it; empty if it gives none."""

    number: int
    """The number of the passage in its message, from 1. Passages with a name count, too."""

    @property
    def name(self) -> str:
        return self.own_name or f"{UNNAMED_PASSAGE} {self.number}"


MessagePart = Passage | str
"""A passage, or a text that stays in view."""


# --- splitting ------------------------------------------------------------------------------------


def split_at_passages(texts: Sequence[str], marker: str) -> list[MessagePart]:
    """Return the passages of a message, and the texts between them, in order.

    Args:
        texts: The texts of the message, one for each block of its content.
        marker: A tag, or a regular expression. Of the latter, the group `name` is the name of a
            passage, and the group `text` its text. Without a group `text` it is the first group
            without a name, and without any such group all that matches.
    """
    pattern = _compile(marker)
    text_group = _text_group(pattern)
    parts: list[MessagePart] = []
    num_passages = 0
    for text in texts:
        last_end = 0
        for match in pattern.finditer(text):
            if not (match[text_group] or "").strip():
                continue  # an empty passage stays in view, with what is around it
            num_passages += 1
            first, end = match.span(text_group)
            # What precedes the text of the passage stays in view, with the opening tag.
            parts.append(text[last_end:first].strip())
            parts.append(Passage(match[text_group].strip(), _name_in(match), num_passages))
            last_end = end
        parts.append(text[last_end:].strip())
    if num_passages == 0:
        raise ConfigError(
            f"passages={marker!r:.40} matches nothing in the last message of the user; pass the "
            "tag or the regular expression that marks its passages"
        )
    return [part for part in parts if part != ""]


# --- warnings -------------------------------------------------------------------------------------


def warnings_about(texts: Sequence[str], parts: Sequence[MessagePart], marker: str) -> list[str]:
    """Return warnings for a message in which a passage may hold more than it should: the user's
    question, or further passages. A decoy of the passage would replace these, too. For example, the
    expression `(?s)Source 1: .*` matches from this mark to the end of the message.

    Args:
        texts: The texts of the message, none of them blank.
        parts: What `split_at_passages` made of them.
        marker: The tag or regular expression.
    """
    pattern = _compile(marker)
    warnings: list[str] = []
    if _may_hold_the_question(texts, parts):
        warnings.append(_warning_about_question(texts, parts, marker))

    passages = [part for part in parts if isinstance(part, Passage)]
    if len(passages) == 1 and _holds_further_matches(passages[0], texts, pattern):
        warnings.append(
            f"passages={marker!r:.40}: the only source, '{printable(passages[0].name)}', holds "
            "further matches; let each passage end before the next begins"
        )
    elif _is_tag(pattern):
        # `<document>a<document>b</document>` is one passage, with a tag inside. If it is the only
        # passage and the inner tag begins a line, the warning above has said so already.
        for passage in passages:
            if re.search(_start_of_tag(marker), passage.text):
                warnings.append(
                    f"passages={marker!r:.40}: another <{marker}> begins within the source "
                    f"'{printable(passage.name)}'; close each tag before the next one opens"
                )
    return warnings


def _may_hold_the_question(texts: Sequence[str], parts: Sequence[MessagePart]) -> bool:
    """Return whether a passage may hold the user's question: no words stay in view, or the message
    ends with a passage, and this with a question mark."""
    has_words_in_view = any(
        re.search(r"\w", part) is not None for part in parts if isinstance(part, str)
    )
    ends_in_question = _last_line(texts).endswith(QUESTION_MARKS)
    return not has_words_in_view or (ends_in_question and isinstance(parts[-1], Passage))


def _warning_about_question(texts: Sequence[str], parts: Sequence[MessagePart], marker: str) -> str:
    """Return the warning that the last passage may hold the question."""
    last_passage = [part for part in parts if isinstance(part, Passage)][-1]
    shown_line = printable(shorten(_last_line(texts), 60, placeholder="…"))
    return (
        f"passages={marker!r:.40}: the source '{printable(last_passage.name)}' holds the last "
        f"line of the user's message, '{shown_line}'; if that is the question, let passages end "
        "before it"
    )


def _last_line(texts: Sequence[str]) -> str:
    """Return the last line of a message. Blank lines at its end do not count."""
    return texts[-1].rstrip().rpartition("\n")[2].strip()


def _holds_further_matches(
    passage: Passage, texts: Sequence[str], pattern: re.Pattern[str]
) -> bool:
    """Return whether the pattern matches again at the beginning of a later line of a passage, such
    as at a second mark `[2]`."""
    text = next(text for text in texts if passage.text in text)
    first = text.index(passage.text)
    # In the text of the message, as the pattern may look at what is around the passage.
    line_starts = re.compile(r"(?<=\n)\S").finditer(text, first, first + len(passage.text))
    return any(pattern.match(text, line.start()) for line in line_starts)


# --- the pattern ----------------------------------------------------------------------------------


def _compile(marker: str) -> re.Pattern[str]:
    """Return the pattern of a tag or of a user's regular expression."""
    if re.fullmatch(r"\w[\w-]*", marker):
        start = _start_of_tag(marker)
        return re.compile(
            rf"{start}(?P<attributes>{ATTRIBUTES})>(?P<text>.*?)</{marker}>", re.DOTALL
        )
    try:
        # Without flags: a dot matches no line break, so that a mark such as `\[1\] .*` ends with
        # its line. `(?s)` at the beginning changes that.
        pattern = re.compile(marker)
    except re.error as error:
        raise ConfigError(
            f"passages={marker!r:.40} is neither a tag nor a regular expression ({error})"
        ) from None
    unknown = sorted(pattern.groupindex.keys() - NAMED_GROUPS)
    if unknown:
        raise ConfigError(
            f"passages={marker!r:.60} has the group {unknown[0]!r:.20}; name the groups of a "
            "passage (?P<name>…) and (?P<text>…), and leave others without a name"
        )
    return pattern


def _start_of_tag(name: str) -> str:
    """Return an expression for the start of a tag. It does not match `<document-note>` if the name
    is `document`."""
    return rf"<{name}(?![\w:.-])"


def _is_tag(pattern: re.Pattern[str]) -> bool:
    """Return whether this is the pattern of a tag, as `_compile` makes it: a user's expression may
    not have the group `attributes`."""
    return "attributes" in pattern.groupindex


def _text_group(pattern: re.Pattern[str]) -> int:
    """Return the number of the group that is the text of a passage; 0 is all that matches."""
    if "text" in pattern.groupindex:
        return pattern.groupindex["text"]
    name_group = pattern.groupindex.get("name")
    others = [number for number in range(1, pattern.groups + 1) if number != name_group]
    return others[0] if others else 0


def _name_in(match: re.Match[str]) -> str:
    """Return the name that the message gives a passage; empty if it gives none."""
    groups = match.groupdict()
    if _is_tag(match.re):
        return _name_among(groups["attributes"])
    # A name over several lines becomes one line.
    return " ".join((groups.get("name") or "").split())


def _name_among(attributes: str) -> str:
    """Return the name that the attributes of a tag give; empty if none does.

    For example `index="1" title="faq.md"`: faq.md.
    """
    values = {
        attribute["key"]: attribute["a"] or attribute["b"] or ""
        for attribute in ATTRIBUTE.finditer(attributes)
    }
    return next((values[key] for key in NAME_ATTRIBUTES if values.get(key)), "")
