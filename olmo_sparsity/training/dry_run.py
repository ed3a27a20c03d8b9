"""Say what a run would do and cost, and train nothing: `train --dry-run`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.yaml_files import to_yaml
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.data.tokenizer import load_tokenizer
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.text.vocabulary import count_vocabulary
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.engine import own_device
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
from olmo_sparsity.training.resolve import for_hardware, resolve, with_vocabulary


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
        check_epochs(config, count_epochs(config, shards))
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
