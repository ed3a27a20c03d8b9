"""Estimate the parameters, FLOPs and memory of a run, and look up the peak FLOP/s of a GPU.

Place in the flow: `train --dry-run`, and the throughput in the log.
"""

from __future__ import annotations

import re
import resource
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from olmo_sparsity.config import RunConfig
from olmo_sparsity.model.load import build_model
from olmo_sparsity.model.losses import LanguageModel, rows_per_chunk
from olmo_sparsity.model.transformers_folder import count_parameters


def flops_per_token(model: nn.Module, config: RunConfig) -> float:
    """Forward and backward: 6 per weight of a matmul, and 6·L·D per layer for attention scores and
    sums, over half of L keys because of causality."""
    weight_VD, _ = cast(LanguageModel, model).unembedding
    embeddings = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    matmul_weights = sum(p.numel() for p in model.parameters() if p.ndim > 1) - embeddings
    if any(m.weight is weight_VD for m in model.modules() if isinstance(m, nn.Embedding)):
        matmul_weights += weight_VD.numel()  # tied: looked up once, multiplied once
    attention = config.model.n_layers * config.training.length * config.model.d_model
    return 6.0 * matmul_weights + 6.0 * attention


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


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process so far: on the GPU, or main memory without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # in KiB on Linux


def activation_bytes(config: RunConfig, micro_batch_size: int, device: str = "cpu") -> float:
    """Activations kept for the backward pass, and the largest chunk of logits."""
    rows, width = micro_batch_size * config.training.length, config.model.d_model
    # A block keeps the inputs of its matmuls and norms, about 34·D numbers per token with an MLP
    # ratio of 4 (Korthikanti et al. 2022), or with checkpointing only its input.
    kept = 2 if config.training.activation_checkpointing else 34
    size = 2 if config.training.precision == "bf16" else 4
    vocab_size = config.model.embedding_size or config.model.vocab_size
    chunk = min(rows, rows_per_chunk(vocab_size, torch.device(device)))
    return rows * width * config.model.n_layers * kept * size + chunk * vocab_size * 4 * 2


def estimate(config: RunConfig) -> dict[str, str]:
    """Lines for `--dry-run`. The model is built on PyTorch's meta device, without memory."""
    with torch.device("meta"):
        model = build_model(replace(config.model))
    training = config.training
    parameters = count_parameters(model)
    tokens = training.batch_size * training.length
    micro = training.micro_batch_size or training.batch_size
    # Weights, gradients and two moments in fp32; bf16 adds a cast copy of the weights.
    state = parameters * (16 + (2 if training.precision == "bf16" else 0))
    activations = activation_bytes(config, micro)
    total = tokens * training.num_steps
    return {
        "parameters": f"{parameters:,}",
        "tokens per step": f"{tokens:,} ({training.batch_size} × {training.length})",
        "tokens in all": f"{total:,} in {training.num_steps:,} steps",
        "FLOPs in all": f"{total * flops_per_token(model, config):.3g}",
        "memory": f"{(state + activations) / 2**30:.2f} GiB (estimated: weights and "
        f"optimizer {state / 2**30:.2f}, activations {activations / 2**30:.2f})",
    }
