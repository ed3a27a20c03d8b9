"""Make a table of targets that the user named, or that records bring with them.

    document 1: The bridge opened in 1921 . Anna opened it in 1921 .

    named_targets(documents, "1921", windows)      document  target  distant_part  target_set
                                                          1      10  document      named

The first "1921", at place 4, has no full long window before it, and is left out. Each token of a
name is a target of its own. fixed_targets.py calls both functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from olmo_sparsity.analysis.measurement.at import At, find_spans
from olmo_sparsity.analysis.measurement.target_tables import TARGET_COLUMNS
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.windows import Windows


class _SpanOfDocument(NamedTuple):
    """A run of tokens of one of the documents, from `first` to `end` − 1."""

    document: int
    first: int
    end: int


def named_targets(documents: Documents, at: At, windows: Windows) -> pd.DataFrame:
    """Return a target for each token that `at` names in a document, if it has a full long window.
    Raise DataError if there is none."""
    spans = []
    for document in documents:
        for first, end in find_spans(document, at, missing_ok=True):
            spans.append(_SpanOfDocument(document.number, first, end))
    if not spans:
        raise DataError(
            f"{documents.name}: no document contains at={at!r}; pass words of the text, a regular "
            "expression, or tokens FIRST:END"
        )
    return _table_of_named(spans, documents, windows, "a named target")


def targets_of_records(documents: Documents, windows: Windows) -> pd.DataFrame:
    """Return a target for each token that follows the prompt of a record, in documents that are
    read from records of a prompt and its target. Raise DataError if none has a full long window."""
    spans = []
    for document in documents:
        if document.target is not None:
            end = len(document.tokens)
            spans.append(_SpanOfDocument(document.number, document.target, end))
    return _table_of_named(spans, documents, windows, "a prompt's target")


def _table_of_named(
    spans: Sequence[_SpanOfDocument], documents: Documents, windows: Windows, noun: str
) -> pd.DataFrame:
    """Return a target for each token of the spans that has a full long window. Raise DataError if
    none has, with `noun` as the name of a span."""
    rows = []
    for span in spans:
        for place in range(max(span.first, windows.first_target), span.end):
            rows.append((span.document, place, "document", "named"))
    if not rows:
        raise DataError(
            f"{documents.name}: no token of {noun} has a full long window; lower long, or name "
            "later ones"
        )
    # Spans of several names may overlap.
    return pd.DataFrame(rows, columns=TARGET_COLUMNS).drop_duplicates(ignore_index=True)
