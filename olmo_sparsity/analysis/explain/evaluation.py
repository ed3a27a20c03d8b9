"""Evaluate the targets of an explanation: rank their distant units, and compute all losses.

    Prepared, spans → `recover` → tables → `evaluate_targets` → targets, distant

`recover` returns losses as a measurement stores them, a row for each target and number of units.
An explanation shows a row for each target, and a row for each of its units:

    recovery    target  k  loss_set  loss_without
                    61  0      9.10          0.40   ← the local window alone; the whole long window
                    61  1      1.20          5.30
                    61  2      1.10          5.60

    targets     target  loss_short  loss_long
                    61        9.10       0.40

    distant     target  rank  loss_set  loss_without
                    61     1      1.20          5.30
                    61     2      1.10          5.60

Dimension key: W targets of a row or block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.explain.prepared import Prepared
from olmo_sparsity.analysis.results.target_rows import DOCUMENT
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import Spans
from olmo_sparsity.text.windows import Windows

LOSSES = ["loss_short", "loss_long"]
"""The columns of the losses with the local and with the long window."""


class EvaluatedTargets(NamedTuple):
    """The tables of an explanation; `ExplainedText` describes their columns."""

    targets: pd.DataFrame
    distant: pd.DataFrame
    tables: dict[str, pd.DataFrame]


def evaluate_targets(prepared: Prepared, spans: Spans) -> EvaluatedTargets:
    """Rank the distant units of the targets, and compute all their losses."""
    document = prepared.document
    tables = prepared.recover({DOCUMENT: np.array(spans)})
    recovery = tables["recovery"]
    # A random selector has several draws; the first is shown.
    first_draw = recovery[recovery.draw == 0]
    losses = first_draw.set_index(["target", "k"])[["loss_set", "loss_without"]]

    targets = pd.DataFrame(spans, columns=["target", "end"])
    targets["text"] = ["".join(document.texts[first:end]) for first, end in spans]
    # With 0 units the set is the local window alone, and all but the set the long window.
    no_units = losses.xs(0, level="k").loc[targets.target]
    targets["loss_short"] = no_units.loss_set.to_numpy()
    targets["loss_long"] = no_units.loss_without.to_numpy(float)
    targets["gap"] = targets.loss_short - targets.loss_long

    distant = tables["influence"].rename(columns=lambda name: name.removeprefix("distant_"))
    distant = distant[["target", "rank", "first", "end", "text"]]
    distant["nats"] = _reductions_alone(
        prepared.scorer, document, prepared.windows, targets, distant
    )
    # The loss with k units belongs to the unit of rank k.
    losses_by_rank = losses.rename_axis(index={"k": "rank"}).reset_index()
    distant = distant.merge(losses_by_rank, on=["target", "rank"])
    return EvaluatedTargets(targets, distant, tables)


def _reductions_alone(
    scorer: Scorer,
    document: Document,
    windows: Windows,
    targets: pd.DataFrame,
    distant: pd.DataFrame,
) -> pd.Series:
    """Return by how many nats the loss falls when each distant unit alone is added to the local
    window, a number for each row of `distant`. A selector's score may be something else."""
    nats = pd.Series(0.0, distant.index)
    for target in targets.itertuples():
        block = windows.block(document.tokens, target.target, target.end)
        context = scorer.context(block)
        units = distant[distant.target == target.target]
        # Units are stored by their places in the document; a row takes distant indices.
        rows = [
            context.set_row(np.arange(first, end) - block.first_distant)
            for first, end in zip(units["first"], units["end"], strict=True)
        ]
        losses = np.array([loss_W.sum() for loss_W in scorer.losses(rows)])
        nats[units.index] = target.loss_short - losses
    return nats
