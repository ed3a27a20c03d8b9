"""Say how the training of a model stands, by its run folder.

    runs/c4_1b_pose/checkpoints/…, metrics.jsonl    how far it has come
    runs/c4_1b_pose.failed                          its note: why it failed the last time

job.py says what the states mean, and jobs.py lists the jobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from olmo_sparsity.base.locks import find_holder
from olmo_sparsity.config.run import flatten
from olmo_sparsity.experiment.job import Job, State, where_runs
from olmo_sparsity.experiment.models import Model
from olmo_sparsity.models.checkpoint_files import list_checkpoints, step_of
from olmo_sparsity.training.metrics.read import read_metrics
from olmo_sparsity.training.run_folder.folder import changes_of_work


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
            return State("failed", step, self.read_note())
        if holder.seems_alive:
            return State("running", step, where_runs(holder.owner))
        return State("failed", step, f"died {where_runs(holder.owner)}")

    def find_other_work(self) -> str | None:
        """Return with which other settings the folder holds a run, which is not this model; None if
        it does not."""
        folder = self.model.folder
        changes = changes_of_work(folder, flatten(self.model.settings))
        if not changes:
            return None
        remedy = "set it as it was, or name a new folder"
        return f"{folder} holds work with {', '.join(changes)}; {remedy}"
