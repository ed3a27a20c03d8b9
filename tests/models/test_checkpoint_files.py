"""Weights on disk: they come back as they were, or are refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.checkpoint_files import (
    WEIGHTS,
    StoredWeights,
    checkpoint_folder,
    find_step,
    list_checkpoints,
    load_weights,
    part_name,
    save_weights,
    step_of,
    verified_checkpoints,
    write_index,
)
from olmo_sparsity.models.identity.file_fingerprint import fingerprint
from olmo_sparsity.models.load import load_model
from tests.support.models import FIELDS, steps


@pytest.mark.parametrize("architecture", ["olmo", "gpt_neox"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_and_tied_ones_are_stored_once(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    config = ModelConfig(**FIELDS, architecture=architecture, weight_tying=tied)
    first, second = build_model(config), build_model(config)
    save_weights(first, tmp_path / "w.safetensors")
    save_weights(first.state_dict(), tmp_path / "gathered.safetensors")
    files = [tmp_path / f"{name}.safetensors" for name in ("w", "gathered")]
    assert files[0].read_bytes() == files[1].read_bytes()
    stored = load_file(tmp_path / "w.safetensors")
    assert sum(t.shape == (61, 32) for t in stored.values()) == (1 if tied else 2)
    load_weights(second, tmp_path / "w.safetensors")
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])


def test_parts_that_hold_no_weight_are_counted_in_the_names_of_the_others(tmp_path: Path) -> None:
    """More processes than weights: each writes a part, and some have nothing to write."""
    weights = {"a": torch.ones(2), "b": torch.zeros(3)}
    part_of = {"a": 0, "b": 1}
    for part in range(5):
        own = {name: weights[name] for name in weights if part_of[name] == part}
        save_weights(own, tmp_path / part_name(part, 5))
    write_index(tmp_path, part_of, 5)
    stored = StoredWeights(tmp_path / WEIGHTS)
    assert set(stored) == set(weights)
    assert all(stored[name].equal(weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: w.pop("transformer.ln_f.weight"), "lacks .* transformer.ln_f.weight"),
        (lambda w: w.update(extra=torch.ones(1)), "no place for: extra"),
        (lambda w: w.update({"transformer.ln_f.weight": torch.ones(3)}), r"\[3\], .* \[32\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict], Any], problem: str
) -> None:
    model, path = build_model(ModelConfig(**FIELDS)), tmp_path / "w.safetensors"
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(weights)
    save_file(weights, path)
    with pytest.raises(DataError, match=f"w.safetensors.*{problem}"):
        load_weights(model, path)


def test_other_weights_have_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for number, byte in enumerate((b"a", b"a", b"b")):
        path = tmp_path / str(number) / "model.safetensors"
        path.parent.mkdir()
        path.write_bytes(b"x" * 200_000 + byte)
        paths.append(path)
    for whole_bytes in (2**30, 1000):  # read whole, then by samples
        monkeypatch.setattr(
            "olmo_sparsity.models.identity.file_fingerprint._WHOLE_BYTES", whole_bytes
        )
        first, same, other = (fingerprint([path]) for path in paths)
        assert first == same != other
    assert fingerprint(paths[:2]) != fingerprint(paths[1:])


def newest(run_folder: Path, skip: str = "") -> Path | None:
    checked = verified_checkpoints(run_folder, skip)
    return next((folder for folder, problem in checked if problem is None), None)


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    """Of a run: step 9, step 10, and step 1,000,000, which sorts before step000009 as text."""
    ninth, tenth = steps(tmp_path, 9, 10)
    millionth = tmp_path / "checkpoints" / "step1000000"
    shutil.copytree(tenth, millionth)
    return [ninth, tenth, millionth]


def test_checkpoints_are_named_by_their_steps_and_listed_the_newest_first(tmp_path: Path) -> None:
    for step in (300, 20, 1_000_000):
        checkpoint_folder(tmp_path, step).mkdir(parents=True)
    (tmp_path / "checkpoints/step000400.tmp").mkdir()
    assert checkpoint_folder(tmp_path, 300).name == "step000300"
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [1_000_000, 300, 20]
    assert find_step(tmp_path / "checkpoints/step000400.tmp") is None


def test_a_run_without_checkpoints_has_no_latest_one(tmp_path: Path) -> None:
    assert newest(tmp_path) is None


def test_the_latest_checkpoint_is_that_of_the_most_steps(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    shutil.copytree(checkpoints[1], tmp_path / "checkpoints" / "step2000000.tmp")
    assert newest(tmp_path) == checkpoints[2]


def test_a_damaged_file_makes_the_checkpoint_before_the_latest_unless_it_is_skipped(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    (checkpoints[2] / "engine" / "optimizer.bin").write_bytes(b"Moments")
    assert newest(tmp_path) == checkpoints[1]
    assert newest(tmp_path, skip="engine/") == checkpoints[2]


def test_a_model_is_read_from_the_newest_whole_checkpoint_and_says_so(
    tmp_path: Path, checkpoints: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoints[2] / "model.safetensors").unlink()
    assert load_model(str(tmp_path), device="cpu").name == str(checkpoints[1])
    said = capsys.readouterr().err
    assert "model.safetensors is missing; reading step000010 instead" in said
    assert f"{tmp_path} has not ended: reading step 10 of 1,000" in said


def test_a_run_without_a_whole_checkpoint_is_refused(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    (checkpoints[2] / "model.safetensors").unlink()
    for folder in checkpoints[:2]:
        (folder / "manifest.json").unlink()
    assert newest(tmp_path) is None
    problem = r"no checkpoint of .* is intact.*model.safetensors is miss"
    with pytest.raises(DataError, match=problem):
        load_model(str(tmp_path))
