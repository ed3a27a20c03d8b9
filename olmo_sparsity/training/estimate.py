"""Estimate the parameters, FLOPs and memory of a run, and look up the peak FLOP/s of a GPU.

Place in the flow: `train --dry-run`, and the throughput in the log.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from olmo_sparsity.analysis.kernels.losses import LanguageModel, rows_per_chunk
from olmo_sparsity.analysis.models.transformers_folder import count_parameters
from olmo_sparsity.config.sections import ModelConfig, Precision, TrainingConfig
from olmo_sparsity.model.build import build_model


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


# Dense bf16, from the data sheets; the longer of names with a common beginning comes first.
STATED_TFLOPS = {
    **{"GB200": 2500, "B200": 2250, "GH200": 989, "H200 NVL": 835, "H200": 989},
    **{"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800 PCIe": 756, "H800": 989},
    **{"A100": 312, "A800": 312, "A30": 165, "A40": 150, "A10": 125},
    **{"L40S": 362, "L40": 181, "L4": 121},
}


def stated_flops(device_name: str) -> float | None:
    """FLOP/s in bf16 as stated by the vendor; None if unknown, or for a slice of a GPU (MIG)."""
    words = set(re.split(r"\W+", device_name))
    known = (t for name, t in STATED_TFLOPS.items() if words >= set(name.split()))
    return None if "MIG" in words else next((1e12 * t for t in known), None)


CUDA_CONTEXT_BYTES = 2**29
"""About what a process holds on a GPU for CUDA itself, before its first tensor."""


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
    if training.activation_checkpointing:  # a layer's input, in fp32, and one layer at a time
        return 4 / size * of_width * layers + 10 * of_width + max(loss, 40 * of_width)
    # With an MLP ratio of 4. The residual stream is in fp32.
    kept = 29 if training.precision == "bf16" else 27
    return (kept * layers + 10) * of_width + loss


def state_bytes(precision: Precision, num_parameters: int) -> int:
    """Weights, gradients and two moments in fp32; bf16 adds a cast copy of the weights."""
    return num_parameters * (16 + (2 if precision == "bf16" else 0))


MOST_TOKENS = 65_536
"""Tokens of a micro-batch. Larger ones gain little: its fixed cost is below 2% of a step."""


def fitting_micro_batch_size(
    sizes: ModelConfig, training: TrainingConfig, share: int, device: torch.device
) -> int:
    """Return the largest divisor of `share`, the sequences of a process, that needs at most 85% of
    the memory of its GPU; without a GPU, half of the machine's."""
    if device.type == "cuda":
        room = 0.85 * torch.cuda.get_device_properties(device).total_memory - CUDA_CONTEXT_BYTES
    else:
        room = 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room -= state_bytes(training.precision, count_parameters(_without_memory(sizes)))
    fitting = [
        size
        for size in range(1, share + 1)
        if share % size == 0
        and size * training.length <= MOST_TOKENS
        and activation_bytes(sizes, training, size, device.type) <= room
    ]
    return max(fitting, default=1)


def _without_memory(sizes: ModelConfig) -> nn.Module:
    with torch.device("meta"):
        return build_model(replace(sizes))


def estimate(sizes: ModelConfig, training: TrainingConfig, device: torch.device) -> dict[str, str]:
    """Return lines for `--dry-run`."""
    model = _without_memory(sizes)
    parameters = count_parameters(model)
    tokens = training.batch_size * training.length
    micro = training.micro_batch_size or training.batch_size
    state = state_bytes(training.precision, parameters)
    activations = activation_bytes(sizes, training, micro, device.type)
    context = CUDA_CONTEXT_BYTES if device.type == "cuda" else 0
    total = tokens * training.num_steps
    return {
        "parameters": f"{parameters:,}",
        "tokens per step": f"{tokens:,} ({training.batch_size} × {training.length})",
        "tokens in all": f"{total:,} in {training.num_steps:,} steps",
        "FLOPs in all": f"{total * flops_per_token(model, sizes, training.length):.3g}",
        "memory": f"{(state + activations + context) / 2**30:.2f} GiB (estimated: weights and "
        f"optimizer {state / 2**30:.2f}, activations {activations / 2**30:.2f}"
        + (f", CUDA's context {context / 2**30:.2f})" if context else ")"),
    }
