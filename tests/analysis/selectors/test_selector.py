"""Selectors and units that users add: found by file, used, and part of what a measurement is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from olmo_sparsity.analysis.selectors.selector import find_selector
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.extend import fingerprint_of_files
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


def test_a_changed_rule_is_another_measurement(own: Path) -> None:
    names = [f"{own}:rank", f"{own}:after_w7", "add_one"]
    before = fingerprint_of_files(names)
    assert list(before) == [str(own)]
    own.write_text(OWN + "# changed")
    assert fingerprint_of_files(names) != before


def test_a_file_runs_once_and_replaces_no_module(tmp_path: Path) -> None:
    file, runs = tmp_path / "json.py", tmp_path / "runs"
    file.write_text(
        f"with open({str(runs)!r}, 'a') as runs: runs.write('.')\ndef rank(scorer, question): ...\n"
    )
    first, again = (find_selector(f"{file}:rank").call for _ in range(2))
    assert first is again
    assert runs.read_text() == "."
    assert sys.modules["json"] is json
    file.write_text(file.read_text() + "# changed\n")
    assert find_selector(f"{file}:rank").call is not first
