"""Sort the targets of a document into blocks, and hold one distant text that they are given.

    targets of a document → `sort_into_blocks` → BlockBounds → SpansByPart
    block + distant text + SpansByPart         → EvaluatedText

Neighbouring targets share a block, and with it local window, distant text and states. With
`stride=8` and the first full window at token 16, targets 18, 23 and 30 are sorted like this:

    block of tokens 16 … 23    targets 18 and 23, as spans (2, 3) and (7, 8) of the block
    block of tokens 24 … 31    target 30, as span (6, 7)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from olmo_sparsity.analysis.results.target_rows import DOCUMENT
from olmo_sparsity.analysis.scoring.rows import Context
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.text.distant_text import DistantText
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import Spans
from olmo_sparsity.text.windows import Windows

SpansByPart = dict[str, Spans]
"""Distant part (`document` or `placebo`) → the targets that were chosen with it, as spans of a
block: from the first token to one past the last."""


class BlockBounds(NamedTuple):
    """The places of a block's targets in the document."""

    start: int
    """Place of the first target."""

    end: int
    """One past the place of the last target."""

    def __str__(self) -> str:
        # Part of the names of stored texts, by which a later start finds them.
        return f"({self.start}, {self.end})"


def sort_into_blocks(
    windows: Windows, document: Document, targets: Mapping[str, np.ndarray]
) -> dict[BlockBounds, SpansByPart]:
    """Sort targets into the blocks that their first tokens are in, and return the blocks in order.
    Raise DataError if a target has no full long window.

    Args:
        windows: The windows, which determine where blocks begin.
        document: The document.
        targets: Distant part → places of the document, or an array of two columns with spans of
            places.
    """
    blocks: dict[BlockBounds, SpansByPart] = {}
    length = len(document.tokens)
    for distant_part, places in targets.items():
        for first, end in _as_spans(places):
            if not windows.first_target <= first < end <= length:
                raise DataError(
                    f"targets: tokens {first}:{end} of document {document.number} have no full "
                    f"long window before them; choose from {windows.first_target} to {length - 1}"
                )
            start = int(windows.start_of(first))
            # A target of several tokens may reach beyond the block that its first token is in.
            block_end = min(max(start + windows.stride, end), length)
            spans_by_part = blocks.setdefault(BlockBounds(start, block_end), {})
            spans_by_part.setdefault(distant_part, []).append((first - start, end - start))
    return dict(sorted(blocks.items()))


def _as_spans(places: np.ndarray) -> Spans:
    """Return targets as spans of places, in order, each once. They are given as places of single
    tokens, or as an array of two columns that holds spans already: 18 becomes (18, 19)."""
    spans = np.asarray(places)
    if spans.ndim == 1:
        spans = np.stack([spans, spans + 1], axis=1)
    return sorted({(int(first), int(end)) for first, end in spans})


@dataclass(frozen=True)
class EvaluatedText:
    """One distant text before the targets of a block."""

    context: Context
    distant: DistantText
    is_control: bool
    """Whether it is an unrelated text that the targets are compared with. Otherwise it is the
    distant context that they were chosen in, the document's own or the placebo's."""

    draw: int
    """The index of the unrelated text; 0 for other texts."""

    spans_by_part: SpansByPart
    """The targets that are evaluated with this text. An unrelated text may serve those of both
    distant parts."""

    @property
    def control(self) -> str:
        """Return the value of the column `control`."""
        return "unrelated" if self.is_control else "own"

    @property
    def is_document_context(self) -> bool:
        """Return whether this is the document's own distant context."""
        return not self.is_control and DOCUMENT in self.spans_by_part

    @property
    def all_spans(self) -> Spans:
        """Return the targets of both distant parts, each once."""
        return sorted(set(chain(*self.spans_by_part.values())))

    def places(self, spans: Spans) -> np.ndarray:
        """Return the first place of each target in the document."""
        return self.context.block.start + np.array([first for first, _ in spans])
