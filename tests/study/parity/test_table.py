"""The verdicts on the paper's table of sparse parity, on planted tables of accuracy."""

from __future__ import annotations

import pytest

from study.parity.models import Model
from study.parity.table import format_table, judge
from study.parity.verdicts import format_findings, format_share
from study.tasks.trial import Trial
from tests.support.parity import KS, Right, as_claimed, at_chance, planted


def verdicts(models: list[Model]) -> dict[str, str]:
    return {name: finding.verdict for name, finding in judge(models, KS, 5).items()}


def keeps_all(train_k: int, k: int, length: int) -> float:
    return 0.99


def never_learns_more(train_k: int, k: int, length: int) -> float:
    return 0.99 if k <= train_k else 0.5


@pytest.mark.parametrize(
    ("pose", "rope", "expected"),
    [
        (as_claimed, at_chance, "yes yes yes yes yes yes yes"),
        (at_chance, keeps_all, "yes no no no no no no"),
        (never_learns_more, at_chance, "yes yes yes yes open yes no"),
    ],
)
def test_verdicts_follow_the_planted_table(pose: Right, rope: Right, expected: str) -> None:
    assert " ".join(verdicts(planted(pose, rope)).values()) == expected


def test_seeds_that_disagree_leave_a_claim_open() -> None:
    models = planted(lambda *of: as_claimed(*of) - 0.1, at_chance, spread=0.1)
    assert verdicts(models)["U2"] == "open"


@pytest.mark.parametrize(("first_that_fails", "expected"), [(10, "open"), (12, "yes")])
def test_four_of_five_k_train_decide(first_that_fails: int, expected: str) -> None:
    def right(train_k: int, k: int, length: int) -> float:
        keeps = as_claimed if train_k < first_that_fails else at_chance
        return keeps(train_k, k, length)

    assert verdicts(planted(right, at_chance))["U3"] == expected


@pytest.mark.parametrize(("num_learnt", "expected"), [(4, "yes"), (3, "open"), (1, "no")])
def test_learnt_goes_by_the_seeds_that_master(num_learnt: int, expected: str) -> None:
    models = planted(as_claimed, at_chance, masters=lambda train_k, seed: seed < num_learnt)
    assert verdicts(models)["U1"] == expected


def test_models_that_do_not_master_are_in_no_mean_and_two_are_too_few() -> None:
    def wrong_if_not_learnt(model: Model) -> Model:
        return model if model.mastered else Model(model.trial, False, 0 * model.accuracy)

    three = planted(as_claimed, at_chance, masters=lambda train_k, seed: seed < 3)
    assert verdicts([wrong_if_not_learnt(model) for model in three])["U2"] == "yes"
    two = planted(as_claimed, at_chance, masters=lambda train_k, seed: seed < 2)
    finding = judge(two, KS, 5)["U2"]
    assert {outcome.verdict for outcome in finding.outcomes.values()} == {"void"}
    assert finding.verdict == "open"


def test_a_missing_model_leaves_the_verdicts_of_its_scheme_unfinished() -> None:
    models = planted(as_claimed, at_chance)
    models.remove(next(model for model in models if model.trial == Trial("pose", 12, 4)))
    by_claim = verdicts(models)
    unfinished = {name for name, verdict in by_claim.items() if verdict == "unfinished"}
    assert unfinished == {"U1", "U2", "U3", "U4", "U5", "U7"}
    assert by_claim["U6"] == "yes"


def test_tables_show_the_models_that_learnt() -> None:
    models = planted(never_learns_more, at_chance, masters=lambda train_k, seed: train_k < 12)
    table = format_table(models, "pose", [50, 500]).splitlines()
    assert table[0].startswith("| K_train | models | tokens | k = 1 | k = 2 |")
    assert len(table) == 2 + 4 * 2
    assert table[3].startswith("| 4 | 5 | 500 | 0.99 [0.99, 0.99] | 0.99 [0.99, 0.99] |")
    assert table[3].endswith("| 0.50 [0.50, 0.50] |")


def test_intervals_of_shares_end_at_1_and_two_models_have_none() -> None:
    assert format_share([0.9, 1.0, 1.0]) == "0.97 [0.82, 1.00]"
    assert format_share([0.9, 1.0]) == "0.95"


def test_each_case_is_a_line_and_a_claim_without_models_is_one() -> None:
    models = planted(as_claimed, at_chance)
    assert "| U1 | yes | RoPE alone, K_train = 6 | confirmed | 5 | 1.000 " in format_findings(
        judge(models, KS, 5)
    )
    assert "| U2 | unfinished | – | no model yet | 0 | – |" in format_findings(judge([], KS, 5))
