"""All processes of a run verify a checkpoint together, and choose the same one."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from olmo_sparsity.base import manifest
from olmo_sparsity.base.errors import UnreadableNowError, UserError
from olmo_sparsity.base.manifest import FileEntry, read_entries
from olmo_sparsity.training.checkpoints import resume
from olmo_sparsity.training.checkpoints.resume import find_damage_together, verify_newest
from olmo_sparsity.training.processes.distributed import Processes

T = TypeVar("T")


class Exchange:
    """What threads that play the processes of a run send to each other."""

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=60)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


@dataclass(frozen=True)
class ThreadAsProcess(Processes):
    exchange: Exchange = field(default_factory=lambda: Exchange(1))

    def gather(self, value: Any) -> list[Any]:
        return self.exchange.gather(self.rank, value)

    def sum_integers(self, number: int) -> int:
        return sum(self.gather(number))


def on_all(count: int, work: Callable[[Processes], T]) -> list[T | UserError]:
    """Return what each of so many processes returns or raises."""
    exchange = Exchange(count)

    def run(rank: int) -> T | UserError:
        try:
            return work(ThreadAsProcess(rank, count, exchange=exchange))
        except UserError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.fixture
def run_folder(trained: Path, tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 4 and 6."""
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    return folder


def newest(run_folder: Path) -> Path:
    return run_folder / "checkpoints/step000006"


def test_each_process_hashes_a_share_of_the_files(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 87 GB at 7B parameters."""
    shares: list[dict[str, FileEntry]] = []
    find_damaged_file = resume.find_damaged_file

    def watched(folder: Path, entries: dict[str, FileEntry]) -> str | None:
        shares.append(entries)
        return find_damaged_file(folder, entries)

    monkeypatch.setattr(resume, "find_damaged_file", watched)
    entries = read_entries(newest(run_folder)).files
    found = on_all(3, lambda processes: find_damage_together(newest(run_folder), processes))
    assert found == [None] * 3
    assert sorted(name for share in shares for name in share) == sorted(entries)
    largest_share = max(sum(entry.bytes for entry in share.values()) for share in shares)
    assert largest_share == max(entry.bytes for entry in entries.values())


@pytest.mark.parametrize("name", ["config.yaml", "tokenizer.json", "trainer.json"])
def test_damage_that_any_process_finds_makes_all_take_the_checkpoint_before(
    run_folder: Path, name: str
) -> None:
    path = newest(run_folder) / name
    path.write_bytes(bytes(len(path.read_bytes())))
    for verified in on_all(3, lambda processes: verify_newest(run_folder, processes)):
        assert not isinstance(verified, UserError)
        damaged, intact = verified
        assert damaged.folder == newest(run_folder)
        assert damaged.problem == f"{name} does not have the SHA-256 that manifest.json gives"
        assert (intact.folder.name, intact.problem) == ("step000004", None)


def test_a_file_that_one_process_cannot_read_now_ends_all(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256_of = manifest.sha256_of

    def fail(path: Path) -> str:
        if path.name == "trainer.json":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return sha256_of(path)

    monkeypatch.setattr(manifest, "sha256_of", fail)
    ends = on_all(3, lambda processes: verify_newest(run_folder, processes))
    assert all(isinstance(end, UserError) for end in ends)
    assert [isinstance(end, UnreadableNowError) for end in ends].count(True) == 1
