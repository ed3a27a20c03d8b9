"""Name what start.py hands to loop.py and steps.py: a `Start`, and the `PreparedRun` of it.

    with starting(config, processes) as start:    # lock, counters: of this call of the command
        run = prepare(config, start)              # text, model, engine: ready for step run.step + 1
        run.engine.step(next_batch, 3e-4)

Nothing here computes. The modules of after_step/ get the `PreparedRun`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from olmo_sparsity.base.progress import say
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.data.batches import TrainingBatches
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.evaluation.evaluate import Evaluation, Measures
from olmo_sparsity.training.optimizer.jump_detector import JumpDetector
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.processes.watchdog import Watchdog
from olmo_sparsity.training.run_folder.attempts import StartCount, counted_start
from olmo_sparsity.training.run_folder.folder import Flat
from olmo_sparsity.training.run_folder.gpu_hours import GpuHours


@dataclass(frozen=True)
class Start:
    """One start of a run: what belongs to this call of the command, and ends with it. A run that is
    killed or stopped has several."""

    processes: Processes

    cleanup: contextlib.ExitStack
    """Releases the lock of the run folder, stores the count of GPU-hours (both on the first process
    alone), and stops the watchdog and the profile of steps. It is closed when all is written. The
    watchdog closes it earlier, before it ends a process that hangs."""

    count: StartCount
    """Counts this start, until it ends in an orderly way: too many that died are an error."""

    gpu_hours: GpuHours
    """The GPU-hours of all starts, which may end the run."""

    def report(self, message: str) -> None:
        """Print a message, on the first process alone."""
        if self.processes.is_first:
            say(message)


@contextlib.contextmanager
def starting(config: RunConfig, processes: Processes) -> Iterator[Start]:
    """Yield a start of the run of a config. At the end, close `Start.cleanup`, which unlocks the
    run folder."""
    run_folder = Path(config.run_folder)
    with contextlib.ExitStack() as cleanup, counted_start(run_folder) as count:
        gpu_hours = GpuHours(run_folder, config.training.max_gpu_hours, processes)
        yield Start(processes, cleanup, count, gpu_hours)


@dataclass(frozen=True)
class StepWork:
    """How much a step computes, from which the log gets tokens per second and MFU."""

    tokens: int
    """Tokens of all processes."""

    flops: float
    flops_whole_attention: float
    """FLOPs, if attention is counted as if nothing was masked."""

    stated_flops_per_second: float | None
    """FLOP/s that the vendor states for all devices together; None if they are not known."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready for its next step."""

    start: Start

    config: RunConfig
    """The config of the user, with what hardware and tokenizer determine filled in."""

    settings: Flat
    """The config as flat keys, with which other starts are compared."""

    config_yaml: str
    """The config as YAML, which each checkpoint holds."""

    step: int
    """Steps done already."""

    jump_detector: JumpDetector | None
    """Finds the steps whose update is skipped; None without `optimizer.skip_sigmas`."""

    shards: TokenShards
    """The training text."""

    batches: TrainingBatches
    """The batches of this process, by step."""

    engine: Engine
    """The engine, with the model and the state of the optimizer."""

    evaluation: Evaluation
    measures: Measures
    """What is evaluated besides, such as tasks of lm_eval."""

    watchdog: Watchdog
    step_work: StepWork

    @property
    def processes(self) -> Processes:
        """Return the processes that train together."""
        return self.start.processes

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return Path(self.config.run_folder)
