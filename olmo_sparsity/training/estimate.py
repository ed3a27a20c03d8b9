"""Estimate the parameters, FLOPs and memory of a run, and look up the peak FLOP/s of a GPU.

Place in the flow: `train --dry-run`, and the throughput in the log."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from olmo_sparsity.base.devices import Gpu, device_name, find_gpu, known_gpu
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.sections import ModelConfig, Precision, RunConfig, TrainingConfig
from olmo_sparsity.models.build import build_model, build_theirs
from olmo_sparsity.models.huggingface import HuggingFaceLM
from olmo_sparsity.models.losses import LanguageModel, rows_per_chunk
from olmo_sparsity.models.transformers_folder import count_parameters


def flops_per_token(
    model: nn.Module, sizes: ModelConfig, length: int, whole_attention: bool = False
) -> float:
    """Forward and backward: 6 per weight of a matmul, and 6·L·D per layer for attention scores and
    sums, over half of L keys because of causality. `whole_attention`: over all L, as OLMo-core,
    nanochat and torchtitan count."""
    weight_VD, _ = cast(LanguageModel, model).unembedding
    embeddings = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    matmul_weights = sum(p.numel() for p in model.parameters() if p.ndim > 1) - embeddings
    if any(m.weight is weight_VD for m in model.modules() if isinstance(m, nn.Embedding)):
        matmul_weights += weight_VD.numel()  # tied: looked up once, multiplied once
    attention = sizes.n_layers * length * sizes.n_heads * sizes.effective_head_width
    return 6.0 * matmul_weights + (12.0 if whole_attention else 6.0) * attention


def stated_flops(device: torch.device) -> float:
    """FLOP/s in bf16 as stated by the vendor; 0 if unknown."""
    gpu = find_gpu(device_name(device))
    return 1e12 * gpu.tflops if gpu else 0.0


CUDA_CONTEXT_BYTES = 2**29
"""About what a process holds on a GPU for CUDA itself, before its first tensor."""

USABLE = 0.85
"""Of a GPU's memory; the rest is lost in holes between tensors."""


def activation_bytes(
    sizes: ModelConfig, training: TrainingConfig, micro_batch_size: int, device: str = "cpu"
) -> float:
    """At the peak of a step, as measured (study/tables/scaling.md): what is kept for the
    backward pass, and what the loss needs for the largest chunk of logits."""
    rows = micro_batch_size * training.length
    size = 2 if training.precision == "bf16" else 4
    layers, of_width = sizes.n_layers, rows * sizes.d_model * size
    vocab_size = sizes.embedding_size or sizes.vocab_size
    chunk = min(rows, rows_per_chunk(vocab_size, torch.device(device), training.compile))
    loss = chunk * vocab_size * (2 * size if training.compile else 4 * 4)
    # With an MLP ratio of 4. The residual stream is in fp32.
    kept: float = 29 if training.precision == "bf16" else 27
    if training.activation_checkpointing:  # a layer's input, in fp32, and one layer at a time
        recomputed = -(-layers // training.checkpoint_every)
        kept = 4 / size * recomputed + kept * (layers - recomputed) + 10
        return kept * of_width + max(loss, 40 * of_width)
    return (kept * layers + 10) * of_width + loss


def state_bytes(precision: Precision, parameters: int, engine: str = "ddp", count: int = 1) -> int:
    """Weights, gradients and optimizer of a process, one of `count`; docs/train.md has a table."""
    stage = int(engine[-1]) if engine.startswith("zero") else 0
    if stage == 0:  # bf16 adds a cast copy of the weights
        return parameters * (16 + (2 if precision == "bf16" else 0))
    size, part = 2 if precision == "bf16" else 4, parameters / count
    weights = size * (part if stage == 3 else parameters)
    gradients = 4 * (part if stage >= 2 else parameters)  # added up in fp32
    # Numbers that collectives hold, by configs/deepspeed/*.json. ZeRO-1 casts all gradients at
    # once. ZeRO-2 has two buckets, of full size whatever the model has, and a copy of one. ZeRO-3
    # has a bucket, its copy in the order of the shards, weights in use and those fetched ahead.
    buckets = {2: 10**8 + min(parameters, 5 * 10**7), 3: min(4 * parameters, 2**26)}
    in_use = size * buckets.get(stage, parameters)
    return int(weights + gradients + 12 * part + in_use)


MOST_TOKENS = 65_536
"""Tokens of a micro-batch. Larger ones gain little: its fixed cost is below 2% of a step."""


@dataclass(frozen=True)
class Hardware:
    """The processes of a run, each with a device."""

    count: int
    nodes: int
    memory: float
    """Bytes that a process can use."""

    gpu: Gpu | None

    @property
    def kind(self) -> str:
        return "cuda" if self.gpu else "cpu"

    @staticmethod
    def here(device: torch.device, count: int = 1) -> Hardware:
        if device.type != "cuda":
            memory = 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return Hardware(count, 1, memory, None)
        total = torch.cuda.get_device_properties(device).total_memory
        name = device_name(device)
        gpu = find_gpu(name) or Gpu(name, 0, total / 1e9)
        return Hardware(count, 1, USABLE * total - CUDA_CONTEXT_BYTES, gpu)

    @staticmethod
    def of(name: str, count: int, nodes: int | None) -> Hardware:
        gpu = known_gpu(name, "--gpu")
        if count < 1 or (nodes or 1) < 1 or count % (nodes or 1):
            raise ConfigError(f"--gpus={count} must be a multiple of --nodes={nodes or 1}")
        memory = USABLE * gpu.gigabytes * 1e9 - CUDA_CONTEXT_BYTES
        return Hardware(count, nodes or -(-count // 8), memory, gpu)


def fitting_micro_batch_size(config: RunConfig, hardware: Hardware) -> int:
    """The largest divisor of a process's share of a batch that is at most the configured one, or
    with `auto` fits into memory."""
    training, share = config.training, config.training.batch_size // hardware.count
    if training.micro_batch_size is None:
        return share
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    if training.micro_batch_size:
        return max(size for size in sizes if size <= training.micro_batch_size)
    room = hardware.memory - state_of(config, hardware)
    fitting = [
        size
        for size in sizes
        if size * training.length <= MOST_TOKENS
        and activation_bytes(config.model, training, size, hardware.kind) <= room
    ]
    return max(fitting, default=1)


def state_of(config: RunConfig, hardware: Hardware) -> int:
    parameters = count_parameters(without_memory(config.model))
    return state_bytes(config.training.precision, parameters, config.engine.name, hardware.count)


def without_memory(sizes: ModelConfig) -> nn.Module:
    with torch.device("meta"):
        if sizes.architecture != "olmo":
            return HuggingFaceLM(build_theirs(sizes), is_tried=False)
        return build_model(replace(sizes))


# --- what a run costs -----------------------------------------------------------------------------

MEASURED = [(100_000_000, 0.306, "60M"), (10**15, 0.345, "150M")]
"""Models up to so many parameters: the share of the stated peak that one H200 reached with a model
of that size (docs/train.md). No larger one, and no several GPUs, were measured."""

BETWEEN_GPUS, BETWEEN_NODES = 300e9, 25e9
"""Bytes a second that a GPU sends: assumed."""

COPIED, WRITTEN = 1.4e9, 0.39e9
"""Bytes a second of a checkpoint that a process copies to main memory, and writes and hashes, as
measured on one H200; a disk may be slower for many processes."""

GRACE_S = 30
"""What clusters give a preempted job."""


def estimate(config: RunConfig, hardware: Hardware) -> dict[str, str]:
    """Return lines for `--dry-run`."""
    training, model, count = config.training, without_memory(config.model), hardware.count
    parameters, tokens = count_parameters(model), training.batch_size * training.length
    flops = flops_per_token(model, config.model, training.length) * tokens
    lines = {
        "parameters": f"{parameters:,}",
        "tokens per step": f"{tokens:,} ({training.batch_size} × {training.length})",
        "tokens in all": f"{tokens * training.num_steps:,} in {training.num_steps:,} steps",
        "FLOPs in all": f"{flops * training.num_steps:.3g}",
    }
    below = training.batch_size - training.batch_size % count
    lines["batch"] = f"{count} processes do not divide it; {below} and {below + count} do"
    if below == training.batch_size:
        lines["batch"] = f"{below} = {count} processes × {below // count}"
    if hardware.gpu and hardware.gpu.tflops:
        lines |= _time(config, hardware, parameters, flops)
    engines = ("ddp", "zero1", "zero2", "zero3") if count > 1 else (config.engine.name,)
    for engine in engines:
        lines[f"memory of a process, {engine}"] = _memory(config, hardware, engine)
    saved, kept = 12 * parameters, config.checkpoint
    num_kept = kept.keep + 1 + kept.num_staying(0, training.num_steps)
    text = tokens * training.num_steps * (2 if config.model.vocab_size <= 2**16 else 4)
    lines["disk"] = (
        f"text {text / 1e9:.1f} GB if read once; a checkpoint {saved / 1e9:.1f} GB, the run folder "
        f"{saved * num_kept / 1e9:.1f} GB"
    )
    stands_s, saves_s = saved / count / COPIED, saved / count / WRITTEN
    enough = "within" if stands_s + saves_s <= GRACE_S else "more than"
    lines["a save"] = (
        f"{stands_s + saves_s:.0f} s, {enough} the {GRACE_S} s that clusters give a preempted job; "
        f"training stands still for {stands_s:.1f} s"
    )
    return lines


def gpu_hours(config: RunConfig, hardware: Hardware) -> float:
    """Return the GPU-hours of a run on a known GPU."""
    model = without_memory(config.model)
    flops = flops_per_token(model, config.model, config.training.length)
    flops *= config.training.batch_size * config.training.length
    seconds = sum(_seconds(config, hardware, count_parameters(model), flops)[:2])
    return config.training.num_steps * seconds * hardware.count / 3600


def _seconds(
    config: RunConfig, hardware: Hardware, parameters: int, flops: float
) -> tuple[float, float, str]:
    """Seconds of a step that the GPUs compute and send, and where this is from."""
    training, count, gpu = config.training, hardware.count, hardware.gpu
    assert gpu is not None
    share, of_size = next((s, name) for most, s, name in MEASURED if parameters <= most)
    computing_s = flops / (count * share * gpu.tflops * 1e12)
    micros = training.batch_size // count // (training.micro_batch_size or 1)
    sent = sent_bytes(config.engine.name, parameters, training.precision, micros)
    sending_s = sent * (count - 1) / count / (BETWEEN_NODES if hardware.nodes > 1 else BETWEEN_GPUS)
    source = f"predicted: {share:.0%} of {gpu.tflops:.0f} TFLOP/s, measured on one H200 ({of_size})"
    if count > 1:
        waits = sending_s / (computing_s + sending_s)
        source += f"; {waits:.0%} of the time for collectives, if none overlaps"
    return computing_s, sending_s, source


def _time(config: RunConfig, hardware: Hardware, parameters: int, flops: float) -> dict[str, str]:
    training, count = config.training, hardware.count
    computing_s, sending_s, source = _seconds(config, hardware, parameters, flops)
    hours = training.num_steps * (computing_s + sending_s) / 3600
    tokens_per_s = training.batch_size * training.length / (computing_s + sending_s)
    return {
        "time": f"{hours:,.1f} hours, {hours * count:,.0f} GPU-hours",
        "tokens per second": f"{tokens_per_s:,.0f} ({source})",
    }


def sent_bytes(engine: str, parameters: int, precision: Precision, num_micro_batches: int) -> float:
    """Of a process in a step, (N − 1)/N of which a ring sends; an all-reduce counts twice."""
    size = parameters * (2 if precision == "bf16" and engine.startswith("zero") else 4)
    if engine == "zero1":
        return 3 * size
    if engine == "zero2":
        return 2 * size * num_micro_batches + size
    return 3 * size * num_micro_batches if engine == "zero3" else 2 * size


def _memory(config: RunConfig, hardware: Hardware, engine: str) -> str:
    on = replace(config, engine=replace(config.engine, name=engine))  # type: ignore[arg-type]
    micro = fitting_micro_batch_size(on, hardware)
    state = state_of(on, hardware)
    activations = activation_bytes(config.model, config.training, micro, hardware.kind)
    context = CUDA_CONTEXT_BYTES if hardware.gpu else 0
    fits = "fits" if state + activations <= hardware.memory else "DOES NOT FIT"
    return (
        f"{(state + activations + context) / 2**30:.1f} GiB ({fits}; state {state / 2**30:.1f}, "
        f"activations {activations / 2**30:.1f}), micro-batches of {micro}"
    )


def refuse_too_large(config: RunConfig, hardware: Hardware) -> None:
    """Reject a run that does not fit with a single sequence at a time."""
    of_one = config.model, config.training, 1, hardware.kind
    needed = state_of(config, hardware) + activation_bytes(*of_one)
    if needed > hardware.memory:
        sizes = f"{needed / 2**30:.1f} GiB a device, of {hardware.memory / 2**30:.1f}"
        raise ConfigError(
            f"engine.name={config.engine.name} needs {sizes}; take more GPUs, or zero3"
        )
