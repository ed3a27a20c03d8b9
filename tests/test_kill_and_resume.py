"""Every command that fills a folder, killed at a file operation, ends as if nothing had been.

The random malformed input and damage of earlier versions found faults that the tests of their
modules hold now.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from olmo_sparsity.base.files import is_partial
from olmo_sparsity.command.cli import main
from tests.conftest import data_section, small_run
from tests.support import children

MEASURE = ["--long", "24", "--short", "8", "--stride", "8", "--ks", "1,2", "--draws", "1"]
MEASURE += ["--selectors", "random,nearest", "--min-gap", "0", "--max-documents", "4"]
MEASURE += ["--sets", "gap", "--max-targets", "3", "--units", "tokens"]
COMMANDS = ["prepare", "train", "export", "measure"]
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.utime", "os.chmod", "os.truncate")


def words_of(command: str, folder: Path, run: Path, here: Path) -> list[str]:
    """A command that fills `folder`, from a trained `run`."""
    if command == "export":
        return ["export", str(run), str(folder)]
    if command == "measure":
        return ["measure", str(run), "--out", str(folder), *MEASURE]
    settings: dict[str, Any] = small_run(folder, data_section(run.parent / "data"))
    settings["data"]["corpus"]["max_documents"] = 40
    settings["training"]["num_steps"] = 3
    if command == "prepare":
        settings["data"]["folder"] = str(folder)
    (path := here / f"{command}.yaml").write_text(yaml.safe_dump(settings))
    return [command, str(path)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text and a trained run."""
    folder = tmp_path_factory.mktemp("made")
    for command, name in (("prepare", "data"), ("train", "train")):
        assert main(words_of(command, folder / name, folder / "train", folder)) == 0
    return folder


def content(folder: Path) -> dict[str, str]:
    """The hashes of the files that hold numbers."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".safetensors", ".parquet", ".uint16") and "parts" not in path.parts
    }


def run_killed(words: list[str], watched: str, die_at: float, count_file: str) -> None:
    """The command in this process, killed at its n-th change of a file in a folder."""
    torch.set_num_threads(1)
    count, really = 0, os.fsync

    def operation() -> None:
        nonlocal count
        count += 1
        if count >= die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple) -> None:
        writes = event in CHANGES or (event == "open" and (arguments[2] or 0) & 3)
        if writes and str(arguments[0]).startswith(watched):
            operation()

    def fsync(descriptor: int) -> None:
        operation()
        really(descriptor)

    os.fsync = fsync
    sys.addaudithook(hook)
    code = main(words)
    Path(count_file).write_text(str(count))
    os._exit(code)


@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_a_file_operation_the_same_command_ends_with_the_same_files(
    made: Path, tmp_path: Path, command: str
) -> None:
    counted = tmp_path / "count"

    def run_until(folder: Path, die_at: float) -> int | None:
        words = words_of(command, folder, made / "train", tmp_path)
        child = children.forkserver.Process(
            target=run_killed, args=(words, str(folder), die_at, str(counted))
        )
        child.start()
        child.join()
        return child.exitcode

    whole = tmp_path / "whole"
    assert run_until(whole, float("inf")) == 0
    expected = content(whole)
    assert expected
    # A slow run renews its lock more often, so that the next one may change files less often.
    certain = int(0.9 * int(counted.read_text()))
    for die_at in random.Random(command).sample(range(1, certain), 2):
        folder = tmp_path / f"killed{die_at}"
        assert run_until(folder, die_at) == -signal.SIGKILL
        code = main(words_of(command, folder, made / "train", tmp_path))
        assert code == 0 or command == "export"  # which refuses a folder that is whole
        assert content(folder) == expected, die_at
        assert all(map(is_partial, folder.rglob("*.tmp"))), die_at
