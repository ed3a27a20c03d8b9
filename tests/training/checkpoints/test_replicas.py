"""Copies of weights that have come to differ end a run before they are saved."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from olmo_sparsity.base.launch import EXIT_FAULTY_NODE, SUSPECT_FILE
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.checkpoints.replicas import WeightSums, find_different
from olmo_sparsity.training.engines.engine import Engine
from tests.conftest import data_section, small_run
from tests.support import children


def gathered(parts: list[int], processes: list[list[torch.Tensor]]) -> list[WeightSums]:
    """Return what processes tell each other, which hold copies of these parts of the model."""
    return [
        WeightSums(
            part_number=part,
            node="node1",
            sums=[
                [float(weight.double().sum()), float(weight.double().abs().sum())]
                for weight in weights
            ],
        )
        for part, weights in zip(parts, processes, strict=True)
    ]


def copies(num_processes: int) -> list[list[torch.Tensor]]:
    """Two weights of each process."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(256, 256, generator=generator) / 50, torch.ones(256)]
    return [[weight.clone() for weight in weights] for _ in range(num_processes)]


def test_the_process_whose_copy_differs_from_most_others_is_found() -> None:
    processes = copies(4)
    assert find_different(gathered([0] * 4, processes)) == {}
    processes[2][1] *= 1.5
    assert find_different(gathered([0] * 4, processes)) == {2: 1}


@pytest.mark.parametrize("num_processes", [2, 3])
def test_a_copy_that_is_not_a_number_differs(num_processes: int) -> None:
    processes = copies(num_processes)
    processes[1][1][0] = float("nan")
    assert find_different(gathered([0] * num_processes, processes)) == {1: 1}


def test_of_two_copies_that_differ_both_are_named() -> None:
    processes = copies(2)
    processes[1][0] += 0.01
    assert find_different(gathered([0, 0], processes)) == {0: 0, 1: 0}


def test_processes_of_different_parts_may_differ() -> None:
    processes = copies(4)
    for rank in (1, 3):
        processes[rank][0] *= 2
    assert find_different(gathered([0, 1, 0, 1], processes)) == {}
    assert find_different(gathered([0, 0, 1, 1], processes)).keys() == {0, 1, 2, 3}


def test_rounding_is_no_difference_and_a_missed_update_is() -> None:
    rounded, missed = copies(3), copies(3)
    rounded[1][0] *= 1 + 1e-9
    assert find_different(gathered([0] * 3, rounded)) == {}
    generator = torch.Generator().manual_seed(1)
    signs = torch.randn(256, 256, generator=generator).sign()
    missed[1][0] += 5e-5 * signs
    assert find_different(gathered([0] * 3, missed)) == {1: 0}


def change_weights(number_of_save: int) -> None:
    """Disturbs: the weights of this process are others when it saves for this time."""
    copy_weights, num_saves = Engine.copy_weights, 0

    def changed(self: Engine, whole: bool = False) -> dict[str, torch.Tensor]:
        nonlocal num_saves
        num_saves += 1
        if num_saves == number_of_save:
            for weight in self.replicated_weights().values():
                weight.mul_(1.5)
        return copy_weights(self, whole)

    Engine.copy_weights = changed  # type: ignore[method-assign]


def be_on_node(node: str, suspect_file: Path) -> None:
    """Disturbs: this process is on a node of this name, of a job that asks which node fails."""
    os.environ |= {"SLURMD_NODENAME": node, SUSPECT_FILE: str(suspect_file)}


def be_on_node_with_other_weights(node: str, suspect_file: Path) -> None:
    """Disturbs: the same, and the weights of this process are others at its second save."""
    be_on_node(node, suspect_file)
    change_weights(2)


@pytest.mark.parametrize("engine", ["ddp", "zero1"])
def test_a_run_whose_copies_differ_ends_before_it_saves_them(
    data_folder: Path, tmp_path: Path, engine: str
) -> None:
    given = small_run(tmp_path / "run", data_section(data_folder))
    given["engine"] = {"name": engine}
    suspect_file = tmp_path / "suspect"
    disturb = {
        0: partial(be_on_node, "n1", suspect_file),
        1: partial(be_on_node_with_other_weights, "n2", suspect_file),
    }
    job = children.start(given, disturb=disturb)
    # Of two copies nobody knows which one is wrong: no code with which a job is requeued.
    assert job.wait() == [2, 2]
    assert not suspect_file.exists()
    (line,) = [line for line in job.texts()[0].splitlines() if "step 4 is not saved" in line]
    assert line.startswith("olmo-sparsity: step 4 is not saved: the weights of process 0 on"), line
    assert "process 0 on n1, process 1 on n2 differ from the copies of other" in line
    (newest,) = list_checkpoints(tmp_path / "run")
    assert newest.name == "step000002"


def test_the_next_start_leaves_out_the_node_whose_copies_differ(
    data_folder: Path, tmp_path: Path
) -> None:
    given = small_run(tmp_path / "run", data_section(data_folder))
    given["engine"] = {"name": "ddp"}
    given["training"]["batch_size"] = 6  # three processes share it
    suspect_file = tmp_path / "suspect"
    disturb = {
        0: partial(be_on_node, "n1", suspect_file),
        1: partial(be_on_node_with_other_weights, "n2", suspect_file),
        2: partial(be_on_node, "n3", suspect_file),
    }
    job = children.start(given, 3, disturb=disturb)
    assert job.wait() == [EXIT_FAULTY_NODE] * 3
    assert suspect_file.read_text() == "n2\n"
    assert "the weights of process 1 on n2 differ from the copies" in job.texts()[0]


def be_on_a_node_of_two(rank: int) -> None:
    """Disturbs: this process is one of two on its node. The last one has other weights."""
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    os.environ["SLURMD_NODENAME"] = f"n{rank // 2}"
    if rank == 3:
        change_weights(2)


def test_the_copies_of_nodes_are_compared(data_folder: Path, tmp_path: Path) -> None:
    given = small_run(tmp_path / "run", data_section(data_folder))
    given["engine"] = {"name": "fsdp", "shard_over": "node"}
    disturb = {rank: partial(be_on_a_node_of_two, rank) for rank in range(4)}
    job = children.start(given, 4, disturb=disturb)
    assert job.wait() == [2] * 4
    (line,) = [line for line in job.texts()[0].splitlines() if "step 4 is not saved" in line]
    assert "process 1 on n0, process 3 on n1" in line
