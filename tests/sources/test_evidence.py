"""Evidence on made-up losses: an example, the error rate, a second implementation."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from olmo_sparsity.analysis.options import MIN_GAP
from olmo_sparsity.analysis.results.student_t import quantile, tail
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.sources.options import SourceSettings
from olmo_sparsity.sources.verdicts import effect_tests, evidence
from olmo_sparsity.sources.verdicts.effect_tests import PRIOR_NATS, run_tests
from olmo_sparsity.sources.verdicts.evidence import collect_evidence
from olmo_sparsity.sources.verdicts.losses import StatementLosses
from olmo_sparsity.sources.verdicts.verdict import judge
from tests.support.losses import PARTLY_EVALUATED_SIZES, of_effects, partly_evaluated

# --- the example in the docstring of effect_tests.py ----------------------------------------------


def example() -> StatementLosses:
    without_a = [9.8, 10.3]
    without_b = [2.1, 2.5]
    return StatementLosses(
        all_T=np.array([2.0]),
        decoys_TD=np.array([[10.0, 10.4]]),
        # With two sources, A among decoys is the prompt without B.
        among_TSD=np.array([[without_b, without_a]]),
        without_TSD=np.array([[without_a, without_b]]),
    )


def test_the_effects_of_the_example_are_those_of_its_docstring() -> None:
    losses = example()
    assert losses.cap_T == pytest.approx([10.2])
    assert losses.gap_T == pytest.approx([8.1])
    np.testing.assert_allclose(losses.lost_TSD[0], [[7.8, 8.2], [0.1, 0.5]])


def test_the_tests_of_the_example_are_those_of_its_docstring() -> None:
    tests = run_tests(example(), max_degrees=3)
    lost_TS = tests.mean_ETS[1]
    by_spread, by_decoys = tests.standard_errors
    assert tests.spread_TS[0] == pytest.approx([0.333, 0.333], abs=5e-4)
    assert lost_TS[0] / by_spread.nats_TS[0] == pytest.approx([19.6, 0.73], abs=0.05)
    assert lost_TS[0, 0] / by_decoys.nats_TS[0, 0] == pytest.approx(28.5, abs=0.05)
    assert by_decoys.degrees_of_freedom == 2
    assert tests.p_ETS[1, 0] == pytest.approx([0.00061, 0.258], rel=0.01)


def test_the_example_names_the_source_of_its_docstring() -> None:
    found = collect_evidence(example(), 0.05)
    assert found.p_ETS[1, 0] == pytest.approx([0.0006, 0.26], rel=0.03)
    assert found.is_named_TS.tolist() == [[True, False]]
    assert found.is_open_TS.tolist() == [[False, False]]


# --- the error rate -------------------------------------------------------------------------------


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


@pytest.mark.accept
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
    monkeypatch.setattr(effect_tests, "FEW_SOURCES", 1)
    monkeypatch.setattr(effect_tests, "OTHERS_WEIGHT", 0)
    monkeypatch.setattr(evidence, "MAX_DEGREES_WITH_TWO_DECOYS", 4)
    assert named_by_chance(2, 2, 10, "normal", 100) > 0.15


# --- a second implementation, by loops ------------------------------------------------------------


@dataclass
class Effect:
    """What a source gives, or what is lost without it."""

    capped: list[float]  # by decoy
    uncapped: np.ndarray

    @property
    def is_evaluated(self) -> bool:
        return not np.isnan(self.capped).any()


@dataclass
class LoopRound:
    spread: np.ndarray  # TS
    means: np.ndarray  # ETS; NaN: not evaluated
    p: np.ndarray  # ETS
    above: np.ndarray  # ETS; nats above the threshold


def effects_of(losses: StatementLosses, t: int, s: int, num: int) -> list[Effect]:
    decoys = losses.decoys_TD[t, :num]
    among = losses.among_TSD[t, s, :num]
    without = losses.without_TSD[t, s, :num]
    most = np.median(decoys[~np.isnan(decoys)])
    gives = [min(a, most) - min(b, most) for a, b in zip(decoys, among, strict=True)]
    lost = [min(loss, most) - losses.all_T[t] for loss in without]
    return [Effect(gives, decoys - among), Effect(lost, without)]


def round_by_loops(losses: StatementLosses, num: int, max_degrees: int, limit: float) -> LoopRound:
    """Test each source after `num` decoys, one after the other."""
    num_T, num_S = losses.without_TSD.shape[:2]
    tests = LoopRound(
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
            tests.spread[t, s] = spread
            standard_errors = [(spread, max_degrees), *scales]
            for n in range(2):
                if effects[t][s][n].is_evaluated:
                    mean = np.mean(effects[t][s][n].capped)
                    tests.means[n, t, s] = mean
                    p_of_tests = [
                        tail(mean / scale / noise, degrees) for scale, degrees in standard_errors
                    ]
                    least = [
                        scale * noise * quantile(limit, degrees)
                        for scale, degrees in standard_errors
                    ]
                    tests.p[n, t, s] = max(p_of_tests)
                    tests.above[n, t, s] = mean - max(least)
    return tests


@pytest.mark.parametrize(("num_sources", "draws"), PARTLY_EVALUATED_SIZES)
def test_the_evidence_is_that_of_plain_loops(num_sources: int, draws: int) -> None:
    losses = partly_evaluated(num_sources, draws)
    stages = {2: [2], 4: [2, 4], 5: [2, 4, 5], 8: [2, 4, 8]}[draws]
    shares = [*[0.1] * (len(stages) - 1), 1 - 0.1 * (len(stages) - 1)]
    max_degrees = 4 if len(stages) > 1 else 3
    limit = 0.05 / (2 * 3 * num_sources)
    rounds = [
        round_by_loops(losses.of_first_decoys(num), num, max_degrees, limit * share)
        for num, share in zip(stages, shares, strict=True)
    ]
    found = collect_evidence(losses, 0.05)
    p_ETS = np.min([tests.p / share for tests, share in zip(rounds, shares, strict=True)], 0)
    np.testing.assert_allclose(found.p_ETS, np.minimum(p_ETS, 1), rtol=1e-7)
    last = [tests for tests in rounds if np.isfinite(tests.means).any()][-1]
    np.testing.assert_allclose(found.spread_TS, last.spread)
    np.testing.assert_allclose(
        found.nats_above_TS, np.max([tests.above for tests in rounds], (0, 1))
    )


@pytest.mark.parametrize(("num_sources", "draws"), PARTLY_EVALUATED_SIZES)
def test_the_named_sources_are_those_of_benjamini_and_hochberg(
    num_sources: int, draws: int
) -> None:
    losses = partly_evaluated(num_sources, draws)
    found = collect_evidence(losses, 0.05)
    p_TS = np.minimum(1, 2 * found.p_ETS.min(0))
    p_TS[losses.gap_T < MIN_GAP] = 1.0
    ranks = [sum(p_TS.ravel() <= p) for p in p_TS.ravel()]
    passed = p_TS.ravel() <= 0.05 * np.array(ranks) / p_TS.size
    assert found.is_named_TS.tolist() == (p_TS <= max(p_TS.ravel()[passed], default=-1)).tolist()


def test_a_number_of_decoys_leaves_a_part_of_the_error_rate_for_the_last_round() -> None:
    SourceSettings(draws=1024).check()
    with pytest.raises(ConfigError, match="draws=1025"):
        SourceSettings(draws=1025).check()

    num_early_rounds = len(evidence.decoy_rounds(1024)) - 1
    assert evidence.EARLY_ROUND_FRACTION * num_early_rounds < 1
