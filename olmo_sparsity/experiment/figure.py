"""Draw the figure of an experiment from what is finished; what is not is an empty point with its
reason.

Place in the flow: the last job of an experiment.
"""

from __future__ import annotations

from olmo_sparsity.analysis.report.figures import Missing, draw_figure2
from olmo_sparsity.analysis.results.results import Results, read_results
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.windows import long_window
from olmo_sparsity.experiment.file import Experiment, Measurement
from olmo_sparsity.experiment.jobs import jobs_of, reason_to_skip


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
            job = jobs[measurement.name]
            reason = job.state().detail or reason_to_skip(job, jobs) or str(error)
        say(f"{measurement.name} is not drawn: {reason}")
        if measurement.choices_of is None:
            length = long_window(measurement.long).length
            scheme = measurement.model.settings.positions.scheme
            missing.append(Missing(label, reason, length, measurement.step, scheme))
    if not results:
        raise DataError(f"{experiment.folder}: no measurement is finished; nothing is drawn yet")
    draw_figure2(results, experiment.figure, labels, missing)


def main_measurements(experiment: Experiment) -> list[Measurement]:
    """Return one measurement of each model: of the last step, the longest window, the first of
    distant_states."""
    best: dict[str, Measurement] = {}
    for measurement in experiment.measurements:
        if measurement.choices_of is not None:
            continue
        first = best.setdefault(measurement.model.name, measurement)
        if _rank(measurement, first) > _rank(first, first):
            best[measurement.model.name] = measurement
    if not best:
        raise ConfigError(f"{experiment.path} measures nothing; add a section `measure`")
    return list(best.values())


def _rank(measurement: Measurement, first: Measurement) -> tuple[float, float, bool]:
    """Return a number to order measurements by, with those of the first one's distant_states
    before others."""
    step = float("inf") if measurement.step is None else measurement.step
    length = long_window(measurement.long).length
    return step, length, measurement.distant_states == first.distant_states
