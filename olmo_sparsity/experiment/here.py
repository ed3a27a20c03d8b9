"""Run the jobs of an experiment on this machine, each in a process of its own.

    prepare texts → trainings, one after the other → measurements, several at once → the figure

Place in the flow: file.py → jobs.py → **`run_here`**. Each job has a process of its own, so that
what one keeps in memory, or how it dies, does not affect the next. The process is
`olmo-sparsity experiment FILE --only=JOB`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.launch import EXIT_STOPPED
from olmo_sparsity.base.progress import say
from olmo_sparsity.experiment.child_processes import Command, run_processes
from olmo_sparsity.experiment.file import Experiment
from olmo_sparsity.experiment.job import Job
from olmo_sparsity.experiment.jobs import check_no_other_work, format_states, jobs_of

if TYPE_CHECKING:
    from olmo_sparsity.config.text import DataConfig


def run_here(experiment: Experiment) -> int:
    """Run each job that is neither done nor running: prepare texts, train, measure, draw. Return
    the exit code. A job that fails is left out of the figure, and the same command tries it again.
    Raise ConfigError before anything runs if a folder holds work with other settings."""
    jobs = jobs_of(experiment)
    # Such a job would fail when its turn comes, hours later, and the others would go on.
    check_no_other_work(jobs)
    by_name = {job.name: job for job in jobs}
    experiment.save()  # before anything runs, so that a stopped experiment can be looked at
    num_processes = _num_processes(experiment.file.processes)
    if _prepare_texts(experiment, by_name):
        return EXIT_STOPPED
    for jobs_at_once in _stages_of(jobs):
        runnable = _select_runnable(jobs_at_once, by_name)
        if _run_jobs_of_one_kind(runnable, experiment, num_processes):
            return EXIT_STOPPED
    print(format_states(jobs))
    _check_none_failed(jobs)
    return 0


def _num_processes(processes: int | str) -> int:
    """Return the number of processes of a training. For `auto` it is the number of GPUs, or up to
    two on a CPU."""
    if isinstance(processes, int):
        return processes
    import torch  # takes seconds

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    # Cores that this process may use, which on a shared machine are fewer than it has.
    return min(2, len(os.sched_getaffinity(0)))


def _prepare_texts(experiment: Experiment, jobs: Mapping[str, Job]) -> bool:
    """Tokenize each text that a model still needs. Return whether a signal stopped this.

    Args:
        jobs: All jobs, by name.
    """
    folders: set[str] = set()
    for model in experiment.models:
        data = model.settings.data
        is_needed = jobs[model.name].state().name not in ("done", "running")
        if not is_needed or data.folder in folders or _is_prepared(data):
            continue
        folders.add(data.folder)
        say(f"prepare {data.folder}")
        command = Command([*_THIS_PROGRAM, "prepare", model.config, *model.overrides])
        if run_processes([command], 1).is_stopped:
            return True
    return False


def _is_prepared(data: DataConfig) -> bool:
    from olmo_sparsity.data.prepare import is_prepared  # imports what [train] installs

    return is_prepared(data)


def _stages_of(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Yield jobs in stages. The jobs of a stage are of one kind, and need only jobs of earlier
    stages, so that they can run at once."""
    ended: set[str] = set()
    waiting = list(jobs)
    while waiting:
        ready = [job for job in waiting if ended.issuperset(job.needs)]
        if not ready:  # jobs that need each other: they fail, and say why
            ready = waiting[:1]
        stage = [job for job in ready if job.kind == ready[0].kind]
        for job in stage:
            waiting.remove(job)
            ended.add(job.name)
        yield stage


def _select_runnable(jobs: Sequence[Job], by_name: Mapping[str, Job]) -> list[Job]:
    """Return the jobs that are to run. For a job that cannot, print the reason, and write it into
    the job's note.

    Args:
        jobs: Jobs of one stage: what they need has ended.
        by_name: All jobs.
    """
    runnable = []
    for job in jobs:
        state = job.state().name
        if state == "running":
            continue
        if state == "done" and job.kind != "figure":  # which is drawn again, as results may be new
            continue
        reason = job.reason_to_skip(by_name)
        if reason is None:
            runnable.append(job)
            continue
        say(f"{job.name}: not measured, as {reason}")
        job.note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(job.note, reason)
    return runnable


def _run_jobs_of_one_kind(jobs: Sequence[Job], experiment: Experiment, num_processes: int) -> bool:
    """Run jobs of one kind. Return whether a signal stopped them.

    Args:
        num_processes: Processes of a training, and measurements at once.
    """
    for job in jobs:
        say(f"{job.kind} {job.name}")
    # A training takes all processes, a measurement one.
    num_at_once = num_processes if jobs and jobs[0].kind == "measure" else 1
    commands = [_command_of(experiment, job, num_processes, num_at_once) for job in jobs]
    ending = run_processes(commands, num_at_once)
    if ending.is_stopped:
        return True
    for job, code in zip(jobs, ending.exit_codes, strict=True):
        if code != 0 and job.state().name == "waiting":  # it could not write its note itself
            write_atomically(job.note, f"ended with exit code {code}; its output says more")
    return False


_THIS_PROGRAM = (sys.executable, "-P", "-m", "olmo_sparsity")
"""-P: a folder `olmo_sparsity` where the user works must not take the place of the package."""


def _command_of(experiment: Experiment, job: Job, num_processes: int, num_at_once: int) -> Command:
    """Return the command that runs one job.

    Args:
        num_processes: Number of processes of a training.
        num_at_once: Number of jobs that share the machine's cores.
    """
    words = ["experiment", experiment.path, f"--only={job.name}", *experiment.overrides]
    if job.kind == "train" and num_processes > 1:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
        return Command(
            words=[sys.executable, "-P", "-m", *launcher, "-m", "olmo_sparsity", *words],
            # What -P is for this process, PYTHONSAFEPATH is for those that the launcher starts.
            variables={"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        )
    if num_at_once > 1 and "OMP_NUM_THREADS" not in os.environ:
        num_threads = max(1, len(os.sched_getaffinity(0)) // num_at_once)
        return Command([*_THIS_PROGRAM, *words], {"OMP_NUM_THREADS": str(num_threads)})
    return Command([*_THIS_PROGRAM, *words])


def _check_none_failed(jobs: Sequence[Job]) -> None:
    """Raise UserError with the names of the jobs that have failed, if any has."""
    failed = [job.name for job in jobs if job.state().name == "failed"]
    if failed:
        names = ", ".join(failed[:3])
        if len(failed) > 3:
            names += f" and {len(failed) - 3} more"
        raise UserError(f"{names}: failed (reasons above); the same command tries again")
