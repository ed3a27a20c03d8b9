"""Sort measurements into the curves of Figure 2.

    results → grouped by label and run, then by conditions → one Curve for each group

Results of one run that differ in the length of the long window or in the step alone are points of
one curve. Results that differ in anything else, such as the local window, get curves of their own,
whose labels say what differs:

    label  run        long  short  step     curve
    RoPE   runs/rope   256    128  2000     RoPE, short=128
    RoPE   runs/rope   512    128  2000     RoPE, short=128
    RoPE   runs/rope   512     32  2000     RoPE, short=32
    PoSE   runs/pose   256    128  2000     PoSE

`curves_of` is the entry point; figures.py draws the curves. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import pandas as pd

from olmo_sparsity.analysis.results.loss_statistics import mean_gap
from olmo_sparsity.analysis.results.meta import Meta, main_set
from olmo_sparsity.analysis.results.target_rows import SplitDocuments
from olmo_sparsity.analysis.results.view import spell
from olmo_sparsity.config.windows import long_window

SHARED_WINDOWS = ("short", "stride", "distant_states")
"""The entries of `Meta.windows` that measurements of one curve share. Its points may differ in
`long`."""


class DrawnResults(Protocol):
    """What a figure reads of `Results`. It is a protocol and not `Results` itself, as
    `Results.plot` imports figures.py, and imports go one way."""

    @property
    def summary(self) -> pd.DataFrame: ...
    @property
    def targets(self) -> pd.DataFrame: ...
    @property
    def losses(self) -> pd.DataFrame: ...
    @property
    def recovery(self) -> pd.DataFrame: ...
    @property
    def reported(self) -> pd.DataFrame: ...
    @property
    def parts(self) -> SplitDocuments: ...
    @property
    def meta(self) -> Meta: ...


@dataclass(frozen=True, eq=False)
class Curve:
    """One run in the figure. Its rows are those of the summary, of the main target set and of one
    selector."""

    label: str
    """Name of its scheme, such as RoPE. Curves of one label share their colour."""

    rows: pd.DataFrame
    """Rows by k, of the measurement at the last step and the longest window. They have the columns
    of the summary, and length, step and windows of the measurement."""

    rows_of_run: pd.DataFrame
    """Rows with the smallest k, of all measurements of the run."""

    gaps: pd.DataFrame
    """Mean L_short − L_long of all tokens, a row for each measurement of the run: length, step,
    gap, gap_low, gap_high."""

    trained: Mapping[str, Any]
    """How the model was trained: positions, length, …; empty if unknown."""

    transferred: pd.DataFrame
    """Rows by k of measurements that evaluated the units of another model. They are drawn as stars
    beside the curve."""

    is_transfer: bool = False
    """Whether another model chose the units of the curve itself, which then needs no placebo."""

    @property
    def selector(self) -> str:
        """Return the readable name of the selector."""
        return spell(self.rows.selector.iloc[0])

    def along(self, axis: str) -> pd.DataFrame:
        """Return the rows that differ in `axis` (k, length or step) alone, in its order."""
        if axis == "k":
            return self.rows.sort_values(axis)
        fixed = "step" if axis == "length" else "length"
        rows = self.rows_of_run.sort_values(axis)
        return rows[rows[fixed] == self.rows[fixed].iloc[0]]


def curves_of(results: Sequence[DrawnResults], names: Sequence[str]) -> list[Curve]:
    """Return the curves of measurements, each of the first selector at the main target set.

    Measurements of one name and one run are points of one curve if they differ in length and step
    alone. Otherwise there is a curve for each, whose label says what differs.

    Args:
        results: The measurements.
        names: For each of them the name of its curve, such as RoPE.
    """
    named_results = list(zip(results, names, strict=True))
    # A measurement that evaluated units of another model is drawn as stars beside the curve of its
    # name. It is a curve itself only if that name has no other.
    names_with_curve = {name for result, name in named_results if not _is_transfer(result)}
    transferred: dict[str, list[pd.DataFrame]] = {}
    groups: dict[tuple[str, str], list[DrawnResults]] = {}
    for result, name in named_results:
        if _is_transfer(result) and name in names_with_curve:
            transferred.setdefault(name, []).append(_rows_of(result))
        else:
            groups.setdefault((name, run_of(result)), []).append(result)

    curves = []
    for (name, _), group in groups.items():
        groups_alike = _group_by_conditions(group)
        examples = [results_alike[0] for results_alike in groups_alike]
        for results_alike in groups_alike:
            label = ", ".join([name, *_differing_conditions(results_alike[0], examples)])
            new_curves = _curves_of_alike(label, results_alike, transferred.get(name, []))
            curves += new_curves
            # Transferred rows are drawn once, beside the first curve of their name. Results without
            # rows have no curve.
            if new_curves:
                transferred.pop(name, None)
    return curves


def _group_by_conditions(results: Sequence[DrawnResults]) -> list[list[DrawnResults]]:
    """Return the results in groups that share all conditions, in the order of their first ones."""
    # By their text, as conditions may hold lists, which have no hash.
    by_conditions: dict[str, list[DrawnResults]] = {}
    for result in results:
        by_conditions.setdefault(repr(_conditions(result)), []).append(result)
    return list(by_conditions.values())


class _Point(NamedTuple):
    """A measurement, and its rows of the summary that are drawn."""

    result: DrawnResults
    rows: pd.DataFrame


def _curves_of_alike(
    label: str, results: list[DrawnResults], transferred: list[pd.DataFrame]
) -> list[Curve]:
    """Return the curve of results that differ in length and step alone. If two of them have the
    same length and step, such as two seeds, return a curve for each result.

    Args:
        label: The label of the curves.
        results: The results.
        transferred: Rows of measurements that evaluated units of another model. They are drawn
            beside the first curve.
    """
    points = [_Point(result, _rows_of(result)) for result in results]
    points = [point for point in points if len(point.rows)]
    if not points:
        return []
    point_by_step_and_length = {}
    for point in points:
        step_and_length = tuple(point.rows[["step", "length"]].iloc[0])
        point_by_step_and_length[step_and_length] = point
    is_one_curve = len(point_by_step_and_length) == len(points) > 1
    if is_one_curve:
        # By k, a run is drawn at its last step and its longest windows.
        main_point = point_by_step_and_length[max(point_by_step_and_length)]
        return [_curve(label, main_point, points, transferred)]

    # Transferred rows are drawn once, beside the first curve.
    first_point, *other_points = points
    first_curve = _curve(label, first_point, [first_point], transferred)
    return [first_curve, *(_curve(label, point, [point], []) for point in other_points)]


def _curve(
    label: str,
    main_point: _Point,
    points: Sequence[_Point],
    transferred: list[pd.DataFrame],
) -> Curve:
    """Return a curve of `points`, which is drawn at `main_point` where the axis is k."""
    joined = pd.concat([point.rows for point in points])
    return Curve(
        label=label,
        rows=main_point.rows,
        rows_of_run=joined[joined.k == joined.k.min()],
        gaps=pd.DataFrame([_gap_of(point) for point in points]),
        trained=main_point.result.meta.model.get("trained") or {},
        transferred=pd.concat(transferred) if transferred else main_point.rows[:0],
        is_transfer=_is_transfer(main_point.result),
    )


def _is_transfer(result: DrawnResults) -> bool:
    """Return whether a measurement evaluated units that another model chose."""
    return "choices" in result.meta.targets


def _conditions(result: DrawnResults) -> dict[str, Any]:
    """Return the settings that measurements of one curve share."""
    # The sampled share of blocks is not one of them: --blocks N makes it depend on the window, and
    # it decides how exact a point is, not what it means.
    windows = result.meta.windows
    conditions = {name: windows.get(name) for name in SHARED_WINDOWS}
    conditions["text"] = str(result.meta.data.get("fingerprint"))[:8]
    conditions["selector"] = result.meta.selectors[0] if result.meta.selectors else ""
    return conditions


def _differing_conditions(result: DrawnResults, others: Sequence[DrawnResults]) -> list[str]:
    """Return the conditions of a measurement, as NAME=VALUE, in which some of the others differ."""
    conditions = [_conditions(other) for other in others]
    return [
        f"{name}={value}"
        for name, value in _conditions(result).items()
        if any(other[name] != value for other in conditions)
    ]


def _rows_of(result: DrawnResults) -> pd.DataFrame:
    """Return the rows of the summary that are drawn: of the main target set and the first selector.
    The columns windows, length and step are added."""
    # Of several selectors, a figure shows the first of the summary.
    target_set = main_set(result.targets.target_set)
    rows = result.summary[result.summary.target_set == target_set]
    if not len(rows):
        return rows
    rows = rows[rows.selector == rows.selector.iloc[0]]
    long = result.meta.windows["long"]
    short = result.meta.windows["short"]
    trained = result.meta.model.get("trained") or {}
    return rows.assign(
        windows=f"{long} / {short}",
        length=long_window(long).sort_key,
        step=trained.get("step") or 0,  # a model without steps is drawn at 0
    )


def _gap_of(point: _Point) -> dict[str, float]:
    """Return the mean gap of all tokens with its interval, and the length and step of the point."""
    mean = mean_gap(point.result.reported, point.result.parts)
    return {
        "length": float(point.rows.length.iloc[0]),
        "step": float(point.rows.step.iloc[0]),
        "gap": mean.value,
        "gap_low": mean.low,
        "gap_high": mean.high,
    }


def run_of(result: DrawnResults) -> str:
    """Return the run that the measured model is a checkpoint of, or else the model's name."""
    # The name of a checkpoint of a run is RUN/checkpoints/step002000.
    run, _, _ = str(result.meta.model["name"]).partition("/checkpoints/")
    return run
