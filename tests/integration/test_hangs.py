"""A process that stops: the others write their stacks, name it and end, and the run goes on."""

from __future__ import annotations

import importlib
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity.data.batches import TrainingBatches
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.checkpoints.writer import CheckpointWriter
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.engines.losses import Losses
from olmo_sparsity.training.evaluation.evaluate import Evaluation
from olmo_sparsity.training.metrics.appended_file import AppendedFile
from olmo_sparsity.training.metrics.read import read_metrics
from tests.conftest import data_section, small_run, until
from tests.support import children

pytestmark = pytest.mark.accept

LIMITS = {"step_timeout_s": 6, "work_timeout_s": 20}


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_within(owner: Any, name: str, number: int) -> None:
    """At a call of a method."""
    method, calls = getattr(owner, name), 0

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            stop()
        return method(*given, **named)

    setattr(owner, name, counted)


def in_a_step() -> None:
    children.at_step(6, stop)


def in_an_evaluation() -> None:
    stop_within(Evaluation, "losses", 2)


def in_a_save() -> None:
    stop_within(CheckpointWriter, "save", 2)


def sleep_within(owner: Any, name: str, number: int) -> None:
    """At a call of a function. The other threads of the process go on."""
    if isinstance(owner, str):
        owner = importlib.import_module(owner)
    function, calls = getattr(owner, name), 0

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            time.sleep(1000)
        return function(*given, **named)

    setattr(owner, name, counted)


SLEEPS = {
    "step 6": (Engine, "step", 6),
    "the evaluation of step 4": (Evaluation, "losses", 2),
    "saving step 4": (Engine, "copy_moments", 2),
    "the start": ("olmo_sparsity.training.restore", "build_engine", 1),
}


@pytest.mark.parametrize("task", SLEEPS)
def test_a_process_whose_work_alone_hangs_is_named(
    data_folder: Path, tmp_path: Path, task: str
) -> None:
    given = small_run(tmp_path / "run", data_section(data_folder))
    given["training"] |= {"num_steps": 8, "batch_size": 4}
    given["engine"] = {"name": "ddp", **LIMITS}
    given["evaluation"] |= {"interval_steps": 2}
    job = children.start(given, disturb={1: partial(sleep_within, *SLEEPS[task])})
    assert job.wait() == [76, 76]
    (line,) = [line for line in job.texts()[0].splitlines() if "took more than" in line]
    assert line.startswith(f"olmo-sparsity: {task} took more than")
    assert re.search(r": process 1 on \S+ did not get to where the others wait", line)
    assert len([*(tmp_path / "run/stacks").rglob("*.txt")]) == 2


def wait_for_the_disk(owner: Any, name: str, number: int) -> None:
    """Disturbs: a call of a method takes longer than a step may."""
    method, calls = getattr(owner, name), 0

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            time.sleep(2 * LIMITS["step_timeout_s"])
        return method(*given, **named)

    setattr(owner, name, counted)


@pytest.mark.parametrize(
    ("rank", "place"), [(1, (TrainingBatches, "of_step", 6)), (0, (AppendedFile, "append", 3))]
)
def test_a_disk_that_is_away_for_longer_than_a_step_may_take_ends_no_process(
    data_folder: Path, tmp_path: Path, rank: int, place: tuple
) -> None:
    given = small_run(tmp_path / "run", data_section(data_folder))
    given["training"] |= {"num_steps": 8, "batch_size": 4}
    given["engine"] = {"name": "ddp", **LIMITS, "work_timeout_s": 60}
    given["logging"] = {"interval_steps": 1}
    job = children.start(given, disturb={rank: partial(wait_for_the_disk, *place)})
    assert job.wait() == [0, 0]


def do_nothing() -> None:
    pass


def be_on_a_node_of_two(rank: int, suspect: Path, act: Callable[[], None]) -> None:
    """Disturbs: this process is one of two on its node, in a job that is told of a suspect."""
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    os.environ |= {"SLURMD_NODENAME": f"n{rank // 2}", "OLMO_SPARSITY_SUSPECT": str(suspect)}
    act()


def test_a_process_that_holds_up_its_node_is_named_where_nodes_share_weights(
    data_folder: Path, tmp_path: Path
) -> None:
    """Process 2 waits for the weights of process 3, processes 0 and 1 for the gradients of both."""
    suspect = tmp_path / "suspect"
    given = small_run(tmp_path / "run", data_section(data_folder))
    given["training"] |= {"num_steps": 8, "batch_size": 4}
    given["engine"] = {"name": "fsdp", "shard_over": "node", **LIMITS}
    given["evaluation"] |= {"interval_steps": None}
    hang = partial(sleep_within, Losses, "forward", 6)
    disturb = {
        rank: partial(be_on_a_node_of_two, rank, suspect, hang if rank == 3 else do_nothing)
        for rank in range(4)
    }
    job = children.start(given, 4, disturb=disturb)
    assert job.wait() == [76] * 4
    (line,) = [line for line in job.texts()[0].splitlines() if "took more than" in line]
    assert "step 6 took more than" in line
    assert ": process 3 on n1 did not get to where the others wait, all stacks" in line
    assert suspect.read_text() == "n1\n"


CASES = [
    (engine, place, rank)
    for engine in ("ddp", "fsdp", "zero1", "zero2", "zero3")
    for place in (in_a_step, in_an_evaluation, in_a_save)
    for rank in ((1, 0) if (engine, place) == ("ddp", in_a_step) else (1,))
]


@pytest.mark.parametrize(("engine", "place", "rank"), CASES)
def test_a_stopped_process_is_named_and_all_end(
    data_folder: Path, tmp_path: Path, engine: str, place: Callable[[], None], rank: int
) -> None:
    given = small_run(tmp_path / "run", data_section(data_folder))
    given["training"] |= {"num_steps": 8, "batch_size": 4}
    given["engine"] = {"name": engine, **LIMITS}
    given["evaluation"] |= {"interval_steps": 2}
    job = children.start(given, disturb={rank: place})
    stopped, other = job.processes[rank], job.processes[1 - rank]
    state = Path(f"/proc/{stopped.pid}/stat")
    until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", other.is_alive)
    began = time.monotonic()
    limit = "step_timeout_s" if place is in_a_step else "work_timeout_s"
    other.join(LIMITS[limit] + 30)
    took = time.monotonic() - began
    os.kill(stopped.pid or 0, signal.SIGKILL)  # as srun and torchrun do
    codes, text = job.wait(), job.texts()[1 - rank]
    assert codes[1 - rank] == 76, text
    assert took < LIMITS[limit] + 30
    assert f"engine.{limit}={LIMITS[limit]}: process {rank} on " in text
    (stacks,) = (tmp_path / "run/stacks").rglob("*.txt")
    assert stacks.name == f"process{1 - rank:05d}.txt"
    assert "loop.py" in stacks.read_text()
    if rank == 0:
        return  # its lock is of a process that lives until a launcher kills it
    again = children.start(given)
    assert again.wait() == [0, 0], again.texts()
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl")][-1] == 8
    assert list_checkpoints(tmp_path / "run")[0].name == "step000008"
