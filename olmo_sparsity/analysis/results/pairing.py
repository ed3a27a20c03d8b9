"""Join the tables of a measurement: one row for each target, with all its losses side by side.

    losses, targets, recovery → `join_by_target` → rows of targets
                                                 → statistics.py, compare.py, by_distance.py

The table `recovery` has own and unrelated units in different rows, and a row for each draw:

    recovery   document  target  control    draw   k  loss_set
                      1      18  own           0   1       5.1
                      1      18  unrelated     0   1       6.0
                      1      18  unrelated     1   1       6.2

    returned   document  target   k  loss_long  loss_short  loss_set_own  loss_set_unrelated   gap
                      1      18   1        4.0         6.3           5.1                 6.1   2.3

Never imports torch.
"""

from __future__ import annotations

from itertools import product

import pandas as pd

from olmo_sparsity.analysis.results.target_rows import (
    KEYS,
    SplitDocuments,
    distant_part_losses,
    losses_of_targets,
    whole_documents,
)
from olmo_sparsity.base.errors import DataError


def join_by_target(
    losses: pd.DataFrame,
    targets: pd.DataFrame,
    recovery: pd.DataFrame,
    split_documents: SplitDocuments | None = None,
) -> pd.DataFrame:
    """Return a row for each target in each of its target sets, and each kind of units, selector
    and k, with the losses of all three tables, in nats. Raise DataError if a target was not
    evaluated.

    The losses with own and with unrelated units are columns next to each other, such as
    `loss_set_own` and `loss_set_unrelated`, in which draws are averaged. These columns are added,
    the first four in nats:

        own_reduction         L_short − L_k with the k own units
        unrelated_reduction   L_short − L_k with the k units of an unrelated text
        removal_increase      L_without − L_long: by how much the loss rises without the k own units
        gap                   L_short − L_long
        weight                1 for each target, so that target_sums.py sums it to their number
        whole_document        the number of the document that the bootstrap draws as a whole; for a
                              part of a split document, the number of its first part
    """
    unit_losses = _losses_by_control(recovery)
    losses_of_parts = distant_part_losses(losses_of_targets(losses, targets))
    target_keys = [*KEYS, "distant_part"]
    evaluated = unit_losses.merge(losses_of_parts, on=target_keys)
    rows = targets.merge(evaluated, how="left", on=target_keys)

    lacks_own = rows.loss_set_own.isna().any()
    # A measurement without controls has no unrelated text at all, which is not an error.
    has_unrelated = recovery.control.eq("unrelated").any()
    lacks_unrelated = has_unrelated and rows.loss_set_unrelated.isna().any()
    if lacks_own or lacks_unrelated:
        raise DataError(
            "the table recovery lacks rows of chosen targets; measure again in a new folder"
        )
    # `gap` is there already: `distant_part_losses` has added it.
    return rows.assign(
        own_reduction=rows.loss_short - rows.loss_set_own,
        unrelated_reduction=rows.loss_short - rows.loss_set_unrelated,
        removal_increase=rows.loss_without_own - rows.loss_long,
        weight=1.0,
        whole_document=whole_documents(rows.document, split_documents),
    )


def _losses_by_control(recovery: pd.DataFrame) -> pd.DataFrame:
    """Return the table `recovery` with one row for each target and choice of units. Its columns of
    values are named after what the units are: `loss_set_own`, `loss_set_unrelated`, …"""
    choice_keys = [*KEYS, "distant_part", "units", "selector", "k"]
    value_names = ["loss_set", "loss_without", "num_tokens"]
    unit_losses = recovery.pivot_table(
        values=value_names,
        index=choice_keys,
        columns="control",
        aggfunc="mean",  # over draws
    )
    # Without controls the table has no unrelated text, but `join_by_target` reads its columns.
    unit_losses = unit_losses.reindex(columns=list(product(value_names, ("own", "unrelated"))))
    unit_losses.columns = ["_".join(column) for column in unit_losses.columns]
    return unit_losses.reset_index()
