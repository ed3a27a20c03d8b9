"""Say what a run would do and cost, and train nothing: `train --dry-run`.

    run = describe_run(config, Hardware.of("h100", 16, nodes=2))
    run.lines["time"]                      # "4.1 hours, 65 GPU-hours"
    check_run(run.config, run.hardware)    # raises ConfigError if it does not fit, for example

The text need not be prepared. Without it, only the number of its epochs is missing. Called by the
command `train`, and for each model by `experiment --dry-run` (experiment/price_training.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.yaml_files import to_yaml
from olmo_sparsity.data.shards import TokenShards, open_shards
from olmo_sparsity.data.tokenizer import load_tokenizer
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.text.vocabulary import count_vocabulary
from olmo_sparsity.training.estimate.fit import check_fits
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.report import estimate
from olmo_sparsity.training.metrics.writers import check_metric_writers
from olmo_sparsity.training.processes.device import own_device
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.setup.epochs import (
    check_epochs,
    count_epochs,
    describe_epochs,
    open_prepared,
)
from olmo_sparsity.training.setup.resolve import (
    for_hardware,
    resolve,
    with_staying_checkpoints,
    with_vocabulary,
)


@dataclass(frozen=True)
class RunDescription:
    """What a run would do and cost."""

    config: RunConfig
    """The config, with what the hardware and the tokenizer determine filled in."""

    hardware: Hardware
    """What the run would be on: what the caller has named, or one process here."""

    missing_text: str | None
    """Why the text cannot be read, such as that it is not prepared; None if it can."""

    lines: dict[str, str]
    """What `train --dry-run` prints below the config, by title."""


def dry_run(config: RunConfig, hardware: Hardware | None = None) -> None:
    """Print the resolved config, and the cost of the run on this hardware, by default one process
    here."""
    run = describe_run(config, hardware)
    print(to_yaml(run.config))
    for title, line in run.lines.items():
        print(f"# {title}: {line}")
    # After the lines, as they show what to change. Memory is checked on named hardware alone: else
    # the run is probably not meant for this machine.
    check_run(run.config, hardware)


def check_run(config: RunConfig, hardware: Hardware | None) -> None:
    """Raise ConfigError for a run that does not fit on its hardware, or that reads its text too
    often.

    Args:
        config: Resolved by `describe_run`.
        hardware: What the run will be on. None: it is not known, and not checked.
    """
    shards = open_prepared(config)
    # A run that has begun goes on, however often it reads its text.
    if shards is not None and not list_checkpoints(Path(config.run_folder)):
        check_epochs(config, count_epochs(config, shards))
    if hardware is not None:
        check_fits(config, hardware)


def describe_run(config: RunConfig, hardware: Hardware | None = None) -> RunDescription:
    """Return what a run would do and cost on this hardware, by default one process here. Raise
    ConfigError for what would end the run at its start, before it reads any text."""
    device = own_device(config.training.device, Processes())
    _check_extras(config)
    configured_micro_batch_size = config.training.micro_batch_size
    if hardware is None:
        hardware = Hardware.here(device)
    elif config.engine.name == "auto":
        # The estimate has a line for the engine of the run, so its name must be known.
        engine = replace(config.engine, name="ddp" if hardware.num_processes > 1 else "single")
        config = replace(config, engine=engine)

    shards: TokenShards | None = None
    missing_text = None
    try:
        shards = open_shards(config.data, "train", None)
    except DataError as error:
        missing_text = str(error)

    if shards is None:
        config = _resolve_without_text(config, device, hardware)
        lines = {"text": str(missing_text)}
        lines |= estimate(config, hardware, configured_micro_batch_size)
    else:
        config = resolve(config, shards, device, hardware)
        lines = estimate(config, hardware, configured_micro_batch_size)
        lines |= describe_epochs(shards, count_epochs(config, shards))
    return RunDescription(config, hardware, missing_text, lines)


def _check_extras(config: RunConfig) -> None:
    """Raise ConfigError if a library that the run needs besides the usual ones is not installed, or
    a task of lm_eval cannot be loaded."""
    check_metric_writers(config.logging)
    if config.evaluation.lm_eval:
        # Imports lm_eval, an extra.
        from olmo_sparsity.training.evaluation.lm_eval_tasks import load_tasks

        load_tasks(config.evaluation.lm_eval)


def _resolve_without_text(config: RunConfig, device: torch.device, hardware: Hardware) -> RunConfig:
    """Do what `resolve` does with a text, for one that is not prepared. The vocabulary is the one
    that the tokenizer has, or is to be trained to; the order of the text stays open."""
    tokenizer = config.data.tokenizer
    if tokenizer.name is not None:
        vocab_size = count_vocabulary(load_tokenizer(tokenizer.name))
    else:
        assert tokenizer.train_vocab is not None  # rules.py: exactly one of the two is set
        vocab_size = tokenizer.train_vocab
    config = replace(config, model=with_vocabulary(config.model, vocab_size))
    return for_hardware(with_staying_checkpoints(config), device, hardware)
