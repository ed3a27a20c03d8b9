"""Log metrics to TensorBoard and W&B as well, if configured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

from olmo_sparsity.config import RunConfig
from olmo_sparsity.errors import ConfigError

Sink = Callable[[dict], None]


def open_sinks(config: RunConfig) -> list[Sink]:
    sinks = []
    if config.logging.tensorboard:
        sinks.append(_tensorboard(config))
    if config.logging.wandb_project:
        sinks.append(_wandb(config))
    return sinks


def _tensorboard(config: RunConfig) -> Sink:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "logging.tensorboard=true needs a package: pip install 'olmo-sparsity[tensorboard]'"
        ) from None
    writer = SummaryWriter(f"{config.run_folder}/tensorboard")

    def write(row: dict) -> None:
        for name, value in _scalars(row):
            writer.add_scalar(name, value, row["step"])
        writer.flush()

    return write


def _wandb(config: RunConfig) -> Sink:
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            "logging.wandb_project needs a package: pip install 'olmo-sparsity[wandb]'"
        ) from None
    run = wandb.init(
        project=config.logging.wandb_project, name=config.run_folder, config=asdict(config)
    )

    def write(row: dict) -> None:
        run.log(dict(_scalars(row)), step=row["step"])

    return write


def _scalars(row: dict) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name == "heldout":
            for part in value:
                places = f"{part['from']}-{part['to']}"
                yield f"heldout/{places}", part["loss"]
                yield f"heldout_bits_per_byte/{places}", part["bits_per_byte"]
        elif name == "induction_drop":
            yield f"heldout/{name}", value
        elif name == "sparsity":
            for units, numbers in value.items():
                yield f"heldout/net_excess/{units}", numbers["net"]
        elif name != "step":
            yield f"train/{name}", value
