"""Numbers of the pages that name their row in docs/numbers.yaml are what the row holds."""

from __future__ import annotations

import re

import pytest
import yaml

from study.pages.stored import ROOT
from study.rows import NUMBER, stored_numbers

NUMBERS = yaml.safe_load((ROOT / "docs/numbers.yaml").read_text(encoding="utf-8"))
BOUND = [(page, text, row) for page, found in NUMBERS.items() for text, row in found.items()]


def check(page: str, text: str, row: str) -> None:
    """`text` occurs once in `page`, and its last numbers are those of `row`."""
    assert page.count(" ".join(text.split())) == 1, "this text must occur once in its page"
    stored = list(stored_numbers(row))
    written = NUMBER.findall(re.sub(r"\]\([^)]*\)|`[^`]*`", "", text))[-len(stored) :]
    assert len(written) == len(stored)
    for shown, value in zip(written, stored, strict=True):
        found = f"{value:.{len(shown.partition('.')[2])}f}"
        if float(found) == 0:  # without the sign of a number that was rounded
            shown, found = shown.lstrip("−-+"), found.lstrip("-")
        assert shown.replace("−", "-").replace(",", "").lstrip("+") == found, row


@pytest.mark.parametrize(("page", "text", "row"), BOUND)
def test_numbers_are_those_of_the_row_they_name(page: str, text: str, row: str) -> None:
    check(" ".join((ROOT / page).read_text(encoding="utf-8").split()), text, row)


def test_a_number_that_differs_from_its_row_fails() -> None:
    row = "theory.md#the-attention-class setting=nonlocal; k={2,3}; objective=mixture: "
    check("risks 0.409 and 0.479 of k = 2", "0.409 and 0.479", row + "risk at 8L")
    for page, text in (("0.409 and 0.478", "0.409 and 0.478"), ("0.409, 0.479", "0.409 and 0.479")):
        with pytest.raises(AssertionError):
            check(page, text, row + "risk at 8L")
    assert list(stored_numbers(row + "risk at 8L; range(k)")) == [0.409, 0.4789, 2, 3]
    no_prefix = "real.md#differences difference=no prefix*: "
    every = list(stored_numbers(no_prefix + "recovery[]"))
    assert every[1:] == list(stored_numbers(no_prefix + "recovery[2]; recovery[3]"))
    for wrong in ("difference=no: recovery", "recovery=1: recovery", "difference=no*: excess"):
        with pytest.raises(KeyError):
            list(stored_numbers(f"real.md#differences {wrong}"))
