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
from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.checkpoint_files import load_weights, save_weights, verified_checkpoints
from olmo_sparsity.models.identity import fingerprint
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
        monkeypatch.setattr("olmo_sparsity.models.identity._WHOLE_BYTES", whole_bytes)
        first, same, other = (fingerprint([path]) for path in paths)
        assert first == same != other
    assert fingerprint(paths[:2]) != fingerprint(paths[1:])


def test_the_latest_checkpoint_is_the_newest_whole_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def newest(skip: str = "") -> Path | None:
        checked = verified_checkpoints(tmp_path, skip)
        return next((folder for folder, problem in checked if problem is None), None)

    assert newest() is None
    ninth, tenth = steps(tmp_path, 9, 10)
    millionth = tmp_path / "checkpoints" / "step1000000"  # sorts before step000009 as text
    shutil.copytree(tenth, millionth)
    shutil.copytree(tenth, tmp_path / "checkpoints" / "step2000000.tmp")
    assert newest() == millionth
    (millionth / "engine" / "optimizer.bin").write_bytes(b"Moments")
    assert newest() == tenth
    assert newest("engine/") == millionth
    (millionth / "model.safetensors").unlink()
    assert load_model(str(tmp_path), device="cpu").name == str(tenth)
    said = capsys.readouterr().err
    assert "model.safetensors is missing; reading step000010 instead" in said
    assert f"{tmp_path} has not ended: reading step 10 of 1,000" in said
    for folder in (ninth, tenth):
        (folder / "manifest.json").unlink()
    assert newest() is None
    with pytest.raises(
        DataError, match=r"no checkpoint of .* is intact.*model.safetensors is miss"
    ):
        load_model(str(tmp_path))
