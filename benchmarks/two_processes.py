"""Claim: two processes on two cores train at least 1.6 times as fast as one process on one core.

The model of configs/quick.yaml, the same batches, one thread a process, each process pinned to a
core of its own. Rounds take turns: two processes, then one, the other way round in the next; a
ratio is that of two neighbours, and their median is reported. On a machine that others use too,
watch the share of a core that each process really got; what two free cores would give is estimated
from CPU time, which leaves out waiting for each other: an upper bound.

    python benchmarks/two_processes.py [--rounds 7] [--steps 6] [--engine ddp]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from olmo_sparsity.config_file import load_config
from olmo_sparsity.data.batches import TrainingBatches
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.data.tokens import prepare
from olmo_sparsity.model.load import build_model
from olmo_sparsity.training.choose_engine import build_engine
from olmo_sparsity.training.distributed import connect
from olmo_sparsity.training.loop import resolve

ROOT = Path(__file__).parents[1]
WARM_UP_STEPS = 2


def work(engine_name: str, precision: str) -> None:
    """In a child: told on standard input how many steps to take; answers with the time they took.
    Both contestants stay alive, so that nothing but steps is timed."""
    config = load_config(
        ROOT / "configs/quick.yaml",
        [
            f"--engine.name={engine_name}",
            f"--training.precision={precision}",
            "--training.device=cpu",
        ],
    )
    torch.set_num_threads(1)
    with connect() as processes:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[processes.rank]})
        shards = open_shards(config.data, "train")
        resolve(config, shards, torch.device("cpu"))
        torch.manual_seed(0)
        engine = build_engine(build_model(config.model), config, processes)
        batches = TrainingBatches(
            shards,
            config.positions,
            length=config.training.length,
            batch_size=config.training.batch_size,
            seed=0,
            rank=processes.rank,
            world_size=processes.world_size,
        ).from_step(0)
        for _ in range(WARM_UP_STEPS):
            engine.step(next(batches), 1e-4)
        print(json.dumps({"ready": engine.title}), flush=True)
        for line in sys.stdin:
            started, started_cpu = time.perf_counter(), time.process_time()
            for _ in range(int(line)):
                engine.step(next(batches), 1e-4)
            took, cpu = time.perf_counter() - started, time.process_time() - started_cpu
            print(json.dumps({"seconds": took, "cpu": cpu}), flush=True)


class Contestant:
    def __init__(self, engine_name: str, precision: str, world_size: int) -> None:
        with socket.socket() as found:
            found.bind(("localhost", 0))
            port = str(found.getsockname()[1])
        self.children = []
        for rank in range(world_size):
            place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
            place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            self.children.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--child", engine_name, "--precision", precision],
                    env=os.environ | (place if world_size > 1 else {}) | {"OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        self.title = self.answers()[0]["ready"]

    def answers(self) -> list[dict]:
        return [json.loads(child.stdout.readline()) for child in self.children]

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds, and the share of a core each process got."""
        for child in self.children:
            assert child.stdin is not None
            child.stdin.write(f"{steps}\n")
            child.stdin.flush()
        found = self.answers()
        seconds = max(answer["seconds"] for answer in found)
        return seconds, sum(answer["cpu"] for answer in found) / seconds / len(found)

    def close(self) -> None:
        for child in self.children:
            assert child.stdin is not None
            child.stdin.close()
            child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--engine", default="ddp")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        work(options.child, options.precision)
        return
    cores = len(os.sched_getaffinity(0))
    assert cores >= 2, "two cores are needed"
    config = load_config(ROOT / "configs/quick.yaml")
    prepare(config.data)
    tokens = config.training.batch_size * config.training.length * options.steps
    one = Contestant("single", options.precision, 1)
    two = Contestant(options.engine, options.precision, 2)
    print(f"{platform.processor() or platform.machine()}, {cores} cores, {options.precision}, "
          f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")  # fmt: skip
    ratios: list[float] = []
    cpu_ratios: list[float] = []
    rates: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(options.rounds):
        order = (one, two) if turn % 2 else (two, one)
        found = {len(contestant.children): contestant.run(options.steps) for contestant in order}
        ratios.append(found[1][0] / found[2][0])
        cpu = {n: seconds * share * n for n, (seconds, share) in found.items()}
        cpu_ratios.append(2 * cpu[1] / cpu[2])
        for world_size, (seconds, _) in found.items():
            rates[world_size].append(tokens / seconds)
        print(f"round {turn}: ratio {ratios[-1]:.2f}, share of a core: one process "
              f"{found[1][1]:.0%}, each of two {found[2][1]:.0%}", flush=True)  # fmt: skip
    for contestant in (one, two):
        rate = statistics.median(rates[len(contestant.children)])
        print(f"  {contestant.title:<40}{rate:>8,.0f} tokens/s")
        contestant.close()
    median = statistics.median(ratios)
    print(f"by CPU time, both cores free: at most {statistics.median(cpu_ratios):.2f}")
    print(f"{'met   ' if median >= 1.6 else 'MISSED'} two processes / one: {median:.2f} "
          f"(from {min(ratios):.2f} to {max(ratios):.2f}), at least 1.6 wanted")  # fmt: skip


if __name__ == "__main__":
    main()
