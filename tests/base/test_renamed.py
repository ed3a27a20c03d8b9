"""Names of the last release: accepted with a line, and read in what was stored."""

from __future__ import annotations

import pyarrow as pa
import pytest

from olmo_sparsity.analysis.results.tables import with_current_columns
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.renamed import (
    accepts_old_names,
    current_keys,
    current_words,
    with_current_names,
)


def test_old_options_are_replaced_and_named(capsys: pytest.CaptureFixture) -> None:
    words = ["measure", "--far-states=isolated", "--foreign", "far_states"]
    assert current_words(words) == [
        "measure",
        "--distant-states=isolated",
        "--unrelated",
        "far_states",
    ]
    said = capsys.readouterr().err
    assert "--far-states is called --distant-states now" in said
    assert "--foreign is called --unrelated now" in said


def test_old_keys_are_replaced_and_two_names_of_one_option_refused() -> None:
    assert current_keys({"far_states": "isolated", "k": 2}) == {
        "distant_states": "isolated",
        "k": 2,
    }
    with pytest.raises(ConfigError, match="far_states and distant_states are one option"):
        current_keys({"far_states": "isolated", "distant_states": "isolated"})


def test_a_call_takes_an_old_name() -> None:
    @accepts_old_names
    def check(unrelated: str = "default") -> str:
        return unrelated

    assert check(**{"foreign": "own"}) == "own"
    assert check("own") == "own"


def test_stored_columns_and_controls_are_read_under_their_new_names() -> None:
    table = pa.table({"control": ["own", "foreign"], "foreign_low": [0.1, 0.2]})
    current = with_current_columns(table)
    assert current.column_names == ["control", "unrelated_low"]
    assert current["control"].to_pylist() == ["own", "unrelated"]
    stored = {"windows": {"far_states": "isolated"}, "ks": [1]}
    assert with_current_names(stored) == {"windows": {"distant_states": "isolated"}, "ks": [1]}
