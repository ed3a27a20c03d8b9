"""Identify the process that holds a lock, and notice that it has died.

    Owner.here()              this process: Owner(host="node1", pid=4711, slurm_job="88", …)
    owner.has_died_here       whether it was a process of this machine that is certainly gone

A number alone does not identify a process, as the system gives the numbers of ended processes to
new ones. So an owner also has the start of its machine, its container and its own start, in one
text: `process`. locks.py writes an owner into the file of a lock.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Owner:
    """A process that holds a lock, as the lock's file names it."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    slurm_job: str | None = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID"))
    since: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Random, so that no two owners are equal."""

    process: str | None = None
    """Tells this process from all others since the machine was started; None if unknown."""

    @staticmethod
    def here() -> Owner:
        """Return this process as an owner."""
        return Owner(process=_identify_process(os.getpid()))

    @property
    def has_died_here(self) -> bool:
        """Return whether this was a process of this machine that is certainly gone.

        A process in another container on this machine has numbers of its own. Nothing is certain
        about it, so the answer is False."""
        if self.process is None or self.host != socket.gethostname():
            return False
        machine = _identify_machine()
        is_of_this_machine = machine is not None and self.process.startswith(machine)
        return is_of_this_machine and self.process != _identify_process(self.pid)


def _identify_machine() -> str | None:
    """Return a text that differs after each start of the machine, and between its containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # It ends in a space: _identify_process appends a number, and has_died_here compares this
        # beginning.
        return f"{boot} {os.readlink('/proc/self/ns/pid')} "
    except OSError:  # not Linux
        return None


class _ProcessStatus(NamedTuple):
    """The fields of /proc/PID/stat that tell whether a process is the one it was."""

    state: str
    start_ticks: str
    """Clock ticks from the start of the machine to that of the process."""


def _read_status(pid: int) -> _ProcessStatus | None:
    """Return the status of a process; None if it does not run, or the system is not Linux."""
    try:
        # The second field, the name of the program in parentheses, may hold spaces and parentheses.
        _, _, after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    fields_after_name = after_name.split()
    # proc(5) counts from 1 and from the number of the process: these are its fields 3 and 22.
    return _ProcessStatus(state=fields_after_name[0], start_ticks=fields_after_name[19])


def _identify_process(pid: int) -> str | None:
    """Return a text that only the running process with this number has; None if none runs.

    It holds when the process began, as the system gives the numbers of ended processes to new
    ones."""
    machine = _identify_machine()
    status = _read_status(pid)
    if machine is None or status is None:
        return None
    if status.state in ("Z", "X"):  # it has ended, and its parent has not asked for its code
        return None
    return f"{machine}{status.start_ticks}"
