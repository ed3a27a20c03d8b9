"""Say what makes the intervals of a row doubtful: few targets, few documents, no placebo.

All outputs print these warnings: `measure`, `report`, `compare` and `figure`. Never imports torch.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from olmo_sparsity.analysis.results.reported import MIN_DOCUMENTS, MIN_TARGETS, has_few_targets
from olmo_sparsity.analysis.results.view import num_of

FEW_DOCUMENTS = 10
"""With fewer documents, no verdict is given, and all outputs warn of the intervals."""

SETS_BY_OUTCOME = ("gap",)
"""Target sets that are selected by what distant text does to the prediction."""

MINIMUM = f"at least {MIN_TARGETS} targets and {MIN_DOCUMENTS} documents"
"""What an interval requires, of the text and of the placebo."""


def has_net(rows: pd.DataFrame) -> bool:
    """Return whether net excess means something for these rows.

    Net excess subtracts the effect of selecting targets by their outcome. Targets that were not
    selected so have no such effect to subtract, and their net excess would be below 0 by
    construction.
    """
    are_selected_by_outcome = set(rows.target_set) <= set(SETS_BY_OUTCOME)
    return bool(rows.net.notna().any()) and are_selected_by_outcome


def describe_few(row: Any, has_net: bool) -> str:
    """Return why a row of the summary has too few targets for an interval, or an empty text if it
    has enough. `has_net`: whether it shows net excess, so that its placebo targets must be enough,
    too."""
    frame = pd.DataFrame([row])
    if has_few_targets(frame).any():
        documents = num_of(row["num_documents"], "document")
        return f"{num_of(row['num_targets'], 'target')} in {documents}; {MINIMUM} are needed"
    if has_net and has_few_targets(frame, "placebo").any():
        documents = num_of(row["num_placebo_documents"], "document")
        targets = num_of(row["num_placebo_targets"], "placebo target")
        return f"{targets} in {documents}; {MINIMUM} are needed"
    return ""


def warnings_of_few(row: Any, has_net: bool) -> list[str]:
    """Return what makes the intervals of a row doubtful, each a clause: too few targets, or too few
    documents. All outputs print it: `measure`, `report`, `compare` and `figure`.

    `row`: a row of the summary, or of a comparison. `has_net`: whether net excess is shown."""
    too_few = describe_few(row, has_net)
    if too_few:
        return [f"no intervals: {too_few}"]
    if row["num_documents"] < FEW_DOCUMENTS:
        return [f"{row['num_documents']} documents are too few to trust the interval"]
    return []


def describe_missing_placebo(row: Any, is_transfer: bool) -> str:
    """Return a warning that targets which were selected by their gap have no placebo targets, or an
    empty text if they have some, or need none. `is_transfer`: whether another model ranked the
    units, so that no placebo is needed."""
    needs_placebo = row["target_set"] in SETS_BY_OUTCOME and not is_transfer
    if needs_placebo and row.get("num_placebo_targets") == 0:
        return "no placebo targets, so no net excess"
    return ""
