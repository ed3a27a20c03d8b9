"""Define what all jobs of an experiment have in common: what they wait for, and how they stand.

States are read from the folders on disk alone, so that any machine that sees them knows the same:

    done      the last checkpoint, the manifest of a measurement, or the figure is there, with
              the settings that the file asks for
    running   a lock in the folder has been touched lately
    failed    there is a note with an error message, a lock that was not touched for long, or what
              is there has other settings
    waiting   none of these

training_job.py and measurement_job.py have two of the three kinds of jobs; the third, which draws
the figure, is here. jobs.py lists all jobs of an experiment, and here.py and slurm.py run them.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from olmo_sparsity.base.errors import ReportedElsewhere
from olmo_sparsity.base.files import read_bounded, write_atomically
from olmo_sparsity.base.lock_owner import Owner

StateName = Literal["done", "running", "failed", "waiting"]
STATES: tuple[StateName, ...] = get_args(StateName)

JobKind = Literal["train", "measure", "figure"]


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

    def read_note(self) -> str:
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


def where_runs(owner: Owner) -> str:
    """Return where the process runs that holds a folder: "on node7, job 17"."""
    where = f"on {owner.host}"
    if owner.slurm_job:
        where += f", job {owner.slurm_job}"
    return where
