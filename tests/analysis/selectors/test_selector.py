"""Selectors and units that users add: found by file, used, and part of what a measurement is."""

from __future__ import annotations

from pathlib import Path

import pytest

from olmo_sparsity.analysis.selectors.influence import find_selector
from olmo_sparsity.errors import ConfigError
from tests.support.explanations import TEXT, asked, make_model

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
        assert found.far.drop(columns="text").equals(expected.far.drop(columns="text"))
    starts = [TEXT.split()[first] for first in expected.far["first"] if first]
    assert set(starts) == {"w7"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("guess", "'guess' is not a selector; pass one of add_one, .*your_file.py:your_rule"),
        ("nowhere.py:rank", "'nowhere.py' does not exist"),
        ("{own}:missing", "defines no missing"),
        ("{own}:number", "is not a function"),
    ],
)
def test_what_is_not_a_rule_is_rejected(own: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_selector(name.format(own=own))
