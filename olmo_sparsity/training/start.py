"""Build all that training needs from a config: data, model, engine, and the step to start from.

    prepare
      ─> open_and_claim    what each process does by itself:
           check_possible     rejects what would fail in the first step, or only at the end
           open_inputs        the text, what hardware and tokenizer determine (setup/resolve.py),
                              evaluation and batches
           claim_run_folder   locks the folder, or finds another run in it (run_folder/folder.py)
      ─> check_devices, check_same, check_shared: do all processes see one config and one disk?
      ─> choose_checkpoint    the one to go on from, if there is one (checkpoints/resume.py)
      ─> restore_model
           build_new_model    a new model, or its shapes alone and where its weights come from
           restore            weights, moments and the first step (restore.py)

    loop.py: config ─> prepare ─> PreparedRun ─> Steps (steps.py)

The given config is not changed: what hardware and tokenizer determine is set in a copy,
`PreparedRun.config`. Other modules receive its sections.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from olmo_sparsity.base.progress import say
from olmo_sparsity.config.run import flatten
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.yaml_files import to_yaml
from olmo_sparsity.data.batches import BatchPlan, TrainingBatches
from olmo_sparsity.data.shard_manifest import SPLITS
from olmo_sparsity.data.shards import TokenShards, open_shards
from olmo_sparsity.data.transform import load_transform
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.models.huggingface.exchange import check_exportable
from olmo_sparsity.training.checkpoints.resume import choose_checkpoint
from olmo_sparsity.training.engines.choose import check_engine
from olmo_sparsity.training.engines.deferred import Deferred, without_drawing
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.estimate.compute import flops_per_token, stated_flops_per_second
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.evaluation.evaluate import Evaluation
from olmo_sparsity.training.optimizer.jump_detector import JumpDetector
from olmo_sparsity.training.processes.device import own_device
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.processes.watchdog import Watchdog
from olmo_sparsity.training.restore import restore
from olmo_sparsity.training.run_folder.attempts import StartCount
from olmo_sparsity.training.run_folder.folder import Flat, open_run_folder
from olmo_sparsity.training.run_folder.gpu_hours import GpuHours
from olmo_sparsity.training.run_folder.skipped_batches import read_skipped_batches
from olmo_sparsity.training.run_folder.trainer_state import TrainerState
from olmo_sparsity.training.setup.corpus_weights import weights_of
from olmo_sparsity.training.setup.epochs import check_epochs, describe_epochs
from olmo_sparsity.training.setup.preflight import check_devices, check_same, check_shared
from olmo_sparsity.training.setup.resolve import resolve

Measures = dict[str, Callable[[int, Mapping[str, Tensor]], dict]]
"""Functions that each evaluation calls with a step and a copy of its weights, by the names of their
results in the metrics."""


@dataclass(frozen=True)
class StepWork:
    """How much a step computes, from which the log gets tokens per second and MFU."""

    tokens: int
    """Tokens of all processes."""

    flops: float
    flops_whole_attention: float
    """FLOPs, if attention is counted as if nothing was masked."""

    stated_flops_per_second: float | None
    """FLOP/s that the vendor states for all devices together; None if they are not known."""


@dataclass(frozen=True)
class PreparedRun:
    """What the loop over steps works with: a run that is ready for its next step."""

    config: RunConfig
    """The config of the user, with what hardware and tokenizer determine filled in."""

    settings: Flat
    """The config as flat keys, with which other starts are compared."""

    config_yaml: str
    """The config as YAML, which each checkpoint holds."""

    step: int
    """Steps done already."""

    jump_detector: JumpDetector | None
    """Finds the steps whose update is skipped; None without `optimizer.skip_sigmas`."""

    shards: TokenShards
    """The training text."""

    evaluation: Evaluation
    batches: TrainingBatches
    engine: Engine
    """The engine, with the model and the state of the optimizer."""

    watchdog: Watchdog
    measures: Measures
    step_work: StepWork

    report: Callable[[str], None]
    """Prints on the first process."""


def prepare(
    config: RunConfig,
    processes: Processes,
    folder_lock: contextlib.ExitStack,
    start_count: StartCount,
    gpu_hours: GpuHours,
) -> PreparedRun:
    """Build all that training needs, on all processes together.

    Args:
        folder_lock: Keeps the run folder locked until it is closed.
        start_count: Counts this start.
        gpu_hours: Counts its time.
    """
    report = say if processes.is_first else lambda message: None
    run_folder = Path(config.run_folder)
    watchdog = Watchdog(run_folder, config.engine, processes, folder_lock.close)
    folder_lock.callback(watchdog.stop)

    # What a process can check by itself comes first: if one finds an error, all end. Collectives
    # follow, in which a process would wait for one that has ended.
    with processes.raising_together():
        inputs = open_and_claim(config, processes, folder_lock, start_count, gpu_hours)
    check_devices(config.training.device, inputs.device, processes)
    check_same(inputs.settings, processes)
    check_shared(run_folder, processes)

    checkpoint = choose_checkpoint(inputs.config, processes)
    state, engine, step_work = restore_model(inputs, checkpoint, processes, report)
    for name, line in describe_epochs(inputs.shards, inputs.epochs).items():
        report(f"{name}: {line}")

    # What goes on from the state of the run: which batches and updates are left out.
    inputs.batches.skipped = skipped_batches(state, run_folder, processes)
    jump_detector = None
    skip_sigmas = config.optimizer.skip_sigmas
    if skip_sigmas is not None:
        jump_detector = JumpDetector(skip_sigmas, state.recent, state.num_skipped)
    return PreparedRun(
        config=inputs.config,
        settings=inputs.settings,
        config_yaml=inputs.config_yaml,
        step=state.step,
        jump_detector=jump_detector,
        shards=inputs.shards,
        evaluation=inputs.evaluation,
        batches=inputs.batches,
        engine=engine,
        watchdog=watchdog,
        measures=inputs.measures,
        step_work=step_work,
        report=report,
    )


def open_and_claim(
    config: RunConfig,
    processes: Processes,
    folder_lock: contextlib.ExitStack,
    start_count: StartCount,
    gpu_hours: GpuHours,
) -> Inputs:
    """Check what this process can check by itself, and open its inputs. The first process locks the
    run folder for all."""
    check_possible(config, processes)
    inputs = open_inputs(config, own_device(config.training.device, processes), processes)
    if processes.is_first:
        claim_run_folder(inputs, folder_lock, start_count, gpu_hours)
    return inputs


def check_possible(config: RunConfig, processes: Processes) -> None:
    """Raise ConfigError for what would fail in the first step, or only at the end."""
    check_engine(config.engine, config.training, processes.world_size)
    if config.checkpoint.export_at_end or config.evaluation.lm_eval:
        check_exportable(config.model)
    if config.model.architecture == "olmo":
        from olmo_sparsity.models.olmo.model import check_supported  # imports all of OLMo

        for first_step in config.training.first_steps:  # RoPE may differ in each stage
            check_supported(config.at(first_step).model)


@dataclass(frozen=True)
class Inputs:
    """Config and text of a run, which each process reads by itself, without waiting for others."""

    config: RunConfig
    """The config, with what hardware and tokenizer determine filled in."""

    settings: Flat
    config_yaml: str
    device: torch.device
    """The device of this process."""

    shards: TokenShards
    batches: TrainingBatches
    evaluation: Evaluation
    measures: Measures

    epochs: dict[str, float]
    """How often the whole run reads each corpus."""


def open_inputs(config: RunConfig, device: torch.device, processes: Processes) -> Inputs:
    """Open the text, resolve the config with it, and build what reads the text: batches and
    evaluations."""
    # Each process hashes its share of the shards.
    share = (processes.rank, processes.world_size)
    shards, heldout = (open_shards(config.data, split, share) for split in SPLITS)
    config = resolve(config, shards, device, Hardware.here(device, processes))
    measures = build_measures(config, heldout, device, processes)
    evaluation = build_evaluation(heldout, config)
    evaluation.check()
    batches = build_batches(shards, config, processes)
    return Inputs(
        config=config,
        settings=flatten(config),
        config_yaml=to_yaml(config),
        device=device,
        shards=shards,
        batches=batches,
        evaluation=evaluation,
        measures=measures,
        epochs=batches.order.count_reads(config.training.num_steps),
    )


def build_measures(
    config: RunConfig, heldout: TokenShards, device: torch.device, processes: Processes
) -> Measures:
    """Return the functions that measure a copy of the weights in each evaluation."""
    if not config.evaluation.lm_eval:
        return {}
    from olmo_sparsity.training.evaluation.lm_eval_tasks import Tasks  # imports lm_eval, an extra

    return {"lm_eval": Tasks(config, heldout.tokenizer, device, processes)}


def build_evaluation(heldout: TokenShards, config: RunConfig) -> Evaluation:
    """Return the evaluation that the config describes."""
    return Evaluation(
        heldout,
        config.evaluation,
        trained_length=config.training.length,
        reached_length=config.largest_length,
        mask_documents=config.data.mask_documents,
        per_document=config.positions.per_document,
        weights=config.data.weights,
    )


def build_batches(shards: TokenShards, config: RunConfig, processes: Processes) -> TrainingBatches:
    """Return the batches of this process, by step."""
    plan = BatchPlan(
        config.positions,
        length=config.training.length,
        batch_size=config.training.batch_size,
        seed=config.seed,
        length_at=config.training.length_at,
        positions_at=lambda step: config.at(step).positions,
        transform=load_transform(config.data, shards.tokenizer, config.training.shortest_length),
        mask_documents=config.data.mask_documents,
        order=config.data.order,
        weights=weights_of(config),
    )
    return TrainingBatches(shards, plan, processes.rank, processes.world_size)


def claim_run_folder(
    inputs: Inputs, folder_lock: contextlib.ExitStack, start_count: StartCount, gpu_hours: GpuHours
) -> None:
    """Lock the run folder until `folder_lock` is closed, and count this start. The first process
    does so for all."""
    config = inputs.config
    run_folder = Path(config.run_folder)
    # A run that has begun goes on, however often it reads its text.
    if not list_checkpoints(run_folder):
        check_epochs(config, inputs.epochs)
    folder_lock.enter_context(open_run_folder(run_folder, inputs.settings, inputs.config_yaml))
    # Counted before the model is built: a start that hangs or is killed from here on counts as one
    # that died.
    start_count.begin(config.checkpoint.max_starts)
    folder_lock.enter_context(gpu_hours.keep_stored())


class RestoredModel(NamedTuple):
    """The model of a run, as its checkpoint has it, or new."""

    state: TrainerState
    engine: Engine
    step_work: StepWork


def restore_model(
    inputs: Inputs, checkpoint: Path | None, processes: Processes, report: Callable[[str], None]
) -> RestoredModel:
    """Build the model and its engine, and fill them from the checkpoint to go on from, if there is
    one."""
    config = inputs.config
    with processes.raising_together():
        # The first weights are those of the seed, whatever was drawn before.
        torch.manual_seed(config.seed)
        new_model = build_new_model(config, is_filled=checkpoint is not None)
    state, engine = restore(
        config,
        inputs.settings,
        new_model.model,
        checkpoint,
        meta_weights=new_model.meta_weights,
        data_fingerprint=inputs.shards.fingerprint,
        processes=processes,
        report=report,
    )
    step_work = count_step_work(new_model.model, config, inputs.device, processes)
    return RestoredModel(state, engine, step_work)


class NewModel(NamedTuple):
    """A model as a run begins with it."""

    model: nn.Module
    meta_weights: Deferred | None
    """If the model has shapes and no memory: makes its weights one at a time. Else None."""


def build_new_model(config: RunConfig, is_filled: bool) -> NewModel:
    """Return a new model. Engines that shard get one without memory, as it may not fit into a
    process as a whole. If it `is_filled` from a checkpoint, no random weights are drawn."""
    # A model of transformers is tried when it is built, for which it needs its weights.
    if config.model.architecture != "olmo":
        return NewModel(build_model(config.model), meta_weights=None)

    def build() -> nn.Module:
        with without_drawing() if is_filled else contextlib.nullcontext():
            return build_model(config.model)

    is_sharded = config.engine.name == "fsdp" or config.engine.name.startswith("zero")
    if not is_sharded:
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
    model: nn.Module, config: RunConfig, device: torch.device, processes: Processes
) -> StepWork:
    """Return how much a step of all processes computes."""
    length = config.training.length
    num_tokens = config.training.batch_size * length
    flops = flops_per_token(model, config.model, length)
    flops_whole_attention = flops_per_token(model, config.model, length, whole_attention=True)
    flops_of_device = stated_flops_per_second(device)
    flops_of_all = None if flops_of_device is None else flops_of_device * processes.world_size
    return StepWork(
        tokens=num_tokens,
        flops=num_tokens * flops,
        flops_whole_attention=num_tokens * flops_whole_attention,
        stated_flops_per_second=flops_of_all,
    )
