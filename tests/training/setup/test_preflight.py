"""Before the first step: disks, shards, run folder."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.setup.preflight import check_room, check_shared
from tests.conftest import MakeConfig


def test_a_disk_without_room_for_the_checkpoints_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(num_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes))

    def check(**kept: Any) -> None:
        check_room(Path("/"), CheckpointConfig(interval_steps=2, **kept), 10**6, 0, num_steps=6)

    needed = 3 * 10**6 * 12  # two that are kept, one being written
    free(needed)
    check()
    for num_bytes, kept in ((needed - 1, {}), (needed, {"keep_steps": [1, 3]})):
        free(num_bytes)
        with pytest.raises(UserError, match=r"run_folder=/: .*checkpoint\.keep=2"):
            check(**kept)
    with pytest.raises(UserError, match=r"3 to stay.*--checkpoint\.keep_every_steps=null"):
        check(keep_every_steps=2)
    # From step 3 on, a run of 6 steps saves at step 4, and at its end.
    free(2 * 10**6 * 12 - 1)
    with pytest.raises(UserError, match="run_folder=/: "):
        check_room(Path("/"), CheckpointConfig(interval_steps=4), 10**6, 3, num_steps=6)
    config = make_config()
    free(10**6)
    with pytest.raises(UserError, match="run_folder="):
        train(config)
    assert not (Path(config.run_folder) / "metrics.jsonl").exists()


def fails_at_the_second() -> Any:
    """A replacement of `Processes.raising_together` whose second block fails on another process."""
    number = itertools.count(1)

    @contextlib.contextmanager
    def raising_together() -> Iterator[None]:
        yield
        if next(number) == 2:
            raise UserError("not shared")

    return raising_together


def test_a_disk_that_is_not_shared_is_noticed(tmp_path: Path) -> None:
    class SecondOfTwo(Processes):
        def gather(self, value: Any) -> list[Any]:
            return ["token", value] if isinstance(value, str) else [None, value]

        def raising_together(self) -> Any:
            return contextlib.nullcontext()

    first = SecondOfTwo(rank=0, world_size=2)
    first.raising_together = fails_at_the_second()  # type: ignore[method-assign]
    with pytest.raises(UserError, match="not shared"):
        check_shared(tmp_path, first, patience_s=0.2)
    assert not list(tmp_path.iterdir()), "the mark is left where another process failed"

    second = SecondOfTwo(rank=1, world_size=2)
    with pytest.raises(UserError, match="run_folder="):
        check_shared(tmp_path, second, patience_s=0.2)
    (tmp_path / ".seen-by-all-token").touch()
    check_shared(tmp_path, second, patience_s=0.2)
