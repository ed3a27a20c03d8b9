"""The paper's table of sparse parity on docs/results.md follows from the stored trials."""

from __future__ import annotations

from study.pages.stored import ROOT
from study.pages.write_parity import (
    BLOCKS,
    END,
    PAGE,
    format_mean,
    learnt_cell,
    measured_cell,
    with_tables,
)
from study.parity.table import SCHEMES, case_name, judge, read_table, select, table_settings
from study.parity.verdicts import Finding, Outcome, interval_of
from study.tasks.experiment import list_trials


def test_the_page_has_the_tables_of_the_stored_trials() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(page.count(begin) == 1 for begin in BLOCKS)
    assert page.count(END) == len(BLOCKS)
    assert with_tables(page) == page, "run `python -m study.pages.write_parity`"


ROWS = (4, 8)
"""The K_train of which sentences speak one by one."""


def outcome_of(claim: str, train_k: int) -> Outcome:
    """Return the result of a claim's case of one K_train, with PoSE."""
    settings = table_settings()
    findings = judge(read_table(), sorted(settings.train_ks), len(settings.seeds))
    return findings[claim].outcomes[case_name("pose", train_k)]


def planted(verdict: str, *values: float, claim: str = "U7", scheme: str = "pose") -> str:
    """Return the cell of a claim whose models of K_train = 4 have these values."""
    finding = Finding("open", {case_name(scheme, 4): Outcome(verdict, values)})
    return measured_cell(claim, finding, 4)


def test_a_cell_has_mean_interval_and_outcome() -> None:
    # A slope of −0.1 a doubling is a fall of 0.1; Student's t of two degrees of freedom is 4.303.
    assert planted("confirmed", -0.1, -0.1, -0.1) == "0.10 [0.10, 0.10], as claimed"
    in_nats = planted("refuted", 0.1, 0.2, 0.3, claim="U6", scheme="rope")
    assert in_nats == "0.20 [−0.05, 0.45], refuted"
    assert planted("unfinished", -0.1) == "unfinished"
    assert planted("void") == "void"


def test_a_cell_of_what_is_learnt_counts_the_seeds_of_both_schemes() -> None:
    models = read_table()

    def cell(pose: str, rope: str) -> str:
        outcomes = {case_name("pose", 12): Outcome(pose), case_name("rope", 12): Outcome(rope)}
        some = [model for model in models if model.trial.seed <= 403]
        return learnt_cell(some, Finding("open", outcomes), 12, 3)

    # Of K_train = 12 PoSE has not learnt seed 403.
    assert cell("confirmed", "confirmed") == "2 and 3 of 3, as claimed"
    assert cell("undecided", "confirmed") == "2 and 3 of 3, as claimed and undecided"
    assert cell("unfinished", "confirmed") == "2 and 3 of 3, unfinished"


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
    accuracy = [model.accuracy[500] for model in select(read_table(), "pose", 6)]

    def of_seeds(k: int) -> str:
        *first, last = (f"{of_seed.loc[k]:.2f}" for of_seed in accuracy)
        return f"{', '.join(first)} and {last}"

    assert f"the five seeds have {of_seeds(1)} at 500 tokens for k = 1" in page
    assert f"and {of_seeds(6)} for k = 6" in page
    is_lost_last = [of_seed.loc[1] == of_seed.loc[[1, 2, 4, 6]].max() for of_seed in accuracy]
    assert is_lost_last == [False, True, True, True, True]
    assert accuracy[2].loc[[1, 2, 4, 6]].min() >= 0.975


def test_readme_has_the_numbers_of_the_row_of_4() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    trained, untrained = (format_mean(claim, outcome_of(claim, 4)) for claim in ("U3", "U5"))
    assert f"trained k have {trained} at ten times the length" in readme
    assert f"never trained, loses {untrained} more than k = 4" in readme
    assert outcome_of("U5", 6).verdict == "confirmed"
    first, second = (format_mean(claim, outcome_of(claim, 6)) for claim in ("U3", "U5"))
    said = (
        f"confirms the second, {second}, and leaves the first undecided, as seeds differ: {first}"
    )
    assert said in readme
    assert {
        outcome_of("U3", 6).verdict,
        *(outcome_of(claim, 8).verdict for claim in ("U3", "U5")),
    } == {"undecided"}


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
