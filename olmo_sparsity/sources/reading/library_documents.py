"""Turn documents of LangChain and nodes of LlamaIndex into sources.

Place in the flow: read_sources.py → **`with_segments`** → `Segment` (prompt_parts.py). For example,
two chunks of one file, as a retriever of LangChain returns them:

    Document("It opened in 1921.", {"source": "faq.md"})   →   Segment("faq.md", "It opened …")
    Document("Tickets cost 4.", {"source": "faq.md"})      →   Segment("faq.md (2)", "Tickets …")

Both are recognized by their attributes, so that neither library needs to be installed.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from olmo_sparsity.sources.reading.prompt_parts import Segment

METADATA_NAMES = ("source", "file_name", "file_path", "title", "id")
"""Keys of a document's metadata that name it, the first that it has."""

METADATA_IDS = (*METADATA_NAMES, "doc_id", "document_id", "ref_doc_id")
"""Keys of the metadata whose values `expect` of a questions file takes, too."""


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


def with_segments(items: Sequence[Any]) -> list[Any]:
    """Return the same items, but with a segment for each document of LangChain and node of
    LlamaIndex. Chunks of one file have the same name there, so they are numbered: faq.md, faq.md
    (2)."""
    items_with_segments: list[Any] = []
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

        Args:
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
