"""Every selector against brute force: one forward per subset, batch 1."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.analysis.interpretation import InterpretationName, interpretation_of
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.gates import gate_gradients
from olmo_sparsity.analysis.selectors.halving import first_groups
from olmo_sparsity.analysis.selectors.influence import SELECTORS, Question, find_selector
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.text.units import Units
from olmo_sparsity.text.windows import Block, Windows
from tests.support.brute import (
    CPU,
    DOCUMENT,
    KINDS,
    OF_KINDS,
    OURS,
    READINGS,
    VOCAB,
    Brute,
    assert_ranked,
    question,
    shown_alone,
    tiny,
    units_of,
)
from tests.support.explanations import TEXT, asked, make_model

FAMILIES = [*OURS, "llama"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@pytest.fixture(scope="module")
def block() -> Block:
    return next(iter(Windows(16, 6, 4).blocks(DOCUMENT)))


# --- the tests ------------------------------------------------------------------------------------


@READINGS
@pytest.mark.parametrize(("windows", "kind"), OF_KINDS)
@pytest.mark.parametrize(
    ("model", "selector"),
    [
        *product(FAMILIES, ["add_one", "gradient"]),
        # Of so few units these evaluate all, as add_one does.
        *product(["olmo"], ["add_one_screened", "add_one_nested"]),
    ],
    indirect=["model"],
)
def test_selectors(
    model: Any,
    windows: Windows,
    selector: str,
    kind: str,
    distant_states: InterpretationName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("olmo_sparsity.analysis.scoring.model_runner.rows_per_chunk", lambda *_: 9)
    scorer = Scorer(model, CPU, distant_states=distant_states, batch_tokens=128)
    block = list(windows.blocks(DOCUMENT))[2]
    targets = list(range(block.num_targets))[-3:]
    units, by_hand = units_of(kind, block.num_distant)
    k = min(4, len(by_hand))
    choice = SELECTORS[selector](scorer, question(scorer, block, targets, k, units))
    for row, target in enumerate(targets):
        brute = Brute(model, DOCUMENT, windows, block.start + target, distant_states)
        expected = brute.influences(selector, by_hand)
        np.testing.assert_allclose(choice.score_TU[row], expected, atol=2e-5)
        assert_ranked(choice, row, expected, k)


@READINGS
@pytest.mark.parametrize(("windows", "kind"), OF_KINDS[:3])
def test_pairs_of_so_few_units_are_the_best_of_all(
    model: Any,
    windows: Windows,
    kind: str,
    distant_states: InterpretationName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("olmo_sparsity.analysis.selectors.pairs.NUM_OPENED_FIRST", 10)
    monkeypatch.setattr("olmo_sparsity.analysis.selectors.pairs.NUM_PARTNERS", 9)
    block = list(windows.blocks(DOCUMENT))[1]
    targets = [0, block.num_targets - 1][-block.num_targets :]
    scorer = Scorer(model, CPU, distant_states=distant_states)
    units, by_hand = units_of(kind)
    choice = SELECTORS["pairs"](scorer, question(scorer, block, targets, 4, units))
    for row, target in enumerate(targets):
        brute = Brute(model, DOCUMENT, windows, block.start + target, distant_states)
        falls = {
            pair: brute.loss([]) - brute.loss({*by_hand[pair[0]], *by_hand[pair[1]]})
            for pair in combinations(range(len(by_hand)), 2)
        }
        first, second = choice.unit_TK[row, :2].tolist()
        best = max(falls.values())
        assert falls[min(first, second), max(first, second)] == pytest.approx(best, abs=2e-5)
        assert brute.loss(by_hand[first]) <= brute.loss(by_hand[second]) + 1e-5
        half_of_best = [
            max(f for pair, f in falls.items() if unit in pair) / 2 for unit in range(len(by_hand))
        ]
        np.testing.assert_allclose(choice.score_TU[row], half_of_best, atol=2e-5)
        assert_ranked(choice, row, np.array(half_of_best), 4)


@READINGS
def test_pairs_opens_the_best_gates_and_then_those_of_the_best_pairs(
    distant_states: InterpretationName,
) -> None:
    """Of 54 distant tokens nine are opened with four partners each, then two more of the best
    pairs."""
    model, windows = tiny("olmo"), Windows(60, 6, 1)
    document = np.random.default_rng(3).integers(0, VOCAB, 61)
    brute, scorer = Brute(model, document, windows, 60, distant_states), Scorer(model, CPU)
    scorer.interpretation = interpretation_of(distant_states)
    asked = question(scorer, next(iter(windows.blocks(document))), [0], 3)
    gate, falls = min(0.1, 16 / 54), dict[tuple[int, int], float]()

    def gates(*opened: int) -> np.ndarray:
        places = [np.array(opened)] if opened else None
        gate_F = gate_gradients(scorer, asked.context, [(0, 1)], gate, places)[0]
        gate_F[list(opened)] = -np.inf
        return np.argsort(-gate_F, kind="stable")

    def of_best() -> list[int]:
        pairs = sorted(falls, key=lambda pair: -falls[pair])
        return list(dict.fromkeys(unit for pair in pairs for unit in pair))

    opened = gates()[:9].tolist()
    for _ in range(2):
        for unit in opened:
            for partner in gates(unit)[:4].tolist():
                pair = (min(unit, partner), max(unit, partner))
                falls[pair] = brute.loss([]) - brute.loss(pair)
        opened = [unit for unit in of_best() if unit not in opened][:2]
    choice = SELECTORS["pairs"](scorer, asked)
    score = np.zeros(54)
    for pair, nats in falls.items():
        score[list(pair)] = np.maximum(score[list(pair)], nats / 2)
    np.testing.assert_allclose(np.maximum(choice.score_TU[0], 0), score, atol=2e-5)
    assert {*choice.unit_TK[0].tolist()} <= {*of_best()[:4]}


@READINGS
def test_gates_are_open_where_that_is_asked(
    model: Any, block: Block, distant_states: InterpretationName
) -> None:
    scorer = Scorer(model, CPU, distant_states=distant_states)
    context, opened = scorer.context(block), [np.array([2, 5])]
    closed_F = gate_gradients(scorer, context, [(0, 1)], 1e-6)[0]
    given_F = gate_gradients(scorer, context, [(0, 1)], 1e-6, opened)[0]
    others = [place for place in range(10) if place not in (2, 5)]
    assert np.abs(given_F[others]).max() < 1e-3  # of gates that are closed
    assert np.abs(closed_F).max() < 1e-3
    assert np.abs(given_F[[2, 5]]).max() > 10 * np.abs(closed_F[[2, 5]]).max()
    twice = gate_gradients(scorer, context, [(0, 1), (1, 2)], 0.1, [*opened, np.array([7])])
    for row, (span, places) in enumerate((((0, 1), opened[0]), ((1, 2), np.array([7])))):
        (alone_F,) = gate_gradients(scorer, context, [span], 0.1, [places])
        np.testing.assert_allclose(twice[row], alone_F, atol=2e-5)


@READINGS
@pytest.mark.parametrize("kind", ["tokens", "span:3"])
def test_screened_evaluates_max_16_2k_candidates_exactly(
    model: Any, kind: str, distant_states: InterpretationName
) -> None:
    """Those with the largest gradients of their gates, and of them the best are chosen."""
    document = np.random.default_rng(3).integers(0, VOCAB, 61)
    windows = Windows(60, 6, 1)
    block = next(iter(windows.blocks(document)))
    units, by_hand = units_of(kind, 54)
    exact = Brute(model, document, windows, 60, distant_states).influences("add_one", by_hand)
    scorer = Scorer(model, CPU, distant_states=distant_states)
    gate = gate_gradients(scorer, scorer.context(block), [(0, 1)])[0]
    candidates = np.argsort([-sum(gate[j] for j in unit) for unit in by_hand])
    for k, num_exact in ((2, 16), (20, 40)):
        asked = question(scorer, block, [0], k, units)
        before = scorer.token_forwards
        choice = SELECTORS["add_one_screened"](scorer, asked)
        np.testing.assert_allclose(choice.influence_TK[0], exact[choice.unit_TK[0]], atol=2e-5)
        best = np.sort(exact[candidates[:num_exact]])[::-1][:k]
        np.testing.assert_allclose(choice.influence_TK[0], best, atol=2e-5)
        # The gate's forward and backward over the window alone, the local window, the candidates;
        # distant tokens that are shown alone have states of their own.
        length = 6 if distant_states == "contextual" else 6 + len(by_hand[0])
        alone = 0 if distant_states == "contextual" else 54
        assert scorer.token_forwards - before == alone + 3 * 6 + 6 + num_exact * length


# --- controls -------------------------------------------------------------------------------------


@pytest.fixture
def control_scorer() -> Scorer:
    return shown_alone(tiny("olmo"))


def chosen_by(
    selector: str, scorer: Scorer, block: Block, kind: str, targets: Sequence[int] = (0,)
) -> list[list[int]]:
    block = block.with_distant(np.array([5, 7, 5, 9, 7, 5, 1, 2, 3, 4]))
    asked = question(scorer, block, targets, 3, units_of(kind)[0])
    return SELECTORS[selector](scorer, asked).unit_TK.tolist()


def test_nearest_chooses_the_last_units(control_scorer: Scorer, block: Block) -> None:
    assert chosen_by("nearest", control_scorer, block, "tokens") == [[9, 8, 7]]
    assert chosen_by("nearest", control_scorer, block, "span:3") == [[7, 6, 5]]
    assert chosen_by("nearest", control_scorer, block, "words", (0, 2)) == [[4, 3, 2]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_random_chooses_distinct_units(control_scorer: Scorer, block: Block, kind: str) -> None:
    num_units = len(units_of(kind)[1])
    for row in chosen_by("random", control_scorer, block, kind, (0, 1, 2, 3)):
        assert len(set(row)) == len(row) == min(3, num_units)
        assert set(row) <= set(range(num_units))


@pytest.mark.parametrize("kind", KINDS)
def test_a_random_choice_does_not_depend_on_the_other_targets(
    control_scorer: Scorer, block: Block, kind: str
) -> None:
    drawn = chosen_by("random", control_scorer, block, kind, (0, 1, 2, 3))
    assert chosen_by("random", control_scorer, block, kind, (0, 1, 2, 3)) == drawn
    assert chosen_by("random", control_scorer, block, kind, (1, 3)) == [drawn[1], drawn[3]]


def test_random_draws_go_on_with_their_generator(control_scorer: Scorer, block: Block) -> None:
    asked = question(control_scorer, block, [0], 3)
    draws = [SELECTORS["random"](control_scorer, asked).unit_TK[0] for _ in range(30)]
    assert len({tuple(sorted(units)) for units in draws}) > 10


@pytest.mark.parametrize("selector", ["nearest", "random"])
def test_controls_cost_nothing(control_scorer: Scorer, block: Block, selector: str) -> None:
    chosen_by(selector, control_scorer, block, "tokens")
    assert control_scorer.token_forwards == 0


# --- windows that begin with the text, targets of several tokens ----------------------------------


@READINGS
def test_nested_asks_groups_and_opens_the_best(
    monkeypatch: pytest.MonkeyPatch, distant_states: InterpretationName
) -> None:
    """Its influences are exact ones; what it opens is found here by hand."""
    model = tiny("olmo")
    document = np.random.default_rng(3).integers(0, VOCAB, 64)
    windows = Windows(63, 6, 1)
    block = next(iter(windows.blocks(document)))
    monkeypatch.setattr("olmo_sparsity.analysis.selectors.add_one.GROUP_SIZES", (16, 4))
    monkeypatch.setattr("olmo_sparsity.analysis.selectors.add_one.NUM_KEPT_GROUPS", 8)
    brute = Brute(model, document, windows, 63, distant_states)
    scorer = Scorer(model, CPU, distant_states=distant_states)
    asked = question(scorer, block, [0], 1)
    choice = SELECTORS["add_one_nested"](scorer, asked)
    # 57 distant tokens are too few for eight groups of 16; of 15 groups of 4, eight are opened.
    groups = [list(range(first, min(first + 4, 57))) for first in range(0, 57, 4)]
    falls = [brute.loss([]) - brute.loss(group) for group in groups]
    opened = [j for index in np.argsort(falls)[::-1][:8] for j in groups[index]]
    gate = gate_gradients(scorer, asked.context, asked.spans)[0]
    opened = sorted({*opened, *np.argsort(-gate)[:16].tolist()})
    exact = brute.influences("add_one")
    assert np.flatnonzero(choice.score_TU[0]).tolist() == opened
    np.testing.assert_allclose(choice.score_TU[0, opened], exact[opened], atol=2e-5)
    assert choice.unit_TK[0, 0] == max(opened, key=lambda j: exact[j])
    assert choice.influence_TK[0, 0] == pytest.approx(exact[opened].max(), abs=2e-5)


@READINGS
def test_halving_opens_the_best_groups_down_to_single_units(
    distant_states: InterpretationName,
) -> None:
    """Of a text of 130 distant tokens: three groups of 64, then halves of the best four."""
    model = tiny("olmo")
    document = np.random.default_rng(4).integers(0, VOCAB, 137)
    windows = Windows(136, 6, 1)
    brute = Brute(model, document, windows, 136, distant_states)
    scorer = Scorer(model, CPU, distant_states=distant_states)
    context = scorer.context(next(iter(windows.blocks(document))))
    for kind, width in (("tokens", 1), ("span:3", 3)):
        units = units_of(kind, 130)[0]
        size, score, single = 64 * len(units) // 130, np.zeros(len(units)), set()
        groups = [(a, min(a + size, len(units))) for a in range(0, len(units), size)]
        while groups:
            falls = {}
            for first, end in groups:
                falls[first, end] = brute.loss([]) - brute.loss(range(first, end - 1 + width))
                score[first:end] = falls[first, end] / (end - first)
                single |= {first} if end - first == 1 else set()
            best = sorted(falls, key=lambda group: -falls[group])[:4]
            cut = [(a, (a + b) // 2, b) for a, b in sorted(best) if b - a > 1]
            groups = [half for a, m, b in cut for half in ((a, m), (m, b))]
        asked = Question(context, units, [(0, 1)], 9, np.random.default_rng(0))
        found = SELECTORS["halving"](scorer, asked)
        np.testing.assert_allclose(found.score_TU[0], score, atol=2e-5)
        order = sorted(range(len(units)), key=lambda unit: (unit not in single, -score[unit]))
        assert found.unit_TK[0].tolist() == order[:9]
    groups = first_groups(units_of("tokens", 1025)[0])
    assert groups[:2] == [(0, 128), (128, 256)]
    assert len(first_groups(units_of("tokens", 1024)[0])) == 16
    sentences = Units(np.array([0, 500]), np.array([500, 1000]))
    assert first_groups(sentences) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("name", ["pairs", "gradient"])
def test_where_there_are_no_states_rules_of_losses_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' needs states.* pass .*halving"):
        find_selector(name, interpretation_of("replaced"))
    assert find_selector("halving", interpretation_of("replaced")) is SELECTORS["halving"]
    assert {rule: of.draws for rule, of in SELECTORS.items() if of.draws != 1} == {"random": 3}


OWN = """
from olmo_sparsity.analysis.selectors.influence import add_one

def rank(scorer, question):
    '''As add_one.'''
    return add_one(scorer, question)

def after_w7(text):
    return [number for number in range(len(text)) if text.startswith("w7", number)]

number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_a_rule_of_ones_own_ranks_units_of_ones_own(own: Path) -> None:
    model = make_model()
    for units in ("tokens", f"{own}:after_w7"):
        found, expected = (
            asked(model, selector=name, units=units) for name in (f"{own}:rank", "add_one")
        )
        assert found.distant.drop(columns="text").equals(expected.distant.drop(columns="text"))
    assert set([TEXT.split()[first] for first in expected.distant["first"] if first]) == {"w7"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("guess", "'guess' is not a selector; pass one of .*add_one, .*your_file.py:your_rule"),
        ("nowhere.py:rank", "'nowhere.py' does not exist"),
        ("{own}:missing", "defines no missing"),
        ("{own}:number", "is not a function"),
    ],
)
def test_what_is_not_a_rule_is_rejected(own: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_selector(name.format(own=own))
