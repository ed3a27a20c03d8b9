"""Training, start to end, in one visible loop.

Place in the flow: batches → model → losses → **checkpoints**.

Everything that decides a run is in its config, and everything that must survive a kill is in its
checkpoint; the loop itself holds nothing else. Exit codes are those of `Outcome`.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from olmo_sparsity.config import RunConfig
from olmo_sparsity.config_file import config_text, save_config
from olmo_sparsity.data.batches import TrainingBatches
from olmo_sparsity.data.shards import TokenShards, open_shards
from olmo_sparsity.data.tokenizer import count_vocabulary, load_tokenizer
from olmo_sparsity.data.tokens import refuse_other_settings
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.model.checkpoint_files import fill, load_weights, save_weights
from olmo_sparsity.model.exchange import import_weights
from olmo_sparsity.model.load import build_model
from olmo_sparsity.progress import Progress
from olmo_sparsity.training import checkpoint
from olmo_sparsity.training.checkpoint import ENGINE_FOLDER, TrainerState
from olmo_sparsity.training.engine import (
    Engine,
    choose_device,
    choose_precision,
    measure_matmul_peak,
)
from olmo_sparsity.training.estimate import count_parameters, estimate, flops_per_token
from olmo_sparsity.training.evaluate import evaluate, format_losses
from olmo_sparsity.training.optim import learning_rate
from olmo_sparsity.training.run_folder import Metrics, describe_environment, open_run_folder
from olmo_sparsity.training.sinks import open_sinks


class Outcome(IntEnum):
    """Exit codes of `olmo-sparsity train` (2, as everywhere: the input must be mended)."""

    FINISHED = 0
    STOPPED_BY_SIGNAL = 75
    """Saved and left at the wish of SIGTERM, SIGINT or SIGUSR2; the same command goes on."""


def train(config: RunConfig) -> Outcome:
    # --- what to train on, and what to train ----------------------------------------------------
    shards, heldout = open_shards(config.data, "train"), open_shards(config.data, "heldout")
    resolve(config, shards)
    run_folder = open_run_folder(config)
    torch.manual_seed(config.seed)
    model = build_model(config.model)
    engine = Engine(model, config)
    batches = TrainingBatches(
        shards,
        config.positions,
        length=config.training.length,
        batch_size=config.training.batch_size,
        seed=config.seed,
        planted=config.data.planted,
        rank=engine.rank,
        world_size=engine.world_size,
    )

    # --- where to begin: the newest whole checkpoint, else init_from, else random ---------------
    size = f"{count_parameters(model):,} parameters"
    say(f"{config.run_folder}: {size} on {engine.device}, {engine.name}")
    start = restore(run_folder, engine, model, shards, config)
    if start == config.training.num_steps:
        say(f"{config.run_folder} is finished; raise training.num_steps in another run_folder")
    describe_environment(run_folder, engine.name, engine.device, resumed_at=start)
    metrics = Metrics(run_folder, start, open_sinks(config))
    tokens_per_step = config.training.batch_size * config.training.length
    peak = measure_matmul_peak(engine.device, config.training.precision)
    flops_per_step = tokens_per_step * flops_per_token(model, config)
    num_steps = config.training.num_steps

    def save_checkpoint(step: int) -> None:
        metrics.flush()  # also refuses to save after a loss that is not a number
        state = TrainerState(
            step, step * tokens_per_step, shards.fingerprint, checkpoint.rng_state()
        )

        def write(folder: Path) -> None:
            save_config(config, folder / "config.yaml")
            save_weights(model, folder / "model.safetensors")
            shards.tokenizer.save(str(folder / "tokenizer.json"))
            engine.save_optimizer(folder / ENGINE_FOLDER)

        checkpoint.save(run_folder, state, config.checkpoint.keep, write)

    # --- the loop -------------------------------------------------------------------------------
    with Progress("training", num_steps, "steps") as progress, stop_signals() as stop:
        progress.resume_at(start)
        shown_at, shown_step = time.perf_counter(), start
        for step, batch in enumerate(batches.from_step(start), start=start + 1):
            if step > num_steps:
                break
            rate = learning_rate(config.optimizer, step, num_steps)
            loss, norm = engine.step(batch, rate)
            metrics.add(step, loss=loss, gradient_norm=norm, learning_rate=rate)

            if step % config.logging.interval_steps == 0 or step == num_steps:
                now = time.perf_counter()
                steps_per_s = (step - shown_step) / (now - shown_at)
                shown_at, shown_step = now, step
                shown = metrics.flush(tokens_per_s=steps_per_s * tokens_per_step)
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
                metrics.write({"step": step, "heldout": losses})
                if step < num_steps:
                    progress.note(f"step {step}: held-out loss {format_losses(losses)}")
            if stop.requested or due(step, config.checkpoint.interval_steps, num_steps):
                save_checkpoint(step)
            if stop.requested and step < num_steps:
                progress.note(f"{stop.requested}: saved step {step}; the same command goes on")
                return Outcome.STOPPED_BY_SIGNAL
            shown_at += time.perf_counter() - paused_at  # the rates shown are of training alone

    say(f"held-out loss by position: {format_losses(metrics.last_heldout())}")
    return Outcome.FINISHED


def dry_run(config: RunConfig) -> None:
    """Print what `train` would do: the resolved config, then what it costs."""
    try:
        resolve(config, open_shards(config.data, "train"))
    except DataError as error:
        print(f"# {error}")  # what it costs can be known before the text is there
        config.training.precision = choose_precision(
            config.training.precision, choose_device(config.training.device)
        )
        name = config.data.tokenizer.name
        size = count_vocabulary(load_tokenizer(name)) if name else config.data.tokenizer.train_vocab
        take_vocabulary(config, size or 0)
    print(config_text(config))
    for name, value in estimate(config).items():
        print(f"# {name}: {value}")


def due(step: int, interval_steps: int | None, num_steps: int) -> bool:
    return step == num_steps or (interval_steps is not None and step % interval_steps == 0)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def restore(
    run_folder: Path, engine: Engine, model: nn.Module, shards: TokenShards, config: RunConfig
) -> int:
    """Puts the newest whole checkpoint (or `init_from`) into the engine; returns its step."""
    folder = checkpoint.resume_point(run_folder, say)
    if folder is None:
        if config.init_from is not None:
            fill(model, import_weights(config.init_from, config.model), config.init_from)
            say(f"starting from the weights of {config.init_from}")
        return 0
    state = TrainerState.read(folder)
    if state.data_fingerprint != shards.fingerprint:
        raise DataError(
            f"{folder} was trained on other tokens than those now in {config.data.folder}; restore "
            "the data or start another run_folder"
        )
    load_weights(model, folder / "model.safetensors")
    engine.load_optimizer(folder / ENGINE_FOLDER)
    checkpoint.restore_rng(state.rng)
    say(f"resuming from {folder}")
    return state.step


def resolve(config: RunConfig, shards: TokenShards) -> None:
    """Fill in what hardware and tokenizer decide; refuse what does not fit the shards."""
    refuse_other_settings(config.data)
    model, training = config.model, config.training
    training.precision = choose_precision(training.precision, choose_device(training.device))
    take_vocabulary(config, shards.vocab_size)
    if model.vocab_size < shards.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} is smaller than the tokenizer's "
            f"{shards.vocab_size} in {config.data.folder}; set it to 0 to take the tokenizer's"
        )
    model.eos_token_id = model.pad_token_id = shards.eos_id


def take_vocabulary(config: RunConfig, size: int) -> None:
    model = config.model
    if model.vocab_size == 0:
        model.vocab_size = size
        model.embedding_size = model.embedding_size or -(-size // 128) * 128


class StopRequest:
    requested = ""


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """SIGTERM, SIGINT and SIGUSR2 ask to save and leave after the current step; asked a second
    time, SIGINT interrupts at once."""
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
