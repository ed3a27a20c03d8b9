"""The verdicts on what decides the reach, on planted falls of accuracy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from study.parity.models import Model
from study.parity.reach import CELLS, DEPTHS, Cells, judge
from tests.support.parity import planted_model

SMALL_SEEDS = range(411, 421)
LARGE_SEEDS = range(421, 424)
Fall = Callable[[str, int], float]
"""What a k loses from 50 to 200 tokens, by cell and k."""


def small_model(cell: str, seed: int, fall: Fall) -> Model:
    def accuracy(k: int, length: int) -> float:
        if length <= 50:
            return 1.0
        return 1.0 - fall(cell, k) - 0.001 * (seed % 3)

    return planted_model("pose", 4, seed, accuracy)


def large_model(cell: str, train_k: int, seed: int, known: dict[str, float]) -> Model:
    return planted_model("pose", train_k, seed, lambda k, length: known.get(cell, 0.95))


def planted_cells(fall: Fall, known: dict[str, float] | None = None) -> Cells:
    cells: Cells = {}
    for cell in CELLS:
        if cell.startswith(DEPTHS) and cell != "four_times":
            cells[cell] = [small_model(cell, seed, fall) for seed in SMALL_SEEDS]
        else:
            cells[cell] = [
                large_model(cell, train_k, seed, known or {})
                for train_k in (8, 12)
                for seed in LARGE_SEEDS
            ]
    return cells


def verdicts(cells: Cells) -> dict[str, str]:
    return {claim: finding.verdict for claim, finding in judge(cells).items()}


def nothing(cell: str, k: int) -> float:
    return 0.0


def late_k4(cell: str, k: int) -> float:
    return 0.1 if k == 4 and cell.endswith("late") else 0.0


def late_k4_in_two_layers(cell: str, k: int) -> float:
    return 0.1 if k == 4 and cell == "two_late" else 0.0


@pytest.mark.parametrize(
    ("fall", "expected"),
    [
        (nothing, {"U8": "no", "U9": "no", "U10": "no", "U11": "no"}),
        (late_k4, {"U8": "no", "U9": "yes", "U10": "yes", "U11": "no"}),
        (late_k4_in_two_layers, {"U8": "no", "U9": "open", "U10": "open", "U11": "yes"}),
    ],
)
def test_falls_of_k4_decide(fall: Fall, expected: dict[str, str]) -> None:
    found = verdicts(planted_cells(fall))
    assert {claim: found[claim] for claim in expected} == expected


def test_models_that_do_not_know_k4_where_trained_do_not_count() -> None:
    cells = planted_cells(late_k4)
    for model in cells["two_late"][:5]:
        model.accuracy.loc[4, 50] = 0.98
    outcome = judge(cells)["U9"].outcomes["two layers"]
    assert outcome.verdict == "void"
    assert len(outcome.values) == 5


@pytest.mark.parametrize(
    ("known", "claim", "expected"),
    [
        ({"once": 0.95, "four_times": 0.85}, "U12", "yes"),
        ({"once": 0.95, "four_times": 0.93}, "U12", "no"),
        ({"once": 0.95, "uncooled": 0.85}, "U13", "yes"),
        ({"once": 0.95, "uncooled": 0.95}, "U13", "no"),
    ],
)
def test_each_of_three_seeds_decides(known: dict[str, float], claim: str, expected: str) -> None:
    assert verdicts(planted_cells(nothing, known))[claim] == expected


def test_one_seed_of_three_leaves_it_undecided() -> None:
    cells = planted_cells(nothing, {"once": 0.95, "four_times": 0.85})
    cells["four_times"][0] = large_model("once", 8, LARGE_SEEDS[0], {})
    finding = judge(cells)["U12"]
    assert finding.outcomes["K_train = 8"].verdict == "undecided"
    assert finding.verdict == "open"


def test_a_slope_that_falls_after_mastery_is_seen() -> None:
    cells = planted_cells(nothing)

    def falling(k: int, length: int) -> float:
        return 1.0 - 0.01 * k

    cells["four_times"] = [
        planted_model("pose", train_k, seed, falling) for train_k in (8, 12) for seed in LARGE_SEEDS
    ]
    assert verdicts(cells)["U14"] == "yes"


def test_a_missing_model_is_unfinished() -> None:
    cells = planted_cells(nothing)
    cells["four_late"].pop()
    cells["twice"].clear()
    found = verdicts(cells)
    assert {claim for claim, verdict in found.items() if verdict == "unfinished"} == {
        *("U9", "U10", "U11")
    }
