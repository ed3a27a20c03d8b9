"""Decide from losses and evidence which sources a statement relies on.

Place in the flow: losses.py, evidence.py → **`judge`** → statements.py, which shows the verdicts.
`needs_more_decoys` is called by trials.py before, to evaluate as few decoys as verdicts need. The
module needs NumPy only, not PyTorch.

A statement gets one of five verdicts. It names sources whose effect is beyond chance (evidence.py):

    one         one source, which suffices alone or is needed
    either      several sources, of which each suffices
    both        several sources, of which each is needed
    none        no source: no effect is large enough to be open
    undecided   no source, although a source, or all of them together, may matter

A source *suffices* if it gives half of the nats that all sources give. It is *needed* if a fifth of
them is lost without it, and the others cannot replace most of what it gives.

Dimension key: T statements, S sources, D decoys of a source, W tokens of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from olmo_sparsity.analysis.options import MIN_GAP
from olmo_sparsity.sources.evidence import (
    NEEDED_SHARE,
    SEVERAL_NATS,
    SUFFICIENT_SHARE,
    Evidence,
    collect_evidence,
)
from olmo_sparsity.sources.losses import StatementLosses, mean_over_decoys

REPLACED_SHARE = 0.5
"""A source is needed only if the others replace no more than this share of what it gives. Added
after a trial in which only 34 of 62 statements that rest on either of two sources got that verdict
(study/records/thresholds.md): a fifth may be lost without each of two sources that say the same."""

SCREENED_SHARE = 0.1
"""A source may matter if it gives, or costs, this share of the nats after one decoy. Less than
`NEEDED_SHARE`, since one decoy may understate an effect."""

PART_NATS = 1.0
"""A token may rely on a source if all sources give it so many nats, and `REPLACED_SHARE` of them
are lost without the source. Our choice, as the next one."""

PART_OF_STATEMENT_NATS = 2.0
"""A statement has a part that needs a source if such tokens lose so many nats together."""


class Verdict(NamedTuple):
    kind: str
    """one, either, both, none or undecided."""

    sources: list[int]
    """Numbers of the sources that the verdict names."""


class Judgement(NamedTuple):
    """The verdicts of an answer, and the evidence for them."""

    evidence: Evidence
    verdicts: list[Verdict]
    """One for each statement."""


def judge(losses: StatementLosses, rate: float, has_part_TS: np.ndarray | None = None) -> Judgement:
    """Return a verdict for each statement.

    losses: Losses of each statement.
    rate: Share of the named sources that is expected to be named by chance.
    has_part_TS: Whether a part of the statement needs the source, as `needed_for_parts` returns it.
        None: statements are judged as wholes.
    """
    evidence = collect_evidence(losses, rate)
    gap_T1 = losses.gap_T[:, None]
    # What a source gives may not have been evaluated. Then it counts as not sufficient.
    gives_TS = np.nan_to_num(mean_over_decoys(losses.gives_TSD), nan=-np.inf)
    lost_TS = mean_over_decoys(losses.lost_TSD)

    suffices_TS = evidence.named_TS & (gives_TS >= SUFFICIENT_SHARE * gap_T1)
    needed_TS = evidence.named_TS & (lost_TS >= NEEDED_SHARE * gap_T1)
    needed_TS &= lost_TS >= (1 - REPLACED_SHARE) * gives_TS
    if has_part_TS is not None:
        # Half of the nats do not suffice where another source is needed for a part: two sources
        # that share a name may each give half by that name alone.
        needed_for_part_TS = evidence.named_TS & has_part_TS
        is_other_needed_TS = needed_for_part_TS.sum(1, keepdims=True) > needed_for_part_TS
        needed_TS |= needed_for_part_TS
        suffices_TS &= ~is_other_needed_TS

    is_open_T = evidence.open_TS.any(1) | (losses.gap_T >= SEVERAL_NATS)
    verdicts = [
        _verdict(suffices_S, needed_S, is_open)
        for suffices_S, needed_S, is_open in zip(suffices_TS, needed_TS, is_open_T, strict=True)
    ]
    return Judgement(evidence, verdicts)


def _verdict(suffices_S: np.ndarray, needed_S: np.ndarray, is_open: bool) -> Verdict:
    """Return the verdict of a statement. `is_open`: it may rely on a source that is not named."""
    # A source that suffices, although little is lost without it, has an alternative.
    has_alternative = (suffices_S & ~needed_S).any()
    chosen_S = suffices_S if has_alternative else needed_S
    sources = np.flatnonzero(chosen_S).tolist()
    if len(sources) > 1:
        kind = "either" if has_alternative else "both"
    elif sources:
        kind = "one"
    else:
        kind = "undecided" if is_open else "none"
    return Verdict(kind, sources)


def needed_for_parts(
    token_losses: StatementLosses, statements: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Return has_part_TS: whether the statement has tokens that rely on this source and on no
    other.

    Without it "Anna Weiss opened the bridge in 1921" would rest on either of two sources that both
    name Anna Weiss, although only one of them has the year.

    token_losses: Losses of each token of the answer.
    statements: First and end token of each statement.
    """
    gap_W1 = token_losses.gap_T[:, None]
    lost_WS = mean_over_decoys(token_losses.lost_TSD)
    gives_WS = np.nan_to_num(mean_over_decoys(token_losses.gives_TSD), nan=-np.inf)

    relies_WS = (gap_W1 >= PART_NATS) & (lost_WS >= REPLACED_SHARE * gap_W1)
    # Two sources that say the same may cost half of a token's nats each, yet each gives most.
    gives_enough_WS = gives_WS >= REPLACED_SHARE * gap_W1
    others_give_enough_WS = gives_enough_WS.sum(1, keepdims=True) > gives_enough_WS
    relies_WS &= ~others_give_enough_WS

    lost_by_parts_WS = np.where(relies_WS, lost_WS, 0.0)
    lost_by_parts_TS = np.stack([lost_by_parts_WS[first:end].sum(0) for first, end in statements])
    return lost_by_parts_TS >= PART_OF_STATEMENT_NATS


# --- which sources are evaluated with more decoys -------------------------------------------------


class MoreDecoys(NamedTuple):
    """Sources for which more decoys may change a verdict."""

    gives_S: np.ndarray
    """Whether to evaluate what the source gives: decoys replace all others."""

    lost_S: np.ndarray
    """Whether to evaluate what is lost without the source: decoys replace it."""


def needs_more_decoys(losses: StatementLosses, rate: float) -> MoreDecoys:
    """Return for which sources more decoys may change a verdict.

    Prompts among decoys are evaluated only if prompts without a source do not decide: if no source,
    or more than one, costs a good part of the nats.
    """
    evidence = collect_evidence(losses, rate)
    gap_T1 = losses.gap_T[:, None]
    gives_TS = mean_over_decoys(losses.gives_TSD)
    lost_TS = mean_over_decoys(losses.lost_TSD)
    is_unsettled_TS = (gap_T1 >= MIN_GAP) & ~evidence.named_TS
    may_be_needed_TS = lost_TS >= SCREENED_SHARE * gap_T1

    # One source costs most of the nats, and no other a good part: the verdict is "one" or none.
    costs_one_T = may_be_needed_TS.sum(1) == 1
    is_decided_T = costs_one_T & (lost_TS >= REPLACED_SHARE * gap_T1).any(1)

    # An effect below one spread has p > 0.15, and more decoys rarely change that.
    min_nats_TS = np.maximum(SCREENED_SHARE * gap_T1, evidence.spread_TS)
    may_give_TS = np.isnan(gives_TS) | (gives_TS >= min_nats_TS)
    evaluate_gives_TS = is_unsettled_TS & ~is_decided_T[:, None] & may_give_TS
    evaluate_lost_TS = is_unsettled_TS & may_be_needed_TS & (lost_TS >= evidence.spread_TS)
    return MoreDecoys(evaluate_gives_TS.any(0), evaluate_lost_TS.any(0))
