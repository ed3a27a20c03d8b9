"""Turn losses with and without sources into verdicts, and hold their error rate.

Place in the flow: losses of statements (statements.py) → **verdicts**. Never imports torch.

A statement is asked about where its sources do more than decoys in place of all of them, and a
source counts where it does more than its decoys do: two t-tests, the error rate of each held by
Benjamini–Hochberg, over all statements, and over all statements and sources. The second alone holds
it barely, as nats have heavier tails than a normal distribution; the first gives room.

Dimension key: T statements, S sources, D decoys of a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import atan, cos, pi, sin, sqrt

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.settings import MIN_GAP

SUFFICES, NEEDED = 0.5, 0.2
"""Shares of the nats that all sources give: a source suffices if it alone gives the first, and is
needed if the second is lost without it."""

REPLACED = 0.5
"""A source is not needed if the others replace more than this share of what it gives alone."""

ROUNDING_NATS = 1e-3
"""Decoys that differ by less do not differ."""

Verdict = tuple[str, list[int]]
"""Kind (one, either, both, none) and sources."""


@dataclass(frozen=True)
class Losses:
    """Of each statement, with these texts in view; in nats."""

    none_T: np.ndarray
    """Without any source."""

    all_T: np.ndarray
    alone_TS: np.ndarray
    """With one source."""

    left_out_TS: np.ndarray
    """Without one."""

    decoys_TD: np.ndarray
    """With a decoy in place of every source."""

    among_TSD: np.ndarray
    """… of every other source."""

    without_TSD: np.ndarray
    """… of the source alone."""

    @property
    def most_T(self) -> np.ndarray:
        """The usual loss with decoys. What raises a loss above it misleads, and does not tell what
        sources give: losses are capped here."""
        return np.median(self.decoys_TD, -1)

    @property
    def gap_T(self) -> np.ndarray:
        """Nats that all sources give, against decoys in place of all."""
        return np.minimum(self.decoys_TD, self.most_T[:, None]).mean(-1) - self.all_T

    @property
    def gives_TSD(self) -> np.ndarray:
        """Nats that a source gives among these decoys."""
        most_T11 = self.most_T[:, None, None]
        return np.minimum(self.decoys_TD[:, None], most_T11) - np.minimum(self.among_TSD, most_T11)

    @property
    def lost_TSD(self) -> np.ndarray:
        """Nats that are lost when its decoy takes its place among the other sources."""
        return np.minimum(self.without_TSD, self.most_T[:, None, None]) - self.all_T[:, None, None]

    @staticmethod
    def mean(parts: Sequence[Losses]) -> Losses:
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return Losses(*(np.mean(column, axis=0) for column in columns))


def tail(t: float, freedom: int) -> float:
    """P(T > t) of Student's t with whole degrees of freedom: its finite series."""
    angle = atan(t / sqrt(freedom))
    term = total = 1.0 if freedom % 2 == 0 else cos(angle)
    for i in range(2 + freedom % 2, freedom - 1, 2):
        term *= (i - 1) / i * cos(angle) ** 2
        total += term
    if freedom % 2 == 0:
        return (1 - sin(angle) * total) / 2
    return 0.5 - (angle + (sin(angle) * total if freedom > 1 else 0.0)) / pi


def chances_of_all(losses: Losses) -> np.ndarray:
    """p_T: how likely one more set of decoys in place of all sources would do as well. What lies
    above the usual loss misleads, so the spread is that of the half below it."""
    most_T, num = losses.most_T, losses.decoys_TD.shape[-1]
    below_TD = np.minimum(losses.decoys_TD - most_T[:, None], 0.0)
    spread_T = np.sqrt(2 * (below_TD**2).sum(-1) / (num - 1)).clip(ROUNDING_NATS)
    t_T = (most_T - losses.all_T) / (spread_T * sqrt(1 + 1 / num))
    return np.vectorize(tail)(t_T, num // 2)


def chances(nats_TSD: np.ndarray) -> np.ndarray:
    """How likely one more decoy in place of the source would do as well: a t-test of differences
    between source and decoy. Those of all sources tell how much a statement varies; as they do not
    vary alike, and tails are heavy, degrees of freedom are those of one source."""
    num = nats_TSD.shape[-1]
    spread_T = np.sqrt(nats_TSD.var(-1, ddof=1).mean(-1)).clip(ROUNDING_NATS)
    t_TS = nats_TSD.mean(-1) / (spread_T[:, None] * sqrt(1 + 1 / num))
    return np.vectorize(tail)(t_TS, num - 1)


def are_discoveries(p: np.ndarray, rate: float) -> np.ndarray:
    """Benjamini–Hochberg: at most this share of those found is expected to be chance."""
    ordered = np.sort(p.ravel())
    kept = ordered[ordered <= rate * np.arange(1, p.size + 1) / p.size]
    return p <= (kept[-1] if len(kept) else -1.0)


def are_named(p_2TS: np.ndarray, rate: float) -> np.ndarray:
    """The rate is of sources, each of which is tested twice: by what it gives and what is lost."""
    return are_discoveries((2 * p_2TS.min(0)).clip(max=1.0), rate)


def judge(losses: Losses, rate: float) -> tuple[np.ndarray, list[Verdict]]:
    """p_2TS, of what each source gives and of what is lost without; kind and sources of each
    statement's verdict."""
    p_2TS = np.stack([chances(losses.gives_TSD), chances(losses.lost_TSD)])
    gives_TS, lost_TS, gap_T1 = (
        losses.gives_TSD.mean(-1),
        losses.lost_TSD.mean(-1),
        losses.gap_T[:, None],
    )
    # What is not asked about is no discovery: it would raise the share allowed to the others.
    is_asked_T = losses.gap_T >= MIN_GAP
    is_told_T = are_discoveries(np.where(is_asked_T, chances_of_all(losses), 1.0), rate)
    found_TS = are_named(np.where(is_told_T[:, None], p_2TS, 1.0), rate)
    enough_TS = found_TS & (gives_TS >= SUFFICES * gap_T1)
    needed_TS = found_TS & (lost_TS >= NEEDED * gap_T1) & (lost_TS >= (1 - REPLACED) * gives_TS)
    verdicts: list[Verdict] = []
    for enough_S, needed_S in zip(enough_TS, needed_TS, strict=True):
        are_needed = not (enough_S & ~needed_S).any()
        chosen = np.flatnonzero(needed_S if are_needed else enough_S).tolist()
        several = "both" if are_needed else "either"
        verdicts.append((several if len(chosen) > 1 else ("none", "one")[len(chosen)], chosen))
    return p_2TS, verdicts


def in_words(kind: str, cells: pd.DataFrame, nats: float, draws: int) -> str:
    """`cells`: of the matrix, those of the statement and the named sources."""
    names = list(cells.index)
    if kind == "one":
        (cell,) = cells.itertuples()
        gives = f"gives {cell.gives:.1f} nats", cell.beyond_gives
        lost = f"{cell.lost:.1f} nats are lost without it", cell.beyond_lost
        nats_of, beyond = gives if cell.gives >= cell.lost else lost
        return f"rests on {names[0]} ({nats_of}; beats {beyond} of {draws} decoys)"
    if kind == "either":
        nats_of = " and ".join(f"{own:.1f}" for own in cells.gives)
        return f"rests on either of {', '.join(names)} ({nats_of} nats)"
    if kind == "both":
        return f"rests on {' and '.join(names)} together ({nats:.1f} nats)"
    by_all = round(nats, 1) + 0.0  # no -0.0
    return f"rests on no source (all together: {by_all:.1f} nats)"
