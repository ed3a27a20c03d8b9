"""A manifest vouches for every byte of its folder, and leads nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from olmo_sparsity.base.manifest import find_damage
from tests.support.models import steps


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (checkpoint,) = steps(tmp_path, 1)
    assert find_damage(checkpoint) is None
    return checkpoint


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"momentz", "engine/optimizer.bin does not have the SHA-256"),
        (b"moment", "engine/optimizer.bin has 6 bytes, manifest.json says 7"),
        (None, "engine/optimizer.bin is missing"),
    ],
)
def test_damage_of_a_file_is_described_unless_other_files_are_asked_for(
    folder: Path, content: bytes | None, problem: str
) -> None:
    state = folder / "engine" / "optimizer.bin"
    if content is None:
        state.unlink()
    else:
        state.write_bytes(content)
    assert str(find_damage(folder)).startswith(problem)
    assert find_damage(folder, {"config.yaml", "model.safetensors"}) is None
    assert find_damage(folder, skip="engine/") is None


def test_a_file_that_is_asked_for_and_not_listed_is_named(folder: Path) -> None:
    assert find_damage(folder, {"other"}) == "manifest.json does not list other"


@pytest.mark.parametrize("text", ["{", "[]", '{"files": {"config.yaml": 3}}'])
def test_a_manifest_that_is_no_list_of_files_is_damage(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    assert find_damage(folder) == "manifest.json is not a readable list of files"


def test_a_name_outside_of_the_folder_is_not_read(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    content["files"]["../../outside"] = content["files"]["config.yaml"]
    (folder / "manifest.json").write_text(json.dumps(content))
    (tmp_path / "outside").write_bytes((folder / "config.yaml").read_bytes())
    problem = "manifest.json names '../../outside', which is outside of the folder"
    assert find_damage(folder) == problem
