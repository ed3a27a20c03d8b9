"""What results say of how they were made."""

import subprocess
import sys
from pathlib import Path

import pytest

from olmo_sparsity.process.versions import code_version, typed_command


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("/opt/venv/bin/olmo-sparsity", "olmo-sparsity"),
        ("/home/someone/olmo_sparsity/__main__.py", "olmo-sparsity"),
        ("scripts/measure.py", "scripts/measure.py"),
    ],
)
def test_a_command_is_kept_as_typed_without_where_it_is_installed(
    program: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "measure", "a model", "--out", "there"])
    assert typed_command() == [said, "measure", "a model", "--out", "there"]


def test_the_commit_says_whether_the_code_has_changed_since(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x"]
        done = subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert code_version(tmp_path) is None
    git("init", "-q")
    (tmp_path / "docs").mkdir()
    code, doc = tmp_path / "code.py", tmp_path / "docs/results.md"
    for path in (code, doc):
        path.write_text("one")
    git("add", "-A")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    assert code_version(tmp_path) == commit
    assert code_version(tmp_path / "docs") is None, "the repository is another's"
    doc.write_text("two")
    assert code_version(tmp_path) == commit, "a result was written"
    code.write_text("two")
    assert code_version(tmp_path) == f"{commit}-dirty"
