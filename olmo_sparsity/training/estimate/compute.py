"""Estimate how long the GPUs of a run compute: FLOPs, divided by the share of their peak that they
are expected to reach.

    `flops_per_token` × tokens of a step     3.8e8 FLOPs × 524,288 tokens = 2.0e14 FLOPs
    `share_of_peak` of a GPU's stated peak   30.6% of 9.9e14 FLOP/s
    → `computing_seconds`                    0.66 s a step of the 60M model on one H200

The log of a run counts by `flops_per_token`, too, when it reports MFU, the share of the vendor's
peak that a run reaches.

Dimension key: V vocabulary, D width, L length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from olmo_sparsity.base.devices import device_name
from olmo_sparsity.base.gpus import find_gpu
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.models.language_model import LanguageModel
from olmo_sparsity.training.estimate.activation_memory import share_recomputed
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.meta_model import without_memory

SHARE_OF_FORWARD = 1 / 3
"""FLOPs of a forward pass, as a share of those of a forward and backward pass. The backward pass
takes twice as many: gradients of the inputs and gradients of the weights. A layer that is
recomputed runs its forward pass a second time."""


def flops_per_token(
    model: nn.Module, sizes: ModelConfig, length: int, whole_attention: bool = False
) -> float:
    """Return the FLOPs of a token, forward and backward: 6 for each weight of a product of
    matrices, and 6 · L · D for each layer's attention, in which a token attends to L / 2 places on
    average.

    Args:
        model: A `LanguageModel`, whose weights are counted. It may be on the `meta` device.
        sizes: Its config.
        length: The number of tokens of a sequence, L.
        whole_attention: Count L places, 12 · L · D, as OLMo-core, nanochat and torchtitan do.
    """
    # A multiplication and an addition, in one forward and two backward products: 6 a weight.
    weight_VD, _ = cast(LanguageModel, model).unembedding
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    num_embedded = sum(table.numel() for table in tables)
    # Norms and biases have one dimension, and no product of matrices. An embedding is looked up.
    num_multiplied = sum(weight.numel() for weight in model.parameters() if weight.ndim > 1)
    num_multiplied -= num_embedded
    is_tied = any(table is weight_VD for table in tables)
    if is_tied:  # looked up once, multiplied once
        num_multiplied += weight_VD.numel()

    # With L / 2 places a token has D · L / 2 products for its scores, and as many for the weighted
    # sum of values; with L places twice as many.
    attention_width = sizes.n_heads * sizes.effective_head_width
    products_of_attention = sizes.n_layers * length * attention_width
    flops_of_product = 12.0 if whole_attention else 6.0
    return 6.0 * num_multiplied + flops_of_product * products_of_attention


def stated_flops_per_second(device: torch.device) -> float | None:
    """Return the FLOP/s in bf16 that the vendor states for a device; None if they are not known."""
    gpu = find_gpu(device_name(device))
    return 1e12 * gpu.tflops if gpu else None


# --- the share of a GPU's peak that a run reaches -------------------------------------------------


@dataclass(frozen=True)
class MeasuredShare:
    """The share of the stated peak that one H200 reached with a model (docs/train.md)."""

    num_parameters: int
    """With the embedding."""

    share: float
    model_name: str
    """The name in configs/. It counts no embedding: "60M" has 85 million parameters with it."""


MEASURED_SHARES = (
    MeasuredShare(85_065_728, 0.306, "60M"),
    MeasuredShare(190_513_152, 0.345, "150M"),
)
"""From the smallest model to the largest, all compiled. No larger model was measured, and none on
several GPUs."""

UNCOMPILED_SPEED = 135 / 250
"""The speed of a model that is not compiled, as a share of that of a compiled one: nanoGPT's README
gives 250 and 135 ms a step of GPT-2 (124M) on A100s. No model of this project was measured so."""


@dataclass(frozen=True)
class ExpectedShare:
    """The share of the stated peak that one GPU is expected to reach."""

    share: float
    origin: str
    """Where this number comes from, in words."""


def share_of_peak(num_parameters: int, is_compiled: bool = True) -> ExpectedShare:
    """Return the share of the stated FLOP/s that one GPU is expected to reach with a model of this
    size, compiled or not."""
    expected = _share_if_compiled(num_parameters)
    if is_compiled:
        return expected
    lowered = UNCOMPILED_SPEED * expected.share
    origin = f"assumed: {UNCOMPILED_SPEED:.0%} of a compiled model's {expected.share:.0%}"
    return ExpectedShare(lowered, origin)


def _share_if_compiled(num_parameters: int) -> ExpectedShare:
    """Return the share that one GPU is expected to reach with a compiled model of this size.

    It is that of the largest measured model that is not larger. For models below the smallest
    measured one it is assumed to fall with the root of the parameters, as the width does: narrower
    products fill less of a GPU."""
    smallest = MEASURED_SHARES[0]
    if num_parameters < smallest.num_parameters:
        lowered = smallest.share * (num_parameters / smallest.num_parameters) ** 0.5
        origin = (
            f"assumed: lower than the {smallest.share:.0%} measured on one H200 "
            f"({smallest.model_name})"
        )
        return ExpectedShare(lowered, origin)
    not_larger = [row for row in MEASURED_SHARES if row.num_parameters <= num_parameters]
    nearest = not_larger[-1]
    return ExpectedShare(nearest.share, f"measured on one H200 ({nearest.model_name})")


def computing_seconds(config: RunConfig, hardware: Hardware) -> float:
    """Return the seconds of a step in which the GPUs compute. Their speed must be known."""
    training = config.training
    gpu = hardware.gpu
    assert gpu is not None, "call this only if `hardware.has_known_speed`"
    model = without_memory(config.model)

    flops_of_token = flops_per_token(model, config.model, training.length)
    # The backward pass may recompute layers. It never recomputes the unembedding.
    unembedding_VD, _ = cast(LanguageModel, model).unembedding
    flops_of_layers = flops_of_token - 6.0 * unembedding_VD.numel()
    share_again = share_recomputed(config.model, training)
    flops_of_token += SHARE_OF_FORWARD * share_again * flops_of_layers

    flops_of_step = flops_of_token * (training.batch_size * training.length)
    expected = share_of_peak(count_parameters(model), training.compile)
    return flops_of_step / (hardware.num_processes * expected.share * gpu.tflops * 1e12)
