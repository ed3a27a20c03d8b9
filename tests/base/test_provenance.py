"""The commit and the command that are stored with results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from olmo_sparsity.base.provenance import code_hash, code_version, typed_command


def test_the_commit_says_whether_the_code_has_changed_since(tmp_path: Path) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x"]

    def git(*words: str) -> None:
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    assert code_version(tmp_path) is None
    git("init", "-q")
    (tmp_path / "docs").mkdir()
    for name in ("code.py", "docs/results.md"):
        (tmp_path / name).touch()
    git("add", "-A")
    git("commit", "-qm", "first")
    (tmp_path / "docs/results.md").write_text("a result")
    commit = code_version(tmp_path)
    assert commit is not None
    assert re.fullmatch("[0-9a-f]{40}", commit)
    assert code_version(tmp_path / "docs") is None, "the repository is another's"
    (tmp_path / "code.py").write_text("two")
    assert code_version(tmp_path) == f"{commit}-dirty"


def test_code_of_a_container_is_that_of_its_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLMO_SPARSITY_COMMIT", "a" * 40)
    assert code_version(tmp_path) == "a" * 40
    monkeypatch.setenv("OLMO_SPARSITY_COMMIT", "unknown")
    assert code_version(tmp_path) is None


def test_the_hash_of_the_code_tells_uncommitted_changes_apart(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    module = tmp_path / "inner/module.py"
    module.write_text("K = 1\n")
    hashes = [code_hash(tmp_path)]
    (tmp_path / "notes.txt").write_text("not imported")
    assert code_hash(tmp_path) == hashes[0]
    module.write_text("K = 2\n")
    hashes.append(code_hash(tmp_path))
    module.rename(tmp_path / "inner/other.py")
    hashes.append(code_hash(tmp_path))
    assert len(set(hashes)) == 3
    assert len(code_hash()) == 12, "of this package"


@pytest.mark.parametrize(
    ("program", "stored"),
    [
        ("/home/me/.venv/bin/olmo-sparsity", "olmo-sparsity"),
        ("/home/me/olmo_sparsity/__main__.py", "olmo-sparsity"),
        ("/home/me/sweep.py", "/home/me/sweep.py"),
    ],
)
def test_the_stored_command_has_no_path_of_this_installation(
    monkeypatch: pytest.MonkeyPatch, program: str, stored: str
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "train", "my.yaml"])
    assert typed_command() == [stored, "train", "my.yaml"]
