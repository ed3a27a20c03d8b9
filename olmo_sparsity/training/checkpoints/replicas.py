"""Compare the weights of which several processes hold copies: with DDP all, with ZeRO-1 and 2 those
in the precision of a step, with `fsdp` and `engine.shard_over=node` the parts of each node.

All copies take the same updates, so they stay equal, unless a GPU or its memory is faulty. A
checkpoint takes each weight from one of the processes, so that it would mix unequal copies. Only
two sums of each weight are compared, as weights are too many to send:

    Σ w of one weight    process 0    12.5
                         process 1    12.5
                         process 2    12.9    differs: a faulty GPU on its node?
                         process 3    12.5

If the copies that differ are all on one node, slurm/job.sh starts the run again without that node;
otherwise nobody knows which copies are wrong, and a person has to look. Called before each
save by after_step/save.py.

Dimension key: R processes (ranks) that hold copies of one part, W weights, 2 sums of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.launch import EXIT_FAULTY_NODE, node_name, suspect
from olmo_sparsity.training.engines.engine import Engine

TOLERANCE = 1e-7
"""Largest difference of two sums of a weight, as a share of the sum of its absolute values. Copies
on GPUs of different kinds may drift apart by the rounding of the gradient norm, which is far
less (1e-10); a single update that one process has missed is more."""


class WeightSums(NamedTuple):
    """What a process tells the others about its copies."""

    part_number: int
    """The part of the model of which it holds a copy."""

    node: str
    sums: list[list[float]]
    """For each weight its sum, and the sum of its absolute values."""


def check_replicas(engine: Engine, step: int) -> None:
    """Raise UserError if the copies of a weight differ between processes. Every process must call
    it, before it saves a step."""
    processes = engine.processes
    if processes.world_size == 1:
        return
    copies = engine.replicated_weights()
    # In fp64: an fp32 sum of 10^8 numbers is rounded by more than `TOLERANCE`.
    sums = [
        torch.stack([weight.sum(dtype=torch.float64), weight.abs().sum(dtype=torch.float64)])
        for weight in copies.values()
    ]
    own_sums = torch.stack(sums).tolist() if sums else []
    gathered: list[WeightSums] = processes.gather(
        WeightSums(engine.part_number, node_name(), own_sums)
    )
    # All processes find the same, and the first reports it for all.
    different = find_different(gathered)
    with processes.raising_together():
        if different:
            where = ", ".join(f"process {rank} on {gathered[rank].node}" for rank in different)
            first_name = list(copies)[min(different.values())]
            error = UserError(
                f"step {step} is not saved: the weights of {where} differ from the copies of other "
                f"processes, the first in {first_name} (a faulty GPU or memory?); "
                "the same command goes on from the last checkpoint: test that node, and leave it "
                "out with sbatch --exclude"
            )
            nodes = {gathered[rank].node for rank in different}
            if len(nodes) == 1:
                if processes.is_first:
                    suspect(nodes.pop())
                error.exit_code = EXIT_FAULTY_NODE
            raise error


def find_different(gathered: Sequence[WeightSums]) -> dict[int, int]:
    """Return the ranks whose copies differ from those of most others, each with the index of the
    first weight that differs, by the order of `sums`. Where one half differs from the other, all
    are returned, as there is no majority.

    Args:
        gathered: The sums of each process, by its rank.
    """
    different: dict[int, int] = {}
    for part_number in sorted({process.part_number for process in gathered}):
        ranks = [
            rank for rank, process in enumerate(gathered) if process.part_number == part_number
        ]
        sums_RW2 = np.array([gathered[rank].sums for rank in ranks])
        if len(ranks) == 1 or sums_RW2.size == 0:
            continue
        # The median is the value of most processes, whichever of them is faulty.
        usual_W2 = np.nanmedian(sums_RW2, axis=0)
        limit_W = TOLERANCE * usual_W2[:, 1]  # of the absolute values, as a sum may be near 0
        # Not `>`, which is false of a NaN.
        differs_RW = ~(np.abs(sums_RW2 - usual_W2) <= limit_W[:, None]).all(axis=-1)
        for rank, differs_W in zip(ranks, differs_RW, strict=True):
            if differs_W.any():
                different[rank] = int(differs_W.argmax())
    return different
