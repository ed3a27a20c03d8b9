"""Files that are whole or not there, and manifests that vouch for every byte."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from olmo_sparsity.analysis.models.transformers_folder import check_weight_files
from olmo_sparsity.data.tokenizer import load_tokenizer
from olmo_sparsity.errors import UserError
from olmo_sparsity.folders import holder
from olmo_sparsity.io import (
    age_s,
    follow_umask,
    read_bounded,
    read_json,
    verify_manifest,
    write_atomically,
    writing,
)
from olmo_sparsity.settings import read_given
from olmo_sparsity.training.run_folder import read_metrics
from tests.support.models import steps


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_file_of_mkstemp_gets_the_mode_of_any_other(tmp_path: Path, umask: int) -> None:
    file, other = tmp_path / "weights", tmp_path / "other"
    before = os.umask(umask)
    try:
        file.touch(0o600)
        other.touch()
        follow_umask(file)
    finally:
        os.umask(before)
    assert file.stat().st_mode == other.stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"weights", "other"}


def test_processes_that_write_the_same_file_at_once_do_not_meet(tmp_path: Path) -> None:
    file = tmp_path / "identity.json"
    with writing(file) as first, writing(file) as second:
        first.write_text("first")
        second.write_text("second")
    assert file.read_text() == "first", "the one that ends last"
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_fails_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "identity.json"
    write_atomically(file, "before\n")
    half = "half \ud800"  # the second character cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, half)
    assert file.read_bytes() == b"before\n"
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_disk_is_said_of_the_file(tmp_path: Path) -> None:
    """Also of libraries that give the number in their message only."""
    for error in (OSError(28, "x"), RuntimeError("I/O error: No space (os error 28)")):
        with (
            pytest.raises(UserError, match="weights cannot be written: No space left on device"),
            writing(tmp_path / "weights"),
        ):
            raise error
    for other in (OSError(2, "x", "/another"), RuntimeError("a bug")):
        with pytest.raises(type(other)), writing(tmp_path / "weights"):
            raise other
    assert list(tmp_path.iterdir()) == []


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 5 * 2**30)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (make_pipe, "it is not a regular file"),
        (make_device, "it is not a regular file"),
        (make_sparse, "it has 5,368,709,120 bytes, above the [0-9,]+ that are read"),
    ],
)
def test_what_never_ends_or_fills_the_memory_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], None], problem: str
) -> None:
    readers: dict[str, Callable[[Path], object]] = {
        "meta.json": lambda path: read_json(path, dict, "restore it"),
        "metrics.jsonl": lambda path: list(read_metrics(path)),
        "config.json": lambda path: check_weight_files(path.parent),
        "lock": lambda path: holder(path.parent)[0] is None and read_bounded(path),
    }
    if make is make_sparse:
        readers["tokenizer.json"] = lambda path: load_tokenizer(str(path))
        readers["train.yaml"] = read_given
    for name, read in readers.items():
        make(tmp_path / name)
        with pytest.raises((OSError, UserError), match=f"{name}.*{problem}|{problem}.*{name}"):
            read(tmp_path / name)


def test_the_age_of_a_file_in_a_read_only_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(path)

    os.utime(tmp_path, (time.time() - 60,) * 2)
    monkeypatch.setattr(Path, "touch", refuse)  # root may write anywhere
    assert 60 <= age_s(tmp_path) < 120


def test_a_manifest_vouches_for_every_byte_and_leads_nowhere_else(tmp_path: Path) -> None:
    (folder,) = steps(tmp_path, 1)
    assert verify_manifest(folder) is None
    state = folder / "engine" / "optimizer.bin"
    for damage, problem in (
        (b"momentz", "engine/optimizer.bin does not have the SHA-256"),
        (b"moment", "engine/optimizer.bin has 6 bytes, manifest.json says 7"),
        (None, "engine/optimizer.bin is missing"),
    ):
        state.unlink() if damage is None else state.write_bytes(damage)
        assert str(verify_manifest(folder)).startswith(problem)
        assert verify_manifest(folder, {"config.yaml", "model.safetensors"}) is None
    assert verify_manifest(folder, {"other"}) == "manifest.json does not list other"
    content = json.loads((folder / "manifest.json").read_text())
    content["files"]["../../outside"] = content["files"]["config.yaml"]
    (tmp_path / "outside").write_bytes((folder / "config.yaml").read_bytes())
    for text, problem in (
        ("{", "not a readable list"),
        ("[]", "not a readable list"),
        ('{"files": {"config.yaml": 3}}', "not a readable list"),
        (json.dumps(content), "'../../outside', which is outside of the folder"),
    ):
        (folder / "manifest.json").write_text(text)
        assert problem in str(verify_manifest(folder))
