"""Measure the memory of training processes, and compare it with what `train --dry-run` says.

Claim: what a process holds in training, from its start, is within 15% of the estimate, and with
fsdp and ZeRO-3 no process ever holds a whole model.

    python -m benchmarks.memory [--layers 12] [--processes 1,2,4] [--engines ddp,fsdp,zero1,zero3]

    | engine | processes | build | estimate | step | estimate | save | … | peak / estimate |
    | fsdp   |         4 |   163 |      147 |  721 |      792 |  920 | … |            1.04 |

Each row is a run of a model of width 768 on the CPU, in bf16, in processes that meet over gloo. It
is started twice: to build, take two steps and save, and to resume from what was saved.

    main ─> launch ─> torchrun ─> measure, in each process ─> a file with its peaks, in MiB
         ─> estimates_of

A number is the peak of resident memory of the largest process in a phase, less that of a process
that has imported everything and met the others; next to it, what the estimate says of the start, of
a step, and of saving. The last column is the largest peak as a share of the largest estimate. Files
that are being read count in `resume`, which has no estimate.
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
from typing import TYPE_CHECKING, NamedTuple

import torch

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import TrainingConfig

if TYPE_CHECKING:
    from olmo_sparsity.training.engines.engine import Engine
    from olmo_sparsity.training.processes.distributed import Processes

# What a child needs is imported in `measure`, and what only `main` needs in `estimates_of`: neither
# should hold what the other imports.

TRAINING = TrainingConfig(precision="bf16", batch_size=4, length=64, device="cpu")
TRAINING.micro_batch_size = 1

VOCAB_SIZE = 16384

PHASES = ("build", "step", "save", "resume")
"""Phases of a run, each with a peak of its own."""


class HeldBytes(NamedTuple):
    """Bytes of a parameter in bf16 training that stay between two steps."""

    on_each: int
    """On each process."""

    divided: int
    """Divided among all processes."""


HELD_BETWEEN_STEPS = {
    "ddp": HeldBytes(on_each=16, divided=0),  # fp32 weights, gradients and two moments
    "fsdp": HeldBytes(on_each=0, divided=12),  # fp32 weights and moments; gradients are gone
    "zero1": HeldBytes(on_each=6, divided=12),  # bf16 weights and fp32 gradients
    "zero2": HeldBytes(on_each=2, divided=12),  # bf16 weights; gradients are gone
    "zero3": HeldBytes(on_each=0, divided=18),  # these and gradients, which have fixed places
}

COPIED_BYTES = 12
"""Bytes of a parameter that a save copies, divided among all processes: weight and two moments."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--engines", default="ddp,fsdp,zero1,zero2,zero3")
    # The two options with which `launch` starts this file again, in each process.
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resumes", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.engines, options.layers, options.child, options.resumes)
        return

    columns = "| engine | processes | build | estimate | step | estimate | save | estimate "
    print(columns + "| resume | peak / estimate |", flush=True)
    for engine in options.engines.split(","):
        for count in map(int, options.processes.split(",")):
            print(measured_row(engine, options.layers, count), flush=True)


def measured_row(engine: str, layers: int, count: int) -> str:
    """Return the row of an engine on `count` processes."""
    peaks = launch(engine, layers, count)
    estimates = estimates_of(engine, layers, count)
    cells = [engine, str(count)]
    for phase, estimate in estimates.items():
        cells += [f"{peaks[phase]:,.0f}", f"{estimate:,.0f}"]
    largest_peak = max(peaks[phase] for phase in estimates)
    cells += [f"{peaks['resume']:,.0f}", f"{largest_peak / max(estimates.values()):.2f}"]
    return f"| {' | '.join(cells)} |"


# --- the estimate -------------------------------------------------------------------------------


def model_of(layers: int) -> ModelConfig:
    """Return the shape of the benchmark's model."""
    return ModelConfig(n_layers=layers, vocab_size=VOCAB_SIZE, weight_tying=True)


def estimates_of(engine: str, layers: int, count: int) -> dict[str, float]:
    """Return what the estimate says of each phase, in MiB."""
    from olmo_sparsity.models.huggingface.folder import count_parameters
    from olmo_sparsity.training.estimate.activation_memory import activation_bytes
    from olmo_sparsity.training.estimate.meta_model import without_memory
    from olmo_sparsity.training.estimate.state_memory import (
        gathered_at_once,
        start_bytes,
        state_bytes,
    )

    sizes = model_of(layers)
    model = without_memory(sizes)
    num_parameters = count_parameters(model)
    largest_weight = max(weight.numel() for weight in model.parameters())
    state = state_bytes(
        "bf16",
        num_parameters,
        engine,
        count,
        gathered=gathered_at_once(model, sizes),
        sums_whole_gradients=TRAINING.batch_size // count > 1,
        largest_weight=largest_weight,
    )
    held = HELD_BETWEEN_STEPS[engine]
    bytes_of_phase = {
        "build": start_bytes("bf16", num_parameters, engine, count, largest_weight),
        "step": state + activation_bytes(sizes, TRAINING, micro_batch_size=1),
        "save": num_parameters * (held.on_each + (held.divided + COPIED_BYTES) / count),
    }
    return {phase: num_bytes / 2**20 for phase, num_bytes in bytes_of_phase.items()}


# --- the measurement ----------------------------------------------------------------------------


def launch(engine: str, layers: int, count: int) -> dict[str, float]:
    """Run `count` processes, from the start and then resumed. Return the peak of the largest of
    them in each phase, in MiB."""
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for resumes in (False, True):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*launcher, f"--nproc_per_node={count}", __file__]
            command += ["--engines", engine, "--layers", str(layers), "--child", folder]
            if resumes:
                command.append("--resumes")
            environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            subprocess.run(command, check=True, env=environment, capture_output=True)
            for path in Path(folder).glob(f"*-{resumes}.json"):
                for phase, mib in json.loads(path.read_text()).items():
                    peaks[phase] = max(peaks.get(phase, 0.0), mib)
    return peaks


class PeakMemory:
    """The peaks of this process's resident memory in the phases of a run, in MiB above what it
    holds now."""

    def __init__(self) -> None:
        gc.collect()
        self.mib_before = _resident_mib("VmRSS")
        self.of_phase: dict[str, float] = {}
        self._begin_phase()

    def end_phase(self, phase: str) -> None:
        """Note the peak since the last phase has ended."""
        self.of_phase[phase] = _resident_mib("VmHWM") - self.mib_before
        self._begin_phase()

    def _begin_phase(self) -> None:
        # Linux resets `VmHWM` to what is resident now (proc_pid_clear_refs(5)).
        Path("/proc/self/clear_refs").write_text("5")


def _resident_mib(name: str) -> float:
    """Return a number of /proc/self/status: `VmRSS`, what is resident now, or `VmHWM`, its peak."""
    match = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def measure(engine_name: str, layers: int, out: Path, resumes: bool) -> None:
    """In each process, train two steps and save, or resume. Write the peak of each phase into
    `out`, and end the process."""
    # All that a run imports, some of it late, comes before `PeakMemory` looks what this process
    # holds: libraries are not part of the estimate.
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401 (PyTorch's compiler, as its step)

    import olmo_sparsity.models.checkpoint_files
    import olmo_sparsity.models.olmo.model  # imports OLMo, as building does
    import olmo_sparsity.training.engines.choose  # noqa: F401 (imports the engines' libraries)
    from olmo_sparsity.command.memory import give_back_freed_memory
    from olmo_sparsity.models.build import build_model
    from olmo_sparsity.training.engines.deepspeed_import import import_deepspeed
    from olmo_sparsity.training.engines.deferred import Deferred
    from olmo_sparsity.training.engines.fsdp import FSDPEngine  # noqa: F401 (imports DTensor)
    from olmo_sparsity.training.processes.process_group import connect, start_alone

    # Small enough for a shard of any matrix: what stays in holes of the heap is nobody's estimate.
    give_back_freed_memory(2**16)
    torch.set_num_threads(1)
    with connect() as processes:
        if engine_name.startswith("zero"):
            start_alone()
            import_deepspeed(torch.device("cpu"))
        Deferred(partial(build_model, model_of(layers=1)))  # PyTorch's first call of anything

        peaks = PeakMemory()
        if resumes:
            checkpoint = out / "checkpoints/step000001"
            engine = build(engine_name, layers, processes, checkpoint)
            engine.load_moments(checkpoint / "engine", step=1)
            peaks.end_phase("resume")
        else:
            engine = build(engine_name, layers, processes, checkpoint=None)
            peaks.end_phase("build")
            take_two_steps(engine)
            peaks.end_phase("step")
            save(engine, out)
            peaks.end_phase("save")
        (out / f"{processes.rank}-{resumes}.json").write_text(json.dumps(peaks.of_phase))
        processes.gather(None)  # none ends while another still needs it
    # Threads of gloo and DeepSpeed may keep the process from ending by itself.
    os._exit(0)


def build(engine_name: str, layers: int, processes: Processes, checkpoint: Path | None) -> Engine:
    """Return an engine as a start builds it: with new weights, or with those of a checkpoint."""
    from olmo_sparsity.config.sections import EngineConfig, OptimizerConfig
    from olmo_sparsity.models.build import build_model
    from olmo_sparsity.models.checkpoint_files import StoredWeights, fill
    from olmo_sparsity.training.engines.choose import build_engine
    from olmo_sparsity.training.engines.deferred import Deferred

    torch.manual_seed(0)
    sections = EngineConfig(name=engine_name), TRAINING, OptimizerConfig()
    stored = None if checkpoint is None else StoredWeights(checkpoint / "model.safetensors")
    if engine_name == "ddp":
        model = build_model(model_of(layers))
        if stored is not None:
            fill(model, stored, "stored")
        return build_engine(model, *sections, processes)
    # Engines that shard take one weight at a time, of the checkpoint or a new one.
    new_weights = Deferred(partial(build_model, model_of(layers)))
    return build_engine(new_weights.model, *sections, processes, stored or new_weights)


def take_two_steps(engine: Engine) -> None:
    """Train on random tokens. The second step is the first that begins with moments."""
    from olmo_sparsity.data.batches import Batch

    num_rows = TRAINING.batch_size // engine.processes.world_size
    tokens_BL = torch.randint(0, VOCAB_SIZE, (num_rows, TRAINING.length))
    positions_BL = torch.arange(TRAINING.length).expand_as(tokens_BL)
    batch = Batch(tokens_BL, positions_BL, labels_BL=tokens_BL)
    for _ in range(2):
        engine.step(batch, 1e-4)


def save(engine: Engine, out: Path) -> None:
    """Write a checkpoint, in each process its part."""
    from olmo_sparsity.config.sections import CheckpointConfig
    from olmo_sparsity.models.checkpoint_files import part_name, save_weights, write_index
    from olmo_sparsity.training.checkpoints.save import CheckpointContent
    from olmo_sparsity.training.checkpoints.writer import CheckpointWriter
    from olmo_sparsity.training.run_folder.trainer_state import TrainerState

    processes = engine.processes
    weights = engine.copy_weights()
    write_moments = engine.copy_moments()
    name = part_name(processes.rank, processes.world_size)

    def write_part(folder: Path) -> list[Path]:
        return [save_weights(weights, folder / name), write_moments(folder / "engine")]

    def write_common(folder: Path) -> None:
        if processes.world_size > 1:
            write_index(folder, engine.saver_of, processes.world_size)

    with CheckpointWriter(out, CheckpointConfig(), processes) as writer:
        writer.save(CheckpointContent(TrainerState(1, 1, ""), write_common, write_part))
        writer.wait()


if __name__ == "__main__":
    main()
