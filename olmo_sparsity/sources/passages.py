"""Find the passages that a message of the user holds, by a tag or a regular expression.

Place in the flow: the last message of the user → **`split_at_passages`**: passages, which are
sources, and what stays in view → messages.py, which names them. With the tag `document` and with
the regular expression `\\[\\d+\\] (?P<name>.+)\\n(?P<text>.+)` this message has one passage:

    <document title="faq.md">Tickets cost 4 euros.</document>     [1] faq.md
                                                                  Tickets cost 4 euros.
    What do tickets cost?                                         What do tickets cost?
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import shorten
from typing import NamedTuple

from olmo_sparsity.base.errors import ConfigError, printable

NAME_ATTRIBUTE = re.compile(r"""\b(?:title|name|source|id|index)=["']([^"']+)["']""")
"""An attribute of a passage's tag that names it."""

UNNAMED_PASSAGE = "passage"
"""What a passage without a name is called, with its number."""

NAMED_GROUPS = {"name", "text"}
"""The groups that have a meaning in a user's regular expression."""

QUESTION_MARKS = ("?", "？", "؟")


class Part(NamedTuple):
    """A part of a message of the user."""

    text: str
    name: str = ""
    """The name of the passage. Empty: the text is none, and stays in view."""

    has_own_name: bool = False
    """Whether the message names the passage. Otherwise its name is its number."""


def split_at_passages(texts: Sequence[str], passages: str) -> list[Part]:
    """Return the parts of a message: its passages, and what stays in view.

    texts: The texts of the message, one for each block of its content.
    passages: A tag, or a regular expression. The group `text`, or the first without the name
        `name`, is the text of a passage; without such a group it is all that matches. The group
        `name` is its name.
    """
    pattern = _compile(passages)
    parts = list[Part]()
    num_passages = 0
    for text in texts:
        last_end = 0
        for match in pattern.finditer(text):
            group = _text_group(pattern)
            passage = match[group]
            if not passage or not passage.strip():
                continue
            first, end = match.span(group)
            num_passages += 1
            name = _name_in(match)
            # What precedes the passage stays in view, with the opening tag.
            parts.append(Part(text[last_end:first]))
            parts.append(
                Part(passage, name or f"{UNNAMED_PASSAGE} {num_passages}", has_own_name=bool(name))
            )
            last_end = end
        parts.append(Part(text[last_end:]))
    if not num_passages:
        raise ConfigError(
            f"passages={passages!r:.40} matches nothing in the last message of the user"
        )
    return [part._replace(text=part.text.strip()) for part in parts if part.text.strip()]


def doubts_about(texts: Sequence[str], parts: Sequence[Part], passages: str) -> list[str]:
    """Return what suggests that a passage holds more than it should, as warnings: its decoys would
    then replace the question or other passages, too.

    texts: The texts of the message, of which `split_at_passages` made the parts.
    """
    sources = [part for part in parts if part.name]
    place = f"passages={passages!r:.40}"
    doubts = list[str]()
    last_line = texts[-1].rstrip().rpartition("\n")[2].strip()
    shown_line = printable(shorten(last_line, 60, placeholder="…"))
    stays_in_view = any(re.search(r"\w", part.text) for part in parts if not part.name)
    ends_in_question = last_line.endswith(QUESTION_MARKS) and bool(parts[-1].name)
    if ends_in_question or not stays_in_view:
        doubts.append(
            f"{place}: the source '{printable(sources[-1].name)}' holds the last line of the "
            f"user's message, '{shown_line}'; if that is the question, let passages end before it"
        )
    if len(sources) == 1:
        text = next(text for text in texts if sources[0].text in text)
        first = text.index(sources[0].text)
        line_starts = re.compile(r"(?<=\n)\S").finditer(text, first, first + len(sources[0].text))
        pattern = _compile(passages)
        # Such as a second mark `[2]` at the beginning of a line.
        if any(pattern.match(text, line.start()) for line in line_starts):
            doubts.append(
                f"{place}: the only source, '{printable(sources[0].name)}', holds further matches; "
                "let each passage end before the next begins"
            )
            return doubts
    if "attributes" in _compile(passages).groupindex:
        for part in sources:
            if re.search(rf"<{passages}\b", part.text):
                doubts.append(
                    f"{place}: another <{passages}> begins within the source "
                    f"'{printable(part.name)}'; close each tag before the next one opens"
                )
    return doubts


def _compile(passages: str) -> re.Pattern[str]:
    """Return the pattern of a tag or of a user's regular expression."""
    if re.fullmatch(r"\w[\w-]*", passages):
        return re.compile(
            rf"<{passages}\b(?P<attributes>[^>]*)>(?P<text>.*?)</{passages}>", re.DOTALL
        )
    try:
        # Without flags: a dot matches no line break, so that a mark such as `\[1\] .*` ends with
        # its line. `(?s)` at the beginning changes that.
        pattern = re.compile(passages)
    except re.error as error:
        raise ConfigError(
            f"passages={passages!r:.40} is neither a tag nor a regular expression ({error})"
        ) from None
    unknown = sorted(pattern.groupindex.keys() - NAMED_GROUPS)
    if unknown:
        raise ConfigError(
            f"passages={passages!r:.60} has the group {unknown[0]!r:.20}; name the groups of a "
            "passage (?P<name>…) and (?P<text>…), and leave others without a name"
        )
    return pattern


def _text_group(pattern: re.Pattern[str]) -> int:
    """Return the number of the group that is the text of a passage; 0 is all that matches."""
    if "text" in pattern.groupindex:
        return pattern.groupindex["text"]
    of_names = pattern.groupindex.get("name")
    others = [number for number in range(1, pattern.groups + 1) if number != of_names]
    return others[0] if others else 0


def _name_in(match: re.Match[str]) -> str:
    """Return the name that the message gives a passage; empty if it gives none."""
    groups = match.groupdict()
    if "attributes" in groups:
        attribute = NAME_ATTRIBUTE.search(groups["attributes"])
        return attribute[1] if attribute else ""
    return " ".join((groups.get("name") or "").split())
