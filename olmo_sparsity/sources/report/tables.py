"""Make two tables of an `Attribution`: the matrix of effects, and a row for each source.

Place in the flow: losses.py, evidence.py → **`matrix_of`** → the table of statements
(statement_rows.py), which needs the matrix → **`sources_table`**. docs/sources.md explains the
columns. A cell of the matrix says of one statement and one source, for example,

    gives  se_gives  beyond_gives  tried_gives  p_gives      lost  se_lost  …      above
     8.0     0.1          8             8        0.0001       7.5     0.1           6.2

that the source gives 8.0 ± 0.1 nats, more than 0 beside 8 of 8 decoys, which has a p-value of
0.0001; that 7.5 nats are lost without it; and that its larger effect is 6.2 nats above the
threshold.

Dimension key: T statements, S sources, D decoys of a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.sources.verdicts.effect_tests import EFFECTS
from olmo_sparsity.sources.verdicts.evidence import Evidence
from olmo_sparsity.sources.verdicts.losses import StatementLosses, mean_over_decoys


def matrix_of(
    losses: StatementLosses, evidence: Evidence, source_names: Sequence[str]
) -> pd.DataFrame:
    """Return a row for each statement and source, with both effects of the source in nats.

    Args:
        losses: Losses of each statement.
        evidence: What the tests say of these effects.
        source_names: Names of the sources, in the order of S.
    """
    nats_of_effects = {"gives": losses.gives_TSD, "lost": losses.lost_TSD}
    columns: dict[str, np.ndarray] = {}
    for name, p_TS in zip(EFFECTS, evidence.p_ETS, strict=True):
        nats_TSD = nats_of_effects[name]
        num_tried_TS = np.isfinite(nats_TSD).sum(-1)
        columns[name] = mean_over_decoys(nats_TSD)
        # By the spread of the statement, as the variance of a few decoys may be far too small.
        # Where no decoy was tried, there is no standard error.
        num_or_nan_TS = np.where(num_tried_TS > 0, num_tried_TS, np.nan)
        columns[f"se_{name}"] = evidence.spread_TS / num_or_nan_TS**0.5
        columns[f"beyond_{name}"] = (nats_TSD > 0).sum(-1)
        columns[f"tried_{name}"] = num_tried_TS
        columns[f"p_{name}"] = p_TS
    nats_above_TS = evidence.nats_above_TS
    columns["above"] = np.where(np.isfinite(nats_above_TS), nats_above_TS, np.nan)
    keys = [range(len(losses.all_T)), source_names]
    index = pd.MultiIndex.from_product(keys, names=["statement", "source"])
    return pd.DataFrame({name: values.ravel() for name, values in columns.items()}, index)


def sources_table(
    statements: pd.DataFrame, matrix: pd.DataFrame, source_names: Sequence[str]
) -> pd.DataFrame:
    """Return a row for each source: the numbers of the statements that rely on it, its largest
    effect on any statement in nats, and a verdict in words."""
    # Through reasoning, too: a source that stands behind a sentence is relied on.
    named_by_statement = [{*row.sources, *row.origins} for row in statements.itertuples()]
    open_names = set[str]().union(*statements.open)
    largest_effects = matrix[list(EFFECTS)].max(axis=1).groupby("source").max()
    rows: list[dict[str, Any]] = []
    for name in source_names:
        numbers = tuple(i for i, named in enumerate(named_by_statement) if name in named)
        nats = largest_effects[name]
        nats_in_words = f"{nats + 0.0:.1f} nats"  # no -0.0
        if numbers:
            from_one = ", ".join(str(i + 1) for i in numbers)
            verdict = f"statement {from_one} relies on it ({nats_in_words})"
        elif name in open_names:
            verdict = f"neither named nor excluded (at most {nats_in_words})"
        else:
            verdict = f"changes nothing beyond its decoys (at most {nats_in_words})"
        rows.append({"source": name, "statements": numbers, "nats": nats, "verdict": verdict})
    return pd.DataFrame(rows)
