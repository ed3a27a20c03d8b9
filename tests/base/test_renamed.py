"""Names of the last release: accepted with a line, and read in what was stored."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from olmo_sparsity.analysis.results.schemas import SCHEMAS
from olmo_sparsity.analysis.results.tables import check_columns, read_table, with_current_columns
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.renamed import (
    COLUMNS,
    OldAttribute,
    accepts_old_names,
    current_keys,
    current_words,
    entry_points_of,
    with_current_names,
)
from olmo_sparsity.experiment.file import read_experiment


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


def test_an_old_command_is_replaced_in_its_place_alone() -> None:
    assert current_words(["sweep", "a.yaml"]) == ["experiment", "a.yaml"]
    assert current_words(["train", "sweep"]) == ["train", "sweep"]


def test_an_experiment_takes_old_keys(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    keys = {"folder": "runs/a", "measure": {"long": 32, "short": 8, "far_states": "isolated"}}
    (tmp_path / "a.yaml").write_text(json.dumps(keys | {"configs": ["quick.yaml"]}))
    experiment = read_experiment(str(tmp_path / "a.yaml"))
    assert [model.name for model in experiment.models] == ["quick"]
    assert [one.distant_states for one in experiment.measurements] == ["isolated"]
    said = capsys.readouterr().err
    assert "configs is called models now" in said
    assert "far_states is called distant_states now" in said


def test_a_part_that_an_earlier_release_stored_has_all_columns(tmp_path: Path) -> None:
    names = {new: old for old, new in COLUMNS.items()}
    schema = SCHEMAS["influence"]
    old = schema.empty_table().rename_columns([names.get(name, name) for name in schema.names])
    pq.write_table(old, tmp_path / "influence.parquet")
    assert "far_first" in pq.read_schema(tmp_path / "influence.parquet").names
    check_columns(tmp_path / "influence.parquet", "influence")
    assert read_table(tmp_path / "influence.parquet", "influence").schema.names == schema.names


def test_an_attribute_has_its_old_name_and_says_so_once(capsys: pytest.CaptureFixture) -> None:
    class Block:
        num_distant = 3
        num_far = OldAttribute("num_distant")

    assert [Block().num_far, Block().num_far] == [3, 3]
    assert capsys.readouterr().err.count("Block.num_far is called num_distant now") == 1


def test_a_prompt_model_is_found_under_its_old_name(capsys: pytest.CaptureFixture) -> None:
    from olmo_sparsity.models import prompts

    assert prompts.__getattr__("Engine") is prompts.PromptModel
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        prompts.__getattr__("Motor")
    prompts.__getattr__("Engine")
    said = "olmo_sparsity.models.prompts.Engine is called PromptModel now"
    assert capsys.readouterr().err.count(said) <= 1


def test_openers_of_an_old_group_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "other-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[olmo_sparsity.engines]\nother = other:open\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = [point.value for point in entry_points_of("olmo_sparsity.prompt_models")]
    assert "other:open" in found
