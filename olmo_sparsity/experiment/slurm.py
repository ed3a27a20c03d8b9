"""Submit the jobs of an experiment to SLURM: trainings as arrays, each measurement as an array of
tasks that share its documents, then the figure. A job begins when those that it needs have ended,
well or not (`afterany`), so that what fails is an empty point of the figure and never its end."""

from __future__ import annotations

import getpass
import shlex
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from olmo_sparsity.base.errors import ConfigError, UserError
from olmo_sparsity.base.files import read_json, write_json
from olmo_sparsity.base.progress import say
from olmo_sparsity.experiment.file import Experiment
from olmo_sparsity.experiment.jobs import Job, format_states, jobs_of

TRAIN = Path("slurm/train.sbatch")
MEASURE = Path("slurm/measure.sbatch")


@dataclass(frozen=True)
class Flags:
    """What `experiment` hands to sbatch."""

    train: str
    measure: str
    max_jobs: int | None = None
    """Tasks of an array that run at once."""

    times: Sequence[str] = ()
    """MODEL=TIME: the time limit of a training of this model, or of all whose name begins so."""

    def time_of(self, name: str) -> str | None:
        """The longest name that fits decides."""
        fitting = [word.partition("=") for word in self.times]
        fitting = [pair for pair in fitting if name == pair[0] or name.startswith(f"{pair[0]}_")]
        return max(fitting, key=lambda pair: len(pair[0]))[2] if fitting else None

    def check(self, names: Iterable[str]) -> None:
        names = list(names)
        for word in self.times:
            model, equals, time = word.partition("=")
            fits = any(name == model or name.startswith(f"{model}_") for name in names)
            if not (equals and time and fits):
                raise ConfigError(f"--time={word} must be MODEL=TIME, of {', '.join(names)}")
        if self.max_jobs is not None and self.max_jobs < 1:
            raise ConfigError(f"--max-jobs={self.max_jobs} must be at least 1")


def submit(experiment: Experiment, flags: Flags) -> int:
    """Submit what is neither done, nor running, nor in the queue."""
    flags.check(model.name for model in experiment.models)
    for script in (TRAIN, MEASURE):
        if not script.exists():
            raise ConfigError(f"{script} is not here; submit from the root of olmo-sparsity")
    jobs = jobs_of(experiment)
    numbers = queued(experiment)
    todo = [
        job
        for job in jobs
        if job.name not in numbers and job.state().name not in ("done", "running")
    ]
    if any(job.kind == "measure" for job in todo):  # the figure is drawn again
        redrawn = [job for job in jobs if job.kind == "figure" and job.name not in numbers]
        todo = [job for job in todo if job.kind != "figure"] + redrawn
    experiment.save()
    for job in todo:
        job.note.unlink(missing_ok=True)
    submitted = dict(numbers)
    limit = "" if flags.max_jobs is None else f"%{flags.max_jobs}"
    for trainings in _arrays_of(todo, flags):
        time = flags.time_of(trainings[0].name)
        places = {job.name: place for place, job in enumerate(_trainings(jobs))}
        indices = ",".join(str(places[job.name]) for job in trainings)
        words = shlex.split(flags.train) + ([f"--time={time}"] if time else [])
        words += _dependency(trainings, submitted)
        number = _sbatch([*words, f"--array={indices}{limit}", str(TRAIN)], experiment)
        for job in trainings:
            submitted[job.name] = f"{number}_{places[job.name]}"
        _keep(experiment, submitted)
    for job in todo:
        if job.kind == "train":
            continue
        words = shlex.split(flags.measure) + _dependency([job], submitted)
        if job.kind == "measure":
            words.append(f"--array=0-{experiment.shards - 1}{limit}")
        command = [*words, str(MEASURE)]
        submitted[job.name] = _sbatch(command, experiment, f"--only={job.name}")
        _keep(experiment, submitted)
    print(format_states(jobs, submitted))
    return 0


def _trainings(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.kind == "train"]


def _arrays_of(todo: Sequence[Job], flags: Flags) -> list[list[Job]]:
    """Trainings that can be one array: of one time limit, and with the same needs."""
    groups: dict[tuple[str | None, tuple[str, ...]], list[Job]] = defaultdict(list)
    for job in _trainings(todo):
        groups[flags.time_of(job.name), job.needs].append(job)
    return list(groups.values())


def _dependency(jobs: Sequence[Job], submitted: dict[str, str]) -> list[str]:
    """The flag that lets these wait for the jobs that they need and that are in the queue."""
    needs = [name for job in jobs for name in job.needs]
    numbers = dict.fromkeys(submitted[name] for name in needs if name in submitted)
    return [f"--dependency=afterany:{':'.join(numbers)}"] if numbers else []


def _sbatch(words: Sequence[str], experiment: Experiment, *options: str) -> str:
    """Submit; return the job's number."""
    command = ["sbatch", "--parsable", *words, experiment.path, *options, *experiment.overrides]
    say(shlex.join(command))
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise ConfigError("sbatch is not here; leave --slurm out to run one by one") from None
    if done.returncode != 0:
        raise UserError(f"sbatch ended with {done.returncode}; the same command submits the rest")
    return done.stdout.strip().partition(";")[0]  # without the cluster's name


# --- what is in the queue -------------------------------------------------------------------------


def _record(experiment: Experiment) -> Path:
    return experiment.folder / "slurm.json"


def _keep(experiment: Experiment, submitted: dict[str, str]) -> None:
    write_json(_record(experiment), submitted)


def queued(experiment: Experiment) -> dict[str, str]:
    """The SLURM number of each job that was submitted and has not ended."""
    path = _record(experiment)
    if not path.exists() or shutil.which("squeue") is None:
        return {}
    known = read_json(path, dict[str, str], "delete it if none of its jobs is in the queue")
    words = ["squeue", "-h", "-r", f"--user={getpass.getuser()}", "-o", "%F %K"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise UserError(f"squeue ended with {done.returncode}; try again")
    there = set[str]()
    for line in done.stdout.splitlines():
        number, _, element = line.strip().partition(" ")
        there |= {number, f"{number}_{element}"}
    return {name: number for name, number in known.items() if number in there}
