"""List the jobs of an experiment, which of them each waits for, and how each stands.

Place in the flow: file → **jobs** → here, or SLURM. States are read from the folders on disk alone,
so that any machine that sees them knows the same.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from olmo_sparsity.base.errors import ReportedElsewhere
from olmo_sparsity.base.files import read_bounded, write_atomically
from olmo_sparsity.base.locks import Owner, find_holder, locked
from olmo_sparsity.base.manifest import MANIFEST
from olmo_sparsity.config.run import flatten
from olmo_sparsity.experiment.file import Experiment, Measurement, Model
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.run_folder import is_work_of, read_metrics

STATES = ("done", "running", "failed", "waiting")


@dataclass(frozen=True)
class State:
    name: str
    """One of `STATES`."""

    step: int = 0
    """Steps that are done, if the job trains."""

    detail: str = ""


@dataclass(frozen=True)
class Job:
    kind: Literal["train", "measure", "figure"]
    name: str
    needs: tuple[str, ...]
    """Names of the jobs that have ended before this one begins, with success or not."""

    model: Model | None = None
    measurement: Measurement | None = None
    figure: Path | None = None
    """The file that the job draws, if it draws."""

    @property
    def note(self) -> Path:
        """Return the file next to the job's results with the error message of its last failure."""
        return self._beside("failed")

    @property
    def locks(self) -> Path:
        """Return the folder in which each process of a measurement holds a lock while it runs."""
        return self._beside("running")

    def _beside(self, suffix: str) -> Path:
        if self.model is not None:
            folder = self.model.folder
        elif self.measurement is not None:
            folder = self.measurement.folder
        else:
            assert self.figure is not None
            folder = self.figure
        return folder.with_name(f"{folder.name}.{suffix}")

    def state(self) -> State:
        """Return how the job stands now."""
        if self.model is not None:
            return _state_of_training(self.model, self.note)
        if self.measurement is not None:
            return self._state_of_measurement(self.measurement)
        assert self.figure is not None
        return State("done" if self.figure.is_file() else "waiting")

    def _state_of_measurement(self, measurement: Measurement) -> State:
        """Return how a measurement stands: done by its manifest, running by the locks of its
        processes, failed by its note."""
        if (measurement.folder / MANIFEST).is_file():
            return State("done")
        dead = ""
        for folder in sorted(self.locks.glob("*")):
            holder = find_holder(folder)
            if holder is None:
                continue
            # One process alive is enough: it takes over the documents of those that died.
            if holder.seems_alive:
                return State("running", detail=_place_of(holder.owner))
            dead = f"died {_place_of(holder.owner)}"
        if self.note.is_file():
            return State("failed", detail=_read_note(self.note))
        return State("failed" if dead else "waiting", detail=dead)

    @contextlib.contextmanager
    def recording(self, process: str = "") -> Iterator[None]:
        """Write the note of a job that fails inside. `process`: which one of a measurement."""
        self.note.parent.mkdir(parents=True, exist_ok=True)
        self.note.unlink(missing_ok=True)
        lock: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if process:  # a training locks its own folder
            folder = self.locks / process
            folder.mkdir(parents=True, exist_ok=True)
            lock = locked(folder)
        try:
            with lock:
                yield
        except ReportedElsewhere:
            raise
        except Exception as error:
            write_atomically(self.note, str(error) or type(error).__name__)
            raise


def jobs_of(experiment: Experiment) -> list[Job]:
    """Return all jobs, each after those that it needs: trainings, measurements, the figure. A file
    without `measure` has no measurements, and draws nothing."""
    jobs = []
    for model in experiment.models:
        jobs.append(Job("train", model.name, _origins_of(model, experiment.models), model=model))
    for measurement in experiment.measurements:
        needs = [measurement.model.name]
        for chooser in (measurement.targets_of, measurement.choices_of):
            if chooser is not None:
                needs.append(chooser)
        jobs.append(Job("measure", measurement.name, tuple(needs), measurement=measurement))
    if experiment.measurements:
        measured = tuple(measurement.name for measurement in experiment.measurements)
        jobs.append(Job("figure", "figure", measured, figure=experiment.figure))
    return _sorted_by_needs(jobs)


def _origins_of(model: Model, models: list[Model]) -> tuple[str, ...]:
    """Return the models whose weights this one starts from."""
    settings = model.settings
    origins = [origin for origin in (settings.init_from, settings.branch_from) if origin]
    return tuple(
        other.name
        for other in models
        if other is not model
        if any(Path(origin).is_relative_to(other.folder) for origin in origins)
    )


def _sorted_by_needs(jobs: list[Job]) -> list[Job]:
    """Return the jobs in the same order, but each after those that it needs."""
    waiting = list(jobs)
    placed: dict[str, Job] = {}
    while waiting:
        free = [job for job in waiting if placed.keys() >= set(job.needs)]
        # Models that start from each other are never free; they fail when they run, by name.
        first = free[0] if free else waiting[0]
        waiting.remove(first)
        placed[first.name] = first
    return list(placed.values())


def reason_to_skip(job: Job, jobs: Mapping[str, Job]) -> str | None:
    """Return why a job whose needs have ended cannot run, as one of them left nothing to go on
    with; None if it can."""
    measurement = job.measurement
    if measurement is None:
        return None
    trained = jobs[measurement.model.name]
    state = trained.state()
    is_there = state.name == "done"
    if measurement.step is not None:
        is_there = (measurement.checkpoint / MANIFEST).is_file()
    if not is_there and state.name == "failed":
        return f"its training failed: {state.detail}"
    if not is_there and state.name != "done":
        return f"trained to step {state.step:,} of {measurement.model.num_steps:,}"
    if not is_there:
        return f"{measurement.checkpoint} was not kept; train with checkpoint.keep_steps"
    for name in (measurement.targets_of, measurement.choices_of):
        if name is None:
            continue
        chooser = jobs[name].state()
        if chooser.name != "done":
            because = f": {chooser.detail}" if chooser.detail else ""
            return f"{name}, which chooses the targets, has no result{because}"
    return None


def _state_of_training(model: Model, note: Path) -> State:
    """Return how a training stands: done by its last checkpoint, running by the lock of its folder,
    failed by the note."""
    if not is_work_of(model.folder, flatten(model.settings)):
        return State("failed", 0, f"{model.folder} holds work with other settings")
    saved = next((int(path.name[4:]) for path in list_checkpoints(model.folder)), 0)
    if saved >= model.num_steps:
        return State("done", saved)
    holder = find_holder(model.folder)
    if holder is None and not note.is_file():
        return State("waiting", saved)
    logged = [row["step"] for row in read_metrics(model.folder / "metrics.jsonl")]
    step = max(logged, default=0)
    if holder is None:
        return State("failed", step, _read_note(note))
    if holder.seems_alive:
        return State("running", step, _place_of(holder.owner))
    return State("failed", step, f"died {_place_of(holder.owner)}")


def _place_of(owner: Owner) -> str:
    """Return where a process runs that holds a folder."""
    where = f"on {owner.host}"
    if owner.slurm_job:
        where += f", job {owner.slurm_job}"
    return where


def _read_note(note: Path) -> str:
    """Return the error message of a job's last failure, on one line."""
    return " ".join(read_bounded(note).decode(errors="replace").split())


def format_states(jobs: list[Job], queued: Mapping[str, str] | None = None) -> str:
    """Return a line for each job, and how many there are of each state. `queued`: the SLURM job of
    those that wait in a queue."""
    states = [job.state() for job in jobs]
    width = max(len(job.name) for job in jobs)
    lines = []
    for job, state in zip(jobs, states, strict=True):
        steps = ""
        if job.model is not None:
            steps = f"{state.step:,}/{job.model.num_steps:,}"
        detail = state.detail
        if queued and job.name in queued and state.name in ("waiting", "failed"):
            last_failure = f" ({detail})" if detail else ""
            detail = f"in the queue as {queued[job.name]}{last_failure}"
        line = f"{job.kind:<8}{job.name:<{width}}  {state.name:<8}{steps:>17}  {detail}"
        lines.append(line.rstrip())
    counts = Counter(state.name for state in states)
    total = ", ".join(f"{counts[name]} {name}" for name in STATES)
    return "\n".join([*lines, f"{len(jobs)} jobs: {total}"])
