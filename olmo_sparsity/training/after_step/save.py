"""Save a checkpoint after a step: copy it to main memory, and hand it to the thread that writes it.

steps.py ─> save_checkpoint    waits for the last save, checks that the numbers are finite and
                               equal on all processes, copies, and returns how long it took
         ─> CheckpointWriter   (checkpoints/writer.py) writes the copies during the next steps
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from olmo_sparsity.base.locks import check_not_taken_over
from olmo_sparsity.models.checkpoint_files import part_name, save_weights, write_index
from olmo_sparsity.training.checkpoints.replicas import check_replicas
from olmo_sparsity.training.checkpoints.save import CheckpointContent
from olmo_sparsity.training.checkpoints.save_steps import SaveTime
from olmo_sparsity.training.checkpoints.writer import CheckpointWriter
from olmo_sparsity.training.metrics.metrics import Metrics, check_finite
from olmo_sparsity.training.prepared_run import PreparedRun
from olmo_sparsity.training.run_folder.trainer_state import ENGINE_FOLDER, TrainerState


def save_checkpoint(
    run: PreparedRun, step: int, metrics: Metrics, writer: CheckpointWriter
) -> SaveTime:
    """Copy weights and moments into main memory, from which a thread writes them. Training goes on
    when the copy is complete. Return how long it stood still. Every process must call it."""
    engine = run.engine
    processes = engine.processes
    run.watchdog.expect(f"saving step {step}")
    save_began_s = time.monotonic()
    writer.wait()  # main memory may have room for one copy
    waited_s = time.monotonic() - save_began_s
    with processes.raising_together():
        if processes.is_first:
            check_not_taken_over(writer.run_folder)
        metrics.flush()  # raises if a loss is not finite, as such weights must not be saved

    # After the flush, which knows the CRC of this step's line.
    state = current_state(run, step, metrics)
    copy_began_s = time.monotonic()
    weights = engine.copy_weights()
    write_moments = engine.copy_moments()
    copied_s = time.monotonic() - copy_began_s
    with processes.raising_together():
        # The loss of a step is that before its update, so no loss shows the last update yet.
        total = sum(float(tensor.sum(dtype=torch.float64)) for tensor in weights.values())
        check_finite(step, {"sum of the weights": total})
    check_replicas(engine, step)

    num_parts = processes.world_size

    def write_part(folder: Path) -> list[Path]:
        path = save_weights(weights, folder / part_name(processes.rank, num_parts))
        return [path, write_moments(folder / ENGINE_FOLDER)]

    def write_common(folder: Path) -> None:
        (folder / "config.yaml").write_text(run.config_yaml, encoding="utf-8")
        run.shards.tokenizer.save(str(folder / "tokenizer.json"))
        if num_parts > 1:
            write_index(folder, engine.saver_of, num_parts)

    writer.save(CheckpointContent(state, write_common, write_part), save_began_s)
    return SaveTime(waited_s, copied_s)


def current_state(run: PreparedRun, step: int, metrics: Metrics) -> TrainerState:
    """Return what a checkpoint of a step holds besides weights and moments."""
    state = TrainerState(
        step=step,
        tokens=step * run.step_work.tokens,
        data_fingerprint=run.shards.fingerprint,
        metrics_crc32=metrics.last_crc32,
        skipped_batches=list(run.batches.skipped),
    )
    if run.jump_detector:
        state.recent = run.jump_detector.recent
        state.num_skipped = run.jump_detector.num_skipped
    return state
