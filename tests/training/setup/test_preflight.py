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
from safetensors.torch import load_file

from olmo_sparsity.base.errors import ConfigError, UserError
from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.models.checkpoint_files import WEIGHTS, list_checkpoints
from olmo_sparsity.training.checkpoints.writer import EXIT_DISK
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.setup import preflight
from olmo_sparsity.training.setup.preflight import check_room, check_same, check_shared
from olmo_sparsity.training.steps import Outcome
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


def test_a_run_that_resumes_needs_room_for_the_next_checkpoint_alone(
    make_config: MakeConfig,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """As it would have gone on with so much room if it had not been preempted."""
    newest, before = list_checkpoints(trained)
    shutil.rmtree(newest)
    num_parameters = sum(tensor.numel() for tensor in load_file(before / WEIGHTS).values())
    checkpoint_bytes = 12 * num_parameters

    def free(num_bytes: int, total: int = 10**12) -> None:
        usage = SimpleNamespace(free=num_bytes, total=total)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    # Steps 5 and 6 are to come, and stay.
    config = make_config(checkpoint__keep_every_steps=1)
    free(checkpoint_bytes - 1)
    with pytest.raises(UserError, match=r"the next checkpoint needs .*free space") as error:
        train(config)
    assert error.value.exit_code == EXIT_DISK, "the job is requeued"
    free(checkpoint_bytes - 1, total=checkpoint_bytes - 1)
    with pytest.raises(UserError, match=r"in all, a checkpoint needs .*larger disk") as error:
        train(config)
    assert error.value.exit_code == 2, "no later start would find room"
    free(checkpoint_bytes)
    assert train(config) is Outcome.FINISHED
    assert "enough for the next checkpoint; all that are still to come" in capsys.readouterr().err


def test_a_checkpoint_that_a_save_would_delete_counts_as_room(tmp_path: Path) -> None:
    settings = CheckpointConfig(interval_steps=2, keep_every_steps=1)
    for name in ("step000004", "step000002.set_aside"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    one_too_many = shutil.disk_usage(tmp_path).total // 12
    with pytest.raises(UserError, match="the next checkpoint needs"):
        check_room(tmp_path, settings, one_too_many, 4, num_steps=8)
    with (tmp_path / "checkpoints/step000002.set_aside/model").open("wb") as file:
        file.truncate(2**40)  # takes no space
    free_bytes = shutil.disk_usage(tmp_path).free
    fits = (free_bytes + 2**39) // 12
    assert "enough for the next" in check_room(tmp_path, settings, fits, 4, num_steps=8)


def test_a_run_that_has_started_and_saved_nothing_is_not_asked_for_all_room(tmp_path: Path) -> None:
    """As after training.on_nan=skip went back to the beginning."""
    settings = CheckpointConfig(interval_steps=2, keep=3)
    two_fit = shutil.disk_usage(tmp_path).free // 12 // 2
    with pytest.raises(UserError, match=r"checkpoint\.keep=3") as error:
        check_room(tmp_path, settings, two_fit, 0, num_steps=8)
    assert error.value.exit_code == 2
    (tmp_path / "environment.json").write_text("[]")
    assert check_room(tmp_path, settings, two_fit, 0, num_steps=8)


def fails_at_the_second() -> Any:
    """A replacement of `Processes.raising_together` whose second block fails on another process."""
    number = itertools.count(1)

    @contextlib.contextmanager
    def raising_together() -> Iterator[None]:
        yield
        if next(number) == 2:
            raise UserError("not shared")

    return raising_together


class SecondNode(Processes):
    """The second of two processes; the first one is on `node0`."""

    first_versions: dict[str, str]

    def gather(self, value: Any) -> list[Any]:
        _, installed = value
        return [
            ({"seed": 1}, installed._replace(host="node0", versions=self.first_versions)),
            value,
        ]

    def raising_together(self) -> Any:
        return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("name", "there", "here"),
    [
        ("commit", "1111", "2222"),
        ("PyTorch", "2.12.0", "2.13.0"),
        ("Python files with the hash", "aaaa", "bbbb"),  # uncommitted changes
    ],
)
def test_nodes_with_different_code_or_pytorch_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, there: str, here: str
) -> None:
    monkeypatch.setattr(preflight, "code_version", lambda: "2222-dirty")
    monkeypatch.setattr(preflight, "code_hash", lambda: "bbbb")
    packages = {"olmo-sparsity": "0.2", "torch": "2.13.0"}
    monkeypatch.setattr(preflight, "versions_of_numbers", lambda: packages)
    monkeypatch.setattr(preflight.socket, "gethostname", lambda: "node1")
    second = SecondNode(rank=1, world_size=2)
    same = {"commit": "2222", "olmo-sparsity": "0.2", "PyTorch": "2.13.0"}
    same["Python files with the hash"] = "bbbb"
    object.__setattr__(second, "first_versions", same | {name: there})
    message = f"process 0 on node0 has {name} {there}, process 1 on node1 has {here}; give all"
    with pytest.raises(ConfigError, match=message):
        check_same({"seed": 1}, second)
    # A commit is not known without git.
    for known in (same, {"PyTorch": "2.13.0"}):
        object.__setattr__(second, "first_versions", known)
        check_same({"seed": 1}, second)
    with pytest.raises(ConfigError, match="config of the first process: seed"):
        check_same({"seed": 2}, second)


def test_one_process_of_a_node_looks_for_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "code_version", lambda: pytest.fail("asks git"))
    monkeypatch.setattr(preflight, "code_hash", lambda: pytest.fail("reads all files"))
    second = SecondNode(rank=1, world_size=2, local_rank=1)
    object.__setattr__(second, "first_versions", {"commit": "1111"})
    check_same({"seed": 1}, second)
    check_same({"seed": 1}, Processes())


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
