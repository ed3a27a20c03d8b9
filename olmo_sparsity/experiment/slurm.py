"""Submit the jobs of an experiment to SLURM: trainings as arrays, each measurement as an array of
tasks that share its documents, then the figure.

Place in the flow: file → jobs → **SLURM**. A job begins when those that it needs have ended, well
or not (`afterany`), so that what fails is an empty point of the figure and never its end.
"""

from __future__ import annotations

import getpass
import shlex
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
        """Return the time limit of a training, None for the cluster's. The longest name that fits
        decides."""
        fitting: dict[str, str] = {}
        for word in self.times:
            model, _, time = word.partition("=")
            if _fits(model, name):
                fitting[model] = time
        if not fitting:
            return None
        return fitting[max(fitting, key=len)]

    def check(self, names: Iterable[str]) -> None:
        """Reject a time limit of no model. `names`: of all models."""
        names = list(names)
        for word in self.times:
            model, equals, time = word.partition("=")
            fits = any(_fits(model, name) for name in names)
            if not (equals and time and fits):
                raise ConfigError(f"--time={word} must be MODEL=TIME, of {', '.join(names)}")
        if self.max_jobs is not None and self.max_jobs < 1:
            raise ConfigError(f"--max-jobs={self.max_jobs} must be at least 1")


def _fits(model: str, name: str) -> bool:
    """Return whether `model` is a name, or its beginning up to an underscore."""
    return name == model or name.startswith(f"{model}_")


def submit(experiment: Experiment, flags: Flags) -> int:
    """Submit what is neither done, nor running, nor in the queue."""
    flags.check(model.name for model in experiment.models)
    for script in (TRAIN, MEASURE):
        if not script.exists():
            raise ConfigError(f"{script} is not here; submit from the root of olmo-sparsity")
    jobs = jobs_of(experiment)
    submitted = queued(experiment)
    todo = _to_submit(jobs, submitted)
    _check_texts(_trainings(todo))
    experiment.save()
    for job in todo:
        job.note.unlink(missing_ok=True)
    limit = "" if flags.max_jobs is None else f"%{flags.max_jobs}"
    places = {job.name: place for place, job in enumerate(_trainings(jobs))}
    for trainings in _arrays_of(todo, flags):
        words = shlex.split(flags.train)
        time = flags.time_of(trainings[0].name)
        if time:
            words.append(f"--time={time}")
        words += _dependency(trainings, submitted)
        indices = ",".join(str(places[job.name]) for job in trainings)
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
        # After each, so that what a later sbatch refuses does not submit the earlier ones again.
        _keep(experiment, submitted)
    print(format_states(jobs, submitted))
    return 0


def _to_submit(jobs: Sequence[Job], numbers: Mapping[str, str]) -> list[Job]:
    """Return the jobs that are neither done, nor running, nor in the queue. `numbers`: of those in
    the queue."""
    todo = [
        job
        for job in jobs
        if job.name not in numbers and job.state().name not in ("done", "running")
    ]
    if any(job.kind == "measure" for job in todo):  # the figure is drawn again
        todo = [job for job in todo if job.kind != "figure"]
        todo += [job for job in jobs if job.kind == "figure" and job.name not in numbers]
    return todo


def _check_texts(trainings: Sequence[Job]) -> None:
    """Raise ConfigError for a training whose text is not prepared: no job of SLURM prepares it, and
    nodes often have no internet."""
    from olmo_sparsity.data.tokens import is_prepared  # imports what [train] installs

    for job in trainings:
        model = job.model
        assert model is not None
        data = model.settings.data
        if is_prepared(data):
            continue
        options = [word for word in model.overrides if word.startswith("--data.")]
        line = shlex.join(["olmo-sparsity", "prepare", model.config, *options])
        raise ConfigError(
            f"{model.name}: data.folder={data.folder} is not prepared, and no job prepares it; "
            f"nothing was submitted. Run first, where there is internet: {line}"
        )


def _trainings(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.kind == "train"]


def _arrays_of(todo: Sequence[Job], flags: Flags) -> list[list[Job]]:
    """Return groups of trainings that can be one array: of one time limit, and with the same
    needs."""
    groups: dict[tuple[str | None, tuple[str, ...]], list[Job]] = defaultdict(list)
    for job in _trainings(todo):
        groups[flags.time_of(job.name), job.needs].append(job)
    return list(groups.values())


def _dependency(jobs: Sequence[Job], submitted: dict[str, str]) -> list[str]:
    """Return the flag that lets these wait for the jobs that they need and that are in the
    queue."""
    numbers: dict[str, None] = {}  # each once, in order
    # What is done needs no wait; nor has what was started by hand a SLURM job to depend on.
    for job in jobs:
        numbers |= {submitted[name]: None for name in job.needs if name in submitted}
    return [f"--dependency=afterany:{':'.join(numbers)}"] if numbers else []


def _sbatch(words: Sequence[str], experiment: Experiment, *options: str) -> str:
    """Submit a job, and return its number."""
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
    """Return the SLURM number of each job that was submitted and has not ended."""
    path = _record(experiment)
    if not path.exists() or shutil.which("squeue") is None:
        return {}
    known = read_json(path, dict[str, str], "delete it if none of its jobs is in the queue")
    words = ["squeue", "-h", "-r", f"--user={getpass.getuser()}", "-o", "%F %K"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise UserError(f"squeue ended with {done.returncode}; try again")
    in_queue = set[str]()
    for line in done.stdout.splitlines():
        # A measurement is known by the number of its array, a training by its element, too.
        number, _, element = line.strip().partition(" ")
        in_queue |= {number, f"{number}_{element}"}
    return {name: number for name, number in known.items() if number in in_queue}
