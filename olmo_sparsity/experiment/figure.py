"""Draw the figure of an experiment from what is finished.

Place in the flow: the last job of an experiment calls **`draw`**. A measurement without results is
an empty point of the figure, with its reason. The commands `report` and `figure` take
**`main_measurements`**, one of each model.
"""

from __future__ import annotations

from typing import NamedTuple

from olmo_sparsity.analysis.report.figure_style import Missing
from olmo_sparsity.analysis.report.figures import draw_figure2
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.stored_results import read_results
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.windows import long_window
from olmo_sparsity.experiment.file import Experiment
from olmo_sparsity.experiment.jobs import jobs_of
from olmo_sparsity.experiment.measurements import Measurement


def draw(experiment: Experiment) -> None:
    """Write the figure of all measurements that are finished."""
    results: list[Results] = []
    labels: list[str] = []
    missing: list[Missing] = []
    jobs = {job.name: job for job in jobs_of(experiment)}
    for measurement in experiment.measurements:
        label = experiment.label_of(measurement)
        try:
            results.append(read_results(measurement.folder))
            labels.append(label)
            continue
        except DataError as error:
            # What its job knows says more than that results are missing.
            job = jobs[measurement.name]
            reason = job.state().detail or job.reason_to_skip(jobs) or str(error)
        say(f"{measurement.name} is not drawn: {reason}")
        # A transfer has no point of its own in the figure that could be empty.
        if measurement.choices_of is None:
            length = long_window(measurement.long).length
            scheme = measurement.model.settings.positions.scheme
            missing.append(Missing(label, reason, length, measurement.step, scheme))
    if not results:
        raise DataError(f"{experiment.folder}: no measurement is finished; nothing is drawn yet")
    draw_figure2(results, experiment.figure, labels, missing)


def main_measurements(experiment: Experiment) -> list[Measurement]:
    """Return one measurement of each model: at the last step, with the longest window, and with the
    first of `distant_states`."""
    main: dict[str, Measurement] = {}
    for measurement in experiment.measurements:
        if measurement.choices_of is not None:
            continue
        best_so_far = main.setdefault(measurement.model.name, measurement)
        if _rank(measurement, best_so_far) > _rank(best_so_far, best_so_far):
            main[measurement.model.name] = measurement
    if not main:
        raise ConfigError(f"{experiment.path} measures nothing; add a section `measure`")
    return list(main.values())


class _Rank(NamedTuple):
    """Orders the measurements of a model: the one of the largest rank is its main one."""

    step: float
    length: float
    has_same_states: bool
    """Whether it has the `distant_states` of the best one so far. A measurement with other states
    comes later in the file, and does not replace it."""


def _rank(measurement: Measurement, compared_with: Measurement) -> _Rank:
    """Return the rank of a measurement.

    Args:
        compared_with: The best one of the same model so far.
    """
    return _Rank(
        step=float("inf") if measurement.step is None else measurement.step,
        length=long_window(measurement.long).length,
        has_same_states=measurement.distant_states == compared_with.distant_states,
    )
