"""Claim: what a process holds in training, from its start, is within 15% of what `train --dry-run`
says, and with fsdp and ZeRO-3 no process ever holds a whole model.

    python -m benchmarks.memory [--layers 12] [--processes 1,2,4] [--engines ddp,fsdp,zero1,zero3]

One step of a model of width 768 on the CPU, in bf16, in processes that meet over gloo. Printed is
the peak of resident memory of the largest process in each phase, less that of a process that has
imported everything and met the others; next to each of them, in MiB, what the estimate says of the
start, of a step, and of saving: what is held between steps, and the copy of the process's part. The
last column is the largest peak as a share of the largest estimate. Files that are being read count
in `resume`, which has no estimate.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import TrainingConfig

TRAINING = TrainingConfig(precision="bf16", batch_size=4, length=64, device="cpu")
TRAINING.micro_batch_size = 1
PHASES = ("build", "step", "save", "resume")
"""Phases of a run, each with a peak of its own."""

HELD = {"ddp": 16, "fsdp": 0, "zero1": 6, "zero2": 2, "zero3": 0}
"""Bytes of a parameter that each process holds between steps, in bf16."""

SHARED = {"ddp": 0, "fsdp": 12, "zero1": 12, "zero2": 12, "zero3": 18}
"""Bytes of a parameter that are divided among all processes."""


def model_of(layers: int) -> ModelConfig:
    """Return the shape of the benchmark's model."""
    return ModelConfig(n_layers=layers, vocab_size=16384, weight_tying=True)


def estimates_of(engine: str, layers: int, count: int) -> dict[str, float]:
    """Return what the estimate says of each phase, in MiB."""
    from olmo_sparsity.models.huggingface.folder import count_parameters
    from olmo_sparsity.training.estimate.memory_formulas import (
        activation_bytes,
        gathered_at_once,
        start_bytes,
        state_bytes,
        without_memory,
    )

    sizes = model_of(layers)
    model = without_memory(sizes)
    parameters = count_parameters(model)
    largest_weight = max(weight.numel() for weight in model.parameters())
    state = state_bytes(
        "bf16",
        parameters,
        engine,
        count,
        gathered=gathered_at_once(model, sizes),
        sums_whole_gradients=TRAINING.batch_size // count > 1,
        largest_weight=largest_weight,
    )
    in_bytes = {
        "build": start_bytes("bf16", parameters, engine, count, largest_weight),
        "step": state + activation_bytes(sizes, TRAINING, 1),
        "save": parameters * (HELD[engine] + (SHARED[engine] + 12) / count),
    }
    return {phase: number / 2**20 for phase, number in in_bytes.items()}


def resident_mib(name: str) -> float:
    """Return a number of /proc/self/status: `VmRSS`, what is resident now, or `VmHWM`, its peak."""
    match = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def measure(engine_name: str, layers: int, out: Path, resumes: bool) -> None:
    """In each process, train two steps and save, or resume; write the peak of each phase into
    `out`."""
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401 (PyTorch's compiler, as its step)

    import olmo_sparsity.models.olmo.model  # noqa: F401 (OLMo, as building does)
    from olmo_sparsity.command.memory import give_back_freed_memory
    from olmo_sparsity.config.sections import EngineConfig, OptimizerConfig
    from olmo_sparsity.data.batches import Batch
    from olmo_sparsity.models.build import build_model
    from olmo_sparsity.models.checkpoint_files import StoredWeights, fill
    from olmo_sparsity.training.choose_engine import build_engine
    from olmo_sparsity.training.deepspeed_engine import import_deepspeed
    from olmo_sparsity.training.deferred import Deferred
    from olmo_sparsity.training.distributed import connect, start_alone
    from olmo_sparsity.training.fsdp_engine import FSDPEngine  # noqa: F401 (imports DTensor)

    # Small enough for a shard of any matrix: what stays in holes of the heap is nobody's estimate.
    give_back_freed_memory(2**16)
    torch.set_num_threads(1)
    sizes = model_of(layers)
    checkpoint = out / "checkpoints/step000001"
    peaks: dict[str, float] = {}
    with connect() as processes:
        if engine_name.startswith("zero"):
            start_alone()
            import_deepspeed(torch.device("cpu"))
        Deferred(partial(build_model, model_of(layers=1)))  # PyTorch's first call of anything
        gc.collect()
        mib_before = resident_mib("VmRSS")

        def reset_peak() -> None:
            Path("/proc/self/clear_refs").write_text("5")

        def note(phase: str) -> None:
            """Keep the peak since the last phase."""
            peaks[phase] = resident_mib("VmHWM") - mib_before
            reset_peak()

        reset_peak()
        torch.manual_seed(0)
        is_built_whole = engine_name == "ddp"
        source = None if is_built_whole else Deferred(partial(build_model, sizes))
        model = source.model if source else build_model(sizes)
        stored = StoredWeights(checkpoint / "model.safetensors") if resumes else None
        if stored is not None and source is None:
            fill(model, stored, "stored")
        sections = EngineConfig(name=engine_name), TRAINING, OptimizerConfig()
        engine = build_engine(model, *sections, processes, source and (stored or source))
        if resumes:
            engine.load_moments(checkpoint / "engine", step=1)
            note("resume")
        else:
            note("build")
            rows = 4 // processes.world_size
            tokens_BL = torch.randint(0, 16384, (rows, 64))
            batch = Batch(tokens_BL, torch.arange(64).expand(rows, 64), tokens_BL)
            for _ in range(2):
                engine.step(batch, 1e-4)
            note("step")
            save(engine, out)
            note("save")
        (out / f"{processes.rank}-{resumes}.json").write_text(json.dumps(peaks))
        processes.gather(None)  # none ends while another still needs it
    os._exit(0)


def save(engine: Any, out: Path) -> None:
    """Write a checkpoint, in each process its part."""
    from olmo_sparsity.config.sections import CheckpointConfig
    from olmo_sparsity.models.checkpoint_files import part_name, save_weights, write_index
    from olmo_sparsity.training.checkpoint import CheckpointWriter
    from olmo_sparsity.training.trainer_state import TrainerState

    processes = engine.processes
    weights = engine.copy_weights()
    moments = engine.copy_moments()
    name = part_name(processes.rank, processes.world_size)

    def write_part(folder: Path) -> list[Path]:
        return [save_weights(weights, folder / name), moments(folder / "engine")]

    def write_once(folder: Path) -> None:
        if processes.world_size > 1:
            write_index(folder, engine.part_of, processes.world_size)

    with CheckpointWriter(out, CheckpointConfig(), processes) as writer:
        writer.save(TrainerState(1, 1, ""), write_once, write_part)
        writer.wait()


def launch(engine: str, layers: int, count: int) -> dict[str, float]:
    """Run `count` processes, from the start and then resumed. Return the peak of the largest of
    them in each phase, in MiB."""
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for resumes in (False, True):
            words = ["--engines", engine, "--layers", str(layers), "--child", folder]
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*launcher, f"--nproc_per_node={count}", __file__, *words]
            command += ["--resumes"] * resumes
            environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            subprocess.run(command, check=True, env=environment, capture_output=True)
            for path in Path(folder).glob(f"*-{resumes}.json"):
                for phase, mib in json.loads(path.read_text()).items():
                    peaks[phase] = max(peaks.get(phase, 0.0), mib)
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--engines", default="ddp,fsdp,zero1,zero2,zero3")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resumes", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return measure(options.engines, options.layers, options.child, options.resumes)
    columns = "| engine | processes | build | estimate | step | estimate | save | estimate "
    print(columns + "| resume | peak / estimate |", flush=True)
    for engine in options.engines.split(","):
        for count in map(int, options.processes.split(",")):
            peaks = launch(engine, options.layers, count)
            estimates = estimates_of(engine, options.layers, count)
            cells = [engine, str(count)]
            for phase, estimate in estimates.items():
                cells += [f"{peaks[phase]:,.0f}", f"{estimate:,.0f}"]
            ratio = max(peaks[phase] for phase in estimates) / max(estimates.values())
            cells += [f"{peaks['resume']:,.0f}", f"{ratio:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    return None


if __name__ == "__main__":
    main()
