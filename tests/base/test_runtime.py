"""What a process says of itself: its launcher, its versions, its progress."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path

import pytest

from olmo_sparsity.base.runtime import Launch, Progress, code_version, read_launch

pytestmark = pytest.mark.usefixtures("no_launcher")


def step(*values: object) -> dict[str, object]:
    names = "PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID", "STEP_TASKS_PER_NODE", "STEP_ID"
    return {f"SLURM_{name}": value for name, value in zip(names, [*values, 0], strict=True)}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Launch()),
        ({"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}, Launch(3, 4, 1, 2)),
        ({"RANK": 1, "WORLD_SIZE": 2}, Launch(1, 2, 0, 1)),
        ({"RANK": 2, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_SIZE": 2}, Launch(2, 4, 0, 2)),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 8}, Launch()),  # the batch shell is none of the eight
        (step(5, 8, 1, 1, "4(x2)"), Launch(5, 8, 1, 4)),
        (step(6, 7, 0, 3, "2(x3),1"), Launch(6, 7, 0, 1)),
    ],
)
def test_launchers(
    variables: dict[str, object], expected: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert read_launch() == expected


def test_a_stopped_line_names_no_time_that_is_left(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "LOG_EVERY_S", 0)
    with contextlib.suppress(ValueError), Progress("training", 9, "steps") as it:
        it.update(1)
        raise ValueError
    shown, last = capsys.readouterr().err.splitlines()
    assert shown.endswith(" left")
    assert re.fullmatch(r"training · 1/9 steps · \S+ steps/s · stopped in \d+ s", last)


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
