"""The paper's table of sparse parity on docs/results.md follows from the stored trials."""

from __future__ import annotations

import re

import pytest

from study.pages.stored import ROOT
from study.pages.write_parity import BEGIN, END, PAGE, with_tables
from study.parity.table import SCHEMES, case_name, judge, read_table, select, table_settings
from study.parity.verdicts import Outcome, interval_of
from study.tasks.experiment import list_trials


def test_the_page_has_the_table_of_the_stored_trials() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    assert with_tables(page) == page, "run `python -m study.pages.write_parity`"


ROWS = (4, 8)
"""K_train of the rows that are complete."""


def outcome_of(claim: str, train_k: int, scheme: str = "pose") -> Outcome:
    """Return the result of a claim's case of one row."""
    settings = table_settings()
    findings = judge(read_table(), sorted(settings.train_ks), len(settings.seeds))
    return findings[claim].outcomes[case_name(scheme, train_k)]


def in_words(outcome: Outcome) -> str:
    return {"confirmed": "as claimed", "undecided": "undecided"}[outcome.verdict]


def shown(claim: str, train_k: int) -> str:
    """Return mean, interval and verdict as the page has them. A slope is shown as a fall."""
    outcome = outcome_of(claim, train_k)
    mean, low, high = interval_of(outcome.values)
    if claim == "U7":
        mean, low, high = -mean, -high, -low
    numbers = f"{mean:.2f} [{low:.2f}, {high:.2f}]".replace("-", "−")
    return f"{numbers}, {in_words(outcome)}"


@pytest.mark.parametrize("claim", ["U2", "U3", "U5", "U7"])
def test_the_page_has_the_numbers_and_verdicts_of_complete_rows(claim: str) -> None:
    (row,) = re.findall(rf"^\| {claim}: .*", PAGE.read_text(encoding="utf-8"), re.M)
    assert row.split(" | ")[1:] == [shown(claim, 4), f"{shown(claim, 8)} |"]


@pytest.mark.parametrize("claim", ["U1", "U6"])
def test_the_page_has_the_verdicts_on_both_schemes(claim: str) -> None:
    schemes = SCHEMES if claim == "U1" else ["rope"]
    verdicts = {outcome_of(claim, k, scheme).verdict for k in ROWS for scheme in schemes}
    assert verdicts == {"confirmed"}
    (row,) = re.findall(rf"^\| {claim}: .*", PAGE.read_text(encoding="utf-8"), re.M)
    assert row.count("as claimed") == len(ROWS)


def test_the_sentences_on_the_table_have_its_numbers() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    pose = {train_k: select(read_table(), "pose", train_k) for train_k in ROWS}

    def range_of(train_k: int, k: int) -> str:
        at_500 = [model.accuracy.loc[k, 500] for model in pose[train_k]]
        return f"{min(at_500):.2f} to {max(at_500):.2f}"

    assert f"k = 4 has from {range_of(4, 4)}" in page
    assert f"k = 8 has from {range_of(8, 8)}, and k = 2 from {range_of(8, 2)}" in page
    small = [model.accuracy.loc[k, 500] for model in pose[4] for k in (1, 2)]
    assert min(small) >= 0.99
    assert "k = 1 and 2 have 0.99 or more on all five models" in page
    assert min(model.accuracy.loc[6, 50] for model in pose[4]) >= 0.895
    assert "has 0.90 or more at 50 tokens on all five models" in page
    k6 = [interval_of([model.accuracy.loc[6, 500] for model in pose[row]]) for row in ROWS]
    assert f"k = 6 has {k6[0].mean:.2f} at 500 tokens" in page
    assert f"where it was trained, {k6[1].mean:.2f}" in page
    ends = ", ".join(f"{interval.low:.2f} to {interval.high:.2f}" for interval in k6)
    assert f"are wide ({ends})" in page
    of_12 = select(read_table(), "pose", 12)
    first, second = (model.accuracy.loc[12, 500] for model in of_12 if model.mastered)
    lengths = "of the samples of 500 tokens"
    assert f"one answers k = 12 right in {first:.2f} {lengths}, the other in {second:.2f}" in page
    (not_learnt,) = (model.accuracy for model in of_12 if not model.mastered)
    assert f"answers k = 4 right in {not_learnt.loc[4, 50]:.2f} of the samples of 50" in page


def test_the_page_has_the_numbers_of_each_seed_of_6() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"**What the first {len(read_table())} models show.**" in page
    pose, rope = (select(read_table(), scheme, 6) for scheme in SCHEMES)
    for name, model in zip(["first", "second", "third"], pose, strict=True):
        of_1, of_2, of_4, of_6 = (model.accuracy.loc[k, 500] for k in (1, 2, 4, 6))
        assert f"the {name} {of_1:.2f}, {of_2:.2f}, {of_4:.2f} and {of_6:.2f}" in page
    assert min(model.accuracy.loc[k, 200] for model in pose for k in (1, 2, 4, 6)) >= 0.935
    assert len(rope) == 2
    for model in rope:
        assert [model.accuracy.loc[k, 200] for k in (4, 6)] == pytest.approx([0.5, 0.5], abs=0.03)


def test_readme_has_the_numbers_of_the_row_of_4() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    trained, untrained = (shown(claim, 4).rsplit(", ", 1)[0] for claim in ("U3", "U5"))
    assert f"trained k have {trained} at ten times the length" in readme
    assert f"never trained, loses {untrained} more than k = 4" in readme
    assert {in_words(outcome_of(claim, 8)) for claim in ("U3", "U5")} == {"undecided"}


def test_readme_says_how_many_models_of_the_table_are_trained_and_drawn() -> None:
    models = read_table()
    by_k = [[select(models, scheme, k) for scheme in SCHEMES] for k in table_settings().train_ks]
    num_drawn = sum(len(pose) + len(rope) for pose, rope in by_k if pose and rope)
    said = f"the first {len(models)} of {len(list_trials(table_settings()))} registered models"
    assert f"{said} ({num_drawn} are drawn)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_says_how_well_one_and_two_bits_are_read_at_ten_times_the_length() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for train_k in ROWS:
        pose = select(read_table(), "pose", train_k)
        means = [sum(m.accuracy.loc[k, 500] for m in pose) / len(pose) for k in (1, 2)]
        assert "{:.2f} and {:.2f} with K_train = {}".format(*means, train_k) in readme
