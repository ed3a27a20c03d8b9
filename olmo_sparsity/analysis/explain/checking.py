"""Check an explanation: do the units of unrelated texts lower the losses as much?

    targets of an explanation, text to draw from → `compare_with_unrelated` → Check (check.py)

Several unrelated texts are put in place of the distant context, one after another, and the same
selector ranks the units of each. A target depends on its own units if these lower its loss more
than those of any unrelated text. For two targets and two unrelated texts, in nats:

    target      own units    units of text 0   of text 1    own − mean
    " Ayrton"        7.90               0.40        0.80          7.30
    " was"           0.30               0.10        0.50          0.00
                                                    excess:       3.65, the mean over targets

A loss reduction is L_0 − L_k: the loss with the local window alone, minus the loss with k units.

Targets that were chosen by their gaps have an excess by this choice alone. So targets are then also
chosen by the gap with an unrelated text, the placebo, and their excess is reported beside it.

Dimension key: T targets, X unrelated texts, R resamples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.explain.check import Check
from olmo_sparsity.analysis.explain.largest_gaps import first_place_with_units, largest_gaps
from olmo_sparsity.analysis.explain.prepared import Prepared
from olmo_sparsity.analysis.explain.unrelated import unrelated_documents
from olmo_sparsity.analysis.options import MIN_GAP, is_whole_number
from olmo_sparsity.analysis.results.intervals import percentile_interval, resample_weights
from olmo_sparsity.analysis.results.target_rows import DOCUMENT, PLACEBO
from olmo_sparsity.analysis.scoring.document_losses import context_losses
from olmo_sparsity.analysis.scoring.induction import repetition_drop
from olmo_sparsity.analysis.scoring.tensors import check_finite
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document, Documents

PASSAGE_LENGTH = 128
"""Tokens of the passages that the induction check repeats."""

MAX_PASSAGES = 16
"""The induction check repeats at most this many passages, which bounds its cost."""


def compare_with_unrelated(
    prepared: Prepared, targets: pd.DataFrame, unrelated: Any, draws: int = 8
) -> Check:
    """Evaluate the targets of an explanation again, with unrelated texts in place of their distant
    context.

    Args:
        prepared: The text, its windows, the settings and the model.
        targets: The targets of `ExplainedText`.
        unrelated: Text in any form that `open_documents` reads.
        draws: The number of unrelated texts that are drawn from it.
    """
    if not is_whole_number(draws) or draws < 2:
        raise ConfigError(
            f"draws={draws!r} must be a whole number of at least 2, as the interval is over draws"
        )
    seed = prepared.settings.seed
    unrelated_text = unrelated_documents(prepared.model, unrelated, prepared.document)
    controls = Controls(unrelated_text, prepared.windows, num_draws=draws, seed=seed)
    spans_by_part = _targets_to_check(prepared, targets, controls)
    with prepared.scorer.showing_progress("checking"):
        tables = prepared.recover(spans_by_part, controls)

    # Each number of units from 0 on was evaluated. A short text may have fewer than the option k.
    k = int(tables["recovery"].k.max())
    own, unrelated_by_draw = _loss_reductions(tables["recovery"], k)
    own_T = own.loc[DOCUMENT]
    unrelated_TX = unrelated_by_draw.loc[DOCUMENT]
    table = _table_of_targets(targets, own_T, unrelated_TX)

    # Indexed by distant part and target, so it holds the placebo's targets, too.
    excess_by_target = own - unrelated_by_draw.mean(axis=1)
    excess = float(excess_by_target.loc[DOCUMENT].mean())
    # A share of the gap means something only if there is a gap at each target.
    share = float("nan")
    if table.gap.min() > 0 and table.gap.mean() > MIN_GAP:
        share = excess / table.gap.mean()
    placebo = None
    if prepared.chosen_by_gap:
        placebo = float(excess_by_target.loc[PLACEBO].mean())
    return Check(
        table=table.reset_index(),
        draws=draws,
        k=k,
        excess=percentile_interval(_resampled_excess(own_T, unrelated_TX, seed), excess),
        share=share,
        placebo=placebo,
        induction=repetition_drop(prepared.scorer, _passages(unrelated_text), PASSAGE_LENGTH),
        apart=len(unrelated_text[0].tokens) // len(prepared.document.tokens),
        tables=tables,
    )


def _targets_to_check(
    prepared: Prepared, targets: pd.DataFrame, controls: Controls
) -> dict[str, np.ndarray]:
    """Return the spans of the targets to evaluate, by distant part: the targets of the explanation,
    and, if they were chosen by their gaps, those of the placebo."""
    spans_by_part = {DOCUMENT: targets[["target", "end"]].to_numpy()}
    if not prepared.chosen_by_gap:
        return spans_by_part
    windows = prepared.windows
    losses = context_losses(
        prepared.scorer, prepared.document, windows, controls, prepared.blocks_to_search()
    )
    losses = losses[losses.target >= first_place_with_units(windows, prepared.settings.units)]
    # Chosen in the same way as the explanation's own, from the gaps with an unrelated text.
    spans_by_part[PLACEBO] = np.array(largest_gaps(losses, "placebo_loss_long"))
    return spans_by_part


class _LossReductions(NamedTuple):
    """By how many nats k units lower the loss of each target. Rows have the index (distant part,
    target)."""

    own: pd.Series
    """By the units of the text itself."""

    unrelated_by_draw: pd.DataFrame
    """By the units of unrelated texts, a column for each draw."""


def _loss_reductions(recovery: pd.DataFrame, k: int) -> _LossReductions:
    """Return the loss reductions by k own and by k unrelated units."""
    is_unrelated = recovery.control == "unrelated"
    check_finite(recovery[is_unrelated].loss_set.to_numpy(), "unrelated texts")
    row_keys = ["distant_part", "target", "control", "draw"]
    loss_by_k = recovery.pivot_table("loss_set", row_keys, "k")
    # With k = 0 units a row is the local window alone: L_0 is L_short.
    reduction = loss_by_k[0] - loss_by_k[k]
    # A random selector is drawn several times for own distant tokens, and the mean is taken.
    own = reduction.xs("own", level="control").groupby(["distant_part", "target"]).mean()
    unrelated_by_draw = reduction.xs("unrelated", level="control").unstack("draw")
    return _LossReductions(own, unrelated_by_draw)


def _table_of_targets(
    targets: pd.DataFrame, own_T: pd.Series, unrelated_TX: pd.DataFrame
) -> pd.DataFrame:
    """Return the targets with the loss reductions by their own and by unrelated units, in the
    columns of `Check.table`."""
    return targets.set_index("target")[["end", "text", "gap"]].assign(
        own=own_T,
        unrelated=unrelated_TX.mean(axis=1),
        unrelated_most=unrelated_TX.max(axis=1),
        better=unrelated_TX.ge(own_T, axis=0).sum(axis=1),
    )


def _resampled_excess(own_T: pd.Series, unrelated_TX: pd.DataFrame, seed: int) -> np.ndarray:
    """Return excess_R, the excess over resamples of the unrelated texts. The targets are fixed, so
    they are not resampled."""
    num_draws = unrelated_TX.shape[1]
    excess_X = (own_T.to_numpy()[:, None] - unrelated_TX.to_numpy()).mean(0)
    # A row of weights says how often a resample drew each unrelated text.
    weights_RX = resample_weights(num_draws, seed)
    return weights_RX @ excess_X / num_draws


def _passages(unrelated_text: Documents) -> list[Document]:
    """Cut the unrelated text, which is one document, into passages for the induction check."""
    tokens = unrelated_text[0].tokens
    # Whole passages only, and no more than `MAX_PASSAGES`.
    last_start = min(len(tokens) - PASSAGE_LENGTH, MAX_PASSAGES * PASSAGE_LENGTH)
    starts = range(0, last_start, PASSAGE_LENGTH)
    return [Document(tokens[start : start + PASSAGE_LENGTH]) for start in starts]
