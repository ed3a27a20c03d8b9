"""Decide what makes numbers doubtful, and describe it: few targets or documents, no placebo.

    a row of the summary → `warnings_of_few`, `describe_missing_placebo` → clauses, such as

        no intervals: 7 targets in 3 documents; at least 10 targets and 5 documents are needed
        6 documents are too few to trust the interval
        no placebo targets, so no net excess

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

INDUCTION_SHARE = 0.15
"""A model copies from its context if a passage, when it is repeated, costs it less by at least this
share. A share has the same meaning for any text and vocabulary; nats have not. Of the stored models
those that do not copy have 0.10 at most, those that do 0.17 or more."""

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


def describe_few(row: Any, shows_net: bool) -> str:
    """Return why a row has too few targets for an interval, or an empty text if it has enough.

    Args:
        row: A row of the summary, or of a comparison.
        shows_net: Whether net excess is shown, so that placebo targets must be enough, too.
    """
    # `has_few_targets` takes a table, and a row may be a dict or a Series.
    frame = pd.DataFrame([row])
    if has_few_targets(frame).any():
        documents = num_of(row["num_documents"], "document")
        return f"{num_of(row['num_targets'], 'target')} in {documents}; {MINIMUM} are needed"
    if shows_net and has_few_targets(frame, "placebo").any():
        documents = num_of(row["num_placebo_documents"], "document")
        targets = num_of(row["num_placebo_targets"], "placebo target")
        return f"{targets} in {documents}; {MINIMUM} are needed"
    return ""


def warnings_of_few(row: Any, shows_net: bool) -> list[str]:
    """Return what makes the intervals of a row doubtful, each a clause: too few targets, or too few
    documents.

    Args:
        row: A row of the summary, or of a comparison.
        shows_net: Whether net excess is shown.
    """
    too_few = describe_few(row, shows_net)
    if too_few:
        return [f"no intervals: {too_few}"]
    if row["num_documents"] < FEW_DOCUMENTS:
        return [f"{row['num_documents']} documents are too few to trust the interval"]
    return []


def describe_missing_placebo(row: Any, is_transfer: bool) -> str:
    """Return a warning if targets that were selected by their gap have no placebo targets; an empty
    text if they have some, or need none.

    Args:
        row: A row of the summary.
        is_transfer: Whether another model ranked the units, so that no placebo is needed.
    """
    # Luck with the loss of one model is no luck with that of another.
    needs_placebo = row["target_set"] in SETS_BY_OUTCOME and not is_transfer
    if needs_placebo and row.get("num_placebo_targets") == 0:
        return "no placebo targets, so no net excess"
    return ""


def with_remarks(table: pd.DataFrame, has_net: bool = False) -> pd.DataFrame:
    """Add the column `remark` to a comparison: what makes the intervals of a row doubtful, or
    nothing.

    Args:
        has_net: Whether net excess is compared.
    """
    remarks = []
    for row in table.to_dict("records"):
        is_by_outcome = row["target_set"] in SETS_BY_OUTCOME
        missing_placebo = describe_missing_placebo(row, is_transfer=not has_net)
        shows_net = has_net and is_by_outcome and not missing_placebo
        warnings = warnings_of_few(row, shows_net)
        if missing_placebo:
            warnings.append(missing_placebo)
        if has_net and not is_by_outcome:
            warnings.append("no net excess: these targets were not selected by their gap")
        remarks.append("; ".join(warnings))
    return table.assign(remark=remarks)
