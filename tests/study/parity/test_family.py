"""The verdicts on what carries the reach, on planted accuracies at four times the length."""

from __future__ import annotations

import pytest

from study.parity.family import CELLS, CHANGES, Cells, judge, reach_of
from study.parity.models import Model
from tests.support.parity import KS, planted_model

REACH = 0.95
NONE = 0.6


def three(known: float, at_50: float = 0.99) -> list[Model]:
    return [
        planted_model("pose", 8, seed, lambda k, length: at_50 if length <= 50 else known)
        for seed in (431, 432, 433)
    ]


def planted_cells(**known: float) -> Cells:
    """Ours has reach, theirs and GPT-NeoX have none, and no change matters; but for `known`."""
    defaults = {cell: REACH if cell.startswith("ours") else NONE for cell in CELLS}
    return {cell: three(value) for cell, value in (defaults | known).items()}


def nearest(known: float) -> list[Model]:
    return [
        planted_model("pose", train_k, seed, lambda k, length: known - 0.001 * (seed % 3))  # noqa: B023
        for train_k in KS
        for seed in range(441, 446)
    ]


def verdicts(cells: Cells) -> dict[str, str]:
    return {claim: finding.verdict for claim, finding in judge(cells, nearest(0.95), KS).items()}


@pytest.mark.parametrize(
    ("known", "at_50", "kind"),
    [
        (0.95, 0.99, "reach"),
        (0.75, 0.99, "no reach"),
        (0.85, 0.99, "mixed"),
        (0.95, 0.90, "not learnt"),
    ],
)
def test_three_models_have_one_kind_of_reach(known: float, at_50: float, kind: str) -> None:
    assert reach_of(three(known, at_50)).verdict == kind


def test_seeds_that_differ_are_mixed_and_two_are_unfinished() -> None:
    assert reach_of([*three(0.95)[:2], three(0.6)[0]]).verdict == "mixed"
    assert reach_of(three(0.95)[:2]).verdict == "unfinished"


def test_nothing_that_is_needed_or_suffices_is_no() -> None:
    assert verdicts(planted_cells()) == {
        **{"U15": "yes", "U16": "yes", "U17": "no", "U18": "no", "U19": "no"},
        **{"U20": "yes", "U21": "yes"},
    }


def test_a_change_that_matters_from_both_ends_carries() -> None:
    found = verdicts(planted_cells(ours_but_queries=NONE, theirs_but_queries=REACH))
    assert found["U18"] == "yes"
    assert found["U19"] == "yes"


@pytest.mark.parametrize(
    "known", [{"ours_but_chunks": NONE}, {"theirs_but_chunks": REACH}], ids=["needed", "suffices"]
)
def test_a_change_that_matters_from_one_end_leaves_it_open(known: dict[str, float]) -> None:
    cells = planted_cells(**known)
    finding = judge(cells, [], KS)["U18"]
    assert finding.verdict == "open"
    role = "needed" if "ours_but_chunks" in known else "suffices"
    assert finding.outcomes[f"chunks: {role}; ours without"].values


def test_a_family_that_reaches_with_a_cooldown_says_so() -> None:
    found = verdicts(planted_cells(gpt_neox_cooled=REACH))
    assert found["U17"] == "yes"


def test_theirs_that_differs_from_gpt_neox_is_no() -> None:
    assert verdicts(planted_cells(theirs=REACH))["U16"] == "no"


def test_a_change_without_models_is_unfinished() -> None:
    cells = planted_cells()
    cells[f"ours_but_{CHANGES[-1]}"] = []
    found = verdicts(cells)
    assert found["U18"] == "unfinished"
    assert found["U19"] == "no"


def test_the_nearest_combination_is_judged_as_the_table() -> None:
    kept = judge(planted_cells(), nearest(0.95), KS)
    lost = judge(planted_cells(), nearest(0.7), KS)
    assert (kept["U21"].verdict, lost["U21"].verdict) == ("yes", "no")
