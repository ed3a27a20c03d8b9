"""Decide from losses and evidence which sources a statement relies on.

Place in the flow: losses.py, evidence.py → **`judge`** → attribution.py, which shows the verdicts.
trials.py calls `needs_more_decoys` before, to evaluate as few decoys as verdicts need. The module
needs NumPy only, not PyTorch.

A statement gets one of five verdicts (`VerdictKind`). They follow from two properties of the
sources whose effects are beyond chance (`Evidence.is_named_TS`). A source

    suffices     if it alone gives half of the nats that all sources give
    is needed    if a fifth of these nats is lost without it, and the other sources cannot replace
                 most of what it gives

**An example.** Statements to which sources A and B give 8 nats together. All effects of more than
a nat are beyond chance.

      A: gives  lost      B: gives  lost      verdict
          8.0    7.5          0.1    0.0      one, A        A suffices and is needed
          8.0    0.0          7.9    0.1      either        both suffice: little is lost without one
          4.0    3.9          4.1    4.0      both          both are needed
          0.0    0.1          0.1    0.1      undecided     8 nats of all, but no source has them

A statement to which both give 0.5 nats together, and neither gives any alone, gets "none".

Dimension key: T statements, S sources, D decoys of a source, W tokens of the answer. A suffix 1 is
a dimension of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from olmo_sparsity.analysis.options import MIN_GAP
from olmo_sparsity.sources.verdicts.evidence import (
    NEEDED_FRACTION,
    SEVERAL_NATS,
    SUFFICIENT_FRACTION,
    Evidence,
    collect_evidence,
)
from olmo_sparsity.sources.verdicts.losses import StatementLosses, mean_over_decoys

REPLACED_FRACTION = 0.5
"""A source is needed only if the others replace no more than this fraction of what it gives. Added
after a trial in which only 34 of 62 statements that rest on either of two sources got that verdict
(study/records/thresholds.md): a fifth may be lost without each of two sources that say the same."""

SCREENED_FRACTION = 0.1
"""A source may matter if it gives, or costs, this fraction of the nats after one decoy. Less than
`NEEDED_FRACTION`, since one decoy may understate an effect."""

TOKEN_NATS = 1.0
"""A token may rely on a source if all sources give it this many nats, and `REPLACED_FRACTION` of
them are lost without the source. Our choice, as the next one."""

EXCLUSIVE_NATS = 2.0
"""A source is needed for the tokens that rely on it alone if they lose this many nats together."""

VerdictKind = Literal["one", "either", "both", "none", "undecided"]
"""What a verdict says of a statement:

    one         it relies on one source, which suffices alone or is needed
    either      on any one of several sources; each of them suffices
    both        on several sources; each of them is needed
    none        on no source: no effect is large enough to be open
    undecided   no source is named, although a source, or all of them together, may matter
"""

KINDS_WITH_SOURCES: tuple[VerdictKind, ...] = ("one", "either", "both")
"""The verdicts that name sources."""


class Verdict(NamedTuple):
    """Which sources a statement relies on."""

    kind: VerdictKind
    sources: list[int]
    """The indices of the sources that the verdict names."""


class Judgement(NamedTuple):
    """The verdicts of an answer, and the evidence for them."""

    evidence: Evidence
    verdicts: list[Verdict]
    """One for each statement."""


def judge(
    losses: StatementLosses, rate: float, has_exclusive_tokens_TS: np.ndarray | None = None
) -> Judgement:
    """Return a verdict for each statement.

    Args:
        losses: Losses of each statement.
        rate: The fraction of the named sources that is expected to be named by chance.
        has_exclusive_tokens_TS: Whether the statement has tokens that rely on this source alone, as
            `find_exclusive_tokens` returns it. None means that tokens are not looked at.
    """
    evidence = collect_evidence(losses, rate)
    gap_T1 = losses.gap_T[:, None]
    # What a source gives may not have been evaluated. Then it counts as not sufficient.
    gives_TS = np.nan_to_num(mean_over_decoys(losses.gives_TSD), nan=-np.inf)
    lost_TS = mean_over_decoys(losses.lost_TSD)

    # The two properties of each source.
    suffices_TS = evidence.is_named_TS & (gives_TS >= SUFFICIENT_FRACTION * gap_T1)
    is_needed_TS = evidence.is_named_TS & (lost_TS >= NEEDED_FRACTION * gap_T1)
    is_needed_TS &= lost_TS >= (1 - REPLACED_FRACTION) * gives_TS
    if has_exclusive_tokens_TS is not None:
        # Half of the nats do not suffice where another source has tokens of its own: two sources
        # that share a name may each give half by that name alone.
        is_needed_for_tokens_TS = evidence.is_named_TS & has_exclusive_tokens_TS
        suffices_TS &= ~_is_true_of_another_source(is_needed_for_tokens_TS)
        is_needed_TS |= is_needed_for_tokens_TS

    # Where no source is named, "none" is said only if none is open, nor all together.
    may_rely_T = evidence.is_open_TS.any(1) | (losses.gap_T >= SEVERAL_NATS)
    verdicts = [
        _classify(suffices_S, is_needed_S, may_rely)
        for suffices_S, is_needed_S, may_rely in zip(
            suffices_TS, is_needed_TS, may_rely_T, strict=True
        )
    ]
    return Judgement(evidence, verdicts)


def _classify(suffices_S: np.ndarray, is_needed_S: np.ndarray, may_rely: bool) -> Verdict:
    """Return the verdict of one statement.

    Args:
        suffices_S, is_needed_S: Properties of each source; False for a source that is not named.
        may_rely: Whether the statement may rely on a source that is not named.
    """
    # A source that suffices, although little is lost without it, has an alternative.
    has_alternative = bool((suffices_S & ~is_needed_S).any())
    sources = np.flatnonzero(suffices_S if has_alternative else is_needed_S).tolist()
    if len(sources) > 1:
        return Verdict("either" if has_alternative else "both", sources)
    if len(sources) == 1:
        return Verdict("one", sources)
    return Verdict("undecided" if may_rely else "none", [])


def _is_true_of_another_source(property_TS: np.ndarray) -> np.ndarray:
    """Return for each source whether another source has this property for the same statement."""
    # The number of sources that have it, compared with 1 if the source itself does and 0 if not.
    return property_TS.sum(1, keepdims=True) > property_TS


def find_exclusive_tokens(
    token_losses: StatementLosses, statements: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Return has_exclusive_tokens_TS: whether the statement has tokens that rely on this source and
    on no other, and that lose enough nats without it.

    Without it "Anna Weiss opened the bridge in 1921" would rest on either of two sources that both
    name Anna Weiss, although only one of them has the year.

    Args:
        token_losses: Losses of each token of the answer.
        statements: First and end token of each statement.
    """
    gap_W1 = token_losses.gap_T[:, None]
    lost_WS = mean_over_decoys(token_losses.lost_TSD)
    gives_WS = np.nan_to_num(mean_over_decoys(token_losses.gives_TSD), nan=-np.inf)

    relies_WS = (gap_W1 >= TOKEN_NATS) & (lost_WS >= REPLACED_FRACTION * gap_W1)
    # Two sources that say the same may cost half of a token's nats each, yet each gives most.
    gives_enough_WS = gives_WS >= REPLACED_FRACTION * gap_W1
    relies_on_it_alone_WS = relies_WS & ~_is_true_of_another_source(gives_enough_WS)

    lost_by_tokens_WS = np.where(relies_on_it_alone_WS, lost_WS, 0.0)
    lost_by_tokens_TS = np.stack([lost_by_tokens_WS[first:end].sum(0) for first, end in statements])
    return lost_by_tokens_TS >= EXCLUSIVE_NATS


# --- which sources are evaluated with more decoys -------------------------------------------------


class MoreDecoys(NamedTuple):
    """Sources for which more decoys may change a verdict."""

    gives_S: np.ndarray
    """Whether to evaluate what the source gives: decoys replace all others."""

    lost_S: np.ndarray
    """Whether to evaluate what is lost without the source: decoys replace it."""


def needs_more_decoys(losses: StatementLosses, rate: float) -> MoreDecoys:
    """Return for which sources more decoys may change a verdict.

    What a source gives is evaluated only if prompts without single sources do not decide: if no
    source, or more than one, costs a good part of the nats. Statements of 8 nats, for example,
    after one decoy of each source:

        lost without A   without B    is evaluated with more decoys
             7.5            0.1       what is lost without A
             4.0            3.9       what is lost without A and without B, and what both give
             0.2            0.1       what A and B give: each may have what the other has

    Args:
        losses: Losses of each statement, with the decoys that were evaluated so far.
        rate: The fraction of the named sources that is expected to be named by chance.
    """
    evidence = collect_evidence(losses, rate)
    gap_T1 = losses.gap_T[:, None]
    gives_TS = mean_over_decoys(losses.gives_TSD)
    lost_TS = mean_over_decoys(losses.lost_TSD)

    is_unsettled_TS = (gap_T1 >= MIN_GAP) & ~evidence.is_named_TS
    may_be_needed_TS = lost_TS >= SCREENED_FRACTION * gap_T1

    # One source costs most of the nats, and no other a good part: the verdict is "one" or none.
    has_one_candidate_T = may_be_needed_TS.sum(1) == 1
    is_decided_T = has_one_candidate_T & (lost_TS >= REPLACED_FRACTION * gap_T1).any(1)

    # An effect below one spread has p > 0.15, and more decoys rarely change that.
    min_nats_TS = np.maximum(SCREENED_FRACTION * gap_T1, evidence.spread_TS)
    may_give_TS = np.isnan(gives_TS) | (gives_TS >= min_nats_TS)
    evaluate_gives_TS = is_unsettled_TS & ~is_decided_T[:, None] & may_give_TS
    evaluate_lost_TS = is_unsettled_TS & may_be_needed_TS & (lost_TS >= evidence.spread_TS)

    # One statement that needs it is enough: a prompt gives the losses of all statements.
    return MoreDecoys(gives_S=evaluate_gives_TS.any(0), lost_S=evaluate_lost_TS.any(0))
