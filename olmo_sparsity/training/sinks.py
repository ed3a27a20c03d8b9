"""Log metrics to TensorBoard and W&B as well, if configured.

A sink is a function that takes the rows which metrics.jsonl gets, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from olmo_sparsity.base.errors import naming_extras
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.config.sections import LoggingConfig

Sink = Callable[[dict], None]
"""Takes a row of metrics.jsonl: {"step": …} and the losses of a step, or of an evaluation."""


def open_sinks(
    logging: LoggingConfig, run_folder: Path, start: int, stated: Mapping[str, Any]
) -> list[Sink]:
    """Open what `logging` names. `start`: the step from which the run begins or resumes; `stated`:
    its settings, which W&B shows beside the curves."""
    sinks = []
    if logging.tensorboard:
        sinks.append(_tensorboard(run_folder, start))
    if logging.wandb_project:
        sinks.append(_wandb(logging.wandb_project, run_folder, start, stated))
    return sinks


def check_sinks(logging: LoggingConfig) -> None:
    """Raise an error before a run waits for its GPUs, if what it logs to is not installed."""
    with naming_extras():
        if logging.tensorboard:
            import torch.utils.tensorboard  # noqa: F401
        if logging.wandb_project:
            import wandb  # noqa: F401


def _tensorboard(run_folder: Path, start: int) -> Sink:
    with naming_extras():
        from torch.utils.tensorboard import SummaryWriter
    # Steps that a killed process has written after its last checkpoint are repeated.
    writer = SummaryWriter(f"{run_folder}/tensorboard", purge_step=start + 1)

    def write(row: dict) -> None:
        for name, value in _scalars(row):
            writer.add_scalar(name, value, row["step"])
        writer.flush()

    return write


def _wandb(project: str, run_folder: Path, start: int, stated: Mapping[str, Any]) -> Sink:
    with naming_extras():
        import wandb
    file = run_folder / "wandb_id"  # a resumed run goes on in the same curves
    run = wandb.init(
        project=project,
        name=str(run_folder),
        config=dict(stated),
        id=file.read_text() if start and file.exists() else None,
        resume="allow",
    )
    write_atomically(file, run.id)

    def write(row: dict) -> None:
        run.log(dict(_scalars(row)), step=row["step"])

    return write


def _scalars(row: dict) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row, each under the name of its curve."""
    for name, value in row.items():
        if name == "heldout":
            for part in value:
                places = f"{part['from']}-{part['to']}"
                yield f"heldout/{places}", part["loss"]
                yield f"heldout_bits_per_byte/{places}", part["bits_per_byte"]
        elif name == "by_place":
            yield from _losses(name, value)
        elif name == "by_corpus":
            for corpus, parts in value.items():
                yield from _losses(f"heldout_{corpus}", parts)
        elif name == "induction_drop":
            yield f"heldout/{name}", value
        elif isinstance(value, dict):
            for measure, number in value.items():
                yield f"{name}/{measure}", number
        elif name != "step":
            yield f"train/{name}", value


def _losses(title: str, parts: list[dict]) -> Iterator[tuple[str, float]]:
    for part in parts:
        yield f"{title}/{part['from']}-{part['to']}", part["loss"]
