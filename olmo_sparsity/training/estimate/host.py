"""Estimate what a run takes beside its devices: main memory, disk, and the time of a save.

For c4_1b with `fsdp` on 8 H100:

    disk_of(config).checkpoint_bytes               14.1 GB: weights and two moments, in fp32
    predict_save(config, hardware).pause_s         1.3 s, in which the GPUs are copied
    predict_save(config, hardware).total_s         15.4 s, after which all is on the disk
    main_memory_of(config, hardware)               6.2 GB at the peak of each process, a save:
                                                   4.3 of libraries and 1.9 of the copy

A save copies from the devices to main memory, while training stands still. A thread then hashes the
copy and writes it to the disk, while training goes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.training.estimate.device_memory import bytes_copied_for_tasks, count_shards
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.meta_model import without_memory
from olmo_sparsity.training.run_folder.skipped_batches import COMES_BACK_WITHIN

CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Weights and two moments, in fp32."""

COPIED_BYTES_PER_S = 1.4e9
"""Bytes of a checkpoint that each process copies to main memory in a second: measured on one
H200."""

WRITTEN_BYTES_PER_S = 0.39e9
"""Bytes of a checkpoint that each process hashes and writes in a second, at most: measured on one
H200. The file system limits many processes together (`Hardware.disk_bytes_per_s`)."""

LIBRARIES_BYTES = 4 * 2**30
"""Bytes of main memory that a process on a GPU takes for Python, PyTorch, CUDA and batches
(about)."""


@dataclass(frozen=True)
class Disk:
    """Bytes on disk of a run and its text."""

    text_bytes: int
    """The tokens that the run reads, if it reads none of them twice."""

    checkpoint_bytes: int
    run_folder_bytes: int
    """All checkpoints that exist at once, with the one that is being written."""

    num_set_aside: int
    """About how many checkpoints `training.on_nan=skip` may set aside, beside those of
    `run_folder_bytes`."""


def disk_of(config: RunConfig) -> Disk:
    """Return the bytes that a run takes on disk. The vocabulary of the config must be known."""
    training = config.training
    num_tokens = training.batch_size * training.length * training.num_steps
    # Shards have IDs of 16 bits where all IDs fit into them (data/preparation/folder.py).
    bytes_of_token = 2 if config.model.vocab_size <= 2**16 else 4
    bytes_of_checkpoint = checkpoint_bytes(config)
    # One more than is kept: the oldest is deleted after the new one is complete.
    num_checkpoints = config.checkpoint.keep + 1
    num_checkpoints += config.checkpoint.num_staying(0, training.num_steps)
    return Disk(
        text_bytes=num_tokens * bytes_of_token,
        checkpoint_bytes=bytes_of_checkpoint,
        run_folder_bytes=bytes_of_checkpoint * num_checkpoints,
        num_set_aside=_count_set_aside(config),
    )


def _count_set_aside(config: RunConfig) -> int:
    """Return about how many checkpoints a run may set aside at most. Each skip after the first sets
    some aside if the batch of the skip before was not the cause: those of the last
    COMES_BACK_WITHIN steps (run_folder/skipped_batches.py has an example)."""
    if config.training.on_nan != "skip":
        return 0
    # Each time: the last ones, and the permanent ones of the last COMES_BACK_WITHIN steps.
    num_each_time = config.checkpoint.keep
    if config.checkpoint.keep_every_steps:
        num_each_time += COMES_BACK_WITHIN // config.checkpoint.keep_every_steps
    return (config.training.max_skips - 1) * num_each_time


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of a checkpoint: weights and two moments."""
    return CHECKPOINT_BYTES_PER_PARAMETER * count_parameters(without_memory(config.model))


def checkpoint_bytes_per_process(config: RunConfig, hardware: Hardware) -> float:
    """Return the bytes of a checkpoint that each process copies and writes: an equal share, 1.77 GB
    of the 14.1 GB of c4_1b on 8 GPUs."""
    return checkpoint_bytes(config) / hardware.num_processes


@dataclass(frozen=True)
class PredictedSave:
    """How long a save is predicted to take."""

    pause_s: float
    """Seconds in which training stands still, while weights and moments are copied."""

    total_s: float
    """Seconds until the checkpoint is on disk. After the pause a thread writes it."""

    @property
    def longest_s(self) -> float:
        """Return the seconds from a signal until a checkpoint is on disk, if the one before has
        just begun: it is completed first."""
        return 2 * self.total_s


def predict_save(config: RunConfig, hardware: Hardware) -> PredictedSave:
    """Predict how long a save takes: each process copies its part, then hashes and writes it, all
    to one file system."""
    saved_bytes = checkpoint_bytes_per_process(config, hardware)
    pause_s = saved_bytes / COPIED_BYTES_PER_S
    own_share_of_disk = hardware.disk_bytes_per_s / hardware.num_processes
    written_bytes_per_s = min(WRITTEN_BYTES_PER_S, own_share_of_disk)
    return PredictedSave(pause_s, total_s=pause_s + saved_bytes / written_bytes_per_s)


def main_memory_of(config: RunConfig, hardware: Hardware) -> float:
    """Return the bytes of main memory that a process needs at its peak: the start, a save, or tasks
    of lm_eval."""
    libraries = LIBRARIES_BYTES if hardware.gpu else 0
    copied = max(save_copy_bytes(config, hardware), task_copy_bytes(config, hardware))
    return max(main_memory_at_start(config), copied) + libraries


def save_copy_bytes(config: RunConfig, hardware: Hardware) -> float:
    """Return the bytes of main memory that a process takes for a save, into which it copies its
    part of the checkpoint. A GPU copies to pinned memory, each tensor by itself: a weight as a
    whole, and its two moments in the parts into which the engine divides the weight."""
    if not hardware.gpu:
        return checkpoint_bytes_per_process(config, hardware)
    divides_weights = config.engine.name in ("fsdp", "zero3")
    num_parts = count_shards(config, hardware) if divides_weights else 1
    bytes_of_all = 0
    for weight in without_memory(config.model).parameters():
        num_of_part = math.ceil(weight.numel() / num_parts)
        bytes_of_all += pinned_bytes(4 * weight.numel())
        bytes_of_all += 2 * num_parts * pinned_bytes(4 * num_of_part)
    return bytes_of_all / hardware.num_processes


def task_copy_bytes(config: RunConfig, hardware: Hardware) -> float:
    """Return the bytes of main memory that a process takes for the whole copy of the weights on
    which it measures tasks of lm_eval; 0 without tasks."""
    if not hardware.gpu or not config.evaluation.lm_eval:
        return bytes_copied_for_tasks(config)
    weights = without_memory(config.model).parameters()
    return sum(pinned_bytes(4 * weight.numel()) for weight in weights)


def pinned_bytes(num_bytes: int) -> int:
    """Return the bytes of pinned memory that PyTorch takes for a tensor: it rounds up to a power of
    two (`CachingHostAllocator`), such as 3, 4 and 5 bytes to 4, 4 and 8. For a model of 7B it takes
    1.4 times the bytes of all weights."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def main_memory_at_start(config: RunConfig) -> float:
    """Return the bytes of main memory that a process needs to make its weights, in fp32. `fsdp` and
    ZeRO make one weight of OLMo at a time; otherwise all weights are there at once."""
    model = without_memory(config.model)
    can_build_in_parts = config.engine.name == "fsdp" or config.engine.name.startswith("zero")
    # A model of transformers is tried when it is built, for which it needs all of its weights.
    is_built_in_parts = config.model.architecture == "olmo" and can_build_in_parts
    if is_built_in_parts:
        return 4 * max(weight.numel() for weight in model.parameters())
    return 4 * count_parameters(model)
