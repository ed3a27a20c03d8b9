"""Read the sources of a prompt as a user passes them.

Place in the flow: sources → **`read_turns`** → messages with named parts → prompt/encode.py

A part with a name is a source, and a part without a name stays in view. `read_turns` accepts

    {"faq.md": text, …}                            sources by name
    [Segment("faq.md", text), "In view.", …]       sources, and texts in view
    [Document(…), TextNode(…), …]                  documents of LangChain, nodes of LlamaIndex
    [{"role": "user", "content": [Segment(…)]}, …] chat messages with sources in them

For example,

    read_turns({"faq.md": "It opened in 1921."})
    →  [Turn("", [Segment("faq.md", "It opened in 1921.")])]         outside messages

    read_turns([{"role": "user", "content": ["Notes:", Segment("faq.md", "It opened in 1921.")]}])
    →  [Turn("user", [Segment("", "Notes:"), Segment("faq.md", "It opened in 1921.")])]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from olmo_sparsity.base.errors import ConfigError, printable
from olmo_sparsity.sources.reading.library_documents import (
    LangChainDocument,
    LlamaIndexNode,
    with_segments,
)
from olmo_sparsity.sources.reading.prompt_parts import Segment, Turn, parts_of
from olmo_sparsity.sources.reading.surrogates import check_no_lone_surrogates

Source = Segment | str | Mapping[str, Any] | LangChainDocument | LlamaIndexNode
Sources = Mapping[str, str] | Sequence[Source]

WORDS_OF_VERDICTS = ("none", "no source")
"""Names that would read as "rests on no source" in `expect` of a questions file, or in a
verdict."""

SHOWN_CHARACTERS = 50
"""Length of the beginning of a source in a list of sources."""


def list_sources(sources: Sources | None, title: str = "") -> list[str]:
    """Return lines with the number of sources, and the name and first words of each. A user who has
    said how sources are marked, but not named them, sees whether they are the right ones. `title`:
    the beginning of the first line."""
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
    turns: list[Turn] = []
    for item in with_segments(sources):
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
    other_keys = {key: value for key, value in item.items() if key not in ("role", "content")}
    role = item.get("role")
    content = item.get("content")
    if not isinstance(role, str) or not role or (content is None and not other_keys):
        raise ConfigError(
            f"sources: {printable(repr(item))[:60]} has no role or content; a source in a list is "
            "Segment(name, text)"
        )
    check_no_lone_surrogates(other_keys, f"sources: a message of {printable(role)}")
    if isinstance(content, list):
        return Turn(role, [_read_part(part) for part in content], other_keys)
    return Turn(role, [_read_part(content)] if content else [], other_keys)


def _read_part(item: Any) -> Segment:
    """Read a part of a message or of a list: a text, or a source with its name."""
    if isinstance(item, str):
        check_no_lone_surrogates(item, "sources: a text without a name")
        return Segment("", item)
    is_segment = isinstance(item, Segment)
    if not is_segment or not isinstance(item.name, str) or not isinstance(item.text, str):
        raise ConfigError(f"sources: {item!r:.60} is neither a text nor a Segment of name and text")
    check_no_lone_surrogates(item.name, f"sources: the name '{printable(item.name)}'")
    check_no_lone_surrogates(item.text, f"sources: the text of '{printable(item.name)}'")
    if not (item.name.strip() and item.text.strip()):
        raise ConfigError(f"sources: {item!r:.60} has an empty name or text; leave it out")
    if item.name.strip() in WORDS_OF_VERDICTS:
        raise ConfigError(
            f"sources: the name '{item.name}' means that a statement rests on no source; rename "
            "this source"
        )
    return item
