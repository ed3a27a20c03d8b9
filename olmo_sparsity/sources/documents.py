"""Read sources, messages and answers as a user passes them.

Place in the flow:

    sources   → **`read_turns`** → messages with named parts → encode_prompt.py
    answer    → **`Answer.pieces`** → texts, some of which are statements → answer_tokens.py

A part with a name is a source, and a part without a name stays in view. `read_turns` accepts

    {"faq.md": text, …}                            sources by name
    [Segment("faq.md", text), "In view.", …]       sources, and texts in view
    [Document(…), TextNode(…), …]                  documents of LangChain, nodes of LlamaIndex
    [{"role": "user", "content": [Segment(…)]}, …] chat messages with sources in them
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any, NamedTuple, Protocol

from olmo_sparsity.base.errors import ConfigError, check_type, printable

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a letter beyond 16 bits, which no tokenizer and no file takes."""

WORDS_OF_VERDICTS = ("none", "no source")
"""Names that would read as "rests on no source" in `expect` of a questions file, or in a
verdict."""

METADATA_NAMES = ("source", "file_name", "file_path", "title", "id")
"""Keys of a document's metadata that name it, the first that it has."""

METADATA_IDS = (*METADATA_NAMES, "doc_id", "document_id", "ref_doc_id")
"""Keys of the metadata whose values `expect` of a questions file takes, too."""


@dataclass(frozen=True)
class Segment:
    """A part of a prompt: a source, which has a name, such as a document, a message or what a tool
    returned; or, without a name, a text that stays in view.

    Example:
        attribute(model, sources=[Segment("faq.md", text), "What follows stays in view."], …)
    """

    name: str
    """The name of the source; empty for a text that stays in view."""

    text: str

    ids: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Other names that `expect` of a questions file takes. A source that is a chunk of a document
    has the names of the document, which stay when the document is cut otherwise."""

    @property
    def is_source(self) -> bool:
        """Whether a statement may be attributed to this part."""
        return self.name != ""


class LangChainDocument(Protocol):
    """The attributes of `langchain_core.documents.Document` that are read."""

    page_content: str
    metadata: dict[Any, Any]


class LlamaIndexNode(Protocol):
    """The attributes of `llama_index.core.schema.TextNode` that are read."""

    @property
    def text(self) -> str: ...

    @property
    def metadata(self) -> dict[str, Any]: ...


Source = Segment | str | Mapping[str, Any] | LangChainDocument | LlamaIndexNode
Sources = Mapping[str, str] | Sequence[Source]


@dataclass(frozen=True)
class Turn:
    """A message, or texts outside messages."""

    role: str
    """The role of the message; empty for texts outside messages."""

    parts: list[Segment]
    others: dict[str, Any] = field(default_factory=dict)
    """Other keys of the message, such as `tool_calls`."""


def parts_of(turns: Iterable[Turn]) -> list[Segment]:
    """Return the parts of all turns, in order."""
    parts = list[Segment]()
    for turn in turns:
        parts += turn.parts
    return parts


class AnswerPiece(NamedTuple):
    """A text of an answer: a statement, or what is between statements."""

    text: str
    is_statement: bool


@dataclass(frozen=True)
class Answer:
    """An answer with the spans of characters, (first, end), of its statements. The rest of it stays
    in view.

    Example:
        Answer("It opened in 1921. Thank you for asking.", [(0, 18)])
    """

    text: str
    spans: Sequence[tuple[int, int]]

    def pieces(self) -> list[AnswerPiece]:
        """Return texts that together are the answer, and whether each is a statement:

            Answer("It opened. Thanks.", [(0, 10)])   →   "It opened."   statement
                                                          " Thanks."     stays in view

        White space belongs to the piece behind it, as most tokenizers begin a word with its space.
        """
        # Cut the text at the spans.
        cuts = list[AnswerPiece]()
        last_end = 0
        for first, end in self._checked_spans():
            cuts.append(AnswerPiece(self.text[last_end:first], False))
            cuts.append(AnswerPiece(self.text[first:end], True))
            last_end = end
        cuts.append(AnswerPiece(self.text[last_end:], False))

        # Move white space at the end of a piece to the next one. The last piece keeps its own.
        pieces = list[AnswerPiece]()
        space_before = ""
        for cut, is_statement in cuts:
            text = space_before + cut
            words = text.rstrip()
            space_before = text[len(words) :]
            if words:
                pieces.append(AnswerPiece(words, is_statement))
        if space_before:
            words, is_statement = pieces[-1]
            pieces[-1] = AnswerPiece(words + space_before, is_statement)
        return pieces

    def _checked_spans(self) -> list[tuple[int, int]]:
        """Return the spans in their order; raise ConfigError if one is empty, overlaps another or
        lies outside the text."""
        check_type("answer: text", self.text, str, "a text")
        try:
            spans = sorted((int(first), int(end)) for first, end in self.spans)
        except (TypeError, ValueError):
            raise ConfigError(
                f"answer: spans={printable(repr(self.spans))[:60]} must be a list of pairs "
                "(first, end) of characters"
            ) from None
        if not spans:
            raise ConfigError(
                "answer: it has no spans; give (first, end) of each statement, or a text"
            )
        last_end = 0
        for first, end in spans:
            is_inside = last_end <= first < end <= len(self.text)
            if not is_inside or not self.text[first:end].strip():
                raise ConfigError(
                    f"answer: the span ({first}, {end}) is empty, overlaps another, or ends after "
                    f"the {len(self.text)} characters; give (first, end) of each statement"
                )
            last_end = end
        return spans


SHOWN_CHARACTERS = 50
"""Length of the beginning of a source in a list of sources."""


def list_sources(sources: Sources | None, title: str = "") -> list[str]:
    """Return lines with the number of sources, and the name and first words of each. A user who has
    said how sources are marked, but not named them, sees whether they are the right ones.

    title: The beginning of the first line.
    """
    segments = [part for part in parts_of(read_turns(sources)) if part.is_source]
    count = "1 source" if len(segments) == 1 else f"{len(segments)} sources"
    lines = [f"{title}{count}"]
    for source in segments:
        beginning = shorten(source.text, SHOWN_CHARACTERS, placeholder="…")
        lines.append(f"  {source.name}: '{beginning}'")
    return lines


def read_turns(sources: Sources | None) -> list[Turn]:
    """Return messages and their parts. Sources in a row that are outside messages become the parts
    of one turn without a role."""
    if isinstance(sources, Mapping):
        sources = [Segment(name, text) for name, text in sources.items()]
    if isinstance(sources, str | bytes) or not isinstance(sources, Sequence):
        raise ConfigError(
            "sources must be {name: text, …}, or a list of Segment(name, text); of a folder, "
            "{path.name: path.read_text() for path in Path(folder).iterdir()}"
        )
    turns = list[Turn]()
    for item in _with_segments(sources):
        # A source is never a mapping here: documents of libraries are segments by now.
        if isinstance(item, Mapping):
            turns.append(_read_message(item))
            continue
        # The first source outside messages, or after a message, begins a turn without a role.
        if not turns or turns[-1].role:
            turns.append(Turn("", []))
        turns[-1].parts.append(_read_part(item))
    return turns


def _read_message(item: Mapping[str, Any]) -> Turn:
    """Read a chat message, whose content is a text or a list of parts."""
    # A chat template may write further keys, such as `tool_calls` and `name`.
    others = {key: value for key, value in item.items() if key not in ("role", "content")}
    role = item.get("role")
    content = item.get("content")
    if not isinstance(role, str) or not role or (content is None and not others):
        raise ConfigError(
            f"sources: {printable(repr(item))[:60]} has no role or content; a source in a list is "
            "Segment(name, text)"
        )
    check_no_half_letters(others, f"sources: a message of {printable(role)}")
    if isinstance(content, list):
        return Turn(role, [_read_part(part) for part in content], others)
    return Turn(role, [_read_part(content)] if content else [], others)


def _with_segments(items: Sequence[Any]) -> list[Any]:
    """Return the same items, but with a segment for each document of LangChain and node of
    LlamaIndex. Chunks of one file have the same name there, so they are numbered: faq.md, faq.md
    (2)."""
    items_with_segments = list[Any]()
    # A name that the user has chosen stays, also if a document before it has the same.
    taken_names = {str(item.name) for item in items if isinstance(item, Segment)}
    for number, item in enumerate(items, start=1):
        document = _as_library_document(item)
        if document is None:
            items_with_segments.append(item)
            continue
        segment = document.segment(number, taken_names)
        taken_names.add(segment.name)
        items_with_segments.append(segment)
    return items_with_segments


class _LibraryDocument(NamedTuple):
    """A document of LangChain or a node of LlamaIndex."""

    text: Any
    """A text, unless the object is broken; checked later."""

    metadata: Mapping[Any, Any]

    def segment(self, number: int, taken_names: Container[str]) -> Segment:
        """Return the document as a source.

        number: Its number in the list, from 1, which names a document without a name.
        taken_names: Names that other sources have.
        """
        names = [str(self.metadata[key]) for key in METADATA_NAMES if self.metadata.get(key)]
        ids = tuple(str(self.metadata[key]) for key in METADATA_IDS if self.metadata.get(key))
        first_name = names[0] if names else f"source {number}"
        name = first_name
        count = 1
        while name in taken_names:
            count += 1
            name = f"{first_name} ({count})"
        return Segment(name, self.text, ids)


def _as_library_document(item: Any) -> _LibraryDocument | None:
    """Return an item as a document of LangChain or LlamaIndex; None if it is not one. Documents are
    recognized by their attributes, so that neither library needs to be installed."""
    metadata = getattr(item, "metadata", None)
    text = getattr(item, "page_content", None)  # LangChain
    if text is None:
        text = getattr(item, "text", None)  # LlamaIndex
    if isinstance(item, Segment) or not isinstance(metadata, Mapping) or text is None:
        return None
    return _LibraryDocument(text, metadata)


def _read_part(item: Any) -> Segment:
    """Read a part of a message or of a list: a text, or a source with its name."""
    if isinstance(item, str):
        check_no_half_letters(item, "sources: a text without a name")
        return Segment("", item)
    is_segment = isinstance(item, Segment)
    if not is_segment or not isinstance(item.name, str) or not isinstance(item.text, str):
        raise ConfigError(f"sources: {item!r:.60} is neither a text nor a Segment of name and text")
    check_no_half_letters(item.name, f"sources: the name '{printable(item.name)}'")
    check_no_half_letters(item.text, f"sources: the text of '{printable(item.name)}'")
    if not (item.name.strip() and item.text.strip()):
        raise ConfigError(f"sources: {item!r:.60} has an empty name or text; leave it out")
    if item.name.strip() in WORDS_OF_VERDICTS:
        raise ConfigError(
            f"sources: the name '{item.name}' means that a statement rests on no source; rename "
            "this source"
        )
    return item


def check_no_half_letters(value: Any, description: str) -> None:
    """Raise ConfigError if a text, or any text in nested lists and objects, has half of a surrogate
    pair. It comes from JSON that was cut within an emoji, or from bytes that are not UTF-8, and
    neither tokenizers nor files take it.

    value: A text, list or object.
    description: What the value is, for the message.
    """
    # A list of what is left to check, not recursion: objects may be nested beyond its limit.
    waiting = [(description, value)]
    while waiting:
        where, item = waiting.pop()
        if isinstance(item, str):
            match = SURROGATE.search(item)
            if match is not None:
                letter = json.dumps(match[0])[1:-1]
                raise ConfigError(
                    f"{where}: character {match.start()} is {letter}, half of a letter (a lone "
                    "surrogate); write the whole letter, or remove it"
                )
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                name = printable(str(key))
                waiting.append((f"{where}, key '{name}'", inner))
                waiting.append((f"{where}, the name of key '{name}'", key))
        elif isinstance(item, list | tuple):
            waiting += [(f"{where}, number {i}", inner) for i, inner in enumerate(item)]
