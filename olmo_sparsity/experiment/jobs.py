"""List the jobs of an experiment, each after the jobs that it waits for, and how all stand.

    TrainingJob  →  MeasurementJob  →  FigureJob
                      ↑         │
                      └─────────┘ the measurement that chooses targets, or tokens, for others

Place in the flow: file.py → **`jobs_of`** → here.py or slurm.py, which run the jobs. job.py has the
kinds of jobs and their states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.experiment.file import Experiment
from olmo_sparsity.experiment.job import STATES, FigureJob, Job
from olmo_sparsity.experiment.measurement_job import MeasurementJob
from olmo_sparsity.experiment.models import Model
from olmo_sparsity.experiment.training_job import TrainingJob


def jobs_of(experiment: Experiment) -> list[Job]:
    """Return all jobs, trainings, measurements and the figure, each after the jobs that it needs.
    An experiment without the section `measure` has no measurements, and draws nothing."""
    jobs: list[Job] = []
    for model in experiment.models:
        origins = _origins_of(model, experiment.models)
        jobs.append(TrainingJob(name=model.name, needs=origins, model=model))
    for measurement in experiment.measurements:
        needs = (measurement.model.name, *measurement.choosers)
        jobs.append(MeasurementJob(name=measurement.name, needs=needs, measurement=measurement))
    if experiment.measurements:
        names = tuple(measurement.name for measurement in experiment.measurements)
        jobs.append(FigureJob(name="figure", needs=names, figure=experiment.figure))
    return _sorted_by_needs(jobs)


def _origins_of(model: Model, models: list[Model]) -> tuple[str, ...]:
    """Return the names of the models from whose checkpoints this one starts."""
    # `init_from` and `branch_from` name a run, or a checkpoint in it.
    settings = model.settings
    origins = [origin for origin in (settings.init_from, settings.branch_from) if origin]
    return tuple(
        other.name
        for other in models
        if other is not model
        if any(Path(origin).is_relative_to(other.folder) for origin in origins)
    )


def _sorted_by_needs(jobs: list[Job]) -> list[Job]:
    """Return the jobs in the same order, but each after the jobs that it needs."""
    waiting = list(jobs)
    placed: dict[str, Job] = {}
    while waiting:
        free = [job for job in waiting if placed.keys() >= set(job.needs)]
        # Models that start from each other are never free; they fail when they run, by name.
        first = free[0] if free else waiting[0]
        waiting.remove(first)
        placed[first.name] = first
    return list(placed.values())


def check_no_other_work(jobs: Iterable[Job]) -> None:
    """Raise ConfigError for a job that would fail, as its folder holds work of other settings."""
    for job in jobs:
        other_work = job.find_other_work()
        if other_work is not None:
            raise ConfigError(f"{job.name}: {other_work}")


def format_states(jobs: Sequence[Job], queued: Mapping[str, str] | None = None) -> str:
    """Return a line for each job with its state, and a line with the number of jobs in each state.

    Args:
        queued: The SLURM number of each job that waits in the queue, by the job's name.
    """
    states = [job.state() for job in jobs]
    width = max(len(job.name) for job in jobs)
    lines = []
    for job, state in zip(jobs, states, strict=True):
        steps = ""
        if isinstance(job, TrainingJob):
            steps = f"{state.step:,}/{job.model.num_steps:,}"
        detail = state.detail
        # A job that failed may have been submitted again.
        if queued and job.name in queued and state.name in ("waiting", "failed"):
            last_failure = f" ({detail})" if detail else ""
            detail = f"in the queue as {queued[job.name]}{last_failure}"
        line = f"{job.kind:<8}{job.name:<{width}}  {state.name:<8}{steps:>17}  {detail}"
        lines.append(line.rstrip())
    counts = Counter(state.name for state in states)
    total = ", ".join(f"{counts[name]} {name}" for name in STATES)
    return "\n".join([*lines, f"{len(jobs)} jobs: {total}"])
