"""Build all that training needs from a config: data, model, engine, and the step to start from.

    prepare
      ─> open_and_claim    what each process does by itself:
           check_possible     rejects what would fail in the first step, or only at the end
           open_inputs        the complete config, batches and evaluation (setup/inputs.py)
           claim_run_folder   locks the folder, or finds another run in it (run_folder/folder.py)
      ─> check_devices, check_same, check_shared: do all processes see one config, one version of
           the code and one disk?
      ─> choose_checkpoint    the one to go on from, if there is one (checkpoints/resume.py)
      ─> restore_model
           build_new_model    a new model, or its shapes alone and where its weights come from
           restore            weights, moments and the first step (restore.py)

    loop.py: config, Start ─> prepare ─> PreparedRun (prepared_run.py) ─> Steps (steps.py)

The given config is not changed: what hardware and tokenizer determine is set in a copy,
`PreparedRun.config`. Other modules receive its sections.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.checkpoints.resume import choose_checkpoint
from olmo_sparsity.training.engines.deferred import Deferred, without_drawing
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.estimate.compute import flops_per_token, stated_flops_per_second
from olmo_sparsity.training.optimizer.jump_detector import JumpDetector
from olmo_sparsity.training.prepared_run import PreparedRun, Start, StepWork
from olmo_sparsity.training.processes.device import own_device
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.processes.watchdog import Watchdog
from olmo_sparsity.training.restore import restore
from olmo_sparsity.training.run_folder.folder import open_run_folder
from olmo_sparsity.training.run_folder.skipped_batches import read_skipped_batches
from olmo_sparsity.training.run_folder.trainer_state import TrainerState
from olmo_sparsity.training.setup.epochs import check_epochs, describe_epochs
from olmo_sparsity.training.setup.inputs import Inputs, check_possible, open_inputs
from olmo_sparsity.training.setup.preflight import check_devices, check_same, check_shared


def prepare(config: RunConfig, start: Start) -> PreparedRun:
    """Build all that training needs, on all processes together."""
    processes = start.processes
    run_folder = Path(config.run_folder)
    watchdog = Watchdog(run_folder, config.engine, processes, start.cleanup.close)
    start.cleanup.callback(watchdog.stop)

    # What a process can check by itself comes first: if one finds an error, all end. Collectives
    # follow, in which a process would wait for one that has ended.
    with processes.raising_together():
        inputs = open_and_claim(config, start)
    check_devices(config.training.device, inputs.device, processes)
    check_same(inputs.settings, processes)
    check_shared(run_folder, processes)

    checkpoint = choose_checkpoint(inputs.config, processes)
    state, engine, step_work = restore_model(inputs, checkpoint, start)
    for name, line in describe_epochs(inputs.shards, inputs.epochs).items():
        start.report(f"{name}: {line}")

    # What goes on from the state of the run: which batches and updates are left out.
    inputs.batches.skipped = skipped_batches(state, run_folder, processes)
    jump_detector = None
    skip_sigmas = config.optimizer.skip_sigmas
    if skip_sigmas is not None:
        jump_detector = JumpDetector(skip_sigmas, state.recent, state.num_skipped)
    return PreparedRun(
        start=start,
        config=inputs.config,
        settings=inputs.settings,
        config_yaml=inputs.config_yaml,
        step=state.step,
        jump_detector=jump_detector,
        shards=inputs.shards,
        batches=inputs.batches,
        engine=engine,
        evaluation=inputs.evaluation,
        measures=inputs.measures,
        watchdog=watchdog,
        step_work=step_work,
    )


def open_and_claim(config: RunConfig, start: Start) -> Inputs:
    """Check what this process can check by itself, and open its inputs. The first process locks the
    run folder for all."""
    processes = start.processes
    check_possible(config, processes)
    inputs = open_inputs(config, own_device(config.training.device, processes), processes)
    if processes.is_first:
        claim_run_folder(inputs, start)
    return inputs


def claim_run_folder(inputs: Inputs, start: Start) -> None:
    """Lock the run folder until this start ends, and count the start. The first process does so for
    all."""
    config = inputs.config
    run_folder = Path(config.run_folder)
    # A run that has begun goes on, however often it reads its text.
    if not list_checkpoints(run_folder):
        check_epochs(config, inputs.epochs)
    lock = open_run_folder(run_folder, inputs.settings, inputs.config_yaml)
    start.cleanup.enter_context(lock)
    # Counted before the model is built: a start that hangs or is killed from here on counts as one
    # that died.
    start.count.begin(config.checkpoint.max_starts)
    start.cleanup.enter_context(start.gpu_hours.keep_stored())


class RestoredModel(NamedTuple):
    """The model of a run, as its checkpoint has it, or new."""

    state: TrainerState
    engine: Engine
    step_work: StepWork


def restore_model(inputs: Inputs, checkpoint: Path | None, start: Start) -> RestoredModel:
    """Build the model and its engine, and fill them from the checkpoint to go on from, if there is
    one."""
    config = inputs.config
    with start.processes.raising_together():
        # The first weights are those of the seed, whatever was drawn before.
        torch.manual_seed(config.seed)
        is_filled = checkpoint is not None or config.init_from is not None
        new_model = build_new_model(config, is_filled)
    state, engine = restore(
        config,
        inputs.settings,
        new_model.model,
        checkpoint,
        meta_weights=new_model.meta_weights,
        data_fingerprint=inputs.shards.fingerprint,
        processes=start.processes,
        report=start.report,
    )
    num_processes = start.processes.world_size
    step_work = count_step_work(new_model.model, config, inputs.device, num_processes)
    return RestoredModel(state, engine, step_work)


class NewModel(NamedTuple):
    """A model as a run begins with it."""

    model: nn.Module
    meta_weights: Deferred | None
    """If the model has shapes and no memory: makes its weights one at a time. Else None."""


def build_new_model(config: RunConfig, is_filled: bool) -> NewModel:
    """Return a new model. Engines that shard get one without memory, as it may not fit into a
    process as a whole. If it `is_filled`, from a checkpoint or `init_from`, no random weights are
    drawn. Later random numbers do not depend on that: each step begins with a seed of its own."""
    # A model of transformers is tried when it is built, for which it needs its weights.
    if config.model.architecture != "olmo":
        return NewModel(build_model(config.model), meta_weights=None)

    def build() -> nn.Module:
        with without_drawing() if is_filled else contextlib.nullcontext():
            return build_model(config.model)

    is_built_in_parts = config.engine.name == "fsdp" or config.engine.name.startswith("zero")
    if not is_built_in_parts:
        return NewModel(build(), meta_weights=None)
    source = Deferred(build)
    return NewModel(source.model, source)


def skipped_batches(state: TrainerState, run_folder: Path, processes: Processes) -> list[int]:
    """Return the numbers of the batches that a run leaves out: those that its checkpoint knows, and
    those that were noted in the run folder since."""
    with processes.raising_together():
        noted = read_skipped_batches(run_folder) if processes.is_first else []
    return sorted({*state.skipped_batches, *processes.gather(noted)[0]})


def count_step_work(
    model: nn.Module, config: RunConfig, device: torch.device, num_processes: int
) -> StepWork:
    """Return how much a step of all processes computes."""
    length = config.training.length
    num_tokens = config.training.batch_size * length
    flops = flops_per_token(model, config.model, length)
    flops_whole_attention = flops_per_token(model, config.model, length, whole_attention=True)
    flops_of_device = stated_flops_per_second(device)
    flops_of_all = None if flops_of_device is None else flops_of_device * num_processes
    return StepWork(
        tokens=num_tokens,
        flops=num_tokens * flops,
        flops_whole_attention=num_tokens * flops_whole_attention,
        stated_flops_per_second=flops_of_all,
    )
