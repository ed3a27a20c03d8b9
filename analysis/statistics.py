"""What k far units give back of the gap, beside what those of another text do, with intervals.

Place in the flow: losses, targets, recovery → **summary**. Never imports torch.

    R_k = Σ_t (L_short − L_k) / Σ_t (L_short − L_long)    a ratio of sums, no mean of ratios
    E_k = R_k − R_k(foreign)                              excess
    net = E_k − E_k(placebo)                              the headline

The placebo is the same pipeline with an unrelated text in place of the far part: its targets are
those that this text seems to help: its excess is what choosing targets by their outcome produces.
Intervals are 95% percentile bootstraps over documents; what is subtracted is resampled together.

Dimension key: T targets, K numbers of far units, D documents, R bootstrap resamples.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from olmo_sparsity.errors import DataError

INDUCTION_NATS = 1.0
"""Drop in loss on a repeated passage from which on a model is said to have induction."""

LSD_NATS, LCL_NATS = 2.0, 2.0
"""LongPPL (Fang et al. 2024): a token is key when the long context lowers its loss by more than the
first and leaves less than the second."""

NUM_RESAMPLES = 2000

NO_GAP_NATS = 1e-4
"""Below this mean gap a ratio to it would be one of rounding errors."""

KEYS = ["document", "target"]
CONTROLS = ("own", "foreign")
GROUPS = ["target_set", "units", "selector", "k"]

SUMMARY_COLUMNS = [
    *GROUPS, "num_tokens", "recovery", "low", "high", "foreign", "foreign_low", "foreign_high",
    "excess", "excess_low", "excess_high", "excess_nats", "excess_nats_low", "excess_nats_high",
    "placebo", "placebo_low", "placebo_high", "net", "net_low", "net_high", "net_nats",
    "net_nats_low", "net_nats_high", "kl_removed", "kl_removed_foreign", "gap", "num_targets",
    "num_documents", "num_placebo_targets",
]  # fmt: skip

WITHOUT_GAP = {"planted_removed": "planted"}
"""Target sets that must show nothing, and the set whose mean gap is their unit."""


def half_of(document: int) -> str:
    """What is fitted, is fitted on one half of the documents and used on the other."""
    return "report" if document % 2 else "threshold"


def summarize(
    losses: pd.DataFrame, targets: pd.DataFrame, recovery: pd.DataFrame, seed: int = 0
) -> pd.DataFrame:
    """One row for each target set, kind of units, selector and k. Draws of one target are averaged
    first."""
    by = [*KEYS, "far_part", "units", "selector", "k", "control"]
    means = recovery.groupby(by, as_index=False)[["loss_set", "kl_set", "num_tokens"]].mean()
    by_far_part = far_part_losses(losses)
    means = means.merge(losses[[*KEYS, "loss_short"]], on=KEYS)
    means = means.assign(regained=means.loss_short - means.loss_set)
    wide = means.set_index(by)[["regained", "kl_set", "num_tokens"]].unstack("control")
    wide = wide.reindex(columns=pd.MultiIndex.from_product([wide.columns.levels[0], CONTROLS]))
    wide.columns = ["_".join(column) for column in wide.columns]
    paired = wide.dropna(subset=["regained_own"]).reset_index()
    paired = paired.merge(by_far_part, on=[*KEYS, "far_part"])
    has_foreign = recovery.control.eq("foreign").any()
    rows = targets.merge(paired, on=[*KEYS, "far_part"], how="left")
    if rows.regained_own.isna().any() or (has_foreign and rows.regained_foreign.isna().any()):
        raise DataError(
            "the table recovery lacks rows of targets that were chosen; measure again into another "
            "folder"
        )
    for name, model in WITHOUT_GAP.items():
        is_flat = rows.target_set == name
        rows.loc[is_flat, "gap"] = rows.gap[rows.target_set == model].mean()
    found = []
    for group, some in rows.groupby(GROUPS, sort=True):
        found.append(dict(zip(GROUPS, group, strict=True)) | _summary_row(some, seed))
    table = pd.DataFrame(found, columns=SUMMARY_COLUMNS)
    return table[table.num_targets > 0].reset_index(drop=True)


def far_part_losses(losses: pd.DataFrame) -> pd.DataFrame:
    """A row for each target and far part: `gap` and `kl` with the document's own far tokens, and
    with the placebo in their place."""
    short = losses.loss_short.astype(float)
    keys = losses[KEYS].assign(loss_short=short)
    own = keys.assign(far_part="document", gap=short - losses.loss_long, kl=losses.kl,
                      stratum=losses.stratum)  # fmt: skip
    placebo = keys.assign(far_part="placebo", gap=short - losses.placebo_loss_long,
                          kl=losses.placebo_kl, stratum=losses.placebo_stratum)  # fmt: skip
    return pd.concat([own, placebo], ignore_index=True)


def _summary_row(rows: pd.DataFrame, seed: int) -> dict:
    own, placebo = (rows[rows.far_part == part] for part in ("document", "placebo"))
    sums = {"own": _document_sums(own), "placebo": _document_sums(placebo)}
    row: dict = {
        "num_tokens": own.num_tokens_own.mean(),
        "gap": own.gap.mean(),
        "num_targets": len(own),
        "num_documents": len(sums["own"]),
        "num_placebo_targets": len(placebo),
    }
    if not len(own):
        return row
    whole, resampled = _resampled(sums["own"], sums["own"].index, seed)
    values = {name: np.append(whole[name], resampled[name]) for name in whole}
    row |= _named("recovery", "", values["recovery"])
    for name in ("foreign", "excess", "excess_nats"):
        row |= _named(name, f"{name}_", values[name])
    for control in ("own", "foreign"):
        left = own[f"kl_set_{control}"].sum(min_count=1) / own.kl.sum(min_count=1)
        row["kl_removed" + ("" if control == "own" else "_foreign")] = float(1 - left)
    if len(placebo):
        documents = sums["own"].index.union(sums["placebo"].index)
        both = [_resampled(sums[part], documents, seed) for part in ("own", "placebo")]
        (own_1, own_R), (placebo_1, placebo_R) = both
        row |= _named("placebo", "placebo_", np.append(placebo_1["excess"], placebo_R["excess"]))
        for name, of in (("net", "excess"), ("net_nats", "excess_nats")):
            net_R = own_R[of] - placebo_R[of]
            row |= _named(name, f"{name}_", np.append(own_1[of] - placebo_1[of], net_R))
    return row


def _document_sums(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each document: what own and foreign units regain, the gap, how many targets."""
    columns = {"own": rows.regained_own, "foreign": rows.regained_foreign, "gap": rows.gap}
    sums = pd.DataFrame(columns | {"targets": 1.0}, index=rows.index)
    return sums.groupby(rows.document).sum(min_count=1)


def _resampled(
    sums: pd.DataFrame, documents: pd.Index, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The quantities of the whole, and of each resample of `documents`."""
    sums_D4 = sums.reindex(documents, fill_value=0.0).to_numpy()
    weights_RD = resample_weights(len(documents), seed)
    return _quantities(sums_D4.sum(0)[None]), _quantities(weights_RD @ sums_D4)


def _quantities(sums_R4: np.ndarray) -> dict[str, np.ndarray]:
    own_R, foreign_R, gap_R, targets_R = sums_R4.T
    with np.errstate(divide="ignore", invalid="ignore"):
        gap_R = np.where(gap_R >= NO_GAP_NATS * targets_R, gap_R, np.nan)  # nothing to recover
        targets_R = np.where(targets_R > 0, targets_R, np.nan)
        return {
            "recovery": own_R / gap_R,
            "foreign": foreign_R / gap_R,
            "excess": (own_R - foreign_R) / gap_R,
            "excess_nats": (own_R - foreign_R) / targets_R,
        }


def _named(name: str, ends: str, values_R: np.ndarray) -> dict[str, float]:
    """The first value, and the interval of the others."""
    value, low, high = interval(values_R[1:], values_R[0])
    return {name: value, f"{ends}low": low, f"{ends}high": high}


def resample_weights(num_documents: int, seed: int = 0) -> np.ndarray:
    """weights_RD: how often each document is drawn in each resample."""
    generator = np.random.default_rng(seed)
    share = np.full(num_documents, 1 / num_documents)
    return generator.multinomial(num_documents, share, size=NUM_RESAMPLES).astype(float)


def interval(resampled_R: np.ndarray, value: float) -> tuple[float, float, float]:
    """The value with its 95% interval, where there is a value."""
    # With too many resamples that have no gap the others are no sample of anything.
    if not np.isfinite(value) or np.isfinite(resampled_R).mean() < 0.98:
        return float("nan"), float("nan"), float("nan")
    low, high = np.nanpercentile(resampled_R, [2.5, 97.5])
    return float(value), float(low), float(high)


# --- beside the summary ---------------------------------------------------------------------------


def hit_rates(
    influence: pd.DataFrame, planted: pd.DataFrame, ks: tuple[int, ...], seed: int = 0
) -> pd.DataFrame:
    """Of the planted tokens of a target, how many are in the selector's first k units?"""
    columns = [*GROUPS, "hit_rate", "hit_low", "hit_high"]
    num_planted = planted.groupby("document").size()
    own = influence[(influence.control == "own") & influence.document.isin(num_planted.index)]
    pairs = own.merge(planted, on="document")
    pairs = pairs[(pairs.far_first <= pairs.place) & (pairs.place < pairs.far_end)]
    rows = []
    for (units, selector), some in own.groupby(["units", "selector"]):
        found = pairs[(pairs.units == units) & (pairs.selector == selector)]
        documents = num_planted.reindex(some.document.unique())
        for k in ks:
            first = found[found["rank"] <= k].drop_duplicates([*KEYS, "place"])
            hits = first.groupby("document").size().reindex(documents.index, fill_value=0)
            shares_D = (hits / documents).to_numpy()
            resampled_R = resample_weights(len(shares_D), seed) @ shares_D / len(shares_D)
            rate = interval(resampled_R, shares_D.mean())
            rows.append(("planted", units, selector, k, *rate))
    return pd.DataFrame(rows, columns=columns)


def longppl(losses: pd.DataFrame) -> dict[str, float | int | None]:
    """Of all targets together; the paper's package averages over one text at a time."""
    gap = losses.loss_short - losses.loss_long
    key = losses.loss_long[(gap > LSD_NATS) & (losses.loss_long < LCL_NATS)]
    return {
        "key_share": len(key) / len(losses),
        "num_key_tokens": len(key),
        "longppl": float(np.exp(key.mean())) if len(key) else None,
        "ppl": float(np.exp(min(losses.loss_long.mean(), 700))),
    }
