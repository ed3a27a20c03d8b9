"""Write the metrics of a run to TensorBoard and W&B as well, if configured.

Place in the flow: `Metrics` of metrics.py gives each row of metrics.jsonl to each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from olmo_sparsity.base.errors import naming_extras
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.config.sections import LoggingConfig

MetricWriter = Callable[[dict], None]
"""Takes a row of metrics.jsonl: {"step": …} and the losses of a step, or of an evaluation."""


def open_metric_writers(
    logging: LoggingConfig, run_folder: Path, start: int, settings: Mapping[str, Any]
) -> list[MetricWriter]:
    """Open the writers that `logging` names. `start`: the step from which the run begins or
    resumes; `settings`: those of the run, which W&B shows beside the curves."""
    writers = []
    if logging.tensorboard:
        writers.append(_tensorboard(run_folder, start))
    if logging.wandb_project:
        writers.append(_wandb(logging.wandb_project, run_folder, start, settings))
    return writers


def check_metric_writers(logging: LoggingConfig) -> None:
    """Raise ConfigError if TensorBoard or W&B is configured and not installed. Called before a run
    waits for its GPUs."""
    with naming_extras():
        if logging.tensorboard:
            import torch.utils.tensorboard  # noqa: F401
        if logging.wandb_project:
            import wandb  # noqa: F401


def _tensorboard(run_folder: Path, start: int) -> MetricWriter:
    """Return a writer to TensorBoard's files in the run folder."""
    with naming_extras():
        from torch.utils.tensorboard import SummaryWriter
    # Steps that a killed process has written after its last checkpoint are repeated.
    writer = SummaryWriter(f"{run_folder}/tensorboard", purge_step=start + 1)

    def write(row: dict) -> None:
        for name, value in _scalars(row):
            writer.add_scalar(name, value, row["step"])
        writer.flush()

    return write


def _wandb(project: str, run_folder: Path, start: int, settings: Mapping[str, Any]) -> MetricWriter:
    """Return a writer to a run of Weights & Biases."""
    with naming_extras():
        import wandb
    # A resumed run goes on in the same curves; one that begins again gets new ones.
    id_file = run_folder / "wandb_id"
    is_resumed = start > 0 and id_file.exists()
    run = wandb.init(
        project=project,
        name=str(run_folder),
        config=dict(settings),
        id=id_file.read_text() if is_resumed else None,
        resume="allow",
    )
    write_atomically(id_file, run.id)

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
    """Yield the loss of each range of positions."""
    for part in parts:
        yield f"{title}/{part['from']}-{part['to']}", part["loss"]
