"""Run the jobs of an experiment on this machine, each in a process of its own.

Place in the flow: file → jobs → **here**. A process of its own for each job, so that what one keeps
in memory, or how it dies, does not reach the next.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.launch import EXIT_STOPPED, STOP_SIGNALS, handling
from olmo_sparsity.base.progress import say
from olmo_sparsity.experiment.file import Experiment
from olmo_sparsity.experiment.jobs import Job, format_states, jobs_of, reason_to_skip

if TYPE_CHECKING:
    from olmo_sparsity.config.text import DataConfig

Command = tuple[Sequence[str], Mapping[str, str]]
"""Words, and variables of the environment."""


def run_here(experiment: Experiment) -> int:
    """Run what is neither done nor running: prepare texts, train, measure, draw. What fails is left
    out of the figure; the same command tries it again."""
    jobs = jobs_of(experiment)
    by_name = {job.name: job for job in jobs}
    experiment.save()
    processes = _num_processes(experiment.file.processes)
    if _prepare(experiment, by_name):
        return EXIT_STOPPED
    ended = set[str]()
    waiting = list(jobs)
    while waiting:
        ready = [job for job in waiting if ended.issuperset(job.needs)]
        if not ready:  # jobs that need each other: they fail, and say why
            ready = waiting[:1]
        ready = [job for job in ready if job.kind == ready[0].kind]
        for job in ready:
            waiting.remove(job)
            ended.add(job.name)
        if _run_alike(_select_runnable(ready, by_name), experiment, processes):
            return EXIT_STOPPED
    print(format_states(jobs))
    failed = [job.name for job in jobs if job.state().name == "failed"]
    if failed:
        names = ", ".join(failed[:3])
        if len(failed) > 3:
            names += f" and {len(failed) - 3} more"
        raise UserError(f"{names}: failed (reasons above); the same command tries again")
    return 0


def _select_runnable(jobs: Sequence[Job], by_name: Mapping[str, Job]) -> list[Job]:
    """Return those of the jobs, whose needs have ended, that are to run. Of a job that cannot, say
    why, and keep the reason as its note."""
    runnable = []
    for job in jobs:
        state = job.state().name
        if state == "running":
            continue
        if state == "done" and job.kind != "figure":  # which is drawn again, as results may be new
            continue
        reason = reason_to_skip(job, by_name)
        if reason is None:
            runnable.append(job)
            continue
        say(f"{job.name}: not measured, as {reason}")
        job.note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(job.note, reason)
    return runnable


def _run_alike(jobs: Sequence[Job], experiment: Experiment, processes: int) -> bool:
    """Run jobs of one kind. Return whether a signal stopped them."""
    for job in jobs:
        say(f"{job.kind} {job.name}")
    # A training takes all processes, a measurement one.
    at_once = processes if jobs and jobs[0].kind == "measure" else 1
    commands = [_command(experiment, job, processes, at_once) for job in jobs]
    codes, is_stopped = run_processes(commands, at_once)
    if is_stopped:
        return True
    for job, code in zip(jobs, codes, strict=True):
        if code != 0 and job.state().name == "waiting":  # it could not write its note itself
            write_atomically(job.note, f"ended with exit code {code}; its output says more")
    return False


def _prepare(experiment: Experiment, jobs: Mapping[str, Job]) -> bool:
    """Tokenize each text that a model still needs. Return whether a signal stopped it."""
    folders = set[str]()
    for model in experiment.models:
        data = model.settings.data
        needed = jobs[model.name].state().name not in ("done", "running")
        if not needed or data.folder in folders or _is_prepared(data):
            continue
        folders.add(data.folder)
        say(f"prepare {data.folder}")
        words = [*_PYTHON, "prepare", model.config, *model.overrides]
        _, stopped = run_processes([(words, {})], 1)
        if stopped:
            return True
    return False


def _is_prepared(data: DataConfig) -> bool:
    from olmo_sparsity.data.tokens import is_prepared  # imports what [train] installs

    return is_prepared(data)


_PYTHON = (sys.executable, "-P", "-m", "olmo_sparsity")


def _command(experiment: Experiment, job: Job, processes: int, at_once: int) -> Command:
    """Return the command of a job. `processes`: of a training; `at_once`: jobs that share the
    machine's cores."""
    words = ["experiment", experiment.path, f"--only={job.name}", *experiment.overrides]
    if job.kind == "train" and processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, "-P", *launcher, "-m", "olmo_sparsity", *words]
        # Or the program's folder would precede the installed packages in each process.
        return command, {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    if at_once > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // at_once)
        return [*_PYTHON, *words], {"OMP_NUM_THREADS": str(threads)}
    return [*_PYTHON, *words], {}


def _num_processes(processes: int | str) -> int:
    """Return the number of processes; of `auto`, the GPUs, or up to two on a CPU."""
    if isinstance(processes, int):
        return processes
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(2, len(os.sched_getaffinity(0)))


def run_processes(commands: Sequence[Command], at_once: int) -> tuple[list[int], bool]:
    """Run commands, so many at once. Return their exit codes, and whether a signal to stop came, to
    this process or to one of them: they may have ended well all the same."""
    children: list[subprocess.Popen] = []
    signals: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        signals.append(number)
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    with handling(STOP_SIGNALS, pass_on):
        for words, variables in commands:
            while sum(child.poll() is None for child in children) >= at_once:
                time.sleep(0.05)
            if signals:
                break
            # In its own process group, or Ctrl-C would reach it twice, and the second kills it.
            child = subprocess.Popen(words, env=os.environ | variables, process_group=0)
            children.append(child)
            if signals:  # it came while the process was started
                child.send_signal(signals[-1])
        codes = [child.wait() for child in children]
    return codes, bool(signals) or EXIT_STOPPED in codes
