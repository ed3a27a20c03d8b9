"""Training in child processes that tests may kill, interrupt, or start several of.

Children fork from a server that has imported everything and run nothing: quick to start, and no
thread pool is copied half alive.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from olmo_sparsity.cli import main

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed decides when it is imported
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["olmo_sparsity.training.loop", "deepspeed"])


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
            process.kill()  # only one that hangs is still there
            process.join()
        return [process.exitcode for process in self.processes]

    def texts(self) -> list[str]:
        return [log.read_text() for log in self.logs]


def start(settings: dict, world_size: int = 2, arguments: list[list[str]] | None = None) -> Job:
    """`olmo-sparsity train` in several processes that meet as under torchrun. `arguments`: more
    words, for each process."""
    folder = Path(settings["run_folder"])
    logs = folder.with_name(f"{folder.name}-logs")
    logs.mkdir(exist_ok=True)
    number = len(list(logs.iterdir()))
    config = logs / f"{number}.yaml"
    config.write_text(json.dumps(settings))
    job = Job([], [])
    variables = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost"}
    variables |= {"MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": str(world_size)}
    for rank in range(world_size):
        job.logs.append(logs / f"{number}-{rank}.log")
        more = arguments[rank] if arguments else []
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = forkserver.Process(
            target=_run,
            args=(["train", str(config), *more], variables | own, str(job.logs[-1])),
        )
        process.start()
        job.processes.append(process)  # type: ignore[arg-type]
    return job


def _run(arguments: list[str], variables: dict[str, str], log: str) -> None:
    torch.set_num_threads(1)
    os.environ |= variables
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os._exit(main(arguments))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]
