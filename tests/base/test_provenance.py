"""The commit that is stored with results."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from olmo_sparsity.base.provenance import code_version


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
