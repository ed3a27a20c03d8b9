"""Compare the speed of training with the Hugging Face Trainer, a bare loop on upstream's OLMo, and
itself on two processes.

Claims: training here is at least 1.15 times as fast as the Hugging Face Trainer on the same
architecture, and never slower than a bare loop on upstream's OLMo; two processes on two cores are
at least 1.6 times as fast as one process on one core.

    python -m benchmarks.train [--rounds 5] [--steps 8]
    python -m benchmarks.train --processes [--rounds 7] [--steps 6] [--engine ddp]
    python -m benchmarks.train --rounds 1 --steps 1   # does it run? in minutes; no number to keep

Same parameters (the model of configs/quick.yaml), batch, precision, optimizer and clipping for all
of a run, taking turns; a ratio is the median over the turns of the ratio within a turn. The share
of the machine's matmul peak is printed for each. Each of the processes has one thread and a core of
its own. On a machine that others use too, watch the share of it that each really got; what two
free cores would give is estimated from CPU time, which leaves out waiting for each other: an upper
bound.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from olmo.config import ModelConfig as UpstreamConfig
from olmo.model import OLMo
from torch import multiprocessing, nn

from olmo_sparsity.config.run import load_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.data.batches import Batch, TrainingBatches
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.huggingface.exchange import hugging_face_model
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.text.vocabulary import IGNORED
from olmo_sparsity.training.engines.choose import build_engine
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.estimate.compute import flops_per_token
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.processes.process_group import connect
from olmo_sparsity.training.setup.inputs import build_batches
from olmo_sparsity.training.setup.resolve import resolve

CONFIG = Path(__file__).parents[1] / "configs/quick.yaml"
WARM_UP_STEPS = 2


def configured(
    precision: str, *settings: str, processes: Processes | None = None
) -> tuple[RunConfig, TrainingBatches]:
    """Return the config of a run on the CPU, and its batches."""
    words = [f"--training.precision={precision}", "--training.device=cpu", *settings]
    config = load_config(CONFIG, words)
    shards = open_shards(config.data, "train")
    cpu = torch.device("cpu")
    config = resolve(config, shards, cpu, Hardware.here(cpu))
    return config, build_batches(shards, config, processes or Processes())


# --- three frameworks -----------------------------------------------------------------------------


def tokens_per_s(step: Callable[[], Any], tokens_per_step: int, num_steps: int) -> float:
    """Return the speed of a training step, after steps that are not timed."""
    for _ in range(WARM_UP_STEPS):
        step()
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    return tokens_per_step * num_steps / (time.perf_counter() - started)


def ours(config: RunConfig, batches: Iterator[Batch]) -> Callable[[], Any]:
    """Return a training step of this package."""
    engine = Engine(build_model(config.model), config.training, config.optimizer)
    return lambda: engine.step(next(batches), 1e-4)


def bare_upstream(config: RunConfig, batches: Iterator[Batch]) -> Callable[[], Any]:
    """Return a training step with ai2-olmo alone, which has contiguous positions only."""
    fields = {name: getattr(config.model, name) for name in UpstreamConfig.__dataclass_fields__}
    model = OLMo(UpstreamConfig(**fields))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    bf16 = config.training.precision == "bf16"

    def step() -> None:
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(batch.tokens_BL).logits
        loss = nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch.labels_BL.flatten(), ignore_index=IGNORED
        )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def hugging_face_trainer(config: RunConfig, batches: Iterator[Batch], num_steps: int) -> float:
    """Return tokens/s of Trainer.train() on the same model in transformers, by its step
    callbacks."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        marks: list[float]

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.marks = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.marks.append(time.perf_counter())

    rows = []
    while len(rows) < config.training.batch_size * (num_steps + WARM_UP_STEPS + 1):
        batch = next(batches)
        # Trainer shifts the labels itself.
        rows += [
            {"input_ids": tokens, "labels": tokens, "position_ids": positions}
            for tokens, positions in zip(batch.tokens_BL, batch.positions_BL, strict=True)
        ]
    model = hugging_face_model(config.model, build_model(config.model).state_dict(), "benchmark")
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=config.training.batch_size,
            max_steps=num_steps + WARM_UP_STEPS,
            learning_rate=1e-4,
            weight_decay=0.1,
            max_grad_norm=1.0,
            bf16=config.training.precision == "bf16",
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=rows, callbacks=[clock]).train()
    seconds = clock.marks[-1] - clock.marks[WARM_UP_STEPS - 1]
    return config.training.batch_size * config.training.length * num_steps / seconds


def matmul_peak(precision: str) -> float:
    """Return FLOP/s of a plain square matmul on the CPU, the best of several sizes."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    peak = 0.0
    for size in (256, 512, 1024, 2048):
        left = torch.randn(size, size, dtype=dtype)
        for _ in range(4):
            started = time.perf_counter()
            left @ left
            peak = max(peak, 2 * size**3 / (time.perf_counter() - started))
    return peak


def compare_frameworks(num_rounds: int, num_steps: int) -> None:
    """Print the speed of the three frameworks, taking turns, and ratios within each turn."""
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )
    for precision in ("fp32", "bf16"):
        config, training_batches = configured(precision)
        batches = training_batches.from_step(1)
        model = build_model(config.model)
        peak = matmul_peak(precision)
        flops = flops_per_token(model, config.model, config.training.length)
        tokens = config.training.batch_size * config.training.length
        rates_by_name: dict[str, list[float]] = {"ours": [], "bare upstream": [], "Trainer": []}
        for _ in range(num_rounds):
            rates_by_name["ours"].append(tokens_per_s(ours(config, batches), tokens, num_steps))
            upstream = bare_upstream(config, batches)
            rates_by_name["bare upstream"].append(tokens_per_s(upstream, tokens, num_steps))
            rates_by_name["Trainer"].append(hugging_face_trainer(config, batches, num_steps))
        print(
            f"\n{precision}: {count_parameters(model):,} parameters, batch {tokens:,} tokens, "
            f"matmul peak {peak / 1e9:.0f} GFLOP/s, {num_rounds} rounds"
        )
        for name, rates in rates_by_name.items():
            pairs = zip(rates_by_name["ours"], rates, strict=True)
            ratios = [our_rate / rate for our_rate, rate in pairs]
            rate = statistics.median(rates)
            print(
                f"  {name:<14}{rate:>8,.0f} tokens/s  {rate * flops / peak:>4.0%} of peak"
                f"  ours / this: {statistics.median(ratios):.2f}"
                f" (from {min(ratios):.2f} to {max(ratios):.2f})"
            )


# --- two processes --------------------------------------------------------------------------------


def take_steps(engine_name: str, environment: dict[str, str], pipe: Connection) -> None:
    """In a process of its own, receive numbers of steps, and send their wall and CPU seconds. All
    processes stay alive, so that nothing but steps is timed. `environment`: how the process finds
    the others; empty: it is alone."""
    os.environ |= environment
    torch.set_num_threads(1)
    with connect() as processes:
        own_core = sorted(os.sched_getaffinity(0))[processes.rank]
        os.sched_setaffinity(0, {own_core})
        engine_option = f"--engine.name={engine_name}"
        config, training_batches = configured("fp32", engine_option, processes=processes)
        batches = training_batches.from_step(1)
        torch.manual_seed(0)
        engine = build_engine(
            build_model(config.model),
            config.engine,
            config.training,
            config.optimizer,
            processes,
        )
        for _ in range(WARM_UP_STEPS):
            engine.step(next(batches), 1e-4)
        pipe.send(engine.title)
        while num_steps := pipe.recv():  # 0 ends the process
            started = time.perf_counter()
            started_cpu = time.process_time()
            for _ in range(num_steps):
                engine.step(next(batches), 1e-4)
            pipe.send((time.perf_counter() - started, time.process_time() - started_cpu))


def start(engine_name: str, num_processes: int) -> list[Connection]:
    """Start processes that train together, and return a pipe to each."""
    with socket.socket() as free_socket:
        free_socket.bind(("localhost", 0))
        _, port = free_socket.getsockname()
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    context = multiprocessing.get_context("spawn")
    pipes = []
    for rank in range(num_processes):
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(num_processes), "LOCAL_RANK": str(rank)}
        environment = address | ranks if num_processes > 1 else {}
        pipe, child_pipe = multiprocessing.Pipe()
        context.Process(target=take_steps, args=(engine_name, environment, child_pipe)).start()
        pipes.append(pipe)
    return pipes


def compare_processes(engine_name: str, num_rounds: int, num_steps: int) -> None:
    """Print the speed of two processes against one, taking turns."""
    cores = len(os.sched_getaffinity(0))
    assert cores >= 2, "two cores are needed"
    training = configured("fp32")[0].training
    contestants = {1: start("single", 1), 2: start(engine_name, 2)}
    titles = {n: {pipe.recv() for pipe in pipes} for n, pipes in contestants.items()}
    print(
        f"{platform.processor() or platform.machine()}, {cores} cores, fp32, "
        f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    )
    walls: dict[int, list[float]] = {1: [], 2: []}
    cpus: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(num_rounds):
        for n in (1, 2) if turn % 2 else (2, 1):
            for pipe in contestants[n]:
                pipe.send(num_steps)
            seconds = [pipe.recv() for pipe in contestants[n]]
            walls[n].append(max(wall for wall, _ in seconds))
            cpus[n].append(sum(cpu for _, cpu in seconds))
        share_of_one = cpus[1][-1] / walls[1][-1]
        share_of_two = cpus[2][-1] / walls[2][-1] / 2
        print(
            f"round {turn}: ratio {walls[1][-1] / walls[2][-1]:.2f}, share of a core: one "
            f"process {share_of_one:.0%}, each of two {share_of_two:.0%}",
            flush=True,
        )
    tokens = training.batch_size * training.length * num_steps
    for n, pipes in contestants.items():
        print(f"  {titles[n].pop():<40}{tokens / statistics.median(walls[n]):>8,.0f} tokens/s")
        for pipe in pipes:
            pipe.send(0)
    ratios = [one / two for one, two in zip(walls[1], walls[2], strict=True)]
    # On free cores the wall time of two is half of their CPU time, if none waits for the other.
    ratios_if_free = [2 * one / two for one, two in zip(cpus[1], cpus[2], strict=True)]
    median = statistics.median(ratios)
    print(f"by CPU time, both cores free: at most {statistics.median(ratios_if_free):.2f}")
    print(
        f"{'met   ' if median >= 1.6 else 'MISSED'} two processes / one: {median:.2f} "
        f"(from {min(ratios):.2f} to {max(ratios):.2f}), at least 1.6 wanted"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, help="turns of each (5; 7 with --processes)")
    parser.add_argument("--steps", type=int, help="timed steps of a turn (8; 6 with --processes)")
    parser.add_argument("--processes", action="store_true", help="two processes against one")
    parser.add_argument("--engine", default="ddp", help="of the two (%(default)s)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    prepare(load_config(CONFIG).data)
    if options.processes:
        compare_processes(options.engine, options.rounds or 7, options.steps or 6)
    else:
        compare_frameworks(options.rounds or 5, options.steps or 8)


if __name__ == "__main__":
    main()
