"""Sources, messages and answers as a user gives them: Python objects → **parts with names**."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from olmo_sparsity.base.errors import ConfigError, printable


@dataclass(frozen=True)
class Segment:
    """A named part of a prompt: a source, a message, what a tool returned."""

    name: str
    text: str


Sources = Mapping[str, str] | Sequence[Segment | str | Mapping[str, Any]]


@dataclass(frozen=True)
class Turn:
    """A message; without a role, texts outside messages."""

    role: str
    parts: list[Segment]
    others: dict[str, Any] = field(default_factory=dict)  # such as `tool_calls`


@dataclass(frozen=True)
class Answer:
    """An answer with the spans of characters, (first, end), of its statements."""

    text: str
    spans: Sequence[tuple[int, int]]

    def pieces(self) -> list[tuple[str, bool]]:
        """Texts that together are the answer, and whether each is a statement. White space belongs
        to the piece behind it, as tokens hold it."""
        found, at, space = list[tuple[str, bool]](), 0, ""
        for first, end in [*self._checked(), (len(self.text), len(self.text))]:
            for text, is_statement in ((self.text[at:first], False), (self.text[first:end], True)):
                words = (space + text).rstrip()
                space = (space + text)[len(words) :]
                found += [(words, is_statement)] if words else []
            at = end
        if space:
            found[-1] = (found[-1][0] + space, found[-1][1])
        return found

    def _checked(self) -> list[tuple[int, int]]:
        spans, last = sorted((int(first), int(end)) for first, end in self.spans), 0
        for first, end in spans:
            if not last <= first < end <= len(self.text) or not self.text[first:end].strip():
                raise ConfigError(f"answer: span ({first}, {end}) is empty, overlaps or ends late")
            last = end
        if not spans:
            raise ConfigError("answer: it has no spans; give (first, end) of each statement")
        return spans


def read_turns(sources: Sources | None) -> list[Turn]:
    """Return messages and their parts; without messages, one turn without a role."""
    if isinstance(sources, Mapping):
        sources = [Segment(name, text) for name, text in sources.items()]
    if isinstance(sources, str) or not isinstance(sources, Sequence):
        raise ConfigError("sources must be {name: text, …}, or a list of Segment(name, text)")
    turns = list[Turn]()
    for item in sources:
        if isinstance(item, Mapping):
            others = {key: item[key] for key in item if key not in ("role", "content")}
            role, content = item.get("role"), item.get("content")
            if not isinstance(role, str) or not role or (content is None and not others):
                said = printable(repr(item))[:60]
                raise ConfigError(f"sources: {said} has no role or content; name with Segment")
            parts = content if isinstance(content, list) else [content] if content else []
            turns.append(Turn(role, [_part(part) for part in parts], others))
        else:
            if not turns or turns[-1].role:
                turns.append(Turn("", []))
            turns[-1].parts.append(_part(item))
    return turns


def _part(item: Any) -> Segment:
    part = Segment("", item) if isinstance(item, str) else item
    if not isinstance(part, Segment) or not all(isinstance(x, str) for x in (part.name, part.text)):
        raise ConfigError(f"sources: {item!r:.60} is neither a text nor a Segment of name and text")
    if any("\ud800" <= letter <= "\udfff" for letter in part.name + part.text):
        raise ConfigError(f"sources: {item!r:.60} holds half of a surrogate pair, which is no text")
    if part is item and not (part.name.strip() and part.text.strip()):
        raise ConfigError(f"sources: {item!r:.60} has an empty name or text; leave it out")
    return part
