"""Join the tables of a measurement: one row for each target, with all its losses.

    losses, targets, recovery → `pair` → rows of targets

The table `recovery` has own and unrelated units in different rows. `pair` puts them side by side:

    recovery   document  target  control    draw   k  loss_set
                      1      18  own           0   1       5.1
                      1      18  unrelated     0   1       6.0
                      1      18  unrelated     1   1       6.2

    returned   document  target   k  loss_short  loss_set_own  loss_set_unrelated   gap
                      1      18   1         6.3           5.1                 6.1   2.3

Statistics, comparisons and the split by distance are all computed from such rows. Never imports
torch.
"""

from __future__ import annotations

from itertools import product

import pandas as pd

from olmo_sparsity.analysis.results.target_rows import (
    KEYS,
    Parts,
    distant_part_losses,
    losses_of_targets,
    whole_documents,
)
from olmo_sparsity.base.errors import DataError


def pair(
    losses: pd.DataFrame,
    targets: pd.DataFrame,
    recovery: pd.DataFrame,
    parts: Parts | None = None,
) -> pd.DataFrame:
    """Join the tables: return a row for each target in each of its sets, kind of units, selector
    and k. Own and unrelated text have columns next to each other, such as `loss_set_own`, in which
    draws are averaged. These columns are added, in nats but for the last two:

        own_reduction         L_short − L_k, with the k own units
        unrelated_reduction   the same with the k units of an unrelated text
        removal_increase      L_without − L_long: what is lost without the k own units
        gap                   L_short − L_long
        weight                1, which is summed to the number of targets
        whole_document        the document that is resampled, which of a part is the whole
    """
    row_keys = [*KEYS, "distant_part", "units", "selector", "k"]
    value_names = ["loss_set", "loss_without", "num_tokens"]
    # `pivot_table` takes the mean of several rows, here of several draws.
    sets = recovery.pivot_table(value_names, row_keys, "control")
    # Without controls the table has no unrelated text, but its columns are expected below.
    sets = sets.reindex(columns=list(product(value_names, ("own", "unrelated"))))
    sets.columns = ["_".join(column) for column in sets.columns]

    losses = distant_part_losses(losses_of_targets(losses, targets))
    sets = sets.reset_index().merge(losses, on=[*KEYS, "distant_part"])
    rows = targets.merge(sets, how="left", on=[*KEYS, "distant_part"])

    has_unrelated = recovery.control.eq("unrelated").any()
    if rows.loss_set_own.isna().any() or (has_unrelated and rows.loss_set_unrelated.isna().any()):
        raise DataError("the table recovery lacks rows of chosen targets; measure again elsewhere")
    # The column `gap` comes from `distant_part_losses`.
    return rows.assign(
        own_reduction=rows.loss_short - rows.loss_set_own,
        unrelated_reduction=rows.loss_short - rows.loss_set_unrelated,
        removal_increase=rows.loss_without_own - rows.loss_long,
        weight=1.0,
        whole_document=whole_documents(rows.document, parts),
    )
