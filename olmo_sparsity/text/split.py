"""Split documents that are longer than a model reads into consecutive parts, at a border of text.

    a novel of 20,000 tokens, a limit of 8,192  →  three parts of about 6,670 tokens

A part ends at the best border of text near its ideal end:

    tokens 0 … 6,666 would be a third; a paragraph ends at token 6,590, so the part ends there

Parts of one document share a group, so that none serves as unrelated text for another. From here on
each part is a document, with windows and rows of its own. Only counts of documents and intervals
take the parts of one document together (`whole_documents` in analysis/results/target_rows.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np

from olmo_sparsity.base.progress import say
from olmo_sparsity.text.documents import Document, Documents

GROUPED_BY_DOCUMENT = "document"
"""`Documents.grouped_by` of parts, if the user has named no field."""


class Border(NamedTuple):
    """Where a part may end: before a unit of this kind."""

    units: str
    max_distance: float
    """How far from the ideal end such a border is looked for, as a fraction of the part's ideal
    length."""


BORDERS = (Border("paragraphs", 0.25), Border("sentences", 0.25), Border("words", 0.1))
"""The kinds of borders, the best first."""


def split_long_documents(documents: Documents, max_tokens: int, reader: str) -> Documents:
    """Return documents of at most `max_tokens` tokens, in order. Longer ones are split into
    consecutive parts of about equal length, each of which is a document. `reader`: the name of the
    model, for the message."""
    items: list[Document] = []
    numbers_of_parts: dict[str, list[int]] = {}
    num_split = 0
    for document in documents.items:
        # The name by which results count the parts of a document together.
        name = document.name or f"document {document.number}"
        if name in numbers_of_parts:  # two records may have one title
            name = f"{name} ({document.number})"
        parts = _parts_of(document, name, max_tokens, first_number=len(items))
        numbers_of_parts[name] = [part.number for part in parts]
        num_split += len(parts) > 1
        items += parts
    if not num_split:
        say(f"split_long: no document is longer than the {max_tokens:,} tokens that {reader} takes")
        return documents
    say(
        f"split_long: {num_split:,} of {len(documents):,} documents are longer than the "
        f"{max_tokens:,} tokens that {reader} takes; {len(documents):,} documents are "
        f"{len(items):,} parts"
    )
    grouped_by = documents.grouped_by or GROUPED_BY_DOCUMENT
    return replace(documents, items=items, grouped_by=grouped_by, parts=numbers_of_parts)


def _parts_of(document: Document, name: str, max_tokens: int, first_number: int) -> list[Document]:
    """Return the parts of a document; a document that is short enough is its only part.

    Args:
        name: What the parts are named after.
        first_number: The number that the first part has as a document.
    """
    ends = _ends_of_parts(document, max_tokens)
    parts = []
    first_index = 0
    for index, end in enumerate(ends):
        part_name = f"{name}, part {index + 1} of {len(ends)}"
        part = replace(
            document,
            tokens=document.tokens[first_index:end],
            number=first_number + index,
            group=document.group or name,
            name=part_name if len(ends) > 1 else document.name,
        )
        parts.append(part)
        first_index = end
    return parts


def _ends_of_parts(document: Document, max_tokens: int) -> list[int]:
    """Return for each part of a document the index after its last token, in rising order."""
    num_tokens = len(document.tokens)
    if num_tokens <= max_tokens:
        return [num_tokens]

    starts_of_units = []
    # Without a tokenizer there is no text in which units could be found.
    if document.tokenizer is not None:
        for border in BORDERS:
            units = document.units(border.units, 0, num_tokens)
            starts_of_units.append(np.asarray(units.first))

    ends: list[int] = []
    first_index = 0
    while num_tokens - first_index > max_tokens:
        # Equal parts, so that the last one is not too short for a target.
        num_left = ceil((num_tokens - first_index) / max_tokens)
        length = (num_tokens - first_index) / num_left
        first_index = _best_end(starts_of_units, first_index, length, max_tokens)
        ends.append(first_index)
    return [*ends, num_tokens]


def _best_end(
    starts_of_units: Sequence[np.ndarray], first_index: int, length: float, max_tokens: int
) -> int:
    """Return where a part should end: at the best kind of border near its ideal end.

    Args:
        starts_of_units: For each of `BORDERS`, the indices of the tokens at which a unit begins.
            Empty if the document has no text: the part then ends at its ideal end.
        first_index: The index of the part's first token.
        length: The ideal number of its tokens. It must not have more than `max_tokens`.
    """
    ideal_end = first_index + length
    for border, starts in zip(BORDERS, starts_of_units, strict=False):
        is_near = np.abs(starts - ideal_end) <= border.max_distance * length
        candidates = starts[is_near & (starts <= first_index + max_tokens)]
        if len(candidates):
            return int(candidates[np.abs(candidates - ideal_end).argmin()])
    return int(ideal_end)
