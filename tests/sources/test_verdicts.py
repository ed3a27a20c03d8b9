"""Evidence and verdicts on made-up losses, and their error rate (evidence.py, verdicts.py)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity.analysis.options import MIN_GAP
from olmo_sparsity.analysis.results.intervals import quantile, tail
from olmo_sparsity.sources import evidence as evidence_module
from olmo_sparsity.sources.evidence import PRIOR_NATS, Losses, weigh
from olmo_sparsity.sources.verdicts import (
    in_words,
    judge,
    needed_for_parts,
    sources_to_look_at,
)
from tests.support.sources import made_up


def of_effects(own_TS: np.ndarray, decoys_TSD: np.ndarray) -> Losses:
    """Return losses where each text lowers the loss of a statement by its own effect, whatever else
    is shown. `own_TS`: effects of the sources; `decoys_TSD`: of their decoys."""
    source_TS1 = own_TS[..., None]
    all_sources_T11 = source_TS1.sum(1, keepdims=True)
    all_decoys_T1D = decoys_TSD.sum(1, keepdims=True)
    return Losses(
        all_T=-own_TS.sum(-1),
        decoys_TD=-all_decoys_T1D[:, 0],
        among_TSD=-(all_decoys_T1D - decoys_TSD + source_TS1),
        without_TSD=-(all_sources_T11 - source_TS1 + decoys_TSD),
    )


def drawn(tails: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    return generator.normal(size=shape) if tails == "normal" else generator.standard_t(3, shape)


def named_by_chance(num_sources: int, draws: int, scale: float, tails: str, num: int) -> float:
    """Return the share of answers with any name, of three statements each, where each text has an
    effect of its own, drawn as those of its decoys are."""
    generator = np.random.default_rng(1)
    num_named = 0
    for _ in range(num):
        shape = (3, num_sources, 1 + draws)
        spread_T11 = scale * PRIOR_NATS * np.ones((3, 1, 1))
        if tails == "each statement has its own scale":
            spread_T11 = spread_T11 * np.sqrt(4 / generator.chisquare(4, (3, 1, 1)))
            effects = generator.normal(size=shape) * spread_T11
        else:
            effects = drawn(tails, shape, generator) * spread_T11
        verdicts_T = judge(of_effects(effects[..., 0], effects[..., 1:]), 0.05)[1]
        num_named += any(named for _, named in verdicts_T)
    return num_named / num


@pytest.mark.parametrize("tails", ["normal", "t3", "each statement has its own scale"])
@pytest.mark.parametrize(
    ("num_sources", "draws", "scale"),
    [
        *((1, 2, 10), (2, 2, 10), (2, 4, 10), (3, 4, 3), (4, 2, 10), (5, 2, 3), (5, 4, 1)),
        *((5, 8, 10), (2, 16, 10), (3, 16, 3)),
    ],
)
def test_the_error_rate_is_held_where_no_source_matters(
    num_sources: int, draws: int, scale: float, tails: str
) -> None:
    """5%, whatever the number of sources, also where effects have heavy tails or are ten times as
    large as the prior says. study/false_names.py has 2,000 answers of each."""
    assert named_by_chance(num_sources, draws, scale, tails, 150) <= 0.08


def test_the_rate_is_not_held_by_the_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail: a prior that is ten times too small, and too little else."""
    for name, value in (("FEW_SOURCES", 1), ("OTHERS_WEIGHT", 0), ("MOST_FREEDOM_OF_TWO", 4)):
        monkeypatch.setattr(evidence_module, name, value)
    assert named_by_chance(2, 2, 10, "normal", 100) > 0.15


# --- a second implementation, by loops ------------------------------------------------------------


@dataclass
class Effect:
    """What a source gives (test 0), or what is lost without it (test 1)."""

    capped: list[float]  # by decoy
    uncapped: np.ndarray

    @property
    def is_evaluated(self) -> bool:
        return not np.isnan(self.capped).any()


@dataclass
class LoopLook:
    spread: np.ndarray  # TS
    means: np.ndarray  # 2TS; NaN: not evaluated
    p: np.ndarray  # 2TS
    above: np.ndarray  # 2TS; nats above the least that is named


def effects_of(losses: Losses, t: int, s: int, num: int) -> list[Effect]:
    decoys = losses.decoys_TD[t, :num]
    among = losses.among_TSD[t, s, :num]
    without = losses.without_TSD[t, s, :num]
    most = np.median(decoys[~np.isnan(decoys)])
    gives = [min(a, most) - min(b, most) for a, b in zip(decoys, among, strict=True)]
    lost = [min(loss, most) - losses.all_T[t] for loss in without]
    return [Effect(gives, decoys - among), Effect(lost, without)]


def look_by_loops(losses: Losses, num: int, freedom: int, limit: float) -> LoopLook:
    """Test each source after `num` decoys, one after the other."""
    num_T, num_S = losses.without_TSD.shape[:2]
    look = LoopLook(
        spread=np.zeros((num_T, num_S)),
        means=np.full((2, num_T, num_S), np.nan),
        p=np.ones((2, num_T, num_S)),
        above=np.full((2, num_T, num_S), -np.inf),
    )
    effects = [[effects_of(losses, t, s, num) for s in range(num_S)] for t in range(num_T)]
    tried = {
        s for t, s, n in product(range(num_T), range(num_S), range(2))
        if effects[t][s][n].is_evaluated
    }  # fmt: skip
    noise = (1 + 1 / num) ** 0.5
    for t in range(num_T):
        known = [effect for of_source in effects[t] for effect in of_source if effect.is_evaluated]
        most = np.nanmedian(losses.decoys_TD[t, :num])
        total = 3 * (0.3**2 + (0.02 * most) ** 2)
        weight = 3
        scales = list[tuple[float, int]]()
        if num > 1 and known:
            total += (num - 1) * np.mean([np.var(effect.capped, ddof=1) for effect in known])
            weight += num - 1
            if num_S <= 4:
                variance = np.mean([np.var(effect.uncapped, ddof=1) for effect in known])
                scales = [((variance + 1e-12) ** 0.5, min(6, len(tried) * (num - 1)))]
        for s in range(num_S):
            total_of_source = total
            weight_of_source = weight
            if num_S > 4:
                others = [effects[t][o][1].capped[0] ** 2 for o in range(num_S) if o != s]
                total_of_source += 4 * np.median(others) / 0.91
                weight_of_source += 4
            spread = (total_of_source / weight_of_source) ** 0.5
            look.spread[t, s] = spread
            tests = [(spread, freedom), *scales]
            for n in range(2):
                if effects[t][s][n].is_evaluated:
                    mean = np.mean(effects[t][s][n].capped)
                    look.means[n, t, s] = mean
                    p_of_tests = [tail(mean / scale / noise, free) for scale, free in tests]
                    least = [scale * noise * quantile(limit, free) for scale, free in tests]
                    look.p[n, t, s] = max(p_of_tests)
                    look.above[n, t, s] = mean - max(least)
    return look


def partly_evaluated(num_sources: int, draws: int) -> Losses:
    """Losses of three statements, in which decoys of some sources were not evaluated, or only the
    first ones."""
    generator = np.random.default_rng(num_sources)
    own = generator.normal(size=(3, num_sources)) * 3
    losses = of_effects(own, generator.normal(size=(3, num_sources, draws)))
    losses = replace(losses, all_T=losses.all_T + 20, decoys_TD=losses.decoys_TD + 20)
    losses.without_TSD[:] += 20
    losses.among_TSD[:] += 20
    losses.among_TSD[:, -1, 1:] = np.nan
    if num_sources > 2:
        losses.without_TSD[:, 0, 2:] = np.nan
        losses.decoys_TD[0, 1:] = np.nan
        losses.among_TSD[0, :, 1:] = np.nan
        losses.among_TSD[:, 1] = np.nan
    return losses


SIZES = [(1, 2), (2, 2), (3, 4), (4, 5), (5, 2), (6, 4), (7, 8)]


@pytest.mark.parametrize(("num_sources", "draws"), SIZES)
def test_the_evidence_is_that_of_plain_loops(num_sources: int, draws: int) -> None:
    losses = partly_evaluated(num_sources, draws)
    stages = {2: [2], 4: [2, 4], 5: [2, 4, 5], 8: [2, 4, 8]}[draws]
    shares = [*[0.1] * (len(stages) - 1), 1 - 0.1 * (len(stages) - 1)]
    freedom = 4 if len(stages) > 1 else 3
    limit = 0.05 / (2 * 3 * num_sources)
    looks = [
        look_by_loops(losses.first(num), num, freedom, limit * share)
        for num, share in zip(stages, shares, strict=True)
    ]
    found = weigh(losses, 0.05)
    p_2TS = np.min([look.p / share for look, share in zip(looks, shares, strict=True)], 0)
    np.testing.assert_allclose(found.p_2TS, np.minimum(p_2TS, 1), rtol=1e-7)
    last = [look for look in looks if np.isfinite(look.means).any()][-1]
    np.testing.assert_allclose(found.spread_TS, last.spread)
    np.testing.assert_allclose(found.nats_above_TS, np.max([look.above for look in looks], (0, 1)))


@pytest.mark.parametrize(("num_sources", "draws"), SIZES)
def test_the_named_sources_are_those_of_benjamini_and_hochberg(
    num_sources: int, draws: int
) -> None:
    losses = partly_evaluated(num_sources, draws)
    found = weigh(losses, 0.05)
    p_TS = np.minimum(1, 2 * found.p_2TS.min(0))
    p_TS[losses.gap_T < MIN_GAP] = 1.0
    ranks = [sum(p_TS.ravel() <= p) for p in p_TS.ravel()]
    passed = p_TS.ravel() <= 0.05 * np.array(ranks) / p_TS.size
    assert found.named_TS.tolist() == (p_TS <= max(p_TS.ravel()[passed], default=-1)).tolist()


def means_of(losses: Losses, t: int) -> list[tuple[float, float]]:
    """Of each source, what it gives and what is lost without it; NaN: not evaluated."""

    def mean(nats_D: np.ndarray) -> float:
        return float(np.nanmean(nats_D)) if np.isfinite(nats_D).any() else np.nan

    num_sources = losses.without_TSD.shape[1]
    return [(mean(losses.gives_TSD[t, s]), mean(losses.lost_TSD[t, s])) for s in range(num_sources)]


@pytest.mark.parametrize(("num_sources", "draws"), SIZES)
def test_more_decoys_are_evaluated_where_they_may_change_a_verdict(
    num_sources: int, draws: int
) -> None:
    losses = partly_evaluated(num_sources, draws)
    evidence = weigh(losses, 0.05)
    expected_gives = set[int]()
    expected_lost = set[int]()
    for t in range(3):
        gap, spread, nats = losses.gap_T[t], evidence.spread_TS[t], means_of(losses, t)
        costly = [s for s, (_, lost) in enumerate(nats) if lost >= 0.1 * gap]
        is_decided = len(costly) == 1 and any(lost >= 0.5 * gap for _, lost in nats)
        for s, (gives, lost) in enumerate(nats):
            if gap < MIN_GAP or evidence.named_TS[t, s]:
                continue
            if s in costly and lost >= spread[s]:
                expected_lost.add(s)
            if not is_decided and not gives < max(0.1 * gap, spread[s]):
                expected_gives.add(s)
    gives_S, lost_S = sources_to_look_at(losses, 0.05)
    assert {*np.flatnonzero(gives_S).tolist()} == expected_gives
    assert {*np.flatnonzero(lost_S).tolist()} == expected_lost


@pytest.mark.parametrize(("num_sources", "draws"), SIZES)
def test_verdicts_follow_their_rules(num_sources: int, draws: int) -> None:
    losses = partly_evaluated(num_sources, draws)
    evidence, verdicts_T = judge(losses, 0.05)
    for t in range(3):
        gap, spread, nats = losses.gap_T[t], evidence.spread_TS[t], means_of(losses, t)
        enough, needed, is_open = set[int](), set[int](), set[int]()
        for s, (gives, lost) in enumerate(nats):
            least = min(max(2 * spread[s], 1.5), 3)
            if not evidence.named_TS[t, s]:
                if lost >= max(0.2 * gap, least) or gives >= max(0.5 * gap, least):
                    is_open.add(s)
                continue
            if gives >= gap / 2:
                enough.add(s)
            if lost >= 0.2 * gap and not lost < gives / 2:
                needed.add(s)
        assert {*np.flatnonzero(evidence.open_TS[t]).tolist()} == is_open
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
    # Losses of usual size, as a share of them is part of the spread.
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


def by_tokens(lost: Any, gives: Any, gap: float = 4.0) -> Losses:
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
def test_each_part_of_a_statement_needs_its_source(lost: Any, gives: Any, expected: Any) -> None:
    tokens = by_tokens(lost, gives)
    parts_TS = needed_for_parts(tokens, [(0, 3)])
    whole = made_up([[12.0, 11.0]], [[0.5, 0.5]], gap=12.0)  # as wholes each suffices
    assert judge(whole, 0.05)[1] == [("either", [0, 1])]
    assert judge(whole, 0.05, parts_TS)[1] == [expected]


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
    names = ["lost", "beyond_lost", "tried_lost", "beyond_gives", "tried_gives"]
    cells = pd.DataFrame([[3.0, 5, 6, 7, 8]] * 2, ["a", "b"], names)
    cells = cells[: len(gives)].astype({name: int for name in names[1:]}).assign(gives=gives)
    said = in_words(kind, cells, 7.0, 0.5, 8)
    assert re.findall(r"\b(?:[ab](?! decoy)\b|[\d.]+)", said) == words.split()
    assert ("gives" in said) == (gives == [3.1])
    assert "-" not in in_words("none", cells, -0.04, 0.5, 8)


def test_more_decoys_are_advised_only_where_they_can_decide() -> None:
    cells = pd.DataFrame([[3.0, np.nan]], ["a"], ["lost", "gives"])
    assert "draws=16" in in_words("undecided", cells, 7.0, 0.7, 8)
    advice = in_words("undecided", cells, 7.0, 0.8, 8)
    assert "draws" not in advice
    assert "varies by 0.8 nats" in advice
