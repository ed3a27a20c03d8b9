"""Fill a new model: from the newest intact checkpoint, else from `branch_from` or `init_from`.

    a model, a checkpoint or None  ─>  restore  ─>  TrainerState(step=300, …), Engine

Called by start.py, once in each start. The steps:

restore ─> find_origin             the state, weights and moments to begin with
        ─> fill_model              or `source_of_weights`, for an engine that takes them one by one
        ─> build_engine
        ─> load_moments            of the optimizer
        ─> report_start            the log, environment.json
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.checkpoint_files import (
    WEIGHTS,
    StoredWeights,
    check_fit,
    fill,
    load_checkpoint_config,
)
from olmo_sparsity.models.huggingface.computation import check_angles, describe_changes
from olmo_sparsity.models.huggingface.config_of_weights import config_of
from olmo_sparsity.models.huggingface.exchange import import_weights
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.training.engines.choose import build_engine
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.run_folder.environment import add_start
from olmo_sparsity.training.run_folder.folder import Flat, check_same_branch, check_same_run
from olmo_sparsity.training.run_folder.trainer_state import ENGINE_FOLDER, TrainerState
from olmo_sparsity.training.setup.preflight import check_room


class Restored(NamedTuple):
    """A run that can begin or go on."""

    state: TrainerState
    """The state of the checkpoint; that of step 0 for a run that begins."""

    engine: Engine
    """The engine, whose model and optimizer are filled."""


class NamedWeights(NamedTuple):
    """Weights, and what messages call them."""

    tensors: Mapping[str, Tensor]
    name: str


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run goes on from, or the weights of another model with which it begins
    (`init_from`). A run that begins with a new model has neither."""

    state: TrainerState

    checkpoint: Path | None = None
    """A checkpoint of the run or of its trunk, which also holds the state of the optimizer."""

    weights: NamedWeights | None = None
    """The weights to begin with. None: those of a new model."""

    log_line: str = ""
    """Says in the log where the run goes on."""


def restore(
    config: RunConfig,
    settings: Flat,
    model: nn.Module,
    latest: Path | None,
    *,
    meta_weights: Mapping[str, Tensor] | None,
    data_fingerprint: str,
    processes: Processes,
    report: Callable[[str], None],
) -> Restored:
    """Fill the model and build its engine, from a checkpoint if there is one.

    Args:
        settings: The settings of the run as flat keys, with which those of a checkpoint are
            compared.
        latest: The checkpoint to go on from (`choose_checkpoint`); None if there is none.
        meta_weights: The weights of a model on the meta device, which has shapes and no memory; the
            engine loads them one by one. None: the model has memory.
        data_fingerprint: The hash of the text, which a checkpoint must have been trained on.
    """
    # Counted before the engine is built, which may shard the weights.
    num_parameters = count_parameters(model)
    with processes.raising_together():
        origin = find_origin(config, settings, latest, data_fingerprint)
        source = None
        if meta_weights is None:
            fill_model(model, origin)
        else:
            source = source_of_weights(model, origin, meta_weights)
        if processes.is_first:
            scarce_room = check_room(
                Path(config.run_folder),
                config.checkpoint,
                num_parameters,
                origin.state.step,
                config.training.num_steps,
            )
            if scarce_room:
                report(scarce_room)
    engine = build_engine(
        model, config.engine, config.training, config.optimizer, processes, source
    )
    with processes.raising_together():
        load_moments(engine, origin)
    report_start(config, engine, origin, num_parameters, report)
    return Restored(origin.state, engine)


def find_origin(
    config: RunConfig, settings: Flat, latest: Path | None, data_fingerprint: str
) -> Origin:
    """Return what a run goes on from: its checkpoint if there is one, else `init_from`. Raise
    ConfigError if it cannot."""
    if latest is not None:
        state = TrainerState.read(latest)
        check_checkpoint(latest, state, config, settings, data_fingerprint)
        saved_model = load_checkpoint_config(latest).model
        # RoPE may differ from the checkpoint's, in a branch or where a stage begins.
        changes = describe_changes(saved_model, config.at(state.step + 1).model)
        return Origin(
            state,
            checkpoint=latest,
            weights=NamedWeights(StoredWeights(latest / WEIGHTS), name=str(latest / WEIGHTS)),
            log_line=f"resuming from {latest}{changes}",
        )
    state = TrainerState(step=0, tokens=0, data_fingerprint=data_fingerprint)
    if config.init_from is None:
        return Origin(state)
    model = config.at(1).model
    weights = NamedWeights(import_weights(config.init_from, model), name=config.init_from)
    changes = describe_changes(ModelConfig(**config_of(config.init_from)), model)
    return Origin(
        state,
        weights=weights,
        log_line=f"starting from the weights of {config.init_from}{changes}",
    )


def check_checkpoint(
    latest: Path, state: TrainerState, config: RunConfig, settings: Flat, data_fingerprint: str
) -> None:
    """Raise ConfigError or DataError if a run with these settings cannot go on from a checkpoint.

    Args:
        state: The state in the checkpoint.
        settings: The config as flat keys.
        data_fingerprint: The hash of the text of the run.
    """
    # RUN_FOLDER/checkpoints/step000100; that of `branch_from` is in the folder of its trunk.
    is_own = latest.parent.parent == Path(settings["run_folder"])
    if is_own:  # it may still be of another run, put there by hand
        check_same_run(latest, settings)
    else:
        check_same_branch(latest, settings)
        next_model = config.at(state.step + 1).model
        check_angles(load_checkpoint_config(latest).model, next_model, f"branch_from={latest}")
    if state.data_fingerprint != data_fingerprint:
        raise DataError(f"{latest} was trained on other tokens than {settings['data.folder']} has")
    num_steps = settings["training.num_steps"]
    if not is_own and state.step >= num_steps:
        raise ConfigError(
            f"branch_from={latest} has {state.step} steps; raise training.{num_steps=}"
        )


def fill_model(model: nn.Module, origin: Origin) -> None:
    """Give a model that has memory the weights that the run begins with. Those of a new run are
    there since it was built."""
    if origin.weights is not None:
        fill(model, origin.weights.tensors, origin.weights.name)


def source_of_weights(
    model: nn.Module, origin: Origin, meta_weights: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the weights from which the engine takes its parts, for a model without memory. None of
    them is read before, but their names and shapes."""
    if origin.weights is None:
        return meta_weights
    weights = origin.weights
    check_fit(model.state_dict(keep_vars=True), weights.tensors, weights.name)
    return weights.tensors


def load_moments(engine: Engine, origin: Origin) -> None:
    """Load the state of the optimizer from a checkpoint, if the run goes on from one."""
    if origin.checkpoint is not None:
        # Adam corrects its moments for the number of updates, not of steps.
        num_updates = origin.state.step - origin.state.num_skipped
        engine.load_moments(origin.checkpoint / ENGINE_FOLDER, num_updates)


def report_start(
    config: RunConfig,
    engine: Engine,
    origin: Origin,
    num_parameters: int,
    report: Callable[[str], None],
) -> None:
    """Report what is trained and where it goes on, and add this start to environment.json."""
    run_folder = Path(config.run_folder)
    step = origin.state.step
    report(f"{run_folder}: {num_parameters:,} parameters on {engine.device}, {engine.title}")
    if origin.log_line:
        report(origin.log_line)
    if step == config.training.num_steps:
        report(f"{run_folder} is finished: nothing is trained or evaluated again")
    with engine.processes.raising_together():
        if engine.processes.is_first:
            described = engine.describe() | {"name": config.engine.name}
            changed_code = add_start(run_folder, described, engine.device, resumed_at=step)
            if changed_code:
                report(changed_code)
