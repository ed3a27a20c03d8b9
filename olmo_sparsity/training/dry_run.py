"""Say what a run would do and cost, and train nothing: `train --dry-run`.

    run = describe_run(config, Hardware.of("h100", 16, nodes=2))
    run.lines["time"]      # "4.1 hours, 65 GPU-hours"

The text need not be prepared: then all is counted but how often it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.yaml_files import to_yaml
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.data.tokenizer import load_tokenizer
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.text.vocabulary import count_vocabulary
from olmo_sparsity.training.device import own_device
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.epochs import (
    check_epochs,
    count_epochs,
    describe_epochs,
    open_prepared,
)
from olmo_sparsity.training.estimate.fit import check_fits
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.report import estimate
from olmo_sparsity.training.metric_writers import check_metric_writers
from olmo_sparsity.training.resolve import (
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
    # After the lines, which show what to change, and with no check against a machine on which the
    # run is not meant to be.
    check_run(run.config, None if hardware is None else run.hardware)


def check_run(config: RunConfig, hardware: Hardware | None) -> None:
    """Raise ConfigError for a run that cannot be on this hardware, or that reads its text too
    often. `config`: resolved by `describe_run`; `hardware`: None if it is not known."""
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
    check_metric_writers(config.logging)
    if config.evaluation.lm_eval:
        from olmo_sparsity.training.lm_eval_tasks import load_tasks

        load_tasks(config.evaluation.lm_eval)

    configured_micro_batch_size = config.training.micro_batch_size
    if hardware is None:
        hardware = Hardware.here(device)
    elif config.engine.name == "auto":
        # Otherwise `resolve` would choose the engine by the processes of this start, which is one.
        engine = replace(config.engine, name="ddp" if hardware.num_processes > 1 else "single")
        config = replace(config, engine=engine)
    missing_text = None
    try:
        shards = open_shards(config.data, "train", None)
        config = resolve(config, shards, device, hardware)
    except DataError as error:
        missing_text = str(error)
        config = with_staying_checkpoints(_with_vocabulary_of_tokenizer(config))
        config = for_hardware(config, device, hardware)

    lines: dict[str, str] = {}
    if missing_text is not None:
        lines["text"] = missing_text
    lines |= estimate(config, hardware, configured_micro_batch_size)
    prepared = open_prepared(config)
    if prepared is not None:
        lines |= describe_epochs(prepared, count_epochs(config, prepared))
    return RunDescription(config, hardware, missing_text, lines)


def _with_vocabulary_of_tokenizer(config: RunConfig) -> RunConfig:
    """Return a config whose model has the vocabulary that the tokenizer has, or is to be trained
    to. All but the text's epochs can then be counted without a text."""
    tokenizer = config.data.tokenizer
    if tokenizer.name is not None:
        vocab_size = count_vocabulary(load_tokenizer(tokenizer.name))
    else:
        assert tokenizer.train_vocab is not None  # rules.py: exactly one of the two is set
        vocab_size = tokenizer.train_vocab
    return replace(config, model=with_vocabulary(config.model, vocab_size))
