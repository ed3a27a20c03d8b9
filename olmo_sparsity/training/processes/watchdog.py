"""End a run whose processes wait for one that does not come: stacks, one line, exit code 76.

Training says what it does now, and for how long it may:

    watchdog.expect("the evaluation of step 100")                     # engine.work_timeout_s
    watchdog.expect_step(101)                                         # engine.step_timeout_s
    with watchdog.disk_work("reading the batch of step 102"): ...     # does not count for the step

A thread of each process compares the time with the limit of this task. At a time-out:

    every process     writes its stacks, and waits for those of the others (stacks.py)
    one process       prints one line, which names the processes that the others waited for:
                      "step 101 took more than …: process 3 on node1 did not come, stacks of …"
    every process     unlocks the run folder, and ends with exit code 76

If the late processes are on one node, slurm/job.sh is told which, and excludes it from the next
start. A process that waits for its disk has more time than one that computes (`disk_work`). The
others, which wait for it in a step, learn it from the store at which all have met.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from olmo_sparsity.base.launch import EXIT_LOST_PROCESS, node_name, suspect
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.sections import EngineConfig
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.processes.stacks import Stacks

REPORT_S = 3.0
"""Seconds that the others leave to the process that reports."""

DISK_PATIENCE_S = 30.0
"""Seconds after which a process ends whether its stacks are written or not: a network disk that
hangs may be what the run waits for, and blocks whoever writes to it."""

TIMES_LONGEST_STEP = 5
"""How many times as long as the longest step so far a step may take."""

DISK_WORK = "number of processes that wait for a disk"
"""The key of the store under which they are counted."""

STORE_PATIENCE_S = 5.0
"""Seconds in which the store must answer. It lives in the first process, so a question never ends
if that process is what hangs."""


class Task(NamedTuple):
    """What this process does now. It is one object, because the main thread may go on to another
    task while the watching thread reads it."""

    name: str
    limit: str
    """Its limit in words, such as `engine.work_timeout_s=1800`."""

    limit_s: float
    deadline: float
    """The time, by `time.monotonic`, at which it must have ended."""

    is_disk_work: bool = False
    """Whether it waits for a disk, so that other processes wait for it longer, too."""


class _Start(NamedTuple):
    """What processes tell each other when they begin."""

    time: str
    node: str


class Watchdog:
    """Watches the tasks of this process. With several processes, a thread ends it at a time-out."""

    def __init__(
        self,
        run_folder: Path,
        limits: EngineConfig,
        processes: Processes,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to watch. Every process must call it.

        Args:
            release: Is called before this process is ended: it unlocks the run folder.
        """
        self.limits = limits
        self.processes = processes
        self.release = release
        self.first_step_s = 0.0
        """Seconds of the first step, in which kernels may be compiled."""

        self.longest_step_s = 0.0
        """Seconds of the longest step after the first."""

        self.step_began_s: float | None = None
        """When the current step began, by `time.monotonic`, later by its waits for a disk; None
        between steps."""

        self.nodes = [node_name()]
        """The name of the node of each process."""

        self.has_announced_wait = False
        """Whether this process has told the others that it waits for its disk."""

        self.expect("the start")
        # For a process alone nobody waits, except on a cluster, where launchers set the variable.
        if processes.world_size == 1 and "WORLD_SIZE" not in os.environ:
            return
        starts = processes.gather(_Start(time.strftime("%Y%m%d-%H%M%S"), node_name()))
        self.nodes = [start.node for start in starts]
        # All write into one folder, named by the clock of the first.
        self.stacks = Stacks(run_folder / "stacks" / starts[0].time, processes, self.nodes)
        threading.Thread(target=self._watch, daemon=True).start()

    def expect(self, task: str) -> None:
        """Expect this process to finish a task within `engine.work_timeout_s`. The next call, or
        `stop`, ends the task."""
        limit_s = self.limits.work_timeout_s
        self._begin(task, f"engine.work_timeout_s={limit_s}", limit_s)

    def expect_step(self, step: int) -> None:
        """Expect this process to finish a step. A step of a large model may take longer than
        `engine.step_timeout_s`, so that it may take `TIMES_LONGEST_STEP` times as long as the
        longest one so far; but not longer than `engine.work_timeout_s`, at which connections give
        up."""
        self._end_step()  # now, as it may have been the longest
        timeout_s = self.limits.step_timeout_s
        longest_s = self.longest_step_s or self.first_step_s
        learnt_s = min(TIMES_LONGEST_STEP * longest_s, self.limits.work_timeout_s)
        limit = f"engine.step_timeout_s={timeout_s}"
        if learnt_s > timeout_s:
            limit = f"{learnt_s:.0f} s, {TIMES_LONGEST_STEP} times the longest step, and {limit}"
        self._begin(f"step {step}", limit, max(timeout_s, learnt_s))
        self.step_began_s = time.monotonic()

    def _begin(self, task: str, limit: str, limit_s: float) -> None:
        """Begin a task, which ends the one before."""
        self._end_step()
        self.task = Task(task, limit, limit_s, time.monotonic() + limit_s)

    def _end_step(self) -> None:
        """Remember how long the step took that ends here, if there is one."""
        if self.step_began_s is not None:
            self.longest_step_s = max(self.longest_step_s, time.monotonic() - self.step_began_s)
            self.step_began_s = None

    @contextlib.contextmanager
    def disk_work(self, task: str) -> Iterator[None]:
        """Inside, this process waits for a disk, which may take `engine.work_timeout_s`. This does
        not count as time of the task that it interrupts."""
        interrupted = self.task
        wait_began_s = time.monotonic()
        limit_s = self.limits.work_timeout_s
        limit = f"engine.work_timeout_s={limit_s}"
        self.task = Task(task, limit, limit_s, wait_began_s + limit_s, is_disk_work=True)
        try:
            yield
        finally:
            waited_s = time.monotonic() - wait_began_s
            if self.step_began_s is not None:
                self.step_began_s += waited_s
            self.task = interrupted._replace(deadline=interrupted.deadline + waited_s)

    def stop(self) -> None:
        """Stop watching."""
        self.task = self.task._replace(deadline=float("inf"))
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        """End the process if its task takes too long. Runs in a thread."""
        # The last task that got more time, because another process waits for its disk.
        extended_task: Task | None = None
        extended_deadline = float("inf")
        while self.task.deadline < float("inf"):  # until `stop`
            # If this thread is blocked, too, one without Python prints stacks and ends the process.
            # Each call replaces the one before.
            faulthandler.dump_traceback_later(self.limits.work_timeout_s + 60, exit=True)
            time.sleep(min(1.0, self.limits.step_timeout_s / 4))
            task = self.task  # read once, as the main thread may go on to another
            self._announce_wait(task.is_disk_work)
            now = time.monotonic()
            deadline = extended_deadline if task is extended_task else task.deadline
            if now > deadline and not task.is_disk_work and self._someone_waits_for_a_disk():
                extended_task = task
                deadline = extended_deadline = self._extend(task, now)
            if now > deadline:
                self._end(task)

    def _extend(self, task: Task, now: float) -> float:
        """Return a later deadline of a task that waits for another process's disk. When the disk is
        back, the task has its whole time again; but it ends `engine.work_timeout_s` after it began
        at the latest, as a process that died in its disk work stays counted as waiting."""
        began_s = task.deadline - task.limit_s
        return min(now + task.limit_s, began_s + self.limits.work_timeout_s)

    def _announce_wait(self, is_disk_work: bool) -> None:
        """Tell the others whether this process waits for a disk, if that has changed."""
        if is_disk_work != self.has_announced_wait and self.processes.world_size > 1:
            _add_to_store(DISK_WORK, 1 if is_disk_work else -1)
            self.has_announced_wait = is_disk_work

    def _someone_waits_for_a_disk(self) -> bool:
        """Return whether some process has announced that it waits for its disk."""
        if self.processes.world_size == 1:
            return False
        num_waiting = _add_to_store(DISK_WORK, 0)
        return num_waiting is not None and num_waiting > 0

    def _end(self, task: Task) -> None:
        """Report that a task took too long, and end this process."""
        time_out = f"olmo-sparsity: {task.name} took more than {task.limit}"
        try:
            reporter = threading.Thread(
                target=self._report, args=(task.name, time_out), daemon=True
            )
            reporter.start()
            reporter.join(DISK_PATIENCE_S)
            if reporter.is_alive() and self.processes.is_first:
                no_stacks = f"the disk of {self.stacks.folder} takes no stacks"
                say(f"{time_out}: {no_stacks}; the same command goes on")
        finally:
            # Other threads wait in collectives that cannot be interrupted.
            os._exit(EXIT_LOST_PROCESS)

    def _report(self, task: str, time_out: str) -> None:
        """Write the stacks, let one process say which ones are missing or behind, and unlock the
        run folder. Runs in a thread, as a disk may block it for ever.

        Args:
            task: The name of the task.
            time_out: The beginning of the line: that the task took too long.
        """
        rank = self.processes.rank
        self.stacks.write(task)
        reporting_ranks = self.stacks.wait_for_all()
        # The first process may be the one that hangs.
        if rank == min(reporting_ranks, default=rank):
            late_processes = self.stacks.find_late(reporting_ranks)
            where = f"{late_processes.description} are in {self.stacks.folder}"
            say(f"{time_out}: {where}; the same command goes on")
            nodes = {self.nodes[late_rank] for late_rank in late_processes.ranks}
            if len(nodes) == 1:
                suspect(nodes.pop())
        else:
            # The end of this process closes its connections. Then the work of the reporting process
            # fails, and may end it before it has reported.
            time.sleep(REPORT_S)
        self.release()


def _add_to_store(key: str, number: int) -> int | None:
    """Add a number to a counter of the store at which the processes of the run have met, and return
    the sum; with 0 it only reads. Return None if the store does not answer, or is gone with the
    first process."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    sums: list[int] = []

    def add() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            sums.append(store.add(key, number))

    # A question cannot be interrupted, so a thread of its own waits for the answer.
    asking = threading.Thread(target=add, daemon=True)
    asking.start()
    asking.join(STORE_PATIENCE_S)
    return sums[0] if sums else None
