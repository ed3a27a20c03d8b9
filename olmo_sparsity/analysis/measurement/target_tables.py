"""Read tables of targets: which document has which targets, and whether two tables are the same.

A table of targets has the columns `TARGET_COLUMNS`. Here token 18 of document 1 is in two sets, and
token 25 is a target of the placebo:

    document  target  distant_part  target_set
           1      18  document      bigram
           1      18  document      gap
           1      25  placebo       gap

    targets_of_document   {"document": [[18, 19]], "placebo": [[25, 26]]}, each from its first token
                          to one past its last

Targets of another measurement may have several tokens. Their table has the column `end`, too: one
past the last token of a target. targets.py and named_targets.py make the tables.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.target_rows import DOCUMENT, KEYS, has_spans, with_ends
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.windows import Windows

TARGET_COLUMNS = [*KEYS, "distant_part", "target_set"]
"""Columns of a table of targets: document, target (the place of its first token), distant part,
target set."""


def targets_of_document(targets: pd.DataFrame, document: Document) -> dict[str, np.ndarray]:
    """Return the targets of one document: distant part → an array of two columns, with a row for
    each target, its first place and one past its last. A target in several sets has one row."""
    rows = with_ends(targets[targets.document == document.number])
    groups = rows.groupby("distant_part")[["target", "end"]]
    return {str(part): np.unique(spans.to_numpy(), axis=0) for part, spans in groups}


def with_full_window(
    targets: pd.DataFrame, windows: Windows, *, keep_placebo: bool
) -> pd.DataFrame:
    """Return the targets of another measurement of the same text that have a full long window here.
    So two models are compared at the same targets.

    Args:
        targets: The table of the other measurement.
        windows: The windows of this measurement.
        keep_placebo: Whether to return its placebo targets, too. They were chosen with unrelated
            texts, which are the same here only if windows, seed and controls are.
    """
    is_kept = targets.target >= windows.first_target
    if not keep_placebo:
        is_kept &= targets.distant_part == DOCUMENT
    return targets[is_kept].sort_values(TARGET_COLUMNS, ignore_index=True)


def targets_fingerprint(targets: pd.DataFrame) -> str:
    """Return the SHA-256 of a table of targets, by which two tables are known to be the same."""
    # Without targets of several tokens `end` is left out, as earlier versions did not store it.
    columns = [*TARGET_COLUMNS, "end"] if has_spans(targets) else TARGET_COLUMNS
    return hashlib.sha256(targets[columns].to_csv(index=False).encode()).hexdigest()


def check_all_evaluated(folder: Path, targets: pd.DataFrame, recovery: pd.DataFrame) -> None:
    """Raise DataError if a target has no row in the table recovery.

    Args:
        folder: The folder of the measurement, for the error.
    """
    # Losses of two runs may differ in their last digits, so that a target close to the threshold is
    # chosen by only one of them.
    keys = [*KEYS, "distant_part"]
    evaluated = pd.MultiIndex.from_frame(recovery[keys])
    missing = pd.MultiIndex.from_frame(targets[keys]).difference(evaluated)
    if len(missing):
        document, target, _ = missing[0]
        raise DataError(
            f"{folder}: {len(missing)} targets were not evaluated, such as {target} of document "
            f"{document}, as losses changed; delete {folder / 'parts/recovery'}, and run it again"
        )
