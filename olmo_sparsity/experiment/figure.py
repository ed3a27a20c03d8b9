"""Draw the figure of an experiment from what is finished; what is not is an empty point with its
reason."""

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
    for one in experiment.measurements:
        label = experiment.label_of(one)
        try:
            results.append(read_results(one.folder))
            labels.append(label)
            continue
        except DataError as error:
            state = jobs[one.name].state()
            reason = state.detail or reason_to_skip(jobs[one.name], jobs) or str(error)
        say(f"{one.name} is not drawn: {reason}")
        if one.choices_of is None:
            length = long_window(one.long).length
            scheme = one.model.settings.positions.scheme
            missing.append(Missing(label, reason, length, one.step, scheme))
    if not results:
        raise DataError(f"{experiment.folder}: no measurement is finished; nothing is drawn yet")
    draw_figure2(results, experiment.figure, labels, missing)


def main_measurements(experiment: Experiment) -> list[Measurement]:
    """One measurement of each model: of the last step, the longest window, the first reading."""
    found: dict[str, Measurement] = {}
    for one in experiment.measurements:
        if one.choices_of is not None:
            continue
        before = found.get(one.model.name)
        if before is None or _rank(one, before) > _rank(before, before):
            found[one.model.name] = one
    if not found:
        raise ConfigError(f"{experiment.path} measures nothing; add a section `measure`")
    return list(found.values())


def _rank(one: Measurement, first: Measurement) -> tuple[float, float, bool]:
    step = float("inf") if one.step is None else one.step
    length = long_window(one.long).length
    return step, length, one.distant_states == first.distant_states
