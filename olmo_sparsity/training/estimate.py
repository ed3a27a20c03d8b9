"""Estimate the parameters, FLOPs, memory, hours and price of a run.

    config, Hardware ─> fitting_micro_batch_size ─> cost_with: memory of a device, seconds of a step
                                                 ─> estimate: the lines of `train --dry-run`

Memory is computed by the formulas of memory.py. Time is FLOPs divided by a measured share of the
vendor's peak, and bytes divided by the speed of the network. The log uses `flops_per_token` for
MFU.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import cast, get_args, get_type_hints

import torch
from torch import nn

from olmo_sparsity.base.devices import Gpu, device_name, find_gpu, known_gpu
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.sections import (
    EngineConfig,
    ModelConfig,
    Precision,
    RunConfig,
)
from olmo_sparsity.models.losses import LanguageModel
from olmo_sparsity.models.transformers_folder import count_parameters
from olmo_sparsity.training.memory import (
    activation_bytes,
    gathered_at_once,
    share_recomputed,
    start_bytes,
    state_bytes,
    without_memory,
)
from olmo_sparsity.training.optim import matrices_of_layers


def flops_per_token(
    model: nn.Module, sizes: ModelConfig, length: int, whole_attention: bool = False
) -> float:
    """Return the FLOPs of a token, forward and backward: 6 for each weight of a product of
    matrices, and 6 · L · D for each layer's attention, in which a token attends to L / 2 places on
    average. `whole_attention`: count L places, as OLMo-core, nanochat and torchtitan do."""
    weight_VD, _ = cast(LanguageModel, model).unembedding
    embeddings = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    matmul_weights = sum(p.numel() for p in model.parameters() if p.ndim > 1) - embeddings
    is_tied = any(m.weight is weight_VD for m in model.modules() if isinstance(m, nn.Embedding))
    if is_tied:  # looked up once, multiplied once
        matmul_weights += weight_VD.numel()
    attention = sizes.n_layers * length * sizes.n_heads * sizes.effective_head_width
    return 6.0 * matmul_weights + (12.0 if whole_attention else 6.0) * attention


def stated_flops(device: torch.device) -> float:
    """Return the FLOP/s in bf16 that the vendor states for a device; 0 if they are not known."""
    gpu = find_gpu(device_name(device))
    return 1e12 * gpu.tflops if gpu else 0.0


CUDA_CONTEXT_BYTES = 2**29
"""Bytes that CUDA itself takes on a GPU for each process, before the first tensor (about)."""

USABLE_SHARE = 0.85
"""The share of a GPU's memory that tensors can use. The rest is lost in holes between them."""

ENGINES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
"""The engines for several processes."""

MAX_MICRO_BATCH_TOKENS = 65_536
"""The largest number of tokens in a micro-batch that `auto` chooses. Larger ones gain little: the
fixed cost of a micro-batch is below 2% of a step."""


@dataclass(frozen=True)
class Hardware:
    """The processes of a run, each with a device."""

    count: int
    nodes: int
    memory: float
    """Bytes that a process can use."""

    gpu: Gpu | None
    nics_per_node: int | None = None
    """Number of network cards of a node. None: the usual number for the GPU."""

    price: float | None = None
    """Price of a GPU-hour, in any currency."""

    @property
    def kind(self) -> str:
        """Return the type of the devices, as PyTorch names it."""
        return "cuda" if self.gpu else "cpu"

    @staticmethod
    def here(device: torch.device, count: int = 1) -> Hardware:
        """Return `count` devices like this one, on one node."""
        if device.type != "cuda":
            memory = 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return Hardware(count, 1, memory, None)
        total = torch.cuda.get_device_properties(device).total_memory
        name = device_name(device)
        gpu = find_gpu(name) or Gpu(name, 0, total / 1e9)
        return Hardware(count, 1, USABLE_SHARE * total - CUDA_CONTEXT_BYTES, gpu)

    @staticmethod
    def of(
        name: str,
        count: int,
        nodes: int | None,
        nics_per_node: int | None = None,
        price: float | None = None,
    ) -> Hardware:
        """Return GPUs by their name, by default eight on a node."""
        gpu = known_gpu(name, "--gpu")
        options = {"--gpus": count, "--nodes": nodes, "--nics-per-node": nics_per_node}
        for option, number in options.items():
            if number is not None and number < 1:
                raise ConfigError(f"{option}={number} must be at least 1")
        if price is not None and not 0 <= price < math.inf:
            raise ConfigError(f"--gpu-hour={price} must be a price of 0 or more")
        num_nodes = nodes or -(-count // 8)
        if count % num_nodes:
            raise ConfigError(f"--gpus={count} must be a multiple of --nodes={num_nodes}")
        memory = USABLE_SHARE * gpu.gigabytes * 1e9 - CUDA_CONTEXT_BYTES
        return Hardware(count, num_nodes, memory, gpu, nics_per_node, price)

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes per second that each process sends in a ring of all processes. NCCL
        makes a ring for each network card (github.com/NVIDIA/nccl/issues/495). So all cards of a
        node together carry what leaves it, and each ring is as fast as its slowest part."""
        assert self.gpu is not None
        within_node = 1e9 * self.gpu.gigabytes_per_s
        if self.nodes == 1:
            return within_node
        per_node = self.count // self.nodes
        nics = self.nics_per_node or (per_node if self.gpu.has_own_nic else 1)
        between_nodes = NIC_BYTES_PER_S * nics
        return between_nodes if per_node == 1 else min(within_node, between_nodes)


def fitting_micro_batch_size(config: RunConfig, hardware: Hardware) -> int:
    """Return the number of sequences in a micro-batch: the largest divisor of a process's share of
    the batch that is at most the configured number, or that fits into memory with `auto`."""
    training = config.training
    share = training.batch_size // hardware.count
    if training.micro_batch_size is None:
        return share
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    if training.micro_batch_size:
        return max((size for size in sizes if size <= training.micro_batch_size), default=1)
    # 0 means `auto`.
    fitting = [
        size
        for size in sizes
        if size * training.length <= MAX_MICRO_BATCH_TOKENS
        and needed_bytes(config, hardware, size) <= hardware.memory
    ]
    return max(fitting, default=1)


def state_of(config: RunConfig, hardware: Hardware, micro_batch_size: int = 1) -> int:
    """Return the bytes of weights, gradients and optimizer on each device."""
    model = without_memory(config.model)
    num_sequences = config.training.batch_size // hardware.count
    is_added_up = micro_batch_size < num_sequences
    sums_whole_gradients = is_added_up and not config.engine.reduce_every_micro_batch
    num_shards = hardware.count
    if config.engine.name == "fsdp" and config.engine.shard_over == "node":
        num_shards = hardware.count // hardware.nodes
    whole = state_bytes(
        config.training.precision,
        count_parameters(model),
        config.engine.name,
        num_shards,
        gathered_at_once(model, config.model),
        sums_whole_gradients,
    )
    if config.optimizer.name == "muon":  # one moment of a matrix, not two
        num_shards_of_moments = num_shards if config.engine.name == "fsdp" else 1
        in_matrices = sum(matrix.numel() for matrix in matrices_of_layers(model))
        whole -= 4 * in_matrices // num_shards_of_moments
    return whole


def needed_bytes(config: RunConfig, hardware: Hardware, micro_batch_size: int) -> float:
    """Return the bytes on each device at the peak of the run, in its start or in its steps."""
    step = state_of(config, hardware, micro_batch_size)
    activations = activation_bytes(config.model, config.training, micro_batch_size, hardware.kind)
    evaluation = evaluation_of(config, hardware)
    return max(step + activations, start_of(config, hardware), evaluation)


def evaluation_of(config: RunConfig, hardware: Hardware) -> int:
    """Return the bytes on each device while tasks of lm_eval are measured, without activations; 0
    without tasks. Every process then has a whole copy of the model in fp32 beside its state."""
    if not config.evaluation.lm_eval:
        return 0
    # Whole gradients, which `fsdp` adds up over micro-batches, are gone by then.
    state = state_of(config, hardware, config.training.batch_size // hardware.count)
    return state + copied_for_tasks(config)


def start_of(config: RunConfig, hardware: Hardware) -> int:
    """Return the bytes on each device at the peak before the first step."""
    model = without_memory(config.model)
    return start_bytes(
        config.training.precision,
        count_parameters(model),
        config.engine.name,
        hardware.count,
        largest_weight=max(weight.numel() for weight in model.parameters()),
    )


def with_engine(config: RunConfig, engine: str) -> RunConfig:
    return replace(config, engine=replace(config.engine, name=engine))  # type: ignore[arg-type]


def with_micro_batches(config: RunConfig, micro_batch_size: int | None) -> RunConfig:
    return replace(config, training=replace(config.training, micro_batch_size=micro_batch_size))


# --- what a run costs -----------------------------------------------------------------------------

MEASURED = [(85_065_728, 0.306, "60M"), (190_513_152, 0.345, "150M")]
"""Parameters of a model, and the share of the stated peak that one H200 reached with it
(docs/train.md). No larger one, and no several GPUs, were measured."""

NIC_BYTES_PER_S = 25e9
"""Bytes per second of a network card: assumed, of 200 Gbit/s."""

RECOMPUTED = 1 / 3
"""FLOPs of a layer's second forward pass, as a share of its forward and backward pass."""

COPIED_BYTES_PER_S = 1.4e9
"""Bytes of a checkpoint that each process copies to main memory in a second: measured on one
H200."""

WRITTEN_BYTES_PER_S = 0.39e9
"""Bytes of a checkpoint that each process hashes and writes in a second: measured on one H200. A
disk may be slower for many processes."""

GRACE_S = 30
"""Seconds that clusters give a preempted job before they kill it."""

LIBRARIES_BYTES = 4 * 2**30
"""Bytes of main memory that a process on a GPU takes for Python, PyTorch, CUDA and batches
(about)."""


@dataclass(frozen=True)
class Cost:
    """The cost of a run with one engine, on known GPUs."""

    engine: str
    micro_batch_size: int
    state: float
    """Bytes of weights, gradients and optimizer on each device."""

    activations: float
    start: float
    """Bytes on each device at the peak of the start, before the first step."""

    evaluation: float
    """Bytes on each device while tasks of lm_eval are measured; 0 without."""

    context: float
    """Bytes on each device that CUDA takes for itself."""

    fits: bool
    computing_s: float
    """Seconds of a step in which the GPUs compute; 0 if the GPU is not known."""

    sending_s: float
    """Seconds of a step in which the GPUs send, if they do not compute meanwhile."""

    hours: float
    gpu_hours: float

    @property
    def peak(self) -> float:
        """Return the bytes on each device at the peak of the run."""
        return max(self.state + self.activations, self.start, self.evaluation) + self.context


def cost_with(config: RunConfig, hardware: Hardware) -> Cost:
    """Return the cost of a run with its engine. `training.micro_batch_size` may still be auto."""
    micro_batch_size = fitting_micro_batch_size(config, hardware)
    config = with_micro_batches(config, micro_batch_size)
    computing_s = sending_s = 0.0
    if hardware.gpu and hardware.gpu.tflops:
        computing_s, sending_s = _seconds(config, hardware)
    hours = config.training.num_steps * (computing_s + sending_s) / 3600
    return Cost(
        engine=config.engine.name,
        micro_batch_size=micro_batch_size,
        state=state_of(config, hardware, micro_batch_size),
        activations=activation_bytes(
            config.model, config.training, micro_batch_size, hardware.kind
        ),
        start=start_of(config, hardware),
        evaluation=evaluation_of(config, hardware),
        context=CUDA_CONTEXT_BYTES if hardware.gpu else 0,
        fits=needed_bytes(config, hardware, micro_batch_size) <= hardware.memory,
        computing_s=computing_s,
        sending_s=sending_s,
        hours=hours,
        gpu_hours=hours * hardware.count,
    )


def estimate(
    config: RunConfig, hardware: Hardware, micro_batch_size: int | None = None
) -> dict[str, str]:
    """Return the lines of `--dry-run`, by their titles. `micro_batch_size`: the configured number,
    where `config` has the number that was chosen for its engine. Each engine is then estimated with
    the number that fits it."""
    training = config.training
    model = without_memory(config.model)
    count = hardware.count
    parameters = count_parameters(model)
    tokens = training.batch_size * training.length
    flops = flops_per_token(model, config.model, training.length) * tokens
    lines = {
        "parameters": f"{parameters:,}",
        "tokens per step": f"{tokens:,} ({training.batch_size} × {training.length})",
        "tokens in all": f"{tokens * training.num_steps:,} in {training.num_steps:,} steps",
        "FLOPs in all": f"{flops * training.num_steps:.3g}",
    }
    share, rest = divmod(training.batch_size, count)
    if rest == 0:
        lines["batch"] = f"{training.batch_size} = {count} processes × {share}"
    else:
        divisible = training.batch_size - rest
        lines["batch"] = (
            f"{count} processes do not divide it; {divisible} and {divisible + count} do"
        )
    if micro_batch_size is not None:
        config = with_micro_batches(config, micro_batch_size)
    cost = cost_with(config, hardware)
    if cost.hours:
        lines |= _time(config, hardware, cost)
    engines = ENGINES if count > 1 else (config.engine.name,)
    for engine in engines:
        lines[f"memory of a process, {engine}"] = _memory(with_engine(config, engine), hardware)
    return lines | _saves(config, hardware, parameters)


def _saves(config: RunConfig, hardware: Hardware, parameters: int) -> dict[str, str]:
    """Return lines about main memory, disks, and the duration of a save."""
    count = hardware.count
    saved_by_each = 12 * parameters / count

    at_start = main_memory_at_start(config)
    for_tasks = copied_for_tasks(config)
    of_process = main_memory_of(config, hardware)
    of_node = of_process * count / hardware.nodes

    disk = disk_of(config)
    pause_s = saved_by_each / COPIED_BYTES_PER_S
    save_s = pause_s + saved_by_each / WRITTEN_BYTES_PER_S
    enough = "within" if save_s <= GRACE_S else "more than"
    return {
        "main memory": (
            f"{of_process / 2**30:.1f} GiB a process (the start takes {at_start / 2**30:.1f}, "
            f"a copy for a save {saved_by_each / 2**30:.1f}"
            + (f", one for lm_eval {for_tasks / 2**30:.1f}" if for_tasks else "")
            + f"); {of_node / 2**30:.0f} GiB a node"
        ),
        "disk": (
            f"text {disk.text / 1e9:.1f} GB if read once; a checkpoint {disk.checkpoint / 1e9:.1f} "
            f"GB, the run folder {disk.run_folder / 1e9:.1f} GB"
        ),
        "a save": (
            f"{save_s:.0f} s, {enough} the {GRACE_S} s that clusters give a preempted job; "
            f"training stands still for {pause_s:.1f} s"
        ),
    }


@dataclass(frozen=True)
class Disk:
    """Bytes on disk of a run and its text."""

    text: int
    """Bytes of the tokens that the run reads, if it reads none of them twice."""

    checkpoint: int
    run_folder: int
    """Bytes of all checkpoints that exist at once, with the one that is being written."""


def disk_of(config: RunConfig) -> Disk:
    """Return the bytes that a run takes on disk. The vocabulary of the config must be known."""
    training = config.training
    token_size = 2 if config.model.vocab_size <= 2**16 else 4
    # Weights and two moments, in fp32.
    checkpoint = 12 * count_parameters(without_memory(config.model))
    settings = config.checkpoint
    # One more than is kept: the oldest is deleted after the new one is complete.
    num_kept = settings.keep + 1 + settings.num_staying(0, training.num_steps)
    return Disk(
        text=training.batch_size * training.length * training.num_steps * token_size,
        checkpoint=checkpoint,
        run_folder=checkpoint * num_kept,
    )


def gpu_hours(config: RunConfig, hardware: Hardware) -> float:
    """Return the GPU-hours of a run on a known GPU."""
    return cost_with(config, hardware).gpu_hours


def main_memory_of(config: RunConfig, hardware: Hardware) -> float:
    """Return the bytes of main memory that a process needs at its peak: the start, a save, or tasks
    of lm_eval."""
    saved_by_each = disk_of(config).checkpoint / hardware.count
    libraries = LIBRARIES_BYTES if hardware.gpu else 0
    copied = max(saved_by_each, copied_for_tasks(config))
    return max(main_memory_at_start(config), copied) + libraries


def copied_for_tasks(config: RunConfig) -> int:
    """Return the bytes of the copy of all weights, in fp32, on which each process measures tasks of
    lm_eval; 0 without tasks."""
    if not config.evaluation.lm_eval:
        return 0
    return 4 * count_parameters(without_memory(config.model))


def main_memory_at_start(config: RunConfig) -> float:
    """Return the bytes of main memory that a process needs to make its weights."""
    model = without_memory(config.model)
    is_made_weight_by_weight = config.model.architecture == "olmo" and (
        config.engine.name == "fsdp" or config.engine.name.startswith("zero")
    )
    if is_made_weight_by_weight:
        return 4 * max(weight.numel() for weight in model.parameters())
    return 4 * count_parameters(model)


def share_of_peak(parameters: int) -> tuple[float, str]:
    """Return the share of the stated FLOP/s that one GPU is expected to reach, and in words where
    this number comes from. For models below the smallest measured one it is assumed to fall with
    the root of the parameters, as the width does: narrower products fill less of a GPU."""
    smallest, share, name = MEASURED[0]
    if parameters < smallest:
        lowered = share * (parameters / smallest) ** 0.5
        return lowered, f"assumed: lower than the {share:.0%} measured on one H200 ({name})"
    _, share, name = max(row for row in MEASURED if row[0] <= parameters)
    return share, f"measured on one H200 ({name})"


def _seconds(config: RunConfig, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of a step in which the GPUs compute, and the seconds in which they
    send."""
    training = config.training
    count = hardware.count
    gpu = hardware.gpu
    assert gpu is not None
    model = without_memory(config.model)
    parameters = count_parameters(model)
    flops = flops_per_token(model, config.model, training.length)
    unembedding, _ = cast(LanguageModel, model).unembedding
    of_layers = flops - 6.0 * unembedding.numel()
    flops += RECOMPUTED * share_recomputed(config.model, training) * of_layers
    flops *= training.batch_size * training.length
    share, _ = share_of_peak(parameters)
    computing_s = flops / (count * share * gpu.tflops * 1e12)
    num_micro = max(1, training.batch_size // count // (training.micro_batch_size or 1))
    num_reductions = num_micro if config.engine.reduce_every_micro_batch else 1
    sent = sent_bytes(config.engine.name, parameters, training.precision, num_micro, num_reductions)
    return computing_s, sent * (count - 1) / count / hardware.bytes_per_s


def _time(config: RunConfig, hardware: Hardware, cost: Cost) -> dict[str, str]:
    """Return lines about the time and the price of a run on known GPUs."""
    training = config.training
    gpu = hardware.gpu
    assert gpu is not None
    share, origin = share_of_peak(count_parameters(without_memory(config.model)))
    source = f"predicted: {share:.0%} of {gpu.tflops:.0f} TFLOP/s, {origin}"
    step_s = cost.computing_s + cost.sending_s
    if hardware.count > 1:
        waits = f"{cost.sending_s / step_s:.0%} of the time for collectives"
        source += f"; {waits} at {hardware.bytes_per_s / 1e9:.0f} GB/s, if none overlaps"
    tokens_per_s = training.batch_size * training.length / step_s
    lines = {
        "time": f"{cost.hours:,.1f} hours, {cost.gpu_hours:,.0f} GPU-hours",
        "tokens per second": f"{tokens_per_s:,.0f} ({source})",
    }
    if hardware.price is not None:
        price = cost.gpu_hours * hardware.price
        lines["price"] = f"{price:,.2f}, at {hardware.price:g} a GPU-hour"
    return lines


def sent_bytes(
    engine: str,
    parameters: int,
    precision: Precision,
    num_micro_batches: int,
    num_reductions: int = 1,
) -> float:
    """Return the bytes that a process passes to collectives in a step, those of an all-reduce
    twice. A ring of N processes sends (N − 1)/N of them. `num_reductions`: with `fsdp`, how often
    gradients are added up over processes."""
    is_sharded = engine == "fsdp" or engine.startswith("zero")
    size = parameters * (2 if precision == "bf16" and is_sharded else 4)
    if engine == "fsdp":  # weights forward and backward; gradients in fp32
        return 2 * size * num_micro_batches + 4 * parameters * num_reductions
    if engine == "zero1":
        return 3 * size
    if engine == "zero2":
        return 2 * size * num_micro_batches + size
    return 3 * size * num_micro_batches if engine == "zero3" else 2 * size


def _memory(config: RunConfig, hardware: Hardware) -> str:
    """Return a line about the memory of a process with the config's engine."""
    cost = cost_with(config, hardware)
    parts = (
        f"state {cost.state / 2**30:.1f}, activations {cost.activations / 2**30:.1f}, "
        f"start {cost.start / 2**30:.1f}"
    )
    if cost.evaluation:
        parts += f", lm_eval {cost.evaluation / 2**30:.1f}"
    fits = "fits" if cost.fits else "DOES NOT FIT"
    line = f"{cost.peak / 2**30:.1f} GiB ({fits}; {parts}), micro-batches of "
    line += str(cost.micro_batch_size)
    return f"{line}, {cost.hours:,.1f} hours" if cost.hours else line


def refuse_too_large(config: RunConfig, hardware: Hardware) -> None:
    """Reject a run that does not fit with a single sequence at a time."""
    needed = needed_bytes(config, hardware, 1)
    if needed <= hardware.memory:
        return
    raise ConfigError(
        f"engine.name={config.engine.name} needs {needed / 2**30:.1f} GiB a device, of "
        f"{hardware.memory / 2**30:.1f}; {_remedy(config, hardware)}"
    )


MAX_GPUS = 4096
"""Largest number of GPUs that a message proposes."""


def _remedy(config: RunConfig, hardware: Hardware) -> str:
    """Return the end of a message: the engines that fit, or the number of GPUs on which one
    does."""
    fitting = _fitting_engines(config, hardware)
    if fitting:
        return f"use {' or '.join(fitting)}"
    count = hardware.count
    while count <= MAX_GPUS and count <= config.training.batch_size:
        count *= 2
        fitting = _fitting_engines(config, replace(hardware, count=count))
        if fitting:
            return f"no engine fits {hardware.count} of these; use {fitting[-1]} on {count}"
    remedy = "shorten training.length"
    if config.training.activation_memory_budget:  # neither None nor 0
        remedy = "lower training.activation_memory_budget"
    elif (
        config.training.activation_memory_budget is None
        and not config.training.activation_checkpointing
    ):
        remedy = "pass --training.activation_checkpointing=true"
    return f"no engine fits, on any number of these; {remedy}"


def _fitting_engines(config: RunConfig, hardware: Hardware) -> list[str]:
    """Return the options of the engines with which a single sequence at a time fits."""
    known = get_args(get_type_hints(EngineConfig)["name"])
    fitting = []
    for engine in ENGINES if hardware.count > 1 else ():
        if engine not in known:
            continue
        words = f"--engine.name={engine}"
        changed = with_engine(config, engine)
        if engine == "zero3" and config.training.compile:  # rejected together
            words += " --training.compile=false"
            changed = replace(changed, training=replace(config.training, compile=False))
        if needed_bytes(changed, hardware, 1) <= hardware.memory:
            fitting.append(words)
    return fitting
