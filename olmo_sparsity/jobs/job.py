"""Run resumable jobs one after the other, or submit them to SLURM.

Place in the flow: beneath sweep.py and experiments.py, which create jobs from a file. The state of
a job is read from its folder alone, whoever ran it, wherever, and however often it was stopped.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from olmo_sparsity.errors import ConfigError, ReportedElsewhere, UserError
from olmo_sparsity.folders import holder
from olmo_sparsity.io import read_bounded, write_atomically
from olmo_sparsity.runtime import EXIT_STOPPED, say


@dataclass(frozen=True)
class State:
    name: str
    """done, running, failed or waiting."""

    step: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Job(ABC):
    """Resumable work that fills a folder, which it locks while it runs."""

    name: str
    folder: Path
    num_steps: int
    needs: tuple[str, ...]
    """Names of jobs that must be done before this one."""

    @property
    @abstractmethod
    def text(self) -> str:
        """Its command, for display."""

    @abstractmethod
    def saved(self) -> int:
        """Number of steps that are saved."""

    def reached(self) -> int:
        """Number of steps done, saved or not."""
        return self.saved()

    @property
    def note(self) -> Path:
        """A file beside the folder with the error message of the last failure."""
        return self.folder.with_name(self.folder.name + ".failed")

    def is_done(self) -> bool:
        return self.saved() >= self.num_steps

    def state(self) -> State:
        saved = self.saved()
        if saved >= self.num_steps:
            return State("done", saved)
        owner, alive = holder(self.folder)
        if owner is not None:
            where = f"on {owner.host}" + (f", job {owner.slurm_job}" if owner.slurm_job else "")
            name, detail = ("running", where) if alive else ("failed", f"died {where}")
            return State(name, self.reached(), detail)
        if self.note.is_file():
            note = read_bounded(self.note).decode(errors="replace")
            return State("failed", self.reached(), " ".join(note.split()))
        return State("waiting", saved)


def format_states(jobs: Sequence[Job]) -> str:
    states = [job.state() for job in jobs]
    width = max(len(job.name) for job in jobs)
    lines = [
        f"{job.name:<{width}}  {state.name:<8}{state.step:>9,}/{job.num_steps:<9,} {state.detail}"
        for job, state in zip(jobs, states, strict=True)
    ]
    counts = Counter(state.name for state in states)
    total = ", ".join(f"{counts[name]} {name}" for name in ("done", "running", "failed", "waiting"))
    return "\n".join([*(line.rstrip() for line in lines), f"{len(jobs)} runs: {total}"])


@contextlib.contextmanager
def recording_failure(job: Job) -> Iterator[None]:
    """Write the note of a job that fails inside."""
    job.note.unlink(missing_ok=True)
    try:
        yield
    except ReportedElsewhere:
        raise
    except Exception as error:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(job.note, str(error) or type(error).__name__)
        raise


def run_here(path: str, overrides: list[str], jobs: Sequence[Job]) -> int:
    """Run the unfinished jobs one after the other, each in its own process. A job whose needs
    failed waits."""
    failed = []
    for number, job in enumerate(jobs):
        if job.state().name in ("done", "running") or unfinished_needs(job, jobs):
            continue
        say(f"{job.name}: {job.text}")
        words = ["sweep", path, f"--only={number}", *overrides]
        code, stopped = run_process([sys.executable, "-P", "-m", "olmo_sparsity", *words])
        if stopped:
            return EXIT_STOPPED
        if code != 0:
            failed.append(job.name)
    print(format_states(jobs))
    if failed:
        raise UserError(f"{', '.join(failed)}: failed; the same command tries again")
    return 0


def unfinished_needs(job: Job, jobs: Sequence[Job]) -> list[str]:
    return [other.name for other in jobs if other.name in job.needs if not other.is_done()]


def run_process(
    command: Sequence[str], environment: dict[str, str] | None = None
) -> tuple[int, bool]:
    """Run a command. Returns its exit code, and whether it or this process got a signal to stop: it
    may have ended well all the same."""
    child: subprocess.Popen | None = None
    signals, early = [], []

    def pass_on(number: int, _: object) -> None:
        signals.append(number)
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    names = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    before = {name: signal.signal(name, pass_on) for name in names}
    try:
        # In its own process group, or Ctrl-C would reach it twice, and the second kills it.
        child = subprocess.Popen(command, process_group=0, env=environment)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    return code, bool(signals) or code == EXIT_STOPPED


def submit(path: str, overrides: list[str], jobs: Sequence[Job], flags: str) -> int:
    """Submit the jobs that are neither done nor running, as one SLURM array for each set of
    needs."""
    script = Path("slurm/train.sbatch")
    if not script.exists():
        raise ConfigError(f"{script} is not here; submit from the root of olmo-sparsity")
    # A running job may have been started by hand, without a SLURM job to depend on.
    todo = {i: job for i, job in enumerate(jobs) if job.state().name not in ("done", "running")}
    if not todo:
        print(format_states(jobs))
        return 0
    arrays: dict[tuple[str, ...], list[int]] = {}
    names = {job.name for job in todo.values()}
    for i, job in todo.items():
        arrays.setdefault(tuple(name for name in job.needs if name in names), []).append(i)
    submitted: dict[str, str] = {}
    for needs, numbers in arrays.items():  # in order of dependency
        words = ["sbatch", *shlex.split(flags)]
        if needs:
            waits = ":".join(submitted[name] for name in needs)
            words += [f"--dependency=afterok:{waits}", "--kill-on-invalid-dep=yes"]
        words += [f"--array={','.join(map(str, numbers))}", str(script), path, *overrides]
        say(shlex.join(words))
        try:
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
        except FileNotFoundError:
            raise ConfigError("sbatch is not here; leave --slurm out to run one by one") from None
        print(done.stdout, end="")
        if done.returncode != 0:
            raise UserError(f"sbatch ended with {done.returncode}; nothing more is submitted")
        match = re.search(r"Submitted batch job (\d+)", done.stdout)
        if match is None:
            raise UserError(f"sbatch printed no job number: {done.stdout.strip()}")
        submitted |= {jobs[i].name: f"{match[1]}_{i}" for i in numbers}
    return 0


def own_environment() -> dict[str, str]:
    """The environment for a single-process command, without the variables of this launch."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID")
    environment = {name: text for name, text in os.environ.items() if name not in launched}
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    )
    return environment
