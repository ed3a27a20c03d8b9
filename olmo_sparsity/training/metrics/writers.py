"""Write the metrics of a run to TensorBoard and W&B as well, if `logging` says so.

    a row of metrics.jsonl                             curves
    {"step": 10, "loss": 4.2, "epochs/web": 0.1}       train/loss, train/epochs/web
    {"step": 10, "heldout": [{"from": 0, "to": 128,    heldout/0-128, heldout_bits_per_byte/0-128
     "loss": 3.3, …}, …], "induction_drop": 0.8}       heldout/induction_drop

Other results of an evaluation are curves such as by_place/512-1024 and lm_eval/TASK/METRIC.

`Metrics` of metrics.py hands each row to `MetricWriters`, after it has written it to metrics.jsonl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from olmo_sparsity.base.errors import naming_extras, one_line
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.sections import LoggingConfig
from olmo_sparsity.training.metrics.loss_rows import LossRow

MetricWriter = Callable[[dict], None]
"""Takes a row of metrics.jsonl, that of a step or of an evaluation, without its CRC."""

MAX_FAILURES = 10
"""Number of successive rows at which a writer that fails to take them is dropped."""


class MetricWriters:
    """Hands rows to the writers that `logging` names. Their errors never end a run: metrics.jsonl
    has every row, and a network that is away for a moment is no reason to lose hours."""

    def __init__(
        self,
        logging: LoggingConfig,
        run_folder: Path,
        resumed_step: int,
        settings: Mapping[str, Any],
    ) -> None:
        """Open the writers.

        Args:
            resumed_step: The step from which the run resumes; 0 if it begins.
            settings: The settings of the run, which W&B shows beside the curves.
        """
        self.writers: dict[str, MetricWriter] = {}
        self.closers: dict[str, Callable[[], object]] = {}
        self.num_failures: Counter[str] = Counter()
        """How many successive rows each writer has just failed to take."""

        check_metric_writers(logging)
        if logging.tensorboard:
            self._open("TensorBoard", lambda: _open_tensorboard(run_folder, resumed_step))
        if logging.wandb_project:
            project = logging.wandb_project
            self._open("W&B", lambda: _open_wandb(project, run_folder, resumed_step, settings))

    def _open(self, name: str, open_writer: Callable[[], OpenWriter]) -> None:
        """Open a writer. If that fails, the run goes on without it until its next start."""
        try:
            writer = open_writer()
        except Exception as error:  # a library's own: of the network, of a login, of a disk
            self._warn(name, error, "gets no rows of this start")
            return
        self.writers[name] = writer.write
        self.closers[name] = writer.close

    def __call__(self, row: dict) -> None:
        """Hand a row to all writers."""
        for name, write in list(self.writers.items()):  # a copy, as the loop may drop a writer
            try:
                write(row)
            except Exception as error:
                self.num_failures[name] += 1
                if self.num_failures[name] == 1:
                    self._warn(name, error, f"may lack rows from step {row['step']} on")
                if self.num_failures[name] == MAX_FAILURES:
                    self._warn(name, error, f"gets no rows after step {row['step']}")
                    del self.writers[name]
            else:
                self.num_failures[name] = 0

    def close(self) -> None:
        """Close all writers, so that another start in this process can open them again."""
        for name, close in self.closers.items():
            try:
                close()
            except Exception as error:
                self._warn(name, error, "may lack its last rows")

    def _warn(self, name: str, error: Exception, effect: str) -> None:
        """Report an error of a writer in one line."""
        reason = one_line(error) or type(error).__name__
        say(f"{name} {effect} ({reason}); metrics.jsonl has all of them")


class OpenWriter(NamedTuple):
    """A writer, and the function that ends it."""

    write: MetricWriter
    close: Callable[[], object]


def check_metric_writers(logging: LoggingConfig) -> None:
    """Raise ConfigError if TensorBoard or W&B is configured and not installed. Called before a run
    waits for its GPUs."""
    with naming_extras():
        # Imported for its error only.
        if logging.tensorboard:
            import torch.utils.tensorboard  # noqa: F401
        if logging.wandb_project:
            import wandb  # noqa: F401


def _open_tensorboard(run_folder: Path, resumed_step: int) -> OpenWriter:
    """Return a writer to TensorBoard's files in the run folder."""
    from torch.utils.tensorboard import SummaryWriter

    # Steps that a killed process has written after its last checkpoint are repeated.
    writer = SummaryWriter(f"{run_folder}/tensorboard", purge_step=resumed_step + 1)

    def write(row: dict) -> None:
        for name, value in _scalars(row):
            writer.add_scalar(name, value, row["step"])
        writer.flush()

    return OpenWriter(write, writer.close)


def _open_wandb(
    project: str, run_folder: Path, resumed_step: int, settings: Mapping[str, Any]
) -> OpenWriter:
    """Return a writer to a run of Weights & Biases."""
    import wandb

    # A resumed run goes on in the same curves; one that begins again gets new ones.
    id_file = run_folder / "wandb_id"
    is_resumed = resumed_step > 0 and id_file.exists()
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

    return OpenWriter(write, run.finish)


def _scalars(row: dict) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row, each under the name of its curve."""
    for name, value in row.items():
        if name == "heldout":
            for heldout_row in value:
                positions = f"{heldout_row['from']}-{heldout_row['to']}"
                yield f"heldout/{positions}", heldout_row["loss"]
                yield f"heldout_bits_per_byte/{positions}", heldout_row["bits_per_byte"]
        elif name == "by_place":
            yield from _losses(name, value)
        elif name == "by_corpus":
            for corpus, rows in value.items():
                yield from _losses(f"heldout_{corpus}", rows)
        elif name == "induction_drop":
            yield f"heldout/{name}", value
        elif isinstance(value, dict):  # numbers by name, such as those of lm_eval
            for metric, number in value.items():
                yield f"{name}/{metric}", number
        elif name not in ("step", "timestamp"):
            yield f"train/{name}", value


def _losses(title: str, rows: list[LossRow]) -> Iterator[tuple[str, float]]:
    """Yield the loss of each range of positions, such as `by_place/512-1024`."""
    for row in rows:
        yield f"{title}/{row['from']}-{row['to']}", row["loss"]
