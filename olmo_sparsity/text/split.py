"""Split documents that are longer than a model reads into consecutive parts, at a border of text.

    a novel of 20,000 tokens, a limit of 8,192  →  three parts of about 6,670 tokens

Parts of one document share a group, so that none serves as unrelated text for another. Each part is
a document for what follows: its windows, its half, its rows. Only counts of documents and intervals
take the parts of one document together (`whole_documents` in analysis/results/target_rows.py).
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np

from olmo_sparsity.base.progress import say
from olmo_sparsity.text.documents import Document, Documents

GROUPED_BY_DOCUMENT = "document"
"""`Documents.grouped_by` of parts, where the user named no field."""

BORDERS = (("paragraphs", 0.25), ("sentences", 0.25), ("words", 0.1))
"""Where a part may end, the best first; and how far from its ideal end, as a share of its ideal
length, such a border is searched."""


def split_long_documents(documents: Documents, most: int, reader: str) -> Documents:
    """Return documents of at most `most` tokens, in order: longer ones are split into consecutive
    parts of about equal length. `reader`: the name of the model, for the message."""
    items: list[Document] = []
    parts: dict[str, list[int]] = {}
    num_split = 0
    for document in documents.items:
        ends = _ends_of_parts(document, most)
        name = document.name or f"document {document.number}"
        if name in parts:
            name = f"{name} ({document.number})"
        numbers = list(range(len(items), len(items) + len(ends)))
        parts[name] = numbers
        num_split += len(ends) > 1
        first = 0
        for index, end in enumerate(ends, start=1):
            part = replace(
                document,
                tokens=document.tokens[first:end],
                number=len(items),
                group=document.group or name,
                name=f"{name}, part {index} of {len(ends)}" if len(ends) > 1 else document.name,
            )
            items.append(part)
            first = end
    if not num_split:
        say(f"split_long: no document is longer than the {most:,} tokens that {reader} takes")
        return documents
    say(
        f"split_long: {num_split:,} of {len(documents):,} documents are longer than the {most:,} "
        f"tokens that {reader} takes; {len(documents):,} documents are {len(items):,} parts"
    )
    grouped_by = documents.grouped_by or GROUPED_BY_DOCUMENT
    return replace(documents, items=items, grouped_by=grouped_by, parts=parts)


def _ends_of_parts(document: Document, most: int) -> list[int]:
    """Return the end of each part of a document, rising; the last is the document's own."""
    num_tokens = len(document.tokens)
    if num_tokens <= most:
        return [num_tokens]
    borders = _borders(document)
    ends: list[int] = []
    first = 0
    while num_tokens - first > most:
        # Equal parts, so that the last one is not too short for a target.
        num_left = ceil((num_tokens - first) / most)
        length = (num_tokens - first) / num_left
        first = _nearest_border(borders, first, length, most)
        ends.append(first)
    return [*ends, num_tokens]


def _borders(document: Document) -> list[tuple[np.ndarray, float]]:
    """Return for each kind of border the places at which a unit begins, and how far to search."""
    if document.tokenizer is None:
        return []
    borders = []
    for kind, share in BORDERS:
        units = document.units(kind, 0, len(document.tokens))
        borders.append((np.asarray(units.first), share))
    return borders


def _nearest_border(
    borders: list[tuple[np.ndarray, float]], first: int, length: float, most: int
) -> int:
    """Return the best border near the ideal end of a part that begins at `first`."""
    ideal = first + length
    for places, share in borders:
        is_near = (np.abs(places - ideal) <= share * length) & (places <= first + most)
        near = places[is_near]
        if len(near):
            return int(near[np.abs(near - ideal).argmin()])
    return int(ideal)
