"""Read `metrics.jsonl` of a run folder.

    read_metrics(path)         # [{"step": 10, "loss": 4.2, …}, {"step": 10, "heldout": […], …}, …]
    read_lines_of_run(path)    # the same, with the text of each line; DataError if the file is of
                               # another run than the checkpoints beside it

A line that a kill has cut short, or whose CRC is wrong, is skipped. Each checkpoint stores the CRC
of the line of its step, by which a file of another run is noticed. metrics.py writes the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from olmo_sparsity.base.conform import conform
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import check_readable_now, read_bounded
from olmo_sparsity.base.json_text import parse_json
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.run_folder.trainer_state import TrainerState

_MAX_BYTES = 2**30
"""Largest size of a metrics file that is read: millions of steps."""


class MetricLine(NamedTuple):
    """A line of the file."""

    text: bytes
    row: dict[str, Any]
    """Its content, without the CRC."""


def read_metrics(path: Path) -> list[dict]:
    """Return the rows of a metrics file, without those of damaged lines."""
    return [line.row for line in _read_lines(path)]


def read_lines_of_run(path: Path, until: int | None = None) -> list[MetricLine]:
    """Return the lines of a run's metrics. Raise DataError if they are those of another run: at the
    step of a checkpoint, the CRC of the line differs from the one that the checkpoint stores.

    Args:
        until: The step from which the run resumes. Checkpoints of later steps are ignored: they
            are damaged, and a start that was killed may have repeated their steps, with other
            losses. None: no checkpoint is ignored.
    """
    lines = _read_lines(path)
    crc32_of_step = {}
    for line in lines:
        if "heldout" not in line.row:
            # `row` is without the CRC, which only the text has.
            crc32_of_step[line.row["step"]] = json.loads(line.text).get("crc32")

    for folder in list_checkpoints(path.parent):
        try:
            state = TrainerState.read(folder)
        except DataError:  # it is damaged or cannot be read now, and is not resumed from
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


def _read_lines(path: Path) -> list[MetricLine]:
    """Return the lines of a file that are intact. Report how many are damaged."""
    try:
        content = read_bounded(path, _MAX_BYTES) if path.exists() else b""
    except OSError as error:
        check_readable_now(path, error)
        raise DataError(f"{path}: {error.strerror}; restore it") from None

    parsed_lines = [_parse_line(text) for text in content.splitlines()]
    # A kill may have cut the last line short, which is no damage.
    if parsed_lines and parsed_lines[-1] is None and not content.endswith(b"\n"):
        parsed_lines.pop()
    lines = [line for line in parsed_lines if line is not None]
    num_damaged = len(parsed_lines) - len(lines)
    if num_damaged:
        say(f"{path}: {num_damaged} damaged lines are skipped")
    return lines


def _parse_line(text: bytes) -> MetricLine | None:
    """Return a line of the file; None if it is damaged: its CRC is wrong, or it has no step."""
    try:
        row = parse_json(text, dict)
        conform({"step": row.get("step")}, dict[str, int])
    except ValueError:
        return None
    return MetricLine(text, row)
