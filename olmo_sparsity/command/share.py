"""Find which shard of a command's work this process does.

    --shard 0/4                        Shard(0, 4): the first of four
    task 2 of an array of 4 tasks      Shard(2, 4)
    there, process 1 of 3 of a task    a third of that, for commands that have no other use of
                                       processes (`by_launch`)
    neither                            all of the work

`measure`, `prepare` and `attribute` call `parse_shard`, and the measurements of an experiment,
which have no --shard, `shard_of_array_task`.
"""

from __future__ import annotations

import os

from olmo_sparsity.analysis.shard import ALL_DOCUMENTS, Shard
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.launch import read_launch


def parse_shard(text: str | None, by_launch: bool = True) -> Shard:
    """Return the shard of this process.

    Args:
        text: The value of --shard. None means that the task of a SLURM array decides, or all is one
            shard.
        by_launch: Divide that shard among the processes of a launch.
    """
    launch = read_launch()
    if text is None:
        shard = shard_of_array_task()
        return shard.part(launch.rank, launch.world_size) if by_launch else shard
    shard = _read_shard(text)
    if launch.world_size > 1:
        # Each process would do the same shard.
        raise ConfigError(
            f"--shard={text}: the {launch.world_size} processes of this launch share the work "
            "by themselves; omit it"
        )
    return shard


def _read_shard(text: str) -> Shard:
    """Return the shard that is written as i/n."""
    index, _, num_shards = text.partition("/")
    are_numbers = index.isdecimal() and num_shards.isdecimal()
    if not (are_numbers and int(index) < int(num_shards)):
        raise ConfigError(f"--shard={text} must be i/n with 0 <= i < n, such as 0/4")
    return Shard(shard_index=int(index), num_shards=int(num_shards))


def shard_of_array_task() -> Shard:
    """Return the shard of this task of a SLURM array; outside of an array, a shard with all of the
    work."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if not task:
        return ALL_DOCUMENTS
    if not os.environ.get("SLURM_ARRAY_TASK_COUNT"):
        raise ConfigError(
            f"SLURM_ARRAY_TASK_ID={task} is set without SLURM_ARRAY_TASK_COUNT, so this process "
            "does not belong to a SLURM array; unset it, or pass --shard"
        )
    # A variable that is missing is -1, and then the array does not count as whole.
    first_task = int(os.environ.get("SLURM_ARRAY_TASK_MIN") or -1)
    last_task = int(os.environ.get("SLURM_ARRAY_TASK_MAX") or -1)
    num_tasks = int(os.environ.get("SLURM_ARRAY_TASK_COUNT") or -1)
    # A part of the array, such as --array=1,3, would leave the work of other tasks undone.
    if first_task != 0 or num_tasks != last_task + 1:
        raise ConfigError(
            "--shard is that of the SLURM array, and some tasks lack: submit the whole array, "
            f"--array=0-{last_task}: finished work is not done again"
        )
    return Shard(shard_index=int(task), num_shards=num_tasks)
