"""Fill a new model: from the newest intact checkpoint, else from `branch_from` or `init_from`.

choose_checkpoint ─> find_origin: state, weights, moments ─> restore: model, engine, first step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from olmo_sparsity.base.errors import ConfigError, DataError, UnreadableNowError
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import CheckpointConfig, RunConfig
from olmo_sparsity.models.checkpoint_files import (
    WEIGHTS,
    StoredWeights,
    check_fit,
    fill,
    load_checkpoint_config,
)
from olmo_sparsity.models.exchange import (
    check_angles,
    config_of,
    describe_changes,
    import_weights,
)
from olmo_sparsity.models.transformers_folder import count_parameters
from olmo_sparsity.training import checkpoint
from olmo_sparsity.training.checkpoint import ENGINE_FOLDER, TrainerState
from olmo_sparsity.training.choose_engine import build_engine
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.training.metrics import read_metrics
from olmo_sparsity.training.preflight import check_room
from olmo_sparsity.training.run_folder import (
    Flat,
    check_same_branch,
    check_same_run,
    describe_environment,
)


@dataclass(frozen=True)
class Origin:
    """What a run goes on from, or begins with: a checkpoint, the weights of another model
    (`init_from`), or a new model, which has neither."""

    state: TrainerState

    checkpoint: Path | None = None
    """A checkpoint of the run or of its trunk, which also holds the state of the optimizer."""

    weights: Mapping[str, Tensor] | None = None
    """The weights to begin with. None: those of a new model."""

    name_of_weights: str = ""
    """Names the weights in messages."""

    log_line: str = ""
    """Says in the log where the run goes on."""


def restore(
    config: RunConfig,
    settings: Flat,
    model: nn.Module,
    *,
    meta_weights: Mapping[str, Tensor] | None,
    data_fingerprint: str,
    processes: Processes,
    report: Callable[[str], None],
) -> tuple[TrainerState, Engine]:
    """Fill the model and build its engine, from a checkpoint if there is one; return the state of
    the run, too. `meta_weights`: the weights of a model on the meta device, which has shapes and no
    memory; the engine loads them one by one. None: the model has memory."""
    run_folder = Path(config.run_folder)
    num_parameters = count_parameters(model)
    num_steps = config.training.num_steps
    latest = choose_checkpoint(config, processes)
    with processes.agree():
        origin = find_origin(config, settings, latest, data_fingerprint)
        if origin.weights is not None and meta_weights is None:
            fill(model, origin.weights, origin.name_of_weights)
        elif origin.weights is not None:
            # The model has no memory to fill. The engine takes these weights when it shards them.
            check_fit(model.state_dict(keep_vars=True), origin.weights, origin.name_of_weights)
            meta_weights = origin.weights
        state = origin.state
        if processes.is_first:
            check_room(run_folder, config.checkpoint, num_parameters, state.step, num_steps)
    sections = config.engine, config.training, config.optimizer
    engine = build_engine(model, *sections, processes, meta_weights)
    if origin.checkpoint is not None:
        with processes.agree():
            # Adam corrects its moments for the number of updates, not of steps.
            num_updates = state.step - state.num_skipped
            engine.load_moments(origin.checkpoint / ENGINE_FOLDER, num_updates)
    report(f"{run_folder}: {num_parameters:,} parameters on {engine.device}, {engine.title}")
    if origin.log_line:
        report(origin.log_line)
    if state.step == num_steps:
        report(f"{run_folder} is finished: nothing is trained or evaluated again")
    with processes.agree():
        if processes.is_first:
            described = engine.describe() | {"name": config.engine.name}
            describe_environment(run_folder, described, engine.device, resumed_at=state.step)
    return state, engine


def choose_checkpoint(config: RunConfig, processes: Processes) -> Path | None:
    """Return the checkpoint to go on from, of the run or of `branch_from`, on all processes the
    same; None for a run that begins."""
    latest = None
    with processes.agree():
        if processes.is_first:
            run_folder = Path(config.run_folder)
            latest = find_checkpoint(run_folder, config.checkpoint, config.start_over)
            if latest is None and config.branch_from is not None:
                latest = checkpoint.branch_point(config.branch_from)
    return processes.gather(latest)[0]


def find_origin(
    config: RunConfig, settings: Flat, latest: Path | None, data_fingerprint: str
) -> Origin:
    """Return what a run goes on from: its checkpoint if there is one, else `init_from`. Raise
    ConfigError if it cannot."""
    if latest is not None:
        state = check_checkpoint(latest, config, settings, data_fingerprint)
        saved_model = load_checkpoint_config(latest).model
        changes = describe_changes(saved_model, config.at(state.step + 1).model)
        return Origin(
            state,
            checkpoint=latest,
            weights=StoredWeights(latest / WEIGHTS),
            name_of_weights=str(latest / WEIGHTS),
            log_line=f"resuming from {latest}{changes}",
        )
    state = TrainerState(step=0, tokens=0, data_fingerprint=data_fingerprint)
    if config.init_from is None:
        return Origin(state)
    model = config.at(1).model
    weights = import_weights(config.init_from, model)
    changes = describe_changes(ModelConfig(**config_of(config.init_from)), model)
    return Origin(
        state,
        weights=weights,
        name_of_weights=config.init_from,
        log_line=f"starting from the weights of {config.init_from}{changes}",
    )


def find_checkpoint(run_folder: Path, saving: CheckpointConfig, start_over: bool) -> Path | None:
    """Return the checkpoint to resume; None for a run that begins. With `start_over` a run whose
    checkpoints are damaged or gone begins, too, and what is left of them is set aside."""
    logged = max((row["step"] for row in read_metrics(run_folder / "metrics.jsonl")), default=0)
    try:
        latest = checkpoint.resume_point(run_folder, say)
        # A save may be under way when a run dies. The next one begins only when it is on the disk,
        # so that after two intervals one checkpoint at least must be there.
        if latest is None and saving.interval_steps and logged > 2 * saving.interval_steps:
            gone = f"{run_folder} has logged {logged} steps, and no checkpoint is there now"
            raise DataError(f"{gone}; {checkpoint.RESTORE}")
    except UnreadableNowError:
        # A disk error that passes must not start the run over: `start_over` may stand in a script.
        raise
    except DataError as error:
        if not start_over:
            raise
        set_aside_to = checkpoint.set_aside(run_folder)
        say(f"{error.problem}: beginning at step 0; what is left is in {set_aside_to}")
        return None
    if latest is None and logged:
        say(f"{run_folder} has logged {logged} steps and saved none: beginning again at step 0")
    return latest


def check_checkpoint(
    latest: Path, config: RunConfig, settings: Flat, data_fingerprint: str
) -> TrainerState:
    """Check that a run with these settings can go on from a checkpoint; return its state."""
    is_own = latest.parent.parent == Path(settings["run_folder"])
    state = TrainerState.read(latest)
    if is_own:  # It may still be of another run, put there by hand.
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
    return state
