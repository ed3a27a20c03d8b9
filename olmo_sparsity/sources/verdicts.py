"""Turn evidence into verdicts: which sources a statement relies on. Without torch.

Place in the flow: losses (trials.py) and evidence (evidence.py) → **verdicts** (`judge`) →
statements.py. `sources_to_look_at` tells trials.py which further decoys may change them.

Of the sources that pass a test, a verdict names

    one         a source that suffices alone, or is needed
    either      several, of which each suffices
    both        several, of which each is needed
    none        no source: no effect is large enough to be open
    undecided   no source, although a source, or all of them together, may matter

Dimension key: T statements, S sources, D decoys of a source, W tokens of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.options import MIN_GAP
from olmo_sparsity.sources.evidence import (
    NEEDED_SHARE,
    SEVERAL_NATS,
    SUFFICIENT_SHARE,
    Evidence,
    Losses,
    mean_of_tried,
    weigh,
)

REPLACED_SHARE = 0.5
"""A source is needed only if the others replace no more than this share of what it gives."""

SCREENED_SHARE = 0.1
"""A source may matter if it gives, or costs, this share of the nats after one decoy."""

PART_NATS = 1.0
"""A token may rely on a source if all sources give it so many nats, and REPLACED_SHARE of them are
lost without the source."""

PART_OF_STATEMENT_NATS = 2.0
"""A statement has a part that needs a source if such tokens lose so many nats together."""

DECIDED_SPREADS = 4.0
"""More decoys decide about an open source if its effect is so many spreads."""


class Verdict(NamedTuple):
    kind: str
    """one, either, both, none or undecided."""

    sources: list[int]
    """Numbers of the sources that the verdict names."""


class Judgement(NamedTuple):
    """The verdicts of an answer, and what they are based on."""

    evidence: Evidence
    verdicts: list[Verdict]
    """One for each statement."""


def judge(losses: Losses, rate: float, parts_TS: np.ndarray | None = None) -> Judgement:
    """Return a verdict for each statement.

    losses: Losses of each statement.
    rate: Of the sources that verdicts name, the share that is expected to be named by chance.
    parts_TS: What `needed_for_parts` returns. None: statements are judged as wholes.
    """
    evidence = weigh(losses, rate)
    gap_T1 = losses.gap_T[:, None]
    gives_TS = np.nan_to_num(mean_of_tried(losses.gives_TSD), nan=-np.inf)
    lost_TS = mean_of_tried(losses.lost_TSD)
    suffices_TS = evidence.named_TS & (gives_TS >= SUFFICIENT_SHARE * gap_T1)
    needed_TS = evidence.named_TS & (lost_TS >= NEEDED_SHARE * gap_T1)
    needed_TS &= lost_TS >= (1 - REPLACED_SHARE) * gives_TS
    if parts_TS is not None:
        # Half of the nats do not suffice where another source is needed for a part: a name that two
        # sources share may give as much.
        carries_TS = evidence.named_TS & parts_TS
        others_carry_TS = carries_TS.sum(1, keepdims=True) > carries_TS
        needed_TS |= carries_TS
        suffices_TS &= ~others_carry_TS

    is_open_T = evidence.open_TS.any(1) | (losses.gap_T >= SEVERAL_NATS)
    verdicts = [
        _verdict(suffices_S, needed_S, is_open)
        for suffices_S, needed_S, is_open in zip(suffices_TS, needed_TS, is_open_T, strict=True)
    ]
    return Judgement(evidence, verdicts)


def _verdict(suffices_S: np.ndarray, needed_S: np.ndarray, is_open: bool) -> Verdict:
    """Return the verdict of a statement. `is_open`: it may rely on a source that is not named."""
    # A source that suffices and is not needed has an alternative.
    has_alternative = (suffices_S & ~needed_S).any()
    chosen = np.flatnonzero(suffices_S if has_alternative else needed_S).tolist()
    if len(chosen) > 1:
        kind = "either" if has_alternative else "both"
    elif chosen:
        kind = "one"
    else:
        kind = "undecided" if is_open else "none"
    return Verdict(kind, chosen)


def needed_for_parts(tokens: Losses, statements: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return, by statement and source, whether the statement has tokens that rely on this source
    and that the other sources do not replace.

    tokens: Losses of each token of the answer.
    statements: First and end token of each statement.
    """
    gap_W1 = tokens.gap_T[:, None]
    lost_WS = mean_of_tried(tokens.lost_TSD)
    gives_WS = np.nan_to_num(mean_of_tried(tokens.gives_TSD), nan=-np.inf)
    relies_WS = (gap_W1 >= PART_NATS) & (lost_WS >= REPLACED_SHARE * gap_W1)
    # Two sources that say the same may cost half of a token's nats each, yet each gives most.
    gives_enough_WS = gives_WS >= REPLACED_SHARE * gap_W1
    others_give_enough_WS = gives_enough_WS.sum(1, keepdims=True) > gives_enough_WS
    relies_WS &= ~others_give_enough_WS
    nats_WS = np.where(relies_WS, lost_WS, 0.0)
    nats_TS = np.stack([nats_WS[first:end].sum(0) for first, end in statements])
    return nats_TS >= PART_OF_STATEMENT_NATS


# --- which sources are evaluated with more decoys -------------------------------------------------


class CloserLook(NamedTuple):
    """Sources for which more decoys may change a verdict."""

    gives_S: np.ndarray
    """With decoys in all other places."""

    lost_S: np.ndarray
    """With decoys in their own place."""


def sources_to_look_at(losses: Losses, rate: float) -> CloserLook:
    """Return the sources for which more decoys may change a verdict. What a source gives matters
    only if what is lost without one does not decide: where no source, or more than one, costs a
    good part of the nats."""
    evidence = weigh(losses, rate)
    gap_T1 = losses.gap_T[:, None]
    gives_TS = mean_of_tried(losses.gives_TSD)
    lost_TS = mean_of_tried(losses.lost_TSD)
    is_undecided_TS = (gap_T1 >= MIN_GAP) & ~evidence.named_TS
    may_be_needed_TS = lost_TS >= SCREENED_SHARE * gap_T1

    # Removing one source costs most of the nats, and no other costs a good part: this decides.
    costs_one_T = may_be_needed_TS.sum(1) == 1
    is_decided_T = costs_one_T & (lost_TS >= REPLACED_SHARE * gap_T1).any(1)

    least_nats_TS = np.maximum(SCREENED_SHARE * gap_T1, evidence.spread_TS)
    may_give_TS = np.isnan(gives_TS) | (gives_TS >= least_nats_TS)
    look_at_gives_TS = is_undecided_TS & ~is_decided_T[:, None] & may_give_TS
    look_at_lost_TS = is_undecided_TS & may_be_needed_TS & (lost_TS >= evidence.spread_TS)
    return CloserLook(look_at_gives_TS.any(0), look_at_lost_TS.any(0))


# --- in words -------------------------------------------------------------------------------------


def in_words(kind: str, cells: pd.DataFrame, nats: float, spread: float, draws: int) -> str:
    """Return the verdict in words.

    cells: The matrix at the statement and the named sources; if it is undecided, those that are
        open.
    nats: What all sources give.
    spread: How the loss of the statement varies with the text in one place.
    draws: Largest number of decoys of a source.
    """
    names = list(cells.index)
    if kind == "undecided":
        return _undecided_in_words(cells, nats, spread, draws)
    if kind == "one":
        (cell,) = cells.itertuples()
        if shows_what_it_gives(cell):
            effect = f"gives {cell.gives:.1f} nats"
            beaten = f"{cell.beyond_gives} of {cell.tried_gives}"
        else:
            effect = f"the loss rises by {cell.lost:.1f} nats without it"
            beaten = f"{cell.beyond_lost} of {cell.tried_lost}"
        return f"rests on {names[0]} ({effect}; beats {beaten} decoys)"
    if kind == "either":
        nats_of_each = " and ".join(f"{gives:.1f}" for gives in cells.gives)
        return f"rests on either of {', '.join(names)} ({nats_of_each} nats)"
    if kind == "both":
        return f"rests on {' and '.join(names)} together ({nats:.1f} nats)"
    rounded_nats = round(nats, 1) + 0.0  # no -0.0
    return f"rests on no source (all together: {rounded_nats:.1f} nats)"


def shows_what_it_gives(cell: Any) -> bool:
    """Return whether the verdict on one source shows what it gives, and not what is lost without
    it. `cell`: the row of the matrix."""
    # What a source gives is NaN where it was not evaluated. Of one decoy it is weaker evidence than
    # what is lost with many.
    return bool(cell.gives > cell.lost and cell.tried_gives >= cell.tried_lost)


def _undecided_in_words(cells: pd.DataFrame, nats: float, spread: float, draws: int) -> str:
    effects = np.fmax(cells.lost, cells.gives) if len(cells) else pd.Series(dtype=float)
    largest_effect = effects.max() if len(cells) else nats
    # Without this ratio no number of decoys decides, and the advice would never end.
    if largest_effect >= DECIDED_SPREADS * spread:
        remedy = f"take more decoys (draws={2 * draws}), of the sources' own kind"
    else:
        remedy = (
            f"its loss varies by {spread:.1f} nats with the text in one place; take decoys that "
            "are more like the sources"
        )
    if cells.empty:
        return f"undecided: no source alone stands out of {nats:.1f} nats of all; {remedy}"
    candidates = [f"{name} may matter ({effect:.1f} nats)" for name, effect in effects.items()]
    return f"undecided: {', '.join(candidates)}; {remedy}"
