"""Draw the figure of an experiment from what is finished.

Place in the flow: the last job of an experiment calls **`draw`**. A measurement without results is
an empty point of the figure, with its reason. The commands `report` and `figure` take
**`main_measurements`**, one of each model: `c4_pose-last-4032` of `c4_pose-last-960`,
`c4_pose-last-4032` and `c4_pose-5000-4032`, for example.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from olmo_sparsity.analysis.report.figure_style import Missing
from olmo_sparsity.analysis.report.figures import draw_figure2
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.stored_results import read_results
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.experiment.file import Experiment
from olmo_sparsity.experiment.job import Job
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
        results_or_reason = _read_finished(measurement, jobs)
        if isinstance(results_or_reason, Results):
            results.append(results_or_reason)
            labels.append(label)
            continue
        say(f"{measurement.name} is not drawn: {results_or_reason.reason}")
        # A transfer has no point of its own in the figure that could be empty.
        if measurement.choices_of is None:
            missing.append(
                Missing(
                    label=label,
                    reason=results_or_reason.reason,
                    length=measurement.long_length,
                    step=measurement.step,
                    positions=measurement.model.settings.positions.scheme,
                )
            )
    if not results:
        raise DataError(f"{experiment.folder}: no measurement is finished; nothing is drawn yet")
    draw_figure2(results, experiment.figure, labels, missing)


class _NotDrawn(NamedTuple):
    """A measurement whose results cannot be drawn."""

    reason: str


def _read_finished(measurement: Measurement, jobs: Mapping[str, Job]) -> Results | _NotDrawn:
    """Return the results of a measurement, or why they cannot be drawn.

    Args:
        jobs: All jobs, by name.
    """
    job = jobs[measurement.name]
    state = job.state()
    try:
        results = read_results(measurement.folder)
    except DataError as error:
        # What its job knows says more than that results are missing.
        return _NotDrawn(state.detail or job.reason_to_skip(jobs) or str(error))
    has_other_options = state.name == "failed"
    return _NotDrawn(state.detail) if has_other_options else results


def main_measurements(experiment: Experiment) -> list[Measurement]:
    """Return one measurement of each model: at the last step, with the longest window, and with the
    first of `distant_states`."""
    measurements = [
        measurement for measurement in experiment.measurements if measurement.choices_of is None
    ]
    if not measurements:
        raise ConfigError(f"{experiment.path} measures nothing; add a section `measure`")
    # The measurements of further values come after those of the first.
    first_states = measurements[0].distant_states
    of_model: dict[str, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        if measurement.distant_states == first_states:
            of_model[measurement.model.name].append(measurement)
    return [max(candidates, key=_latest_and_longest) for candidates in of_model.values()]


def _latest_and_longest(measurement: Measurement) -> tuple[float, float]:
    """Return the key by which the main measurement of a model is the largest."""
    return (measurement.step_order, measurement.long_length)
