"""Write and read `metrics.jsonl` of a run folder: a line for each step, and one for each
evaluation.

    {"step": 10, "timestamp": "2026-03-01T12:00:00Z", "loss": 4.2, ..., "crc32": "..."}
    {"step": 10, "timestamp": "2026-03-01T12:00:05Z", "heldout": [...], ..., "crc32": "..."}

`Metrics` writes them in training, and rejects numbers that are not finite. Each checkpoint stores
the CRC of the line of its step, so that `read_own_lines` notices a file of another run.
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

from olmo_sparsity.base.conform import conform
from olmo_sparsity.base.errors import DataError, UserError
from olmo_sparsity.base.files import read_bounded, writing
from olmo_sparsity.base.json_text import parse_json, with_crc
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.retry import retry
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.metric_writers import MetricWriter
from olmo_sparsity.training.trainer_state import TrainerState

if TYPE_CHECKING:
    from torch import Tensor

_MAX_BYTES = 2**30
"""Largest size of a metrics file that is read: millions of steps."""


class PendingRow(NamedTuple):
    """The row of a step that is not written yet."""

    step: int
    timestamp: str
    numbers: dict[str, Tensor | float]
    """Numbers by name. Those of a GPU are still there."""


class MetricLine(NamedTuple):
    """A line of the file."""

    text: bytes
    row: dict[str, Any]
    """Its content, without the CRC."""


# --- writing ------------------------------------------------------------------------------------


def check_finite(step: float, values: dict[str, float]) -> None:
    """Raise UserError if a value is not finite. The error has the step in `diverged_at`, which
    `training.on_nan=skip` reads. `values`: numbers by their names in the message."""
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


class Metrics:
    """Writes the metrics of a run. Losses stay on the device until `flush`, so that the host need
    not wait for the GPU at each step."""

    def __init__(
        self,
        run_folder: Path,
        start: int,
        writers: Sequence[MetricWriter],
        writes: bool = True,
        while_writing: Callable[[], AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        """Open the file of a run that continues after step `start`.

        start: The last step that the run has done.
        writers: Get each row, too, such as that of Weights & Biases.
        writes: Whether this process writes. The others only check their numbers.
        while_writing: Makes a context in which rows are written, such as one with a time limit.
        """
        self.path = run_folder / "metrics.jsonl"
        self.writers = writers
        self.writes = writes
        self.while_writing = while_writing
        self.pending: list[PendingRow] = []
        """The rows of the steps since the last `flush`."""

        self.last_crc32: str | None = None
        """CRC of the line of the last step."""

        self._unwritten = b""
        """Lines that are not in the file, as the disk did not take them."""

        self._num_failures = 0
        """Number of writes in a row that have failed."""

        self._num_bytes = 0
        """Size of the file after the last write that succeeded."""

        self.earlier_losses: list[tuple[int, float]] = []
        """Steps of earlier starts, with their losses."""

        if writes and self.path.exists():
            # A killed run may have written past its last checkpoint; those steps are repeated.
            own_lines = read_own_lines(self.path, until=start)
            lines = [line for line in own_lines if line.row["step"] <= start]
            with writing(self.path) as partial:
                partial.write_bytes(b"".join(line.text + b"\n" for line in lines))
            self._num_bytes = self.path.stat().st_size
            self.earlier_losses = [
                (line.row["step"], line.row["loss"]) for line in lines if "loss" in line.row
            ]

    def add(self, step: int, **values: Tensor | float) -> None:
        """Add the numbers of a step, which `flush` writes."""
        self.pending.append(PendingRow(step, timestamp(), values))

    def flush(self, **speed: float) -> float | None:
        """Write the rows of the steps since the last call. Return their mean loss; None if there
        are none. At the first row with a number that is not finite, write the rows before it and
        raise UserError.

        speed: Numbers of all these steps, written with the last row.
        """
        rows: list[dict[str, Any]] = []
        for pending in self.pending:
            # Reading a number of a GPU waits for its step.
            numbers = {name: float(value) for name, value in pending.numbers.items()}
            rows.append({"step": pending.step, "timestamp": pending.timestamp, **numbers})
        self.pending = []
        if not rows:
            return None
        rows[-1].update(speed)

        # Earlier rows are those of intact weights, and say how the run diverged.
        for number, row in enumerate(rows):
            values = {"loss": row["loss"], "gradient norm": row["gradient_norm"]}
            if not all(map(math.isfinite, values.values())):
                self.write(*rows[:number])
                check_finite(row["step"], values)
        self.write(*rows)
        return float(sum(row["loss"] for row in rows) / len(rows))

    def write_heldout(self, step: int, losses: list[dict], drop: float, measured: dict) -> None:
        """Write the line of an evaluation. `measured`: its other results, by name."""
        total = sum(row["loss"] for row in losses)  # finite if all of them are
        # Raises for an earlier step, if one was not finite. And W&B drops a row whose step is below
        # that of the last one.
        self.flush()
        # No training loss shows the effect of the last update, so it is checked here.
        check_finite(step, {"held-out loss": total})
        row = {"step": step, "timestamp": timestamp(), "heldout": losses, "induction_drop": drop}
        self.write(row | measured)

    def write(self, *rows: dict) -> None:
        """Append rows to the file, and hand them to the other writers. While the disk does not take
        them, they are kept for the next call: training goes on."""
        if not self.writes:
            return
        for row in rows:
            line = with_crc(row)
            if "heldout" not in row:  # a checkpoint knows the line of its training step
                self.last_crc32 = line["crc32"]
            self._unwritten += json.dumps(line).encode() + b"\n"
        try:
            with self.while_writing():
                self._append()
        except OSError as error:
            if not self._num_failures:
                say(f"{self.path} cannot be written now ({error.strerror}): its rows are kept")
            self._num_failures += 1
        for write_elsewhere in self.writers:
            for row in rows:
                write_elsewhere(row)

    def _append(self) -> None:
        """Append what is not written yet. Raises OSError."""
        if not self._unwritten:
            return
        with self.path.open("ab") as file:
            if self._num_failures:
                file.truncate(self._num_bytes)  # a part of them may be there
            file.write(self._unwritten)
            file.flush()
            num_bytes = file.tell()
        # Only now, as a network disk may report an error when a file is closed.
        self._num_bytes = num_bytes
        self._unwritten = b""
        self._num_failures = 0

    def finish(self) -> None:
        """Try for a last time to append what is not written yet, and report rows that are lost. No
        error: the checkpoint is saved, and the run may go on elsewhere."""
        try:
            retry(self._append, lambda error: True, lambda line: None)
        except OSError as error:
            num_rows = self._unwritten.count(b"\n")
            lost = f"its last {num_rows} rows are lost"
            say(f"{self.path} cannot be written ({error.strerror}): {lost}")

    def last_heldout(self) -> list[dict] | None:
        """Return the losses of the last evaluation; None if its line is lost."""
        rows = [row["heldout"] for row in read_metrics(self.path) if "heldout" in row]
        return rows[-1] if rows else None


# --- reading ------------------------------------------------------------------------------------


def read_metrics(path: Path) -> list[dict]:
    """Return the rows of a metrics file, without those of damaged lines."""
    return [line.row for line in _read_lines(path)]


def _read_lines(path: Path) -> list[MetricLine]:
    """Return the lines of a file that are intact. Report how many are damaged. A last line without
    an end is no damage, as a kill may have cut it short."""
    try:
        content = read_bounded(path, _MAX_BYTES) if path.exists() else b""
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; restore it") from None
    texts = content.splitlines()
    lines = []
    for text in texts:
        with contextlib.suppress(ValueError):
            row = parse_json(text, dict)
            conform({"step": row.get("step")}, dict[str, int])
            lines.append(MetricLine(text, row))
    is_last_cut = not content.endswith(b"\n") and (not lines or lines[-1].text is not texts[-1])
    num_damaged = len(texts) - len(lines) - is_last_cut
    if texts and num_damaged:
        say(f"{path}: {num_damaged} damaged lines are skipped")
    return lines


def read_own_lines(path: Path, until: int | None = None) -> list[MetricLine]:
    """Return the lines of a run's metrics. Raise DataError if they are those of another run, whose
    CRC at the step of a checkpoint differs from the one that the checkpoint stores.

    until: Ignore checkpoints of later steps than this one, from which the run resumes. It did not
        resume from them as they are damaged, and a start that was killed may have repeated their
        steps, with other losses.
    """
    lines = _read_lines(path)
    crc32_of_step = {}
    for line in lines:
        if "heldout" not in line.row:
            crc32_of_step[line.row["step"]] = json.loads(line.text).get("crc32")
    for folder in list_checkpoints(path.parent):
        try:
            state = TrainerState.read(folder)
        except DataError:  # it is damaged, and not resumed from
            continue
        if until is not None and state.step > until:
            continue
        line_crc32 = crc32_of_step.get(state.step)  # None if the line is lost
        saved_crc32 = state.metrics_crc32  # None if the checkpoint is older than this check
        if line_crc32 is not None and saved_crc32 is not None and line_crc32 != saved_crc32:
            raise DataError(
                f"{path} is not of the run of {folder}: its line of step {state.step} is another; "
                "restore the file of this run, or delete it to go on without"
            )
    return lines
