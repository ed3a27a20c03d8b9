"""What k chosen far tokens give back of the gap, beside what tokens of another text give back.

Place in the flow: ranked far tokens → **L_k** → recovery with intervals.

    R_k = Σ_t (L_short − L_k) / Σ_t (L_short − L_long)    a ratio of sums, no mean of ratios
    E_k = R_k − R_k(foreign)                              the headline

Intervals are 95% percentile bootstraps over documents; own and foreign are resampled together.

Dimension key: T targets, K numbers of far tokens, D documents, R bootstrap resamples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.influence import SELECTORS, Choice, Question
from analysis.losses import context_losses
from analysis.scoring import Scorer, long_row
from analysis.windows import NOTHING, Block, Windows

NUM_RESAMPLES = 2000

NO_GAP_NATS = 1e-4
"""Below this mean gap a ratio to it would be one of rounding errors."""


@dataclass(frozen=True)
class SetLosses:
    loss_TK: np.ndarray
    kl_TK: np.ndarray | None
    """KL(p_long ‖ p_set), only where it was asked for."""

    kl_short_T: np.ndarray | None
    """KL(p_long ‖ p_short)."""


def set_losses(
    scorer: Scorer,
    block: Block,
    own: Block,
    targets: np.ndarray,
    choice: Choice,
    ks: tuple[int, ...],
    with_kl: bool,
) -> SetLosses:
    """L_set(t; F_k(t)) of each target's k best, far tokens taken from `block`."""
    rows = [
        scorer.set_row(block, choice.far_TK[row, :k], int(target))
        for row, target in enumerate(targets)
        for k in ks
    ]
    shape = (len(targets), len(ks))
    loss_TK = np.array(scorer.losses(rows)).reshape(shape)
    if not with_kl:
        return SetLosses(loss_TK, None, None)
    log_p_WV = scorer.log_probabilities(long_row(own))
    short = [scorer.set_row(own, NOTHING, int(target)) for target in targets]
    log_p = [log_p_WV[[int(target)]] for target in targets for _ in ks]
    kl_TK = np.array(scorer.divergences(rows, log_p)).reshape(shape)
    kl_short = scorer.divergences(short, log_p[:: len(ks)])
    return SetLosses(loss_TK, kl_TK, np.array(kl_short)[:, 0])


def recover(
    scorer: Scorer,
    document: np.ndarray,
    windows: Windows,
    *,
    selector: str = "add_one",
    ks: tuple[int, ...] = (1, 2, 4, 8, 16),
    targets: np.ndarray | None = None,
    foreign: np.ndarray | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """What the k most influential far tokens of each target give back, one row a target and k.

    `targets` are places in the document (default: every one with a full long window). With
    `foreign`, N − S tokens of another document, the candidates are those instead: the control that
    belongs beside every recovery. `far` holds the chosen places, the most influential first.
    """
    wanted = np.arange(windows.long, len(document)) if targets is None else np.asarray(targets)
    losses = context_losses(scorer, document, windows)
    rows = []
    for own in windows.blocks(document):
        inside = wanted[(wanted >= own.start) & (wanted < own.start + own.num_targets)] - own.start
        if not len(inside):
            continue
        block = own if foreign is None else own.with_far(foreign)
        generator = np.random.default_rng([seed, own.start])
        choice = SELECTORS[selector](scorer, Question(block, own, inside, max(ks), generator))
        found = set_losses(scorer, block, own, inside, choice, ks, with_kl=False)
        for row, target in enumerate((own.start + inside).tolist()):
            here = target - windows.long
            far = own.start - windows.long + choice.far_TK[row]
            rows += [
                (target, k, losses.loss_short[here], found.loss_TK[row, column],
                 losses.loss_long[here], far[:k].tolist())
                for column, k in enumerate(ks)
            ]  # fmt: skip
    columns = ["target", "k", "loss_short", "loss_set", "loss_long", "far"]
    return pd.DataFrame(rows, columns=columns)


# --- statistics -----------------------------------------------------------------------------------

KEYS = ["document", "target"]


def summarize(losses: pd.DataFrame, recovery: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """The summary table (without costs): one row a target set, selector, control and k."""
    gaps = losses.assign(gap=losses.loss_short - losses.loss_long)[[*KEYS, "loss_short", "gap"]]
    rows = recovery.merge(gaps, on=KEYS, validate="many_to_one")
    rows["regained"] = rows.loss_short - rows.loss_set
    # A target's draws are averaged first: they are repeats of one measurement.
    by = ["target_set", "selector", "control", "k", *KEYS]
    values = ["regained", "gap", "kl_set", "kl_short"]
    means = rows.groupby(by, as_index=False)[values].mean()
    # Where there is no gap, nothing is to be recovered: those targets are measured in the mean gap
    # of the others.
    for without, having in WITHOUT_GAP.items():
        means.loc[means.target_set == without, "gap"] = means[means.target_set == having].gap.mean()
    found = []
    for (target_set, selector), part in means.groupby(["target_set", "selector"]):
        for k, at_k in part.groupby("k"):
            own = at_k[at_k.control == "own"].set_index(KEYS)
            foreign = at_k[at_k.control == "foreign"].set_index(KEYS)
            found += list(_rows_of(own, foreign.reindex(own.index), seed))
            for row in found[-2:]:
                row |= {"target_set": target_set, "selector": selector, "k": int(k)}
    return pd.DataFrame(found, columns=SUMMARY_COLUMNS)


SUMMARY_COLUMNS = [
    "target_set", "selector", "control", "k", "recovery", "low", "high",
    "excess", "excess_low", "excess_high", "excess_nats", "excess_nats_low", "excess_nats_high",
    "kl_removed", "gap", "num_targets", "num_documents",
]  # fmt: skip

WITHOUT_GAP = {"zero_gap": "gap", "planted_removed": "planted"}
"""Target sets that must show nothing, and the set whose mean gap is their unit."""


def _rows_of(own: pd.DataFrame, foreign: pd.DataFrame, seed: int) -> Iterator[dict]:
    documents = own.index.get_level_values("document").to_numpy()
    sums = pd.DataFrame(
        {
            "own": own.regained.to_numpy(),
            "foreign": foreign.regained.to_numpy(),
            "gap": own.gap.to_numpy(),
            "targets": 1.0,
        }
    )
    sums_D4 = sums.groupby(documents).sum(min_count=1).to_numpy()
    resampled_R4 = resample_weights(len(sums_D4), seed) @ sums_D4
    # The whole, then its resamples.
    own_R, foreign_R, gap_R, targets_R = np.vstack([sums_D4.sum(0), resampled_R4]).T
    if gap_R[0] < NO_GAP_NATS * len(own):
        gap_R[:] = np.nan  # there is nothing to recover: no ratio
    about = {"gap": own.gap.mean(), "num_targets": len(own), "num_documents": len(sums_D4)}
    for control, regained_R, table in (("own", own_R, own), ("foreign", foreign_R, foreign)):
        row = about | _named("recovery", "", regained_R / gap_R)
        if control == "own":
            row |= _named("excess", "excess_", (own_R - foreign_R) / gap_R)
            row |= _named("excess_nats", "excess_nats_", (own_R - foreign_R) / targets_R)
        kl_left = table.kl_set.sum(min_count=1) / table.kl_short.sum(min_count=1)
        yield row | {"control": control, "kl_removed": float(1 - kl_left)}


def _named(name: str, ends: str, values_R: np.ndarray) -> dict[str, float]:
    """The first value, and the interval of the others."""
    value, low, high = interval(values_R[1:], values_R[0])
    return {name: value, f"{ends}low": low, f"{ends}high": high}


def resample_weights(num_documents: int, seed: int) -> np.ndarray:
    """weights_RD: how often each document is drawn in each resample."""
    generator = np.random.default_rng(seed)
    share = np.full(num_documents, 1 / num_documents)
    return generator.multinomial(num_documents, share, size=NUM_RESAMPLES).astype(float)


def interval(resampled_R: np.ndarray, value: float) -> tuple[float, float, float]:
    low, high = np.percentile(resampled_R, [2.5, 97.5])
    return float(value), float(low), float(high)
