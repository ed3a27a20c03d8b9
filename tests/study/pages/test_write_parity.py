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


def of_k_train_8(claim: str) -> Outcome:
    """Return the result of a claim's case of PoSE with K_train = 8."""
    settings = table_settings()
    findings = judge(read_table(), sorted(settings.train_ks), len(settings.seeds))
    return findings[claim].outcomes[case_name("pose", 8)]


def rounded(claim: str) -> str:
    """Return mean and interval of `of_k_train_8`, as the page has them."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(*interval_of(of_k_train_8(claim).values))


def negated(text: str) -> str:
    """Turn the interval of a slope into that of a fall."""
    mean, low, high = re.findall(r"-?[\d.]+", text)
    return f"{mean.lstrip('-')} [{high.lstrip('-')}, {low.lstrip('-')}]"


def test_the_sentences_on_the_table_have_its_numbers() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"the mean is {rounded('U2')} at 200 tokens and {rounded('U3')} at 500" in page
    assert f"it falls by {negated(rounded('U7'))} a doubling of k" in page
    assert f"it loses {rounded('U5').replace('-', '−')} more than k = 8" in page
    pose = select(read_table(), "pose", 8)
    at_500 = [model.accuracy.loc[8, 500] for model in pose]
    assert f"k = 8 has from {min(at_500):.2f} to {max(at_500):.2f}" in page
    k2_at_500 = [model.accuracy.loc[2, 500] for model in pose]
    assert f"and k = 2 from {min(k2_at_500):.2f} to {max(k2_at_500):.2f}" in page
    assert f"k = 10 has {min(m.accuracy.loc[10, 50] for m in pose):.2f} or more at 50" in page
    (largest,) = select(read_table(), "pose", 12)
    assert f"k = 12 is right in {largest.accuracy.loc[12, 500]:.2f}" in page


def test_readme_says_how_many_models_of_the_table_are_trained_and_drawn() -> None:
    models = read_table()
    by_k = [[select(models, scheme, k) for scheme in SCHEMES] for k in table_settings().train_ks]
    num_drawn = sum(len(pose) + len(rope) for pose, rope in by_k if pose and rope)
    said = f"the first {len(models)} of {len(list_trials(table_settings()))} registered models"
    assert f"{said} ({num_drawn} are drawn)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("claim", "sentence"),
    [
        ("U2", "at four times the length** (U2, as claimed)"),
        ("U3", "at ten times** (U3, undecided)"),
        ("U5", "Untrained k** (U5, undecided)"),
        ("U7", "Larger k is lost first** (U7, as claimed)"),
    ],
)
def test_the_page_says_what_the_rules_give_for_k_train_8(claim: str, sentence: str) -> None:
    said = {"confirmed": "as claimed", "undecided": "undecided"}[of_k_train_8(claim).verdict]
    assert said in sentence
    assert sentence in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_readme_says_how_well_one_and_two_bits_are_read_at_ten_times_the_length() -> None:
    pose = select(read_table(), "pose", 8)
    means = [sum(m.accuracy.loc[k, 500] for m in pose) / len(pose) for k in (1, 2)]
    said = "one and two bits still have {:.2f} and {:.2f} with K_train = 8".format(*means)
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")
