"""Train a model: set up, resume, run the training loop, save checkpoints.

Place in the flow: batches → model → losses → **checkpoints**.

The config determines a run, and its checkpoints hold all state that must survive a kill. Exit codes
are those of `Outcome`.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from enum import IntEnum
from itertools import islice
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from torch import Tensor, nn

from olmo_sparsity.config import RunConfig
from olmo_sparsity.config_check import check_model
from olmo_sparsity.config_file import config_text, save_config
from olmo_sparsity.data.background import in_background
from olmo_sparsity.data.batches import Batch, TrainingBatches
from olmo_sparsity.data.shards import TokenShards, open_shards
from olmo_sparsity.data.tokenizer import count_vocabulary, load_tokenizer
from olmo_sparsity.data.tokens import refuse_other_settings
from olmo_sparsity.ending import EXIT_STOPPED
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.model.checkpoint_files import fill, load_weights, save_weights
from olmo_sparsity.model.exchange import check_exportable, export, import_weights
from olmo_sparsity.model.load import build_model, device_name
from olmo_sparsity.progress import Progress, say
from olmo_sparsity.training import checkpoint
from olmo_sparsity.training.checkpoint import ENGINE_FOLDER, CheckpointWriter, TrainerState
from olmo_sparsity.training.choose_engine import build_engine, check_engine
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.engine import choose_device, choose_precision, measure_matmul_peak
from olmo_sparsity.training.estimate import (
    count_parameters,
    estimate,
    flops_per_token,
    peak_memory_gib,
    stated_flops,
)
from olmo_sparsity.training.evaluate import (
    check_heldout,
    evaluate,
    format_losses,
    induction_drop,
)
from olmo_sparsity.training.optim import learning_rate
from olmo_sparsity.training.preflight import (
    attempt,
    check_devices,
    check_readable,
    check_room,
    check_same_config,
    check_shared,
)
from olmo_sparsity.training.run_folder import (
    Metrics,
    describe_environment,
    open_run_folder,
    refuse_divergence,
    refuse_other_branch,
    refuse_other_config,
)
from olmo_sparsity.training.sinks import open_sinks


class Outcome(IntEnum):
    """Exit codes of `olmo-sparsity train`; see ending.py for the others."""

    FINISHED = 0
    STOPPED_BY_SIGNAL = EXIT_STOPPED
    """Saved and stopped by SIGTERM, SIGINT or SIGUSR2; the same command resumes."""


Probe = Callable[[RunConfig, TokenShards, torch.device], Callable[[Mapping[str, Tensor]], dict]]
"""Creates a function of the weights that each evaluation calls (evaluation.sparsity_targets)."""


def train(
    config: RunConfig, processes: Processes | None = None, probe: Probe | None = None
) -> Outcome:
    with contextlib.ExitStack() as held:  # locks the run folder until all is written
        return _train(config, processes or Processes(), probe, held)


def _train(
    config: RunConfig, processes: Processes, probe: Probe | None, held: contextlib.ExitStack
) -> Outcome:
    report = say if processes.is_first else lambda message: None

    # --- data and model -------------------------------------------------------------------------
    run_folder = Path(config.run_folder)
    with processes.agree():
        check_engine(config, processes)
        if config.checkpoint.export_at_end:
            check_exportable(config.model)
        if config.evaluation.sparsity_targets and probe is None:
            raise ConfigError(
                "evaluation.sparsity_targets needs the command `olmo-sparsity train`, or train(…, "
                "probe=analysis.probe.SparsityProbe)"
            )
        device = choose_device(config.training.device, processes)
        shards, heldout = open_shards(config.data, "train"), open_shards(config.data, "heldout")
        check_readable(shards)
        resolve(config, shards, device)
        sparsity_of = None
        if config.evaluation.sparsity_targets and probe is not None and processes.is_first:
            sparsity_of = probe(config, heldout, device)
        check_heldout(heldout, config)
        if processes.is_first:
            held.enter_context(open_run_folder(config))
        batches = TrainingBatches(
            shards,
            config.positions,
            length=config.training.length,
            batch_size=config.training.batch_size,
            seed=config.seed,
            planted=config.data.planted,
            repeated=config.data.repeated,
            mask_documents=config.data.mask_documents,
            rank=processes.rank,
            world_size=processes.world_size,
        )
        torch.manual_seed(config.seed)
        model = build_model(config.model)
        num_parameters = count_parameters(model)
        tokens_per_step = config.training.batch_size * config.training.length
        flops_per_step = tokens_per_step * flops_per_token(model, config)
    check_devices(config.training.device, device, processes)
    check_same_config(config, processes)
    check_shared(run_folder, processes)

    # --- the start: the newest intact checkpoint, else branch_from or init_from, else random ----
    with processes.agree():
        latest = checkpoint.resume_point(run_folder, report) if processes.is_first else None
        if processes.is_first and latest is None and config.branch_from is not None:
            latest = checkpoint.branch_point(config.branch_from)
    latest = processes.gather(latest)[0]
    with processes.agree():
        start = restore_weights(latest, model, shards, config)
        if processes.is_first:
            check_room(run_folder, config, num_parameters, start)
    engine = build_engine(model, config, processes)
    if latest is not None:
        with processes.agree():
            engine.load_moments(latest / ENGINE_FOLDER, start)
    report(f"{config.run_folder}: {num_parameters:,} parameters on {device}, {engine.title}")
    if latest is not None:
        report(f"resuming from {latest}")
    elif config.init_from is not None:
        report(f"starting from the weights of {config.init_from}")
    num_steps = config.training.num_steps
    if start == num_steps:
        report(
            f"{config.run_folder} is finished: nothing is trained or evaluated again; raise "
            "training.num_steps in another run_folder"
        )
    with processes.agree():
        if processes.is_first:
            describe_environment(run_folder, engine.describe(), device, resumed_at=start)
    peak = measure_matmul_peak(device, config.training.precision) * processes.world_size
    stated_peak = (stated_flops(device_name(device)) or 0) * processes.world_size

    def save_checkpoint(step: int) -> None:
        writer.wait()  # there is memory for one copy
        with processes.agree():
            metrics.flush()  # also refuses to save after a loss that is not a number
        state = TrainerState(step, step * tokens_per_step, shards.fingerprint)
        weights = engine.gather_weights()
        with processes.agree():  # the effect of this update is not in any loss yet
            total = sum(float(tensor.sum(dtype=torch.float64)) for tensor in weights.values())
            refuse_divergence(step, {"sum of the weights": total})

        def write_once(folder: Path) -> None:
            save_config(config, folder / "config.yaml")
            save_weights(weights, folder / "model.safetensors")
            shards.tokenizer.save(str(folder / "tokenizer.json"))

        writer.save(state, write_once, engine.copy_moments(), engine.shares_state)

    def measure_sparsity() -> dict | None:
        if not config.evaluation.sparsity_targets:
            return None
        writer.wait()  # so that there is one copy of the weights at a time
        weights = engine.gather_weights()
        with processes.agree():
            return None if sparsity_of is None else sparsity_of(weights)

    # --- the loop -------------------------------------------------------------------------------
    with (
        attempt(run_folder, start, processes),
        Progress("training", num_steps, "steps", enabled=processes.is_first) as progress,
        stop_signals() as stop,
        CheckpointWriter(run_folder, config.checkpoint, processes) as writer,
        contextlib.closing(
            in_background(draw(batches, start, num_steps, device), depth=1)
        ) as drawn,
    ):
        with processes.agree():
            sinks = open_sinks(config, start) if processes.is_first else []
            metrics = Metrics(run_folder, start, sinks, writes=processes.is_first)
        progress.resume_at(start)
        shown_at, shown_step = time.perf_counter(), start
        for step, batch in enumerate(drawn, start=start + 1):
            seed_step(config.seed, step, processes.rank)
            rate = learning_rate(config.optimizer, step, num_steps)
            loss, norm = engine.step(batch, rate)
            metrics.add(step, loss=loss, gradient_norm=norm, learning_rate=rate)

            if step % config.logging.interval_steps == 0 or step == num_steps:
                now = time.perf_counter()
                steps_per_s = (step - shown_step) / (now - shown_at)
                shown_at, shown_step = now, step
                speed = {"tokens_per_s": steps_per_s * tokens_per_step}
                speed["peak_memory_gib"] = peak_memory_gib(device)
                if stated_peak:
                    speed["mfu"] = steps_per_s * flops_per_step / stated_peak
                with processes.agree():
                    shown = metrics.flush(**speed)
                progress.update(
                    step,
                    loss=f"{shown['loss']:.4f}",
                    lr=f"{rate:.2e}",
                    tokens_per_s=f"{steps_per_s * tokens_per_step:,.0f}",
                    of_matmul_peak=f"{steps_per_s * flops_per_step / peak:.0%}",
                )
            paused_at = time.perf_counter()
            if due(step, config.evaluation.interval_steps, num_steps):
                losses = evaluate(engine, heldout, config)
                drop = induction_drop(engine, heldout, config)
                sparsity = measure_sparsity()
                with processes.agree():
                    metrics.write_heldout(step, losses, drop, sparsity)
                if step < num_steps:
                    progress.note(
                        f"step {step}: held-out loss {format_losses(losses)}; induction drop "
                        f"{drop:.2f}"
                    )
            # If one process gets a signal or cannot write a checkpoint, all stop at the same step.
            reason = processes.first_text(stop.requested or writer.failure)
            kept = config.checkpoint
            if reason or due(step, kept.interval_steps, num_steps) or kept.stays(step):
                save_checkpoint(step)
            if reason and step < num_steps:
                writer.wait()
                progress.note(f"{reason}: saved step {step}; the same command goes on")
                return Outcome.STOPPED_BY_SIGNAL
            shown_at += time.perf_counter() - paused_at  # so that rates are of training alone
        writer.wait()

    with processes.agree():
        if processes.is_first and config.checkpoint.export_at_end:
            out = run_folder / "huggingface"
            if not out.exists():  # a finished run may be started again
                export(run_folder, out)
    if processes.is_first:
        last = metrics.last_heldout()
        lost = "lost, with its line of metrics.jsonl"
        report(f"held-out loss by position: {format_losses(last) if last else lost}")
    return Outcome.FINISHED


def dry_run(config: RunConfig) -> None:
    """Print the resolved config and the cost of the run."""
    device = choose_device(config.training.device)
    try:
        resolve(config, open_shards(config.data, "train"), device)
    except DataError as error:
        print(f"# {error}")  # the cost is known without the text
        config.training.precision = choose_precision(config.training.precision, device)
        name = config.data.tokenizer.name
        size = count_vocabulary(load_tokenizer(name)) if name else config.data.tokenizer.train_vocab
        take_vocabulary(config, size or 0)
    print(config_text(config))
    for name, value in estimate(config).items():
        print(f"# {name}: {value}")


def draw(
    batches: TrainingBatches, start: int, num_steps: int, device: torch.device
) -> Generator[Batch, None, None]:
    """The batches of the steps after `start`; runs in a thread."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)  # else the thread would use memory of the first GPU
    for batch in islice(batches.from_step(start), num_steps - start):
        yield batch.pinned() if on_gpu else batch


def due(step: int, interval_steps: int | None, num_steps: int) -> bool:
    return step == num_steps or (interval_steps is not None and step % interval_steps == 0)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Dropout depends only on (seed, step, process), so a resumed run repeats it."""
    (mixed,) = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(mixed))


def restore_weights(
    latest: Path | None, model: nn.Module, shards: TokenShards, config: RunConfig
) -> int:
    """Load the weights of a checkpoint (or `init_from`) into the model; returns the step."""
    if latest is None:
        if config.init_from is not None:
            fill(model, import_weights(config.init_from, config.model), config.init_from)
        return 0
    own = latest.parent.parent == Path(config.run_folder)
    # Its own checkpoint too, which may have been put there by hand.
    (refuse_other_config if own else refuse_other_branch)(latest / "config.yaml", config)
    state = TrainerState.read(latest)
    if state.data_fingerprint != shards.fingerprint:
        raise DataError(
            f"{latest} was trained on other tokens than those now in {config.data.folder}; restore "
            "the data, or take its weights alone with init_from in another run_folder"
        )
    if not own and state.step >= config.training.num_steps:
        raise ConfigError(
            f"branch_from={latest} is at step {state.step}, where training.num_steps="
            f"{config.training.num_steps} ends; raise it"
        )
    load_weights(model, latest / "model.safetensors")
    return state.step


def resolve(config: RunConfig, shards: TokenShards, device: torch.device) -> None:
    """Set the fields that hardware and tokenizer determine; refuse what does not fit the shards."""
    refuse_other_settings(config.data)
    model, training = config.model, config.training
    training.precision = choose_precision(training.precision, device)
    take_vocabulary(config, shards.vocab_size)
    if model.vocab_size < shards.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} is smaller than the tokenizer's "
            f"{shards.vocab_size} in {config.data.folder}; set it to 0 to take the tokenizer's"
        )
    check_model(model, "config")  # the embedding may be too small for the vocabulary
    model.eos_token_id = model.pad_token_id = shards.eos_id


def take_vocabulary(config: RunConfig, size: int) -> None:
    model = config.model
    if model.vocab_size == 0:
        model.vocab_size = size
        model.embedding_size = model.embedding_size or -(-size // 128) * 128


class StopRequest:
    requested = ""


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """On SIGTERM, SIGINT and SIGUSR2 the run saves and stops after the current step. A second
    SIGINT interrupts at once, except while a checkpoint is being written."""
    stop = StopRequest()
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)

    def request(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop.requested:
            raise KeyboardInterrupt
        stop.requested = signal.Signals(number).name

    before = {name: signal.signal(name, request) for name in names}
    try:
        yield stop
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
