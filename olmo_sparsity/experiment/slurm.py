"""Submit the jobs of an experiment to SLURM, all at once, and return; cancel them.

    trainings           arrays, one for each time limit and needed jobs; a task is a model
    each measurement    an array; its tasks share the documents
    the figure          a job

A job begins when the jobs that it needs have ended, well or not (`afterany`). So a job that fails
is an empty point of the figure, and does not keep the figure from being drawn. slurm_queue.py keeps
the SLURM number of each submitted job, so that the same command submits nothing twice.

Place in the flow: file.py → jobs.py → **`submit`**, **`cancel`**.
"""

from __future__ import annotations

import shlex
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from olmo_sparsity.base.errors import ConfigError, UserError
from olmo_sparsity.base.progress import say
from olmo_sparsity.experiment.file import Experiment
from olmo_sparsity.experiment.job import Job
from olmo_sparsity.experiment.jobs import check_no_other_work, format_states, jobs_of
from olmo_sparsity.experiment.slurm_flags import SlurmFlags
from olmo_sparsity.experiment.slurm_queue import keep_numbers, own_queued, queued
from olmo_sparsity.experiment.training_job import TrainingJob

TRAIN = Path("slurm/train.sbatch")
"""The script of a training."""

MEASURE = Path("slurm/measure.sbatch")
"""The script of a measurement, and of the figure."""


def submit(experiment: Experiment, flags: SlurmFlags) -> int:
    """Submit each job that is neither done, nor running, nor in the queue. Return the exit code."""
    flags.check(model.name for model in experiment.models)
    for script in (TRAIN, MEASURE):
        if not script.exists():
            raise ConfigError(f"{script} is not here; submit from the root of olmo-sparsity")
    jobs = jobs_of(experiment)
    submission = _Submission(experiment, flags, queued(experiment))
    todo = _to_submit(jobs, submission.numbers)
    check_no_other_work(todo)
    _check_trainings(_trainings(todo))
    experiment.save()
    for job in todo:
        job.note.unlink(missing_ok=True)  # `--list` would show the earlier failure

    # The script finds the model of a task by its index among all models.
    task_indices = {job.name: index for index, job in enumerate(_trainings(jobs))}
    for trainings in _arrays_of(todo, flags):
        submission.submit_trainings(trainings, task_indices)
    # After the trainings, for whose numbers they wait.
    for job in todo:
        if job.kind != "train":
            submission.submit_job(job)
    print(format_states(jobs, submission.numbers))
    return 0


@dataclass(frozen=True)
class _Submission:
    """Submits jobs, and writes their SLURM numbers after each one. So if sbatch refuses a later
    job, the same command does not submit the earlier ones again."""

    experiment: Experiment
    flags: SlurmFlags
    numbers: dict[str, str]
    """The SLURM number of each job in the queue, by name: 17, or 17_3 for a task of an array."""

    @property
    def _limit(self) -> str:
        """Return the end of --array that limits how many tasks run at once, such as `%2`."""
        return "" if self.flags.max_jobs is None else f"%{self.flags.max_jobs}"

    def submit_trainings(self, trainings: Sequence[Job], task_indices: Mapping[str, int]) -> None:
        """Submit trainings with the same time limit and the same needs as one array.

        Args:
            task_indices: The index of each model among all models, by its name.
        """
        words = shlex.split(self.flags.train)
        time = self.flags.time_of(trainings[0].name)
        if time:
            words.append(f"--time={time}")
        words += _dependency(trainings, self.numbers)
        indices = ",".join(str(task_indices[job.name]) for job in trainings)
        command = [*words, f"--array={indices}{self._limit}", str(TRAIN)]
        array_number = _sbatch(command, self.experiment)
        for job in trainings:
            self.numbers[job.name] = f"{array_number}_{task_indices[job.name]}"
        keep_numbers(self.experiment, self.numbers)

    def submit_job(self, job: Job) -> None:
        """Submit a measurement, or the figure."""
        words = shlex.split(self.flags.measure) + _dependency([job], self.numbers)
        if job.kind == "measure":
            words.append(f"--array=0-{self.experiment.shards - 1}{self._limit}")
        command = [*words, str(MEASURE)]
        self.numbers[job.name] = _sbatch(command, self.experiment, f"--only={job.name}")
        keep_numbers(self.experiment, self.numbers)


def _to_submit(jobs: Sequence[Job], numbers: Mapping[str, str]) -> list[Job]:
    """Return the jobs that are neither done, nor running, nor in the queue.

    Args:
        jobs: All jobs.
        numbers: The SLURM number of each job in the queue, by its name.
    """
    # A job that failed is submitted again.
    todo = [
        job
        for job in jobs
        if job.name not in numbers and job.state().name not in ("done", "running")
    ]
    if any(job.kind == "measure" for job in todo):  # the figure is drawn again
        todo = [job for job in todo if job.kind != "figure"]
        todo += [job for job in jobs if job.kind == "figure" and job.name not in numbers]
    return todo


def _check_trainings(trainings: Sequence[TrainingJob]) -> None:
    """Raise ConfigError for a training whose job would end at once: its text is not prepared, is
    another text than the config's, or is too short. No job prepares a text, as nodes often have no
    internet."""
    # They import what [train] installs.
    from olmo_sparsity.data.prepare import check_same_settings, is_prepared
    from olmo_sparsity.training.dry_run import check_run

    for job in trainings:
        model = job.model
        data = model.settings.data
        if not is_prepared(data):
            options = [word for word in model.overrides if word.startswith("--data.")]
            line = shlex.join(["olmo-sparsity", "prepare", model.config, *options])
            raise ConfigError(
                f"{model.name}: data.folder={data.folder} is not prepared, and no job prepares it; "
                f"nothing was submitted. Run first, where there is internet: {line}"
            )
        try:
            check_same_settings(data)
            check_run(model.settings, hardware=None)
        except UserError as error:
            raise ConfigError(f"{model.name}: {error}; nothing was submitted") from None


def _trainings(jobs: Sequence[Job]) -> list[TrainingJob]:
    """Return the jobs that train."""
    return [job for job in jobs if isinstance(job, TrainingJob)]


def _arrays_of(todo: Sequence[Job], flags: SlurmFlags) -> list[list[TrainingJob]]:
    """Return groups of trainings that can be one array: their time limit and the jobs that they
    need are the same."""
    groups: dict[_ArrayKey, list[TrainingJob]] = defaultdict(list)
    for job in _trainings(todo):
        groups[_ArrayKey(flags.time_of(job.name), job.needs)].append(job)
    return list(groups.values())


class _ArrayKey(NamedTuple):
    """What the trainings of an array have in common, as sbatch takes one of each for an array."""

    time: str | None
    """The time limit; None for the script's own."""

    needs: tuple[str, ...]
    """The names of the jobs that must have ended."""


def _dependency(jobs: Sequence[Job], numbers: Mapping[str, str]) -> list[str]:
    """Return the flag that lets jobs wait for the jobs that they need; no flag if they need none
    that is in the queue.

    Args:
        jobs: Jobs that are submitted together.
        numbers: The SLURM number of each job in the queue, by its name.
    """
    needed: dict[str, None] = {}  # each once, in order
    # A job that is not in the queue is done, or was started by hand and has no SLURM number.
    for job in jobs:
        needed |= {numbers[name]: None for name in job.needs if name in numbers}
    return [f"--dependency=afterany:{':'.join(needed)}"] if needed else []


def _sbatch(words: Sequence[str], experiment: Experiment, *options: str) -> str:
    """Submit a job, and return its SLURM number.

    Args:
        words: SlurmFlags of sbatch, and the script.
        experiment: The experiment, whose file the script is given.
        options: Further words for the script.
    """
    command = ["sbatch", "--parsable", *words, experiment.path, *options, *experiment.overrides]
    say(shlex.join(command))
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise ConfigError("sbatch is not here; leave --slurm out to run one by one") from None
    if done.returncode != 0:
        raise UserError(f"sbatch ended with {done.returncode}; the same command submits the rest")
    return done.stdout.strip().partition(";")[0]  # without the cluster's name


# --- cancel ---------------------------------------------------------------------------------------


def cancel(experiment: Experiment) -> int:
    """Cancel each job of the experiment that waits or runs. Return the exit code."""
    # Trainings that another experiment has submitted are that experiment's to cancel.
    numbers = own_queued(experiment)
    if not numbers:
        print(f"{experiment.folder}: no job of it is in the queue")
        return 0
    # A measurement begins when its training has ended, well or not. If trainings were cancelled
    # first, their measurements would begin.
    _scancel("--state=PENDING", *numbers.values())
    _scancel(*numbers.values())
    print(f"cancelled: {', '.join(numbers)}; the same line with --slurm goes on")
    return 0


def _scancel(*words: str) -> None:
    """Run `scancel`. It succeeds for jobs that have ended, too."""
    done = subprocess.run(["scancel", *words])
    if done.returncode != 0:
        raise UserError(f"scancel ended with {done.returncode}; run the same command again")
