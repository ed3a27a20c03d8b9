"""Check that a text is enough for a measurement: enough documents, and enough units in them.

    Documents, Settings → `find_measured_numbers` → the documents that have a target, or DataError
                        → `warn_of_few_units`     → a printed warning

With `long=16`, documents of 40, 12, 60 and 31 tokens have the numbers 0 to 3. Document 1 is shorter
than the long window, so it has no target, and the measured numbers are 0, 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.target_rows import half_of
from olmo_sparsity.analysis.results.view import num_of
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.units import span_width

SMALLER_UNITS = "pass smaller units (a paragraph ends at a blank line, not at a line break)"
"""The advice of messages on a text of few units."""


def find_measured_numbers(
    documents: Documents, settings: Settings, num_candidates: int
) -> list[int]:
    """Return the numbers of the documents that have a target. Raise DataError if they are too few
    for thresholds and controls.

    Args:
        num_candidates: The number of documents that can replace each other (`Controls`).
    """
    # A document itself, the unrelated ones, and the placebo.
    num_needed = settings.draws + 2
    if len(documents) == 1:
        raise DataError(
            f"text: {documents.name} is one document, and measure requires {num_needed}; "
            "split it (--split-at)"
        )

    first_target = settings.windows.first_target
    numbers = [document.number for document in documents if len(document.tokens) > first_target]
    # Thresholds are fitted on one half of the documents, and used on the other.
    if {half_of(number) for number in numbers} != {"threshold", "report"}:
        raise DataError(
            f"text: {len(numbers)} of {len(documents)} documents are longer than "
            f"{first_target} tokens; measure requires one at an even and one at an odd place: "
            "pass more, or lower long and short"
        )

    if num_candidates < num_needed:
        raise DataError(
            f"text: {num_candidates} documents can replace each other, and "
            f"draws={settings.draws} requires {num_needed}; pass more documents"
        )
    return numbers


def warn_of_few_units(documents: Sequence[Document], settings: Settings) -> None:
    """Warn of each kind of units, such as paragraphs, of which no document has more than the
    smallest k. All distant text is then added, and recovery is 1 by construction."""
    smallest_k = min(settings.ks)
    for kind in settings.units:
        # Every document has as many tokens, or spans of them, as `Settings.check` requires.
        if span_width(kind) is not None:
            continue
        nums_units = (_num_units_of_last_target(kind, doc, settings.short) for doc in documents)
        if not any(num_units > smallest_k for num_units in nums_units):
            all_units = num_of(smallest_k, kind.removesuffix("s"))
            say(
                f"warning: no document has more than {all_units} of distant text, so "
                f"k={smallest_k} adds all of it; {SMALLER_UNITS}"
            )


def _num_units_of_last_target(kind: str, document: Document, short: int) -> int:
    """Return the number of distant units of a document's last target, which has most of them."""
    # All tokens are distant to a target at the document's end, except its local window.
    num_distant = max(1, len(document.tokens) - short)
    return len(document.units(kind, 0, num_distant))
