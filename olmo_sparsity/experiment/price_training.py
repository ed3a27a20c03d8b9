"""Estimate what the trainings of an experiment cost: hours, memory and disk of each model, and the
disk of the texts that they share.

Place in the flow: file.py → jobs.py → **`price_training`** for each model, **`describe_texts`** for
all → price.py. Each model is checked as `train --dry-run` checks it, so that an experiment is not
priced whose trainings would not start. A price is printed as one line:

    1,176,764,416 parameters, 10,485,760,000 tokens in 20,000 steps; 7.9 hours, 63 GPU-hours; 47.4
    GiB a GPU (ddp, fits, micro-batches of 16), main memory 67 GiB a node; the run folder 197.7 GB
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from olmo_sparsity.base.errors import ConfigError, UserError
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.experiment.models import Model
from olmo_sparsity.training.dry_run import check_run, describe_run
from olmo_sparsity.training.estimate.cost import RunCost, cost_of_run
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.host import Disk, disk_of, main_memory_of
from olmo_sparsity.training.estimate.report import describe_batch, size_of_run
from olmo_sparsity.training.setup.epochs import open_prepared


@dataclass(frozen=True)
class TrainingPrice:
    """What the training of one model costs."""

    config: RunConfig
    """The config of the model, with what the hardware determines filled in."""

    hardware: Hardware
    """What the run is assumed to be on: the GPUs that the user has named, or one process here."""

    cost: RunCost
    disk: Disk
    missing_text: str | None
    """Why the text of the model cannot be read, such as that it is not prepared; None if it can."""

    @property
    def gpu_hours(self) -> float | None:
        """Return the GPU-hours; None if the GPU is not known."""
        return None if self.cost.time is None else self.cost.time.gpu_hours

    def __str__(self) -> str:
        size = size_of_run(self.config)
        parts = [
            f"{size.num_parameters:,} parameters, {size.num_tokens:,} tokens in "
            f"{size.num_steps:,} steps"
        ]
        parts.append(f"{size.flops:.3g} FLOPs" if self.cost.time is None else str(self.cost.time))
        parts.append(self._describe_memory())
        parts.append(f"the run folder {self.disk.run_folder_bytes / 1e9:.1f} GB")
        batch_size = self.config.training.batch_size
        if batch_size % self.hardware.num_processes:
            parts.append(f"training.batch_size: {describe_batch(self.config, self.hardware)}")
        return "; ".join(parts)

    def _describe_memory(self) -> str:
        """Return the memory of a GPU and the main memory of a node in words. On a CPU there is one
        memory."""
        cost = self.cost
        fits = "fits" if cost.fits else "DOES NOT FIT"
        owner = "a GPU" if self.hardware.gpu else "a process"
        memory = (
            f"{cost.memory.total_bytes / 2**30:.1f} GiB {owner} ({cost.engine}, {fits}, "
            f"micro-batches of {cost.micro_batch_size})"
        )
        if self.hardware.gpu is None:
            return memory
        bytes_of_process = main_memory_of(self.config, self.hardware)
        bytes_of_node = bytes_of_process * self.hardware.processes_per_node
        return f"{memory}, main memory {bytes_of_node / 2**30:.0f} GiB a node"


def price_training(model: Model, hardware: Hardware | None) -> TrainingPrice:
    """Return the price of a training. Raise ConfigError, with the model's name, if it would not
    start.

    Args:
        hardware: The GPUs; None: one process here.
    """
    try:
        run = describe_run(model.settings, hardware)
        # One process here is only an assumption, so the run need not fit into its memory.
        check_run(run.config, None if hardware is None else run.hardware)
    except UserError as error:
        raise ConfigError(f"{model.name}: {error}") from None
    return TrainingPrice(
        config=run.config,
        hardware=run.hardware,
        cost=cost_of_run(run.config, run.hardware),
        disk=disk_of(run.config),
        missing_text=run.missing_text,
    )


def describe_texts(trainings: Iterable[TrainingPrice]) -> list[str]:
    """Return a line for each text with its size on disk, and a line with the disk of all texts and
    runs together."""
    # Models that read one folder share its text, which takes disk once.
    by_folder: dict[str, list[TrainingPrice]] = {}
    for training in trainings:
        by_folder.setdefault(training.config.data.folder, []).append(training)
    if not by_folder:
        return []

    lines = []
    bytes_of_texts = 0
    bytes_of_runs = 0  # of each model its own, also of seeds
    for folder, readers in by_folder.items():
        first_reader = readers[0]
        if open_prepared(first_reader.config) is None:
            # As much text as the model reads that reads most. If more is prepared, it takes more.
            num_bytes = max(training.disk.text_bytes for training in readers)
            lines.append(
                f"text: {first_reader.missing_text}. How often it is read is not checked; "
                f"{num_bytes / 1e9:.1f} GB if it is read once"
            )
        else:
            num_bytes = _size_of_folder(Path(folder))
            lines.append(f"text: {folder} is prepared, {num_bytes / 1e9:.1f} GB")
        bytes_of_texts += num_bytes
        bytes_of_runs += sum(training.disk.run_folder_bytes for training in readers)
    total_bytes = bytes_of_runs + bytes_of_texts
    lines.append(
        f"disk: {total_bytes / 1e9:,.1f} GB, of which run folders {bytes_of_runs / 1e9:,.1f} and "
        f"texts {bytes_of_texts / 1e9:,.1f}"
    )
    return lines


def _size_of_folder(folder: Path) -> int:
    """Return the bytes of all files in a folder and below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
