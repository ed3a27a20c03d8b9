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
    try:
        _prepare_texts(experiment, by_name)
        for stage in _stages_of(jobs):
            runnable = _select_runnable(stage, by_name)
            _run_jobs_of_one_kind(runnable, experiment, num_processes)
    except _StoppedBySignal:
        return EXIT_STOPPED
    print(format_states(jobs))
    _check_none_failed(jobs)
    return 0


class _StoppedBySignal(Exception):
    """A signal stopped the commands that ran; no further ones are to begin."""


def _run_to_the_end(commands: Sequence[Command], num_at_once: int) -> list[int]:
    """Run commands and return their exit codes. Raise `_StoppedBySignal` if a signal stopped
    them."""
    ending = run_processes(commands, num_at_once)
    if ending.is_stopped:
        raise _StoppedBySignal
    return ending.exit_codes


def _num_processes(processes: int | str) -> int:
    """Return the number of processes that compute at once on this machine. For `auto` it is the
    number of GPUs, or up to two on a CPU."""
    if isinstance(processes, int):
        return processes
    import torch  # takes seconds

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    # Cores that this process may use, which on a shared machine are fewer than it has.
    return min(2, len(os.sched_getaffinity(0)))


def _prepare_texts(experiment: Experiment, jobs: Mapping[str, Job]) -> None:
    """Tokenize each text that a model still needs.

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
        _run_to_the_end([command], num_at_once=1)


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


def _run_jobs_of_one_kind(jobs: Sequence[Job], experiment: Experiment, num_processes: int) -> None:
    """Run jobs of one kind.

    Args:
        num_processes: Number of processes that compute at once: those of one training, or of as
            many measurements.
    """
    if not jobs:
        return
    for job in jobs:
        say(f"{job.kind} {job.name}")
    kind = jobs[0].kind
    processes_of_job = num_processes if kind == "train" else 1
    jobs_at_once = num_processes if kind == "measure" else 1
    commands = [_command_of(experiment, job, processes_of_job, jobs_at_once) for job in jobs]
    exit_codes = _run_to_the_end(commands, jobs_at_once)
    for job, code in zip(jobs, exit_codes, strict=True):
        if code != 0 and job.state().name == "waiting":  # it could not write its note itself
            write_atomically(job.note, f"ended with exit code {code}; its output says more")


_THIS_PROGRAM = (sys.executable, "-P", "-m", "olmo_sparsity")
"""-P: a folder `olmo_sparsity` where the user works must not take the place of the package."""


def _command_of(
    experiment: Experiment, job: Job, processes_of_job: int, jobs_at_once: int
) -> Command:
    """Return the command that runs one job.

    Args:
        processes_of_job: Number of processes of this job; above 1 for a training alone.
        jobs_at_once: Number of jobs that share the machine's cores.
    """
    words = ["experiment", experiment.path, f"--only={job.name}", *experiment.overrides]
    if processes_of_job > 1:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes_of_job}"]
        return Command(
            words=[sys.executable, "-P", "-m", *launcher, "-m", "olmo_sparsity", *words],
            # What -P is for this process, PYTHONSAFEPATH is for those that the launcher starts.
            variables={"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        )
    if jobs_at_once > 1 and "OMP_NUM_THREADS" not in os.environ:
        num_threads = max(1, len(os.sched_getaffinity(0)) // jobs_at_once)
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
