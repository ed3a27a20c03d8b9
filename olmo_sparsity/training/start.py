"""Build all that training needs from a config: data, model, engine, and the step to start from.

The given config is not changed: what hardware and tokenizer determine is set in a copy,
`Start.config`. Other modules receive its sections."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from olmo_sparsity.base.errors import ConfigError, DataError, UnreadableNowError
from olmo_sparsity.base.manifest import MANIFEST
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.rules import check_model
from olmo_sparsity.config.run import flatten, load_saved_config
from olmo_sparsity.config.sections import (
    CheckpointConfig,
    EarlierWeights,
    RunConfig,
    StageConfig,
)
from olmo_sparsity.config.yaml_files import to_yaml
from olmo_sparsity.data.batches import BatchPlan, TrainingBatches, batch_of_step
from olmo_sparsity.data.mixture import Weights, find_order
from olmo_sparsity.data.order import choose_order
from olmo_sparsity.data.shards import SPLITS, TokenShards, open_shards
from olmo_sparsity.data.tokenizer import load_tokenizer
from olmo_sparsity.data.tokens import refuse_other_settings
from olmo_sparsity.data.transform import load_transform, with_fingerprint
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.checkpoint_files import (
    WEIGHTS,
    StoredWeights,
    check_fit,
    fill,
    list_checkpoints,
    load_checkpoint_config,
)
from olmo_sparsity.models.exchange import (
    check_angles,
    check_exportable,
    config_of,
    describe_changes,
    import_weights,
)
from olmo_sparsity.models.transformers_folder import count_parameters
from olmo_sparsity.text.vocabulary import count_vocabulary
from olmo_sparsity.training import checkpoint
from olmo_sparsity.training.attempts import StartCount
from olmo_sparsity.training.checkpoint import ENGINE_FOLDER, TrainerState
from olmo_sparsity.training.choose_engine import build_engine, check_engine
from olmo_sparsity.training.deferred import Deferred
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.engine import Engine, choose_precision, own_device
from olmo_sparsity.training.estimate.compute import flops_per_token, stated_flops
from olmo_sparsity.training.estimate.device_memory import fitting_micro_batch_size
from olmo_sparsity.training.estimate.fit import check_fits
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.report import estimate
from olmo_sparsity.training.evaluate import Evaluation
from olmo_sparsity.training.metric_writers import check_metric_writers
from olmo_sparsity.training.optim import Jumps
from olmo_sparsity.training.preflight import check_devices, check_room, check_same, check_shared
from olmo_sparsity.training.run_folder import (
    Flat,
    describe_environment,
    open_run_folder,
    read_metrics,
    read_skipped_batches,
    refuse_other_branch,
    refuse_other_config,
)
from olmo_sparsity.training.watchdog import Watchdog

Measures = dict[str, Callable[[int, Mapping[str, Tensor]], dict]]
"""What each evaluation measures of a step and a copy of its weights, by its name in the metrics."""


@dataclass(frozen=True)
class Start:
    config: RunConfig
    """Resolved."""

    settings: Flat
    text: str
    """The config as YAML."""

    step: int
    """Steps done already."""

    jumps: Jumps | None

    shards: TokenShards
    evaluation: Evaluation
    batches: TrainingBatches
    engine: Engine
    watchdog: Watchdog

    measures: Measures

    tokens_per_step: int
    flops_per_step: float
    whole_flops_per_step: float
    """The share of the peak if attention is counted as if nothing was masked."""

    stated_flops: float
    """FLOP/s that the vendor states for all devices; 0 if unknown."""

    report: Callable[[str], None]
    """Prints on the first process."""


def prepare(
    config: RunConfig, processes: Processes, held: contextlib.ExitStack, count: StartCount
) -> Start:
    """Build all that training needs, on all processes together. `held` keeps the run folder locked
    until it is closed. `count` counts this start."""
    report = say if processes.is_first else lambda message: None
    run_folder = Path(config.run_folder)
    watchdog = Watchdog(run_folder, config.engine, processes, held.close)
    held.callback(watchdog.stop)
    with processes.agree():
        refuse_impossible(config, processes)
        device = own_device(config.training.device, processes)
        # Each process hashes its share of the shards.
        share = (processes.rank, processes.world_size)
        shards, heldout = (open_shards(config.data, split, share) for split in SPLITS)
        config = resolve(config, shards, device, Hardware.here(device, processes))
        measures = build_measures(config, heldout, device, processes)
        evaluation = build_evaluation(heldout, config)
        evaluation.check()
        settings = flatten(config)
        text = to_yaml(config)
        batches = build_batches(shards, config, processes)
        epochs = batches.order.count_reads(config.training.num_steps)
        if processes.is_first:
            # A run that has begun goes on, however often it reads its text.
            if not list_checkpoints(run_folder):
                refuse_repeated_text(config, epochs)
            held.enter_context(open_run_folder(run_folder, settings, text))
            # Before anything heavy: a start that hangs or is killed from here on is one that died.
            count.begin(config.checkpoint.max_starts)
        torch.manual_seed(config.seed)
        model, source = build_weights(config)
    check_devices(config.training.device, device, processes)
    check_same(settings, processes)
    check_shared(run_folder, processes)
    state, engine = restore(
        config,
        settings,
        model,
        source=source,
        data_fingerprint=shards.fingerprint,
        processes=processes,
        report=report,
    )
    for name, line in describe_epochs(shards, epochs).items():
        report(f"{name}: {line}")
    batches.skipped = skipped_batches(state, run_folder, processes)
    sigmas = config.optimizer.skip_sigmas
    length = config.training.length
    tokens_per_step = config.training.batch_size * length
    flops = flops_per_token(model, config.model, length)
    whole_flops = flops_per_token(model, config.model, length, whole_attention=True)
    return Start(
        config=config,
        settings=settings,
        text=text,
        step=state.step,
        jumps=None if sigmas is None else Jumps(sigmas, state.recent, state.num_skipped),
        shards=shards,
        evaluation=evaluation,
        batches=batches,
        engine=engine,
        watchdog=watchdog,
        measures=measures,
        tokens_per_step=tokens_per_step,
        flops_per_step=tokens_per_step * flops,
        whole_flops_per_step=tokens_per_step * whole_flops,
        stated_flops=stated_flops(device) * processes.world_size,
        report=report,
    )


def skipped_batches(state: TrainerState, run_folder: Path, processes: Processes) -> list[int]:
    """Return the numbers of the batches that a run leaves out: those that its checkpoint knows, and
    those that were noted in the run folder since."""
    with processes.agree():
        noted = read_skipped_batches(run_folder) if processes.is_first else []
    return sorted({*state.skipped_batches, *processes.gather(noted)[0]})


def refuse_impossible(config: RunConfig, processes: Processes) -> None:
    """Raise ConfigError for what would fail in the first step, or only at the end."""
    check_engine(config.engine, config.training, processes.world_size)
    if config.checkpoint.export_at_end or config.evaluation.lm_eval:
        check_exportable(config.model)
    if config.model.architecture == "olmo":
        from olmo_sparsity.models.olmo import check_supported  # imports all of OLMo

        for first_step in config.training.first_steps:  # RoPE may differ in each stage
            check_supported(config.at(first_step).model)


def build_measures(
    config: RunConfig, heldout: TokenShards, device: torch.device, processes: Processes
) -> Measures:
    """Return what each evaluation measures on a copy of the weights, by its name in the metrics."""
    if not config.evaluation.lm_eval:
        return {}
    from olmo_sparsity.training.lm_eval_tasks import Tasks  # imports lm_eval, an extra

    return {"lm_eval": Tasks(config, heldout.tokenizer, device, processes)}


def build_weights(config: RunConfig) -> tuple[nn.Module, Deferred | None]:
    """Return a new model. Engines that shard get one without memory, and what makes its weights one
    at a time."""
    is_sharded = config.engine.name == "fsdp" or config.engine.name.startswith("zero")
    # A model of transformers is tried when it is built, for which it needs its weights.
    if is_sharded and config.model.architecture == "olmo":
        source = Deferred(partial(build_model, config.model))
        return source.model, source
    return build_model(config.model), None


def build_evaluation(heldout: TokenShards, config: RunConfig) -> Evaluation:
    """Return the evaluation that the config describes."""
    return Evaluation(
        heldout,
        config.evaluation,
        trained=config.training.length,
        reached=config.largest_length,
        mask_documents=config.data.mask_documents,
        per_document=config.positions.per_document,
        weights=config.data.weights,
    )


def weights_of(config: RunConfig) -> list[Weights]:
    """Return the weights of several corpora in each stage; empty for a single corpus. They change
    by number of batch, which is the step where no batch is left out."""
    if not config.data.corpora:
        return []
    num_earlier = 0
    stretches = []
    for earlier in config.training.earlier_weights:  # before a branch
        stretches.append(Weights(earlier.weights, earlier.until))
        num_earlier = earlier.until
    for stage in config.training.lengths or [StageConfig()]:
        if stage.until is None or stage.until > num_earlier:
            stretches.append(Weights(stage.weights or config.data.weights, stage.until))
    return stretches


def earlier_weights(config: RunConfig) -> list[EarlierWeights]:
    """Return the weights by which several corpora were read before a branch, up to its checkpoint.
    Raise ConfigError for a branch with other corpora."""
    if config.branch_from is None or not config.data.corpora:
        return []
    own_config = Path(config.run_folder) / "config.yaml"
    if own_config.exists() and list_checkpoints(config.run_folder):
        # The branch goes on by itself, also when its trunk is deleted.
        return load_saved_config(own_config).training.earlier_weights
    origin = Path(config.branch_from)
    if not (origin / MANIFEST).is_file():
        return []  # is refused when the checkpoint is read
    trunk = load_saved_config(origin / "config.yaml")
    names = list(config.data.weights)
    names_of_trunk = list(trunk.data.weights)
    if names != names_of_trunk:
        raise ConfigError(
            f"branch_from={origin} reads the corpora {names_of_trunk}, this run {names}; list the "
            "same ones (a weight may be 0), or take the weights of the model with init_from"
        )
    state = TrainerState.read(origin)
    num_read = batch_of_step(state.step, state.skipped_batches)
    earlier = []
    for stretch in weights_of(trunk):
        until = num_read if stretch.until is None else min(stretch.until, num_read)
        earlier.append(EarlierWeights(until, dict(stretch.of)))
        if until == num_read:
            break
    return earlier


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


# --- the first step: of the newest intact checkpoint, else of branch_from or init_from ------------


@dataclass(frozen=True)
class Origin:
    """What a run goes on from, or begins with."""

    state: TrainerState

    checkpoint: Path | None = None
    """A checkpoint of the run or of its trunk, which also holds the state of the optimizer."""

    weights: Mapping[str, Tensor] | None = None
    """None: of a new model."""

    title: str = ""
    """Names the weights in messages."""

    line: str = ""
    """Says in the log where the run goes on."""


def restore(
    config: RunConfig,
    settings: Flat,
    model: nn.Module,
    *,
    source: Mapping[str, Tensor] | None,
    data_fingerprint: str,
    processes: Processes,
    report: Callable[[str], None],
) -> tuple[TrainerState, Engine]:
    """Fill the model and build its engine, from a checkpoint if there is one; return the state of
    the run, too. `source`: the weights of a model without memory."""
    run_folder = Path(config.run_folder)
    num_parameters = count_parameters(model)
    num_steps = config.training.num_steps
    latest = choose_checkpoint(config, processes)
    with processes.agree():
        origin = find_origin(config, settings, latest, data_fingerprint)
        if origin.weights is not None and source is None:
            fill(model, origin.weights, origin.title)
        elif origin.weights is not None:
            check_fit(model.state_dict(keep_vars=True), origin.weights, origin.title)
            source = origin.weights
        state = origin.state
        if processes.is_first:
            check_room(run_folder, config.checkpoint, num_parameters, state.step, num_steps)
    sections = config.engine, config.training, config.optimizer
    engine = build_engine(model, *sections, processes, source)
    if origin.checkpoint is not None:
        with processes.agree():
            num_updates = state.step - state.num_skipped
            engine.load_moments(origin.checkpoint / ENGINE_FOLDER, num_updates)
    report(f"{run_folder}: {num_parameters:,} parameters on {engine.device}, {engine.title}")
    if origin.line:
        report(origin.line)
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
            title=str(latest / WEIGHTS),
            line=f"resuming from {latest}{changes}",
        )
    state = TrainerState(0, 0, data_fingerprint)
    if config.init_from is None:
        return Origin(state)
    model = config.at(1).model
    weights = import_weights(config.init_from, model)
    changes = describe_changes(ModelConfig(**config_of(config.init_from)), model)
    return Origin(
        state,
        weights=weights,
        title=config.init_from,
        line=f"starting from the weights of {config.init_from}{changes}",
    )


def find_checkpoint(run_folder: Path, kept: CheckpointConfig, start_over: bool) -> Path | None:
    """Return the checkpoint to resume; None for a run that begins, also because `start_over` lets
    one begin whose checkpoints are damaged or gone."""
    logged = max((row["step"] for row in read_metrics(run_folder / "metrics.jsonl")), default=0)
    try:
        latest = checkpoint.resume_point(run_folder, say)
        # The second checkpoint is not begun before the first is on the disk.
        if latest is None and kept.interval_steps and logged > 2 * kept.interval_steps:
            gone = f"{run_folder} has logged {logged} steps, and no checkpoint is there now"
            raise DataError(f"{gone}; {checkpoint.RESTORE}")
    except UnreadableNowError:  # may be gone in an hour, and the flag still in a script
        raise
    except DataError as error:
        if not start_over:
            raise
        kept_in = checkpoint.set_aside(run_folder)
        say(f"{str(error).partition(';')[0]}: beginning at step 0; what is left is in {kept_in}")
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
    if is_own:  # may have been put there by hand
        refuse_other_config(latest, settings)
    else:
        refuse_other_branch(latest, settings)
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


# --- how often the text is read -------------------------------------------------------------------


def open_prepared(config: RunConfig) -> TokenShards | None:
    """Return the shards of the text, unverified; None if it is not prepared."""
    try:
        return open_shards(config.data, "train", None)
    except DataError:
        return None


def count_epochs(config: RunConfig, shards: TokenShards) -> dict[str, float]:
    """Return how often a run reads each corpus; the name of a single one is empty. Sequences that
    `data.transform` replaces count, too: what it leaves of the text is not known here."""
    order = find_order(
        shards,
        length=config.training.length,
        batch_size=config.training.batch_size,
        seed=config.seed,
        order=config.data.order,
        weights=weights_of(config),
    )
    return order.count_reads(config.training.num_steps)


def describe_epochs(shards: TokenShards, epochs: Mapping[str, float]) -> dict[str, str]:
    """Return a line for the text, or for each of several corpora, by its title."""
    lines = {}
    for name, times in epochs.items():
        num_tokens = (shards.corpora[name] if name else shards).num_tokens
        title = f"text {name}" if name else "text"
        lines[title] = f"{num_tokens:,} tokens, read {times:,.3g} times in the whole run"
    return lines


def refuse_repeated_text(config: RunConfig, epochs: Mapping[str, float]) -> None:
    """Raise ConfigError if a run reads a text more often than `training.max_epochs`."""
    training = config.training
    for name, times in epochs.items():
        if times > training.max_epochs:
            text = f"the corpus {name}" if name else "the text"
            most = math.ceil(max(epochs.values()))
            raise ConfigError(
                f"training.num_steps={training.num_steps} reads {text} {times:,.3g} times, above "
                f"training.max_epochs={training.max_epochs:g}; prepare more, lower it, or pass "
                f"--training.max_epochs={most}"
            )


# --- what hardware and tokenizer determine --------------------------------------------------------


def resolve(
    config: RunConfig, shards: TokenShards, device: torch.device, hardware: Hardware
) -> RunConfig:
    """Return a copy with the fields set that hardware and tokenizer determine. Raise ConfigError
    for what does not fit the shards."""
    refuse_other_settings(config.data)
    model = with_vocabulary(config.model, shards.vocab_size)
    if model.vocab_size < shards.vocab_size:
        raise ConfigError(f"{model.vocab_size=} must be 0 or at least {shards.vocab_size}")
    check_model(model, "config")  # the embedding may be too small for the vocabulary
    model = replace(model, eos_token_id=shards.eos_id, pad_token_id=shards.eos_id)
    corpora = shards.corpora.values() or [shards]
    num_sequences = max(corpus.count_sequences(config.training.length) for corpus in corpora)
    order = choose_order(config.data.order, num_sequences)
    data = replace(with_fingerprint(config.data), order=order)
    earlier = earlier_weights(config)
    if config.training.earlier_weights not in ([], earlier):
        raise ConfigError(
            "training.earlier_weights is set, but follows from branch_from; leave it out"
        )
    training = replace(config.training, earlier_weights=earlier)
    config = replace(config, model=model, data=data, training=training)
    return for_hardware(config, device, hardware)


def for_hardware(config: RunConfig, device: torch.device, hardware: Hardware) -> RunConfig:
    """Return a copy with the precision and the micro-batches of this hardware."""
    training = config.training
    training = replace(training, precision=choose_precision(training.precision, device))
    config = replace(config, training=training)
    if training.micro_batch_size is not None:
        training.micro_batch_size = fitting_micro_batch_size(config, hardware)
    return config


def with_vocabulary(model: ModelConfig, size: int) -> ModelConfig:
    """Return a copy that takes the tokenizer's size where none is set."""
    if model.vocab_size != 0:
        return replace(model)
    # Rounded up to a multiple of 128, for fast matrix products.
    rows = model.embedding_size or -(-size // 128) * 128
    return replace(model, vocab_size=size, embedding_size=rows)


def dry_run(config: RunConfig, hardware: Hardware | None = None) -> None:
    """Print the resolved config, and the cost of the run on this hardware, by default one process
    here."""
    config, assumed_hardware, lines = cost_of(config, hardware)
    print(to_yaml(config))
    for name, value in lines.items():
        print(f"# {name}: {value}")
    check_run(config, None if hardware is None else assumed_hardware)


def check_run(config: RunConfig, hardware: Hardware | None) -> None:
    """Raise ConfigError for a run that cannot be on this hardware, or that reads its text too
    often. `config`: resolved by `cost_of`; `hardware`: None if it is not known."""
    shards = open_prepared(config)
    # A run that has begun goes on, however often it reads its text.
    if shards is not None and not list_checkpoints(Path(config.run_folder)):
        refuse_repeated_text(config, count_epochs(config, shards))
    if hardware is not None:
        check_fits(config, hardware)


def cost_of(
    config: RunConfig, hardware: Hardware | None = None
) -> tuple[RunConfig, Hardware, dict[str, str]]:
    """Return the resolved config, what it would run on, and lines of its cost."""
    device = own_device(config.training.device, Processes())
    check_metric_writers(config.logging)
    if config.evaluation.lm_eval:
        from olmo_sparsity.training.lm_eval_tasks import load_tasks

        load_tasks(config.evaluation.lm_eval)
    micro_batch_size = config.training.micro_batch_size
    if hardware is not None and config.engine.name == "auto":
        engine = replace(config.engine, name="ddp" if hardware.num_processes > 1 else "single")
        config = replace(config, engine=engine)
    hardware = hardware or Hardware.here(device)
    missing: dict[str, str] = {}
    try:
        config = resolve(config, open_shards(config.data, "train", None), device, hardware)
    except DataError as error:
        missing["text"] = str(error)  # the cost is known without it
        name = config.data.tokenizer.name
        size = config.data.tokenizer.train_vocab
        if name:
            size = count_vocabulary(load_tokenizer(name))
        config = replace(config, model=with_vocabulary(config.model, size or 0))
        config = for_hardware(config, device, hardware)
    lines = missing | estimate(config, hardware, micro_batch_size)
    shards = open_prepared(config)
    if shards is not None:
        lines |= describe_epochs(shards, count_epochs(config, shards))
    return config, hardware, lines
