"""Write a Chrome trace of some training steps (`train --profile=FIRST:LAST`)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from olmo_sparsity.base.errors import ConfigError

if TYPE_CHECKING:
    from olmo_sparsity.training.prepared_run import PreparedRun


class Profile:
    """Traces some steps of the first process, and writes the trace into the run folder."""

    def __init__(self, steps: str | None, run: PreparedRun) -> None:
        """Check the option `steps`, which is FIRST:LAST, or None for no trace."""
        self.first_step = 0
        self.last_step = 0
        match = re.fullmatch(r"(\d+):(\d+)", steps or "")
        if match:
            self.first_step = int(match[1])
            self.last_step = int(match[2])
        num_steps = run.config.training.num_steps
        if steps is not None and not run.step < self.first_step <= self.last_step <= num_steps:
            raise ConfigError(
                f"--profile={steps} must be FIRST:LAST, two steps from {run.step + 1} to "
                f"{num_steps}, such as 10:15"
            )
        self.path = run.folder / f"trace_{self.first_step}_{self.last_step}.json"
        self.is_here = steps is not None and run.engine.processes.is_first
        self.profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Start or stop tracing, before a step."""
        # On one process: traces are large, and all processes do the same.
        if self.is_here and step == self.first_step:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        if step > self.last_step:
            self.stop()

    def stop(self) -> None:
        """Write the trace if one was started."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.path))
            self.profiler = None
