"""Training in child processes that tests may kill, interrupt, or start several of.

Children fork from a server that has imported everything and run nothing: quick to start, and no
thread pool is copied half alive.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from olmo_sparsity.command.cli import main
from olmo_sparsity.data.batches import TrainingBatches, batch_of_step
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.engines.losses import Losses

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed decides when it is imported
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(
    [
        "pytest",
        "hypothesis",
        "olmo_sparsity.training.loop",
        "olmo_sparsity.training.engines.fsdp",
        "olmo_sparsity.models.olmo.model",
        "olmo_sparsity.analysis.measurement.measurement",
        "transformers.models.llama.modeling_llama",  # as `export` does
        "deepspeed",
        "deepspeed.runtime.zero.muon.original_muon",  # PyTorch's compiler, as its first step does
    ]
)


@dataclass
class Job:
    """The processes of one run."""

    processes: list[multiprocessing.Process]
    logs: list[Path]

    def wait(self, timeout_s: float = 120) -> list[int | None]:
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            if process.is_alive():  # it hangs: its log will say where
                os.kill(process.pid, signal.SIGABRT)
                process.join(5)
            process.kill()
            process.join()
        return [process.exitcode for process in self.processes]

    def texts(self) -> list[str]:
        return [log.read_text() for log in self.logs]


Disturb = Callable[[], None]


def start(
    settings: dict,
    world_size: int = 2,
    arguments: list[list[str]] | None = None,
    disturb: Mapping[int, Disturb] = MappingProxyType({}),
) -> Job:
    """`olmo-sparsity train` in several processes that meet as under torchrun. `arguments`: more
    words, for each process."""
    config = _logs(settings) / "config.yaml"
    config.write_text(json.dumps(settings))
    words = ["train", str(config)]
    more = arguments or [[]] * world_size
    return start_each(settings, main, [[*words, *own] for own in more], disturb)


def start_each(
    settings: dict,
    target: Callable[[Any], int],
    arguments: list[Any],
    disturb: Mapping[int, Disturb] = MappingProxyType({}),
) -> Job:
    """`target` of each argument in a process of its own; what they print goes beside the run.
    `disturb`: what happens first in the process of a rank."""
    logs = _logs(settings)
    number = len(list(logs.glob("*.log")))
    variables = {"WORLD_SIZE": str(len(arguments)), "LOCAL_WORLD_SIZE": str(len(arguments))}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    job = Job([], [])
    for rank, argument in enumerate(arguments):
        own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        job.logs.append(logs / f"{number}-{rank}.log")
        process = forkserver.Process(
            target=_run, args=(target, argument, own, str(job.logs[-1]), disturb.get(rank))
        )
        process.start()
        job.processes.append(process)
    return job


def _run(
    target: Callable[[Any], int],
    argument: Any,
    variables: dict[str, str],
    log: str,
    disturb: Disturb | None,
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # DeepSpeed collects garbage, in a second if that includes all that was imported
    os.environ |= variables
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    if disturb is not None:
        disturb()
    os._exit(target(argument))


def signal_at_step(number: int, name: str) -> None:
    """Disturbs: this process gets a signal."""
    at_step(number, lambda: os.kill(os.getpid(), signal.Signals[name]))


def at_step(number: int, act: Callable[[], None]) -> None:
    """Act when this process begins its step of that number."""
    step, begun = Engine.step, 0

    def counted(self: Engine, *given: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun == number:
            act()
        return step(self, *given)

    Engine.step = counted  # type: ignore[method-assign] # counts steps


def give_no_numbers(
    batches: Container[int], patch: Callable[[Any, str, Any], None] = setattr
) -> None:
    """Disturbs: the losses of the batches with these numbers are NaN in this process."""
    draw, step, forward = TrainingBatches.of_step, Engine.step, Losses.forward
    is_bad = False

    def drawn(self: TrainingBatches, number_of_step: int) -> Any:
        batch: Any = draw(self, number_of_step)
        batch.number = batch_of_step(number_of_step, self.skipped)
        return batch

    def stepped(self: Engine, batch: Any, *given: Any) -> Any:
        nonlocal is_bad
        is_bad = batch.number in batches
        try:
            return step(self, batch, *given)
        finally:
            is_bad = False

    def forwarded(self: Losses, *given: Any) -> Any:
        return forward(self, *given) * (math.nan if is_bad else 1.0)

    patch(TrainingBatches, "of_step", drawn)
    patch(Engine, "step", stepped)
    patch(Losses, "forward", forwarded)


def _logs(settings: dict) -> Path:
    folder = Path(settings["run_folder"])
    logs = folder.with_name(f"{folder.name}-logs")
    logs.mkdir(exist_ok=True)
    return logs


def free_port() -> int:
    """None of those that the kernel hands out: nobody gets it before it is used."""
    while True:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("localhost", port := random.randrange(10_000, 32_000)))
            return port
