"""Write `metrics.jsonl` of a run folder: a line for each step, and one for each evaluation.

    {"step": 10, "timestamp": "2026-03-01T12:00:00Z", "loss": 4.2, ..., "crc32": "..."}
    {"step": 10, "timestamp": "2026-03-01T12:00:05Z", "heldout": [...], ..., "crc32": "..."}

In training, steps.py hands the numbers of each step to `Metrics`, which writes them at each logging
interval:

    metrics.add(9, loss=…, gradient_norm=…)    # tensors, still on the GPU
    metrics.add(10, loss=…, gradient_norm=…)
    metrics.flush(tokens_per_s=…)              # waits for the GPU, writes the lines of 9 and 10

`flush` raises if a number is not finite. A start that resumes at step 300 drops the lines of later
steps, which it takes again. read.py reads the file.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.json_text import with_crc
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.retry import retry
from olmo_sparsity.training.metrics.appended_file import AppendedFile
from olmo_sparsity.training.metrics.loss_rows import LossRow
from olmo_sparsity.training.metrics.read import read_lines_of_run, read_metrics
from olmo_sparsity.training.metrics.writers import MetricWriter

if TYPE_CHECKING:
    from torch import Tensor


class PendingRow(NamedTuple):
    """The row of a step that is not written yet."""

    step: int
    timestamp: str
    numbers: dict[str, Tensor | float]
    """Numbers by name. Those of a GPU are still there."""


class Metrics:
    """Writes the metrics of a run. Losses stay on the device until `flush`, so that the host need
    not wait for the GPU at each step."""

    def __init__(
        self,
        run_folder: Path,
        resumed_step: int,
        writers: Sequence[MetricWriter],
        writes: bool = True,
        while_writing: Callable[[], AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        """Open the file of a run, and drop its lines of later steps than the resumed one.

        Args:
            resumed_step: The step from which the run resumes; 0 if it begins.
            writers: Get each row, too, such as that of Weights & Biases.
            writes: Whether this process writes. The others only check their numbers.
            while_writing: Makes a context in which rows are written, such as one with a time limit.
        """
        self.path = run_folder / "metrics.jsonl"
        self.file = AppendedFile(self.path)
        self.writers = writers
        self.writes = writes
        self.while_writing = while_writing
        self.pending_rows: list[PendingRow] = []
        """The rows of the steps since the last `flush`."""

        self.last_crc32: str | None = None
        """CRC of the line of the last step."""

        self.earlier_losses: list[tuple[int, float]] = []
        """Steps of earlier starts, with their losses."""

        if writes and self.path.exists():
            self._drop_lines_after(resumed_step)

    def _drop_lines_after(self, resumed_step: int) -> None:
        """Drop the lines of later steps. A killed run may have written past its last checkpoint,
        and those steps are taken again."""
        lines = read_lines_of_run(self.path, until=resumed_step)
        kept_lines = [line for line in lines if line.row["step"] <= resumed_step]
        self.file.replace_content(b"".join(line.text + b"\n" for line in kept_lines))
        self.earlier_losses = [
            (line.row["step"], line.row["loss"]) for line in kept_lines if "loss" in line.row
        ]

    def add(self, step: int, **numbers: Tensor | float) -> None:
        """Add the numbers of a step, which `flush` writes."""
        self.pending_rows.append(PendingRow(step, timestamp(), numbers))

    def flush(self, **speed: float) -> float | None:
        """Write the rows of the steps since the last call. Return their mean loss; None if there
        are none. At the first row with a number that is not finite, write the rows before it and
        raise UserError.

        Args:
            speed: Numbers of all these steps, written with the last row.
        """
        rows = self._take_pending_rows()
        if not rows:
            return None
        rows[-1].update(speed)

        for index, row in enumerate(rows):
            checked = {"loss": row["loss"], "gradient norm": row["gradient_norm"]}
            if not all(map(math.isfinite, checked.values())):
                # Earlier rows are those of intact weights, and say how the run diverged.
                self.write(*rows[:index])
                check_finite(row["step"], checked)
        self.write(*rows)
        return float(sum(row["loss"] for row in rows) / len(rows))

    def _take_pending_rows(self) -> list[dict[str, Any]]:
        """Return the rows since the last `flush`, with numbers in place of tensors."""
        rows: list[dict[str, Any]] = []
        for pending in self.pending_rows:
            # Reading a number of a GPU waits for its step.
            numbers = {name: float(value) for name, value in pending.numbers.items()}
            rows.append({"step": pending.step, "timestamp": pending.timestamp, **numbers})
        self.pending_rows = []
        return rows

    def write_heldout(
        self,
        step: int,
        losses: list[LossRow],
        induction_drop: float,
        other_results: dict[str, Any],
    ) -> None:
        """Write the line of an evaluation, an `EvaluationRow`.

        Args:
            losses: Held-out losses by position (`Evaluation.losses`).
            induction_drop: In nats.
            other_results: By name, such as `by_place`.
        """
        total = sum(row["loss"] for row in losses)  # finite if all of them are
        # Raises for an earlier step, if one was not finite. And W&B drops a row whose step is below
        # that of the last one.
        self.flush()
        # No training loss shows the effect of the last update, so it is checked here.
        check_finite(step, {"held-out loss": total})
        row = {
            "step": step,
            "timestamp": timestamp(),
            "heldout": losses,
            "induction_drop": induction_drop,
        }
        self.write(row | other_results)

    def write(self, *rows: dict) -> None:
        """Append rows to the file, and hand them to the other writers. While the disk does not take
        them, they are kept for the next call: training goes on."""
        if not self.writes:
            return
        text = b""
        for row in rows:
            line = with_crc(row)
            if "heldout" not in row:  # a checkpoint stores the CRC of the line of its step
                self.last_crc32 = line["crc32"]
            text += json.dumps(line).encode() + b"\n"
        try:
            with self.while_writing():
                self.file.append(text)
        except OSError as error:
            if self.file.num_failures == 1:  # said once, until a write succeeds
                say(f"{self.path} cannot be written now ({error.strerror}): its rows are kept")
        # Also while the disk is away: they may write to another place.
        for write_elsewhere in self.writers:
            for row in rows:
                write_elsewhere(row)

    def finish(self) -> None:
        """Try for a last time to append what is not written yet. Rows that are lost are reported
        and not raised as an error: the checkpoint is saved, and the run may go on elsewhere."""
        try:
            retry(self.file.flush, lambda error: True, lambda line: None)
        except OSError as error:
            lost = f"its last {self.file.num_unwritten_lines} rows are lost"
            say(f"{self.path} cannot be written ({error.strerror}): {lost}")

    def last_heldout(self) -> list[LossRow] | None:
        """Return the losses by position of the last evaluation; None if no line has any."""
        rows = [row["heldout"] for row in read_metrics(self.path) if "heldout" in row]
        return rows[-1] if rows else None


def check_finite(step: float, values: dict[str, float]) -> None:
    """Raise UserError if a value is not finite. The error has the step in `diverged_at`, which
    `training.on_nan=skip` reads.

    Args:
        values: Numbers by their names in the message.
    """
    if all(math.isfinite(value) for value in values.values()):
        return
    named_values = ", ".join(f"{name} {value}" for name, value in values.items())
    error = UserError(
        f"step {step:.0f}: {named_values}; earlier checkpoints are intact: lower "
        "optimizer.learning_rate in a new folder, or pass --training.on_nan=skip"
    )
    error.diverged_at = round(step)
    raise error


def timestamp() -> str:
    """Return the time now in UTC, in seconds, in the format of ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
