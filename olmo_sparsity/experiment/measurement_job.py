"""Say how a measurement stands, and why it cannot run, by the files next to its results.

    results/c4_1b/measured/c4_1b_pose-last-960/               its results
    results/c4_1b/measured/c4_1b_pose-last-960.failed         its note: why it failed the last time
    results/c4_1b/measured/c4_1b_pose-last-960.running/       the locks of its processes
    results/c4_1b/measured/c4_1b_pose-last-960.options.json   the record of its options

job.py says what the states mean, and jobs.py lists the jobs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_sparsity.base.differences import differences
from olmo_sparsity.base.files import read_json, sha256_of, write_json
from olmo_sparsity.base.locks import find_holder, locked
from olmo_sparsity.base.manifest import MANIFEST
from olmo_sparsity.experiment.job import Job, State, where_runs
from olmo_sparsity.experiment.measurements import Measurement
from olmo_sparsity.models.checkpoint_files import list_checkpoints

_WITHOUT_EFFECT = ("batch_tokens", "device", "device_map")
"""Options of `measure` that do not determine its results."""


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
                return State("running", detail=where_runs(holder.owner))
            death = f"died {where_runs(holder.owner)}"
        if self.note.is_file():
            return State("failed", detail=self.read_note())
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
