"""Verdicts on made-up losses, and the error rate."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity.analysis.options import MIN_GAP
from olmo_sparsity.analysis.results.statistics import quantile, tail
from olmo_sparsity.sources import verdicts
from olmo_sparsity.sources.verdicts import (
    PRIOR_NATS,
    Losses,
    in_words,
    judge,
    sources_to_look_at,
    weigh,
)
from tests.support.sources import made_up


def of_effects(own_TS: np.ndarray, decoys_TSD: np.ndarray) -> Losses:
    """Each text lowers the loss of a statement by its own effect, whatever else is shown."""
    own_TS1, every_TSD = own_TS[..., None], decoys_TSD.sum(1, keepdims=True)
    all_TS1 = own_TS1.sum(1, keepdims=True)
    return Losses(
        all_T=-own_TS.sum(-1),
        decoys_TD=-every_TSD[:, 0],
        among_TSD=-(every_TSD - decoys_TSD + own_TS1),
        without_TSD=-(all_TS1 - own_TS1 + decoys_TSD),
    )


def drawn(tails: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    return generator.normal(size=shape) if tails == "normal" else generator.standard_t(3, shape)


def named_by_chance(num_sources: int, draws: int, scale: float, tails: str, num: int) -> float:
    """The share of answers with any name, of three statements each, where each text has an effect
    of its own, drawn as those of its decoys are."""
    generator, found = np.random.default_rng(1), 0
    for _ in range(num):
        shape = (3, num_sources, 1 + draws)
        spread_T11 = scale * PRIOR_NATS * np.ones((3, 1, 1))
        if tails == "of each statement its own":
            spread_T11 = spread_T11 * np.sqrt(4 / generator.chisquare(4, (3, 1, 1)))
            effects = generator.normal(size=shape) * spread_T11
        else:
            effects = drawn(tails, shape, generator) * spread_T11
        kinds = [kind for kind, _ in judge(of_effects(effects[..., 0], effects[..., 1:]), 0.05)[1]]
        found += any(kind != "none" for kind in kinds)
    return found / num


@pytest.mark.parametrize("tails", ["normal", "t3", "of each statement its own"])
@pytest.mark.parametrize(
    ("num_sources", "draws", "scale"),
    [(1, 2, 10), (2, 2, 10), (2, 4, 10), (3, 4, 3), (4, 2, 10), (5, 2, 3), (5, 4, 1), (5, 8, 10)],
)
def test_the_error_rate_is_held_where_no_source_matters(
    num_sources: int, draws: int, scale: float, tails: str
) -> None:
    """5%, whatever the number of sources, also where effects have heavy tails or are ten times as
    large as the prior says. study/false_names.py has 2,000 answers of each."""
    assert named_by_chance(num_sources, draws, scale, tails, 150) <= 0.08


def test_the_rate_is_not_held_by_the_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail: a prior that is ten times too small, and too little else."""
    for name, value in (("LEAST_OTHERS", 1), ("OTHERS_WEIGHT", 0), ("FREEDOM_OF_TWO", 4)):
        monkeypatch.setattr(verdicts, name, value)
    assert named_by_chance(2, 2, 10, "normal", 100) > 0.15


def by_loops(losses: Losses, num: int, freedom: int, limit: float) -> dict[str, np.ndarray]:
    """Means, p-values, spreads and nats above the least that is named after `num` decoys of each
    source, one after the other."""
    num_T, num_S = losses.without_TSD.shape[:2]
    found = {"spread": np.zeros((num_T, num_S)), "means": np.full((2, num_T, num_S), np.nan)}
    found |= {"p": np.ones((2, num_T, num_S)), "above": np.full((2, num_T, num_S), -np.inf)}
    nats: dict[Any, Any] = {}
    for t, s in product(range(num_T), range(num_S)):
        decoys, among = losses.decoys_TD[t, :num], losses.among_TSD[t, s, :num]
        without, most = losses.without_TSD[t, s, :num], np.median(decoys[~np.isnan(decoys)])
        gives = [min(a, most) - min(b, most) for a, b in zip(decoys, among, strict=True)]
        lost = [min(one, most) - losses.all_T[t] for one in without]
        nats[0, t, s], nats[1, t, s] = (gives, decoys - among), (lost, without)
    for t in range(num_T):
        pairs = product(range(2), range(num_S))
        known = [nats[n, t, s] for n, s in pairs if not np.isnan(nats[n, t, s][0]).any()]
        most = np.nanmedian(losses.decoys_TD[t, :num])
        total, weight, scales = 3 * (0.3**2 + (0.02 * most) ** 2), 3, list[tuple[float, int]]()
        if num > 1 and known:
            total += (num - 1) * np.mean([np.var(capped, ddof=1) for capped, _ in known])
            weight += num - 1
            if num_S <= 4:
                raw = np.mean([np.var(values, ddof=1) for _, values in known])
                tried = {key[2] for key, (of, _) in nats.items() if not np.isnan(of).any()}
                scales = [((raw + 1e-12) ** 0.5, min(6, len(tried) * (num - 1)))]
        for s in range(num_S):
            own_total, own_weight = total, weight
            if num_S > 4:
                others = [nats[1, t, other][0][0] ** 2 for other in range(num_S) if other != s]
                own_total, own_weight = total + 4 * np.median(others) / 0.91, weight + 4
            found["spread"][t, s] = (own_total / own_weight) ** 0.5
            noise, both = (1 + 1 / num) ** 0.5, [(found["spread"][t, s], freedom), *scales]
            for n in range(2):
                capped = nats[n, t, s][0]
                if not np.isnan(capped).any():
                    mean = found["means"][n, t, s] = np.mean(capped)
                    p_of = [tail(mean / scale / noise, free) for scale, free in both]
                    least = [scale * noise * quantile(limit, free) for scale, free in both]
                    found["p"][n, t, s], found["above"][n, t, s] = max(p_of), mean - max(least)
    return found


@pytest.mark.parametrize(
    ("num_sources", "draws"), [(1, 2), (2, 2), (3, 4), (4, 5), (5, 2), (6, 4), (7, 8)]
)
def test_the_evidence_is_that_of_plain_loops(num_sources: int, draws: int) -> None:
    """Also where decoys of some sources were not evaluated, or only the first ones."""
    generator = np.random.default_rng(num_sources)
    own = generator.normal(size=(3, num_sources)) * 3
    losses = of_effects(own, generator.normal(size=(3, num_sources, draws)))
    losses = replace(losses, all_T=losses.all_T + 20, decoys_TD=losses.decoys_TD + 20)
    losses.without_TSD[:] += 20
    losses.among_TSD[:] += 20
    losses.among_TSD[:, -1, 1:] = np.nan
    if num_sources > 2:
        losses.without_TSD[:, 0, 2:] = np.nan
        losses.decoys_TD[0, 1:], losses.among_TSD[0, :, 1:] = np.nan, np.nan
        losses.among_TSD[:, 1] = np.nan
    stages = {2: [2], 4: [2, 4], 5: [2, 4, 5], 8: [2, 4, 8]}[draws]
    spends = [*[0.1] * (len(stages) - 1), 1 - 0.1 * (len(stages) - 1)]
    freedom = 4 if len(stages) > 1 else 3
    each, limit = list(zip(stages, spends, strict=True)), 0.05 / (2 * 3 * num_sources)
    made = [by_loops(losses.first(num), num, freedom, limit * spend) for num, spend in each]
    p_2TS = np.min([one["p"] / spend for one, spend in zip(made, spends, strict=True)], 0)
    p_2TS = np.minimum(p_2TS, 1)
    found = weigh(losses, 0.05)
    np.testing.assert_allclose(found.p_2TS, p_2TS, rtol=1e-7)
    last = [one for one in made if np.isfinite(one["means"]).any()][-1]
    np.testing.assert_allclose(found.spread_TS, last["spread"])
    # Benjamini–Hochberg, by its definition.
    p_TS = np.minimum(1, 2 * p_2TS.min(0))
    p_TS[losses.gap_T < MIN_GAP] = 1.0
    ranks = [sum(p_TS.ravel() <= p) for p in p_TS.ravel()]
    passed = p_TS.ravel() <= 0.05 * np.array(ranks) / p_TS.size
    assert found.found_TS.tolist() == (p_TS <= max(p_TS.ravel()[passed], default=-1)).tolist()
    np.testing.assert_allclose(found.above_TS, np.max([one["above"] for one in made], (0, 1)))
    # More decoys, and verdicts, by their rules.
    gives, lost, named = losses.gives_TSD, losses.lost_TSD, [set(), set()]
    verdicts_T = judge(losses, 0.05)[1]
    for t in range(3):
        nats = [
            [
                np.nanmean(of[t, s]) if np.isfinite(of[t, s]).any() else np.nan
                for of in (gives, lost)
            ]
            for s in range(num_sources)
        ]
        gap, spread = losses.gap_T[t], found.spread_TS[t]
        costly = [s for s, (_, own) in enumerate(nats) if own >= 0.1 * gap]
        is_clear = len(costly) == 1 and any(own >= 0.5 * gap for _, own in nats)
        for s, (given, own) in enumerate(nats):
            if gap < MIN_GAP or found.found_TS[t, s]:
                continue
            if s in costly and own >= spread[s]:
                named[1].add(s)
            if not is_clear and not given < max(0.1 * gap, spread[s]):
                named[0].add(s)
        enough = {s for s in range(num_sources) if found.found_TS[t, s] and nats[s][0] >= gap / 2}
        needed = {
            s for s, (given, own) in enumerate(nats)
            if found.found_TS[t, s] and own >= 0.2 * gap and not own < given / 2
        }  # fmt: skip
        chosen = needed if enough <= needed else enough
        several = "both" if enough <= needed else "either"
        kind = {0: "none", 1: "one"}.get(len(chosen), several)
        assert verdicts_T[t] == (kind, sorted(chosen))
    assert [{*np.flatnonzero(of).tolist()} for of in sources_to_look_at(losses, 0.05)] == named


@pytest.mark.parametrize(
    ("gives", "lost", "expected"),
    [
        ([8.0, 0.1, 0.0], [7.5, 0.0, 0.1], ("one", [0])),
        ([8.0, 7.9, 0.0], [0.0, 0.1, 0.1], ("either", [0, 1])),
        ([4.0, 0.0, 4.1], [3.9, 0.0, 4.0], ("both", [0, 2])),
        ([0.0, 0.1, 0.0], [0.0, 0.1, 0.05], ("none", [])),
        ([0.1, 0.0, 0.1], [8.0, 0.0, 8.0], ("both", [0, 2])),  # only together
        ([8.0, 7.0, 0.0], [3.0, 4.0, 0.0], ("either", [0, 1])),  # the others replace most of one
        ([5.0, 4.5, 0.0], [4.0, 4.1, 0.0], ("both", [0, 1])),
        ([8.0, 1.5, 0.0], [7.5, 1.0, 0.1], ("one", [0])),  # beyond its decoys, and too little
    ],
)
def test_verdicts(gives: list[float], lost: list[float], expected: Any) -> None:
    assert judge(made_up([gives], [lost]), 0.05)[1] == [expected]


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
    ],
)
def test_the_words_have_the_numbers_of_the_verdict(
    kind: str, gives: list[float], words: str
) -> None:
    names = ["lost", "beyond_lost", "tried_lost", "beyond_gives", "tried_gives"]
    cells = pd.DataFrame([[3.0, 5, 6, 7, 8]] * 2, ["a", "b"], names)
    cells = cells[: len(gives)].astype({name: int for name in names[1:]}).assign(gives=gives)
    said = in_words(kind, cells, 7.0)
    assert re.findall(r"\b(?:[ab](?! decoy)\b|[\d.]+)", said) == words.split()
    assert ("gives" in said) == (gives == [3.1])
    assert "-" not in in_words("none", cells, -0.04)
