"""Say of one job what it waits for, and how it stands: a training, a measurement, or the figure.

States are read from the folders on disk alone, so that any machine that sees them knows the same:

    done      the last checkpoint, the manifest of a measurement, or the figure is there, with
              the settings that the file asks for
    running   a lock in the folder has been touched lately
    failed    there is a note with an error message, a lock that was not touched for long, or what
              is there has other settings
    waiting   none of these

    results/c4_1b/c4_1b_pose-last-960/              results of a measurement
    results/c4_1b/c4_1b_pose-last-960.failed        its note: why it failed the last time
    results/c4_1b/c4_1b_pose-last-960.running/      the locks of its processes
    results/c4_1b/c4_1b_pose-last-960.options.json  the record of its options

jobs.py lists all jobs of an experiment. here.py and slurm.py run them.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from olmo_sparsity.base.differences import differences
from olmo_sparsity.base.errors import ReportedElsewhere
from olmo_sparsity.base.files import (
    read_bounded,
    read_json,
    sha256_of,
    write_atomically,
    write_json,
)
from olmo_sparsity.base.lock_owner import Owner
from olmo_sparsity.base.locks import find_holder, locked
from olmo_sparsity.base.manifest import MANIFEST
from olmo_sparsity.config.run import flatten
from olmo_sparsity.experiment.measurements import Measurement
from olmo_sparsity.experiment.models import Model
from olmo_sparsity.models.checkpoint_files import list_checkpoints, step_of
from olmo_sparsity.training.metrics.read import read_metrics
from olmo_sparsity.training.run_folder.folder import changes_of_work

StateName = Literal["done", "running", "failed", "waiting"]
STATES: tuple[StateName, ...] = get_args(StateName)

JobKind = Literal["train", "measure", "figure"]

_WITHOUT_EFFECT = ("batch_tokens", "device", "device_map")
"""Options of `measure` that do not determine its results."""


@dataclass(frozen=True)
class State:
    """How a job stands."""

    name: StateName
    step: int = 0
    """Number of steps that are done, if the job trains."""

    detail: str = ""
    """Where the job runs, or why it failed."""


@dataclass(frozen=True)
class Job(ABC):
    """A part of an experiment that runs in a process of its own."""

    kind: ClassVar[JobKind]

    name: str
    needs: tuple[str, ...]
    """Names of the jobs that must have ended, with success or not, before this one begins."""

    @property
    @abstractmethod
    def results(self) -> Path:
        """Return the folder or file that the job writes."""

    @abstractmethod
    def state(self) -> State:
        """Return how the job stands now."""

    def reason_to_skip(self, jobs: Mapping[str, Job]) -> str | None:
        """Return why the job cannot run although the jobs that it needs have ended; None if it
        can."""
        return None

    def find_other_work(self) -> str | None:
        """Return what is in place of the job's results and has other settings, so that the job
        would fail; None if nothing is."""
        return None

    @property
    def note(self) -> Path:
        """Return the file next to the job's results with the error message of its last failure."""
        return self.results.with_name(f"{self.results.name}.failed")

    def _read_note(self) -> str:
        """Return the error message of the last failure, on one line."""
        return " ".join(read_bounded(self.note).decode(errors="replace").split())

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Write the note if what runs inside fails, and remove an earlier one."""
        self.note.parent.mkdir(parents=True, exist_ok=True)
        self.note.unlink(missing_ok=True)  # an earlier failure says nothing about this try
        try:
            yield
        except ReportedElsewhere:
            raise  # another process of the job has written the note
        except Exception as error:
            write_atomically(self.note, str(error) or type(error).__name__)
            raise


@dataclass(frozen=True)
class TrainingJob(Job):
    """Trains a model."""

    kind = "train"

    model: Model

    @property
    def results(self) -> Path:
        return self.model.folder

    def state(self) -> State:
        """Return how the training stands: its last checkpoint says whether it is done, the lock of
        its folder whether it runs, and the note why it failed."""
        other_work = self.find_other_work()
        if other_work is not None:
            return State("failed", detail=other_work)
        folder = self.model.folder
        checkpoints = list_checkpoints(folder)
        saved_step = step_of(checkpoints[0]) if checkpoints else 0  # the newest is the first
        if saved_step >= self.model.num_steps:
            return State("done", saved_step)

        holder = find_holder(folder)
        if holder is None and not self.note.is_file():
            return State("waiting", saved_step)
        # What is logged is ahead of the last checkpoint.
        logged_steps = [row["step"] for row in read_metrics(folder / "metrics.jsonl")]
        step = max(logged_steps, default=0)
        if holder is None:
            return State("failed", step, self._read_note())
        if holder.seems_alive:
            return State("running", step, _where_runs(holder.owner))
        return State("failed", step, f"died {_where_runs(holder.owner)}")

    def find_other_work(self) -> str | None:
        """Return with which other settings the folder holds a run, which is not this model; None if
        it does not."""
        folder = self.model.folder
        changes = changes_of_work(folder, flatten(self.model.settings))
        if not changes:
            return None
        remedy = "set it as it was, or name a new folder"
        return f"{folder} holds work with {', '.join(changes)}; {remedy}"


@dataclass(frozen=True)
class MeasurementJob(Job):
    """Measures a checkpoint; several processes may share it."""

    kind = "measure"

    measurement: Measurement

    @property
    def results(self) -> Path:
        return self.measurement.folder

    @property
    def locks(self) -> Path:
        """Return the folder in which each process of a measurement holds a lock while it runs."""
        return self.results.with_name(f"{self.results.name}.running")

    @property
    def record(self) -> Path:
        """Return the file next to the results that says with which options they were measured."""
        return self.results.with_name(f"{self.results.name}.options.json")

    @contextlib.contextmanager
    def recording_process(self, process: str) -> Iterator[None]:
        """Hold a lock as one process of the measurement. Write the note if what runs inside fails,
        or else the record of its options. A training needs no such lock, as it locks its own
        folder.

        Args:
            process: A name that no other process of the measurement has.
        """
        with self.recording():
            folder = self.locks / process
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder):
                yield
        # Not before: `measure` refuses a folder with the results of other options.
        write_json(self.record, self._options())

    def _options(self) -> dict[str, Any]:
        """Return what determines the results: options, who chooses targets, and the SHA-256 of the
        checkpoint's list of files, or None if the checkpoint is gone."""
        measurement = self.measurement
        checkpoint: Path | None = measurement.checkpoint
        if measurement.step is None:
            checkpoint = next(iter(list_checkpoints(measurement.model.folder)), None)
        checkpoint_sha256 = None
        if checkpoint is not None and (checkpoint / MANIFEST).is_file():
            checkpoint_sha256 = sha256_of(checkpoint / MANIFEST)
        options = {
            key: value for key, value in measurement.options.items() if key not in _WITHOUT_EFFECT
        }
        return options | {
            "long": measurement.long,
            "distant_states": measurement.distant_states,
            "text": measurement.text,
            "targets": measurement.targets_of,
            "choices": measurement.choices_of,
            "checkpoint": checkpoint_sha256,
        }

    def find_other_work(self) -> str | None:
        """Return with which other options the results were measured; None if with these, or if
        there are none."""
        # An earlier version kept no record.
        if not (self.results / MANIFEST).is_file() or not self.record.is_file():
            return None
        recorded = read_json(self.record, dict, "delete it, and measure again")
        options = self._options()
        if options["checkpoint"] is None:  # it need not stay
            options["checkpoint"] = recorded["checkpoint"]
        changes = differences(recorded, options)
        if not changes:
            return None
        was_measured = f"{self.results} was measured with {', '.join(changes)}"
        return f"{was_measured}; name a new folder, or delete it"

    def state(self) -> State:
        """Return how the measurement stands: its manifest says whether it is done, the locks of its
        processes whether it runs, and the note why it failed."""
        other_work = self.find_other_work()
        if other_work is not None:
            return State("failed", detail=other_work)
        if (self.results / MANIFEST).is_file():
            return State("done")
        death = ""
        for folder in sorted(self.locks.glob("*")):
            holder = find_holder(folder)
            if holder is None:
                continue
            # One process alive is enough: it takes over the documents of those that died.
            if holder.seems_alive:
                return State("running", detail=_where_runs(holder.owner))
            death = f"died {_where_runs(holder.owner)}"
        if self.note.is_file():
            return State("failed", detail=self._read_note())
        return State("failed" if death else "waiting", detail=death)

    def reason_to_skip(self, jobs: Mapping[str, Job]) -> str | None:
        """Return why this cannot be measured although other jobs have ended: its checkpoint is
        missing, or the targets that another measurement chooses. None if it can."""
        return self._why_no_checkpoint(jobs) or self._why_no_targets(jobs)

    def _why_no_checkpoint(self, jobs: Mapping[str, Job]) -> str | None:
        """Return why there is no checkpoint to measure; None if there is."""
        measurement = self.measurement
        training = jobs[measurement.model.name].state()
        has_checkpoint = training.name == "done"
        if measurement.step is not None:
            # An earlier checkpoint can be measured although the training has failed later.
            has_checkpoint = (measurement.checkpoint / MANIFEST).is_file()
        if has_checkpoint:
            return None
        if training.name == "failed":
            return f"its training failed: {training.detail}"
        if training.name != "done":
            return f"trained to step {training.step:,} of {measurement.model.num_steps:,}"
        return f"{measurement.checkpoint} was not kept; train with checkpoint.keep_steps"

    def _why_no_targets(self, jobs: Mapping[str, Job]) -> str | None:
        """Return which measurement should have chosen targets or tokens and has not; None if all
        have."""
        for name in self.measurement.choosers:
            chooser = jobs[name].state()
            if chooser.name != "done":
                because = f": {chooser.detail}" if chooser.detail else ""
                return f"{name}, which chooses the targets, has no result{because}"
        return None


@dataclass(frozen=True)
class FigureJob(Job):
    """Draws the figure."""

    kind = "figure"

    figure: Path

    @property
    def results(self) -> Path:
        return self.figure

    def state(self) -> State:
        """Return whether there is a figure; it may be drawn before all results are there."""
        return State("done" if self.figure.is_file() else "waiting")


def _where_runs(owner: Owner) -> str:
    """Return where the process runs that holds a folder: "on node7, job 17"."""
    where = f"on {owner.host}"
    if owner.slurm_job:
        where += f", job {owner.slurm_job}"
    return where
