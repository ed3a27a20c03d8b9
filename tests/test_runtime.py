"""What a process says of itself: its launcher, its versions, its progress."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from olmo_sparsity.errors import ConfigError
from olmo_sparsity.runtime import Launch, Progress, code_version, read_launch, typed_command

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Launch()),
        ({"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}, Launch(3, 4, 1, 2)),
        ({"RANK": 1, "WORLD_SIZE": 2}, Launch(1, 2, 0, 1)),
        ({"RANK": 2, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_SIZE": 2}, Launch(2, 4, 0, 2)),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 8}, Launch()),  # the batch shell is none of the eight
        (
            {
                "SLURM_STEP_ID": 0,
                "SLURM_PROCID": 5,
                "SLURM_STEP_NUM_TASKS": 8,
                "SLURM_LOCALID": 1,
                "SLURM_NODEID": 1,
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
            },
            Launch(5, 8, 1, 4),
        ),
        (
            {
                "SLURM_STEP_ID": 0,
                "SLURM_PROCID": 6,
                "SLURM_STEP_NUM_TASKS": 7,
                "SLURM_LOCALID": 0,
                "SLURM_NODEID": 3,
                "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
            },
            Launch(6, 7, 0, 1),
        ),
    ],
)
def test_launchers(
    variables: dict[str, object], expected: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert read_launch() == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "0"}, "not WORLD_SIZE"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK=two"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
    ],
)
def test_launchers_that_say_it_wrong(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=expected):
        read_launch()


def test_a_stopped_line_names_no_time_that_is_left(capsys: pytest.CaptureFixture) -> None:
    with contextlib.suppress(ValueError), Progress("training", 9, "steps", log_every_s=0) as it:
        it.update(1)
        raise ValueError
    shown, last = capsys.readouterr().err.splitlines()
    assert shown.endswith(" left")
    assert re.fullmatch(r"training · 1/9 steps · \S+ steps/s · stopped in \d+ s", last)


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
