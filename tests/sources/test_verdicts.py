"""Verdicts on made-up losses, and their words (verdicts/verdict.py, verdict_text.py)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.analysis.options import MIN_GAP
from olmo_sparsity.sources.report.verdict_text import Effect, SourceEffects, verdict_in_words
from olmo_sparsity.sources.verdicts.evidence import collect_evidence
from olmo_sparsity.sources.verdicts.losses import StatementLosses
from olmo_sparsity.sources.verdicts.verdict import find_exclusive_tokens, judge, needs_more_decoys
from tests.support.losses import PARTLY_EVALUATED_SIZES, of_effects, partly_evaluated
from tests.support.sources import made_up

# --- a second implementation, by loops ------------------------------------------------------------


def means_of(losses: StatementLosses, t: int) -> list[tuple[float, float]]:
    """Of each source, what it gives and what is lost without it; NaN: not evaluated."""

    def mean(nats_D: np.ndarray) -> float:
        return float(np.nanmean(nats_D)) if np.isfinite(nats_D).any() else np.nan

    num_sources = losses.without_TSD.shape[1]
    return [(mean(losses.gives_TSD[t, s]), mean(losses.lost_TSD[t, s])) for s in range(num_sources)]


@pytest.mark.parametrize(("num_sources", "draws"), PARTLY_EVALUATED_SIZES)
def test_more_decoys_are_evaluated_where_they_may_change_a_verdict(
    num_sources: int, draws: int
) -> None:
    losses = partly_evaluated(num_sources, draws)
    evidence = collect_evidence(losses, 0.05)
    expected_gives = set[int]()
    expected_lost = set[int]()
    for t in range(3):
        gap, spread, nats = losses.gap_T[t], evidence.spread_TS[t], means_of(losses, t)
        costly = [s for s, (_, lost) in enumerate(nats) if lost >= 0.1 * gap]
        is_decided = len(costly) == 1 and any(lost >= 0.5 * gap for _, lost in nats)
        for s, (gives, lost) in enumerate(nats):
            if gap < MIN_GAP or evidence.is_named_TS[t, s]:
                continue
            if s in costly and lost >= spread[s]:
                expected_lost.add(s)
            if not is_decided and not gives < max(0.1 * gap, spread[s]):
                expected_gives.add(s)
    gives_S, lost_S = needs_more_decoys(losses, 0.05)
    assert {*np.flatnonzero(gives_S).tolist()} == expected_gives
    assert {*np.flatnonzero(lost_S).tolist()} == expected_lost


@pytest.mark.parametrize(("num_sources", "draws"), PARTLY_EVALUATED_SIZES)
def test_verdicts_follow_their_rules(num_sources: int, draws: int) -> None:
    losses = partly_evaluated(num_sources, draws)
    evidence, verdicts_T = judge(losses, 0.05)
    for t in range(3):
        gap, spread, nats = losses.gap_T[t], evidence.spread_TS[t], means_of(losses, t)
        enough, needed, is_open = set[int](), set[int](), set[int]()
        for s, (gives, lost) in enumerate(nats):
            least = min(max(2 * spread[s], 1.5), 3)
            if not evidence.is_named_TS[t, s]:
                if lost >= max(0.2 * gap, least) or gives >= max(0.5 * gap, least):
                    is_open.add(s)
                continue
            if gives >= gap / 2:
                enough.add(s)
            if lost >= 0.2 * gap and not lost < gives / 2:
                needed.add(s)
        assert {*np.flatnonzero(evidence.is_open_TS[t]).tolist()} == is_open
        chosen = needed if enough <= needed else enough
        if len(chosen) > 1:
            kind = "both" if enough <= needed else "either"
        elif chosen:
            kind = "one"
        else:
            kind = "undecided" if is_open or gap >= 3 else "none"
        assert verdicts_T[t] == (kind, sorted(chosen))


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gives", "lost", "expected"),
    [
        ([8.0, 0.1, 0.0], [7.5, 0.0, 0.1], ("one", [0])),
        ([8.0, 7.9, 0.0], [0.0, 0.1, 0.1], ("either", [0, 1])),
        ([4.0, 0.0, 4.1], [3.9, 0.0, 4.0], ("both", [0, 2])),
        ([0.0, 0.1, 0.0], [0.0, 0.1, 0.05], ("undecided", [])),  # 8 nats of all, of none alone
        ([0.1, 0.0, 0.1], [8.0, 0.0, 8.0], ("both", [0, 2])),  # only together
        ([8.0, 7.0, 0.0], [3.0, 4.0, 0.0], ("either", [0, 1])),  # the others replace most of one
        ([5.0, 4.5, 0.0], [4.0, 4.1, 0.0], ("both", [0, 1])),
        ([8.0, 1.5, 0.0], [7.5, 1.0, 0.1], ("one", [0])),  # beyond its decoys, and too little
    ],
)
def test_verdicts(gives: list[float], lost: list[float], expected: Any) -> None:
    assert judge(made_up([gives], [lost]), 0.05)[1] == [expected]


@pytest.mark.parametrize(
    ("lost", "gap", "noise", "kind"),
    [
        (0.0, 0.5, 0.0, "none"),
        (1.4, 2.9, 1.5, "none"),  # a source that costs less than 1.5 nats is never open
        (1.6, 2.9, 1.2, "undecided"),
        (0.0, 3.1, 0.0, "undecided"),  # several nats of all sources together
        (8.4, 8.1, 6.0, "undecided"),
    ],
)
def test_no_source_is_not_said_where_several_nats_may_be_lost(
    lost: float, gap: float, noise: float, kind: str
) -> None:
    """Of three sources one costs so much, with decoys that vary by as much."""
    varied = np.resize([1.0, -1.0], 8) * noise
    losses = made_up([[0.0, 0.0, 0.0]], [[lost, 0.0, 0.0]], gap=gap, noise=0.0)
    losses.without_TSD[:, 0] += varied
    # Losses of usual size, as a fraction of them is in the spread.
    losses = replace(losses, decoys_TD=losses.decoys_TD + 10, all_T=losses.all_T + 10)
    losses = replace(losses, among_TSD=losses.among_TSD + 10, without_TSD=losses.without_TSD + 10)
    assert judge(losses, 0.05)[1] == [(kind, [])]


def test_more_decoys_decide_what_eight_leave_open() -> None:
    """The remedy that an undecided verdict names, where a source costs 4.5 spreads."""
    named = {8: 0, 16: 0}
    for seed in range(60):
        effects = np.random.default_rng(seed).normal(size=(1, 3, 33))
        effects[0, :, 0] = 4.5, 0.0, 0.0
        for draws in named:
            losses = of_effects(effects[..., 0], effects[..., 1 : 1 + draws])
            named[draws] += judge(losses, 0.05)[1] == [("one", [0])]
    assert named[16] >= named[8] + 4, named


def by_tokens(lost: Any, gives: Any, gap: float = 4.0) -> StatementLosses:
    return made_up(gives, lost, gap=gap, noise=0.0)


@pytest.mark.parametrize(
    ("lost", "gives", "expected"),
    [
        # A name that both have, then a token of each source alone.
        ([[0, 0], [4, 0], [0, 4]], [[4, 4], [4, 0], [0, 4]], ("both", [0, 1])),
        ([[0, 0], [0, 0], [0, 0]], [[4, 4], [4, 4], [4, 4]], ("either", [0, 1])),
        # The second has nothing of its own, and lacks what the first has.
        ([[0, 0], [4, 0], [0, 0]], [[4, 4], [4, 0], [4, 4]], ("one", [0])),
        # Each costs most of a token's nats, as two mentions are more than one, and each suffices.
        ([[3, 1], [1, 3], [0, 0]], [[3, 3], [3, 3], [4, 4]], ("either", [0, 1])),
        ([[0, 0], [1.9, 0], [0, 1.9]], [[4, 4], [1.9, 0], [0, 1.9]], ("either", [0, 1])),
    ],
)
def test_the_tokens_of_a_statement_need_their_source(lost: Any, gives: Any, expected: Any) -> None:
    tokens = by_tokens(lost, gives)
    exclusive_TS = find_exclusive_tokens(tokens, [(0, 3)])
    whole = made_up([[12.0, 11.0]], [[0.5, 0.5]], gap=12.0)  # as wholes each suffices
    assert judge(whole, 0.05)[1] == [("either", [0, 1])]
    assert judge(whole, 0.05, exclusive_TS)[1] == [expected]


@pytest.mark.parametrize(
    ("gives", "lost", "expected"),
    [
        ([8.0, 4.0, 0.0], [0.0, 0.0, 0.0], ("either", [0, 1])),
        ([8.0, 3.9, 0.0], [0.0, 0.0, 0.0], ("one", [0])),
        ([0.0, 0.0, 0.0], [1.6, 1.6, 0.0], ("both", [0, 1])),
        ([0.0, 0.0, 0.0], [1.6, 1.5, 0.0], ("one", [0])),
        ([8.0, 8.0, 0.0], [4.0, 4.0, 0.0], ("both", [0, 1])),
        ([8.0, 8.0, 0.0], [3.9, 4.0, 0.0], ("either", [0, 1])),
    ],
)
def test_the_least_that_counts(gives: list[float], lost: list[float], expected: Any) -> None:
    """Where all decoys do the same."""
    assert judge(made_up([gives], [lost], noise=0.0), 0.05)[1] == [expected]


@pytest.mark.parametrize(
    ("kind", "gives", "words"),
    [
        ("one", [2.9], "a 3.0 5 6"),  # what is lost without it, if that is more
        ("one", [3.1], "a 3.1 7 8"),
        ("one", [np.nan], "a 3.0 5 6"),
        ("either", [2.9, 3.1], "a b 2.9 3.1"),
        ("both", [2.9, 3.1], "a b 7.0"),
        ("none", [], "7.0"),
        ("undecided", [2.9, 3.1], "a 3.0 b 3.1 16"),
        ("undecided", [], "7.0 16"),
    ],
)
def test_the_words_have_the_numbers_of_the_verdict(
    kind: str, gives: list[float], words: str
) -> None:
    lost = Effect(3.0, num_tried=6, num_beaten=5)
    effects = [
        SourceEffects(source, Effect(nats, num_tried=8, num_beaten=7), lost)
        for source, nats in zip("ab", gives, strict=False)
    ]
    said = verdict_in_words(kind, effects, 7.0, 0.5, 8)
    assert re.findall(r"\b(?:[ab](?! decoy)\b|[\d.]+)", said) == words.split()
    assert ("gives" in said) == (gives == [3.1])
    assert "-" not in verdict_in_words("none", [], -0.04, 0.5, 8)


def test_more_decoys_are_advised_only_where_they_can_decide() -> None:
    effects = [SourceEffects("a", gives=Effect(np.nan, 0, 0), lost=Effect(3.0, 8, 8))]
    assert "draws=16" in verdict_in_words("undecided", effects, 7.0, 0.7, 8)
    advice = verdict_in_words("undecided", effects, 7.0, 0.8, 8)
    assert "draws" not in advice
    assert "varies by 0.8 nats" in advice
