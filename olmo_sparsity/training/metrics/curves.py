"""Draw the curves of runs: training loss, held-out loss, speed (`olmo-sparsity figure RUN …`).

    draw_curves(["runs/pose", "runs/rope"], Path("curves.png"))    # a color for each run

The numbers are those of metrics.jsonl; loss_table.py prints the same evaluations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from olmo_sparsity.base import drawing
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.training.metrics.loss_rows import EvaluationRow
from olmo_sparsity.training.metrics.loss_table import losses_by_step
from olmo_sparsity.training.metrics.read import read_metrics

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE_STYLES = ("-", "--", "-.", ":")
"""How the ranges of positions of one run are told apart. Runs are told apart by color."""


class _RunCurves(NamedTuple):
    """The metrics of one run."""

    name: str
    steps: pd.DataFrame
    """A row for each step."""

    heldout: pd.DataFrame
    """A row for each evaluation, as `losses_by_step` returns it."""

    color: str


def draw_curves(folders: Sequence[str], out: Path, labels: list[str] | None = None) -> None:
    """Draw training losses, held-out losses by position, and the speed of runs. They may still be
    running.

    Args:
        folders: The folders of the runs.
        out: The picture, whose suffix is its format.
        labels: A name for each run. Default: the names of the folders.
    """
    names = drawing.one_label_each(labels or drawing.labels_of_folders(folders), folders)
    drawing.check_labels_differ(names)
    colors = itertools.cycle(drawing.PALETTE)
    # All files are read before anything is drawn, as an error should come first.
    curves = [
        _read_curves(folder, name, color)
        for folder, name, color in zip(folders, names, colors, strict=False)
    ]
    drawing.save(lambda: _draw(curves), out)


def _read_curves(folder: str, name: str, color: str) -> _RunCurves:
    """Return the metrics of a run. Raise DataError if it has none yet."""
    import pandas as pd

    rows = list(read_metrics(Path(folder) / "metrics.jsonl"))
    if not any("loss" in row for row in rows):
        raise DataError(f"{folder}/metrics.jsonl holds no step yet; draw it later")
    evaluations = [row for row in rows if "heldout" in row]
    heldout = losses_by_step(cast(list[EvaluationRow], evaluations))
    return _RunCurves(name, pd.DataFrame(rows), heldout, color)


def _draw(curves: Sequence[_RunCurves]) -> Figure:
    """Return the figure of some runs, with three axes."""
    from matplotlib.figure import Figure

    # Not of pyplot, which would keep every figure, and may look for a screen.
    figure = Figure(figsize=(7.5, 2.8), layout="constrained")
    loss_axes, heldout_axes, speed_axes = figure.subplots(1, 3)
    for run in curves:
        _draw_steps(loss_axes, run, "loss")
        _draw_steps(speed_axes, run, "tokens_per_s")
        _draw_heldout(heldout_axes, run)
    loss_axes.set_title("training loss")
    heldout_axes.set_title("held-out loss")
    speed_axes.set_title("tokens/s")
    for axes in (loss_axes, heldout_axes, speed_axes):
        axes.set_xlabel("step")
        if axes.lines:  # there may be no evaluation yet
            axes.legend(frameon=False)
    return figure


def _draw_steps(axes: Axes, run: _RunCurves, column: str) -> None:
    """Draw a number of each step. Steps without it are left out: speed is logged now and then."""
    rows = run.steps.reindex(columns=["step", column]).dropna()
    axes.plot(rows.step, rows[column], color=run.color, label=run.name)


def _draw_heldout(axes: Axes, run: _RunCurves) -> None:
    """Draw a curve for each range of positions, and for the farthest places of long documents."""
    ranges = [column for column in run.heldout if column not in ("step", "induction")]
    for column, line_style in zip(ranges, itertools.cycle(LINE_STYLES), strict=False):
        axes.plot(
            run.heldout.step,
            run.heldout[column],
            color=run.color,
            linestyle=line_style,
            label=f"{run.name}, {column}",
        )
