"""Let the processes of a run talk: small messages over gloo, and common errors.

    with connect(limits) as processes:                  # process_group.py
        ranks = processes.gather(processes.rank)        # [0, 1, 2, 3] on each of four processes
        with processes.raising_together():              # around what any process may fail at
            ...

An error of one process must stop all of them, and be reported once. If only process 2 of 4 finds a
damaged file inside `raising_together`, then

    process 2             raises its own error, which is printed: "process 2 of 4 on node1: …"
    processes 0, 1, 3     raise `ReportedElsewhere`, which prints nothing

Without it, the three would wait in their next collective for a process that has ended. A process
that dies or hangs is noticed by the others as `LostProcess`, or by watchdog.py.

All of training is given a `Processes`, also a run of one process, which sends nothing.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from olmo_sparsity.base.errors import ReportedElsewhere, UserError
from olmo_sparsity.base.launch import Launch


class LostProcess(Exception):
    """Another process of this run has died or does not respond."""


class ErrorReport(NamedTuple):
    """What a process tells the others about its error."""

    message: str
    diverged_at: int | None
    """The step whose numbers are not finite, if that is the error."""

    exit_code: int
    """The exit code with which the command ends, on every process."""


@dataclass(frozen=True)
class Processes(Launch):
    """The rank of this process, and communication with the others. A single process sends nothing.

    Each method is a collective: every process must call it, in the same order."""

    group: Any = None
    """A gloo group of all processes. Gradients may be sent by another backend, such as NCCL."""

    @property
    def is_first(self) -> bool:
        """Whether this process prints, and writes files that are written once."""
        return self.rank == 0

    @contextlib.contextmanager
    def raising_together(self) -> Iterator[None]:
        """Run the body on all processes, then wait for all. If some of them had an error, all
        raise: the first of these by rank its error, and the others `ReportedElsewhere`, which is
        silent."""
        error: UserError | None = None
        try:
            yield
        except UserError as caught:
            error = caught
        except OSError as caught:
            # Without a file it may be a broken connection, over which no report can be sent.
            if self.world_size == 1 or caught.filename is None:
                raise
            error = UserError(f"{caught.filename}: {caught.strerror}")
            error.errno = caught.errno

        own_report = None
        if error is not None:
            own_report = ErrorReport(str(error), error.diverged_at, error.exit_code)
        # Without an error processes exchange one number alone, so that this can be done each step.
        if not self.sum_integers(own_report is not None):
            return
        reports: list[ErrorReport | None] = self.gather(own_report)
        report_of_rank = {rank: report for rank, report in enumerate(reports) if report is not None}
        if report_of_rank:
            raise self._error_of_this_process(error, report_of_rank)

    def _error_of_this_process(
        self, own_error: UserError | None, report_of_rank: Mapping[int, ErrorReport]
    ) -> UserError:
        """Return what this process raises after a common failure.

        Args:
            own_error: The error of this process; None if only others had one.
            report_of_rank: What failed, by the rank of each process that had an error.
        """
        speaker = min(report_of_rank)
        if own_error is None or self.rank != speaker:
            error: UserError = ReportedElsewhere()
        else:
            error = own_error
            # An error that all have, such as a wrong option, is of no single process.
            if len(report_of_rank) < self.world_size:
                where = f"process {self.rank} of {self.world_size} on {socket.gethostname()}"
                error.args = (f"{where}: {error}",)
        # With training.on_nan=skip all must skip the batch, or end, alike.
        error.diverged_at = report_of_rank[speaker].diverged_at
        error.exit_code = report_of_rank[speaker].exit_code
        return error

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank. They are pickled."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def sum_in_place(self, numbers: torch.Tensor) -> torch.Tensor:
        """Replace numbers in main memory by their sums over all processes, and return them."""
        if self.world_size > 1:
            dist.all_reduce(numbers, group=self.group)
        return numbers

    def sum_integers(self, number: int) -> int:
        """Return the sum of a number over all processes."""
        return number if self.world_size == 1 else int(self.sum_in_place(torch.tensor(number)))

    def first_nonempty(self, text: str) -> str:
        """Return the first text that is not empty, by rank; an empty one if there is none. While
        there is none, processes exchange one number alone, so that it can be called each step."""
        if not self.sum_integers(bool(text)):
            return ""
        return next(filter(None, self.gather(text)))
