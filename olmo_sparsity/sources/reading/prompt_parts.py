"""Hold the parts of a prompt: sources, which have names, and texts that stay in view.

    Turn("user", [Segment("", "Answer from the notes."), Segment("faq.md", text)])

A `Turn` is a message with its parts, or parts outside messages. read_sources.py makes turns of what
a user passes, and prompt/encode.py encodes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


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
        """Return whether a statement may be attributed to this part."""
        return self.name != ""


@dataclass(frozen=True)
class Turn:
    """A message, or texts outside messages."""

    role: str
    """The role of the message; empty for texts outside messages."""

    parts: list[Segment]
    other_keys: dict[str, Any] = field(default_factory=dict)
    """The keys of the message besides `role` and `content`, such as `tool_calls`."""


def parts_of(turns: Iterable[Turn]) -> list[Segment]:
    """Return the parts of all turns, in order."""
    parts: list[Segment] = []
    for turn in turns:
        parts += turn.parts
    return parts
