"""Sources, messages and answers as a user gives them: Python objects → **parts with names**."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from olmo_sparsity.base.errors import ConfigError, printable


@dataclass(frozen=True)
class Segment:
    """A named part of a prompt: a source, a message, what a tool returned."""

    name: str
    text: str


class LangChainDocument(Protocol):
    page_content: str
    metadata: dict[Any, Any]


class LlamaIndexNode(Protocol):
    @property
    def text(self) -> str: ...

    @property
    def metadata(self) -> dict[str, Any]: ...


Source = Segment | str | Mapping[str, Any] | LangChainDocument | LlamaIndexNode
Sources = Mapping[str, str] | Sequence[Source]


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
    for item in _with_segments(sources):
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


def _with_segments(items: Sequence[Any]) -> list[Any]:
    """Return items with documents of LangChain and nodes of LlamaIndex as segments, which are known
    by their attributes, so that neither needs to be installed. Chunks of one file are numbered."""
    found = list[Any]()
    names = {item.name for item in items if isinstance(item, Segment)}
    for number, item in enumerate(items, start=1):
        metadata = getattr(item, "metadata", None)
        text = getattr(item, "page_content", None)
        text = getattr(item, "text", None) if text is None else text
        if isinstance(item, Segment) or not (isinstance(metadata, Mapping) and text is not None):
            found.append(item)
            continue
        keys = ("source", "file_name", "file_path", "title", "id")
        base = next((str(metadata[key]) for key in keys if metadata.get(key)), f"source {number}")
        name, count = base, 1
        while name in names:
            count += 1
            name = f"{base} ({count})"
        names.add(name)
        found.append(Segment(name, text))
    return found


def _part(item: Any) -> Segment:
    part = Segment("", item) if isinstance(item, str) else item
    if not isinstance(part, Segment) or not all(isinstance(x, str) for x in (part.name, part.text)):
        raise ConfigError(f"sources: {item!r:.60} is neither a text nor a Segment of name and text")
    if any("\ud800" <= letter <= "\udfff" for letter in part.name + part.text):
        raise ConfigError(f"sources: {item!r:.60} holds half of a surrogate pair, which is no text")
    if part is item and not (part.name.strip() and part.text.strip()):
        raise ConfigError(f"sources: {item!r:.60} has an empty name or text; leave it out")
    return part
