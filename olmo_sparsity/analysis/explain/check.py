"""Check an explanation: do the units of unrelated texts lower the losses as much?

The same selector ranks the units of several unrelated texts, put in place of the distant context. A
target depends on its own units if these lower its loss more than those of any unrelated text. For a
target t and an unrelated text d, in nats:

    own_t          = L_0 − L_k, the loss reduction by the k units of the text
    unrelated_td   = the same for the k units of the unrelated text
    excess         = mean over t of (own_t − mean over d of unrelated_td)

With two targets and three unrelated texts the check looks like this:

    target      own    unrelated: d=0   d=1   d=2     own units are
    " Ayrton"   7.90              0.40  0.90  0.20    better than all three: depends on them
    " was"      0.30              0.10  0.50  0.20    no better than the second: may be chance

`compare_with_unrelated` is the entry point; `Check` is what it returns.

Dimension key: T targets, D draws of unrelated texts, R resamples of draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.explain.prepared import Prepared
from olmo_sparsity.analysis.explain.unrelated import unrelated_documents
from olmo_sparsity.analysis.measurement.targets import first_target_place, largest_gaps
from olmo_sparsity.analysis.options import MIN_GAP, is_whole_number
from olmo_sparsity.analysis.report.texts_page import note
from olmo_sparsity.analysis.results.intervals import Interval, percentile_interval, resample_weights
from olmo_sparsity.analysis.results.meta import InductionCheck
from olmo_sparsity.analysis.results.target_rows import DOCUMENT, PLACEBO
from olmo_sparsity.analysis.results.view import html_table, places, quoted, sentence
from olmo_sparsity.analysis.scoring.document_losses import context_losses
from olmo_sparsity.analysis.scoring.induction import repetition_drop
from olmo_sparsity.analysis.scoring.tensors import check_finite
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document, Documents

PASSAGE_LENGTH = 128
"""Tokens of the passages that the induction check repeats."""

MAX_PASSAGES = 16
"""The induction check repeats at most this many passages, which bounds its cost."""


@dataclass(frozen=True, repr=False)
class Check:
    """How much k units of the text, and k units of unrelated texts, lower the losses of targets."""

    table: pd.DataFrame
    """A row for each target. `own`: nats by which its k units lower its loss; `unrelated`: nats by
    which those of an unrelated text do, the mean over draws; `unrelated_most`: the largest of
    these; `better`: the number of draws that lower the loss at least as much as the own units."""

    draws: int
    """The number of unrelated texts."""

    k: int
    excess: Interval
    """Own minus unrelated, in nats a target, with its 95% interval over draws. It holds for these
    targets only."""

    share: float
    """The excess as a share of the gap; NaN if distant tokens raise the loss of a target."""

    placebo: float | None
    """The excess of the targets that an unrelated text seems to help most. None if targets were
    named: only the choice by gap needs a placebo."""

    induction: InductionCheck

    apart: int
    """How many unrelated texts of this length do not overlap; if below `draws`, the draws
    overlap."""

    tables: dict[str, pd.DataFrame]
    """The tables of `recover`, with own distant tokens and with unrelated texts."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold, without the tables of `recover`."""
        values = vars(self) | {"table": self.table.to_dict("records")}
        return {name: value for name, value in values.items() if name != "tables"}

    @property
    def num_beyond(self) -> int:
        """Return how many targets depend on their own units: distant tokens reduce their losses,
        and these units by more than those of any unrelated text."""
        is_reduced = (self.table.gap > 0) & (self.table.own > 0)
        return int((is_reduced & (self.table.better == 0)).sum())

    @property
    def verdict(self) -> str:
        """Return a sentence on how many targets depend on distant units."""
        text = (
            f"{self.num_beyond} of {len(self.table)} targets depend on distant units, which lower "
            "the loss more than those of any unrelated text"
        )
        num_raised = int((self.table.gap <= 0).sum())
        if num_raised:
            text += f"; at {num_raised} all distant tokens together raise the loss"
        return text

    @property
    def summary(self) -> str:
        """Return the excess with its interval, and the excess of the placebo, as text."""
        excess, low, high = self.excess
        text = f"excess {excess:+.2f} nats a target [{low:+.2f}, {high:+.2f}]"
        if np.isfinite(self.share):
            text += f", {self.share:.2f} of the gap"
        if self.placebo is not None:
            text += f"; of placebo targets {self.placebo:+.2f}: net {excess - self.placebo:+.2f}"
        return text

    @property
    def warning(self) -> str:
        """Return reasons to distrust the check, as text; empty if there are none."""
        reasons = []
        if self.apart < self.draws:
            reasons.append(
                f"the {self.draws} unrelated texts overlap: there is text for {self.apart}"
            )
        if not self.induction["has_induction"]:
            drop = self.induction["drop"] / max(self.induction["loss_first"], 1e-9)
            reasons.append(
                f"this model copies little from its context (a repeated passage costs {drop:.0%} "
                "less); such models mostly gain little from distant text"
            )
        return "; ".join(reasons)

    @property
    def note(self) -> str:
        """Return the verdict as HTML."""
        reasons = " ".join(sentence(text) for text in (self.summary, self.warning) if text)
        # Targets that were chosen by their gaps have an excess by this choice alone, as large as
        # the placebo's. Named targets have none.
        excess_by_chance = 0.0 if self.placebo is None else self.placebo
        is_good = self.num_beyond > 0 and self.excess.low > excess_by_chance
        return note(is_good, sentence(self.verdict), reasons)

    @property
    def html(self) -> str:
        """Return the table as HTML."""
        table = self.table
        columns = {
            "target": table.text.map(quoted),
            "where": map(places, table.target, table.end),
            "gap": table.gap,
            "own units": table.own,
            "unrelated": table.unrelated,
            "at most": table.unrelated_most,
            "do as well": [f"{num} of {self.draws}" for num in table.better],
        }
        caption = (
            f"Loss reduction in nats by {self.k} distant units, and by as many units of "
            f"{self.draws} unrelated texts, selected by the same rule"
        )
        return html_table(caption, columns, is_open=True)

    def __repr__(self) -> str:
        lines = [
            f"check: {self.draws} unrelated texts in place of the distant context, {self.k} units "
            "chosen in each by the same rule"
        ]
        for row in self.table.itertuples():
            lines.append(
                f"  {quoted(row.text)} ({places(row.target, row.end)}): own {row.own:+.2f} nats, "
                f"unrelated {row.unrelated:+.2f} (at most {row.unrelated_most:+.2f}); "
                f"{row.better} of {self.draws} do as well"
            )
        lines += [f"  {line}" for line in (self.summary, self.verdict, self.warning) if line]
        return "\n".join(lines)


def compare_with_unrelated(
    prepared: Prepared, targets: pd.DataFrame, unrelated: Any, draws: int = 8
) -> Check:
    """Evaluate the targets of an explanation again, with unrelated texts in place of their distant
    context. `unrelated`: text in any form that `open_documents` reads. `draws`: the number of
    unrelated texts that are drawn from it."""
    if not is_whole_number(draws) or draws < 2:
        raise ConfigError(
            f"draws={draws!r} must be a whole number of at least 2, as the interval is over draws"
        )
    seed = prepared.settings.seed
    unrelated_text = unrelated_documents(prepared.model, unrelated, prepared.document)
    controls = Controls(unrelated_text, prepared.windows, num_draws=draws, seed=seed)
    spans_by_part = _targets_to_check(prepared, targets, controls)
    tables = _evaluate_with_progress(prepared, spans_by_part, controls)
    # `recover` evaluated each number of units from 0 on. A short text may have fewer than k units.
    k = int(tables["recovery"].k.max())
    own, unrelated_by_draw = _loss_reductions(tables["recovery"], k)
    own_T = own.loc[DOCUMENT]
    unrelated_TD = unrelated_by_draw.loc[DOCUMENT]
    table = _table_of_targets(targets, own_T, unrelated_TD)

    # Indexed by kind of distant context and target, so it holds the placebo's targets, too.
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
        excess=percentile_interval(_resampled_excess(own_T, unrelated_TD, seed), excess),
        share=share,
        placebo=placebo,
        induction=repetition_drop(prepared.scorer, _passages(unrelated_text), PASSAGE_LENGTH),
        apart=len(unrelated_text[0].tokens) // len(prepared.document.tokens),
        tables=tables,
    )


def _table_of_targets(
    targets: pd.DataFrame, own_T: pd.Series, unrelated_TD: pd.DataFrame
) -> pd.DataFrame:
    """Return the targets with the loss reductions by their own and by unrelated units."""
    return targets.set_index("target")[["end", "text", "gap"]].assign(
        own=own_T,
        unrelated=unrelated_TD.mean(axis=1),
        unrelated_most=unrelated_TD.max(axis=1),
        better=unrelated_TD.ge(own_T, axis=0).sum(axis=1),
    )


def _resampled_excess(own_T: pd.Series, unrelated_TD: pd.DataFrame, seed: int) -> np.ndarray:
    """Return excess_R, the excess over resamples of the unrelated texts. The targets are fixed, so
    they are not resampled."""
    num_draws = unrelated_TD.shape[1]
    excess_D = (own_T.to_numpy()[:, None] - unrelated_TD.to_numpy()).mean(0)
    # A row of weights says how often a resample drew each unrelated text.
    weights_RD = resample_weights(num_draws, seed)
    return weights_RD @ excess_D / num_draws


def _targets_to_check(
    prepared: Prepared, targets: pd.DataFrame, controls: Controls
) -> dict[str, np.ndarray]:
    """Return the spans of the targets to evaluate, by kind of distant context: the targets of the
    explanation, and, if they were chosen by their gaps, those of the placebo."""
    spans_by_part = {DOCUMENT: targets[["target", "end"]].to_numpy()}
    if not prepared.chosen_by_gap:
        return spans_by_part
    windows = prepared.windows
    losses = context_losses(
        prepared.scorer, prepared.document, windows, controls, prepared.blocks_to_select()
    )
    losses = losses[losses.target >= first_target_place(windows, prepared.settings.units)]
    # Chosen in the same way as the explanation's own, from the gaps with an unrelated text.
    spans_by_part[PLACEBO] = np.array(largest_gaps(losses, "placebo_loss_long"))
    return spans_by_part


def _loss_reductions(recovery: pd.DataFrame, k: int) -> tuple[pd.Series, pd.DataFrame]:
    """Return by how many nats k own units lower the loss of each target, and, in a column for each
    draw, by how many those of an unrelated text do."""
    is_unrelated = recovery.control == "unrelated"
    check_finite(recovery[is_unrelated].loss_set.to_numpy(), "unrelated texts")
    row_keys = ["distant_part", "target", "control", "draw"]
    loss_by_k = recovery.pivot_table("loss_set", row_keys, "k")
    # With k = 0 units a row is the local window alone: L_0 is L_short.
    reduction = loss_by_k[0] - loss_by_k[k]
    # A random selector is drawn several times for own distant tokens, and the mean is taken.
    own = reduction.xs("own", level="control").groupby(["distant_part", "target"]).mean()
    unrelated_by_draw = reduction.xs("unrelated", level="control").unstack("draw")
    return own, unrelated_by_draw


def _evaluate_with_progress(
    prepared: Prepared, spans_by_part: dict[str, np.ndarray], controls: Controls
) -> dict[str, pd.DataFrame]:
    """Evaluate targets with unrelated texts, show progress meanwhile, and return the tables of
    `recover`. `spans_by_part`: targets, by kind of distant context."""
    scorer = prepared.scorer
    forwards_before = scorer.token_forwards
    with Progress("checking", None, "token-forwards") as progress:
        scorer.after_batch = lambda: progress.update(scorer.token_forwards - forwards_before)
        tables = prepared.recover(spans_by_part, controls)
    scorer.after_batch = lambda: None
    return tables


def _passages(unrelated_text: Documents) -> list[Document]:
    """Cut the unrelated text, which is one document, into passages for the induction check."""
    tokens = unrelated_text[0].tokens
    # Whole passages only, and no more than `MAX_PASSAGES`.
    last_start = min(len(tokens) - PASSAGE_LENGTH, MAX_PASSAGES * PASSAGE_LENGTH)
    starts = range(0, last_start, PASSAGE_LENGTH)
    return [Document(tokens[start : start + PASSAGE_LENGTH]) for start in starts]
