"""Compute the bytes of activations at the peak of a training step.

    activation_bytes(config.model, config.training, micro_batch_size=8)     # for 8 sequences

A forward pass keeps activations for the backward pass, so memory grows from the first layer to the
loss, and falls again. For `c4_1b` in bf16, of 16 layers, in vectors of the model's width a token:

    activation_checkpointing    after the last layer    then, on top, the larger of
    false                       16 × 29 + 10            a chunk of logits
    true                        16 × 2 + 10             a chunk of logits; 1.4 × 29 of the one layer
                                                        that is being computed again

device_memory.py adds the result to what the engine holds (state_memory.py). A test compares the sum
with steps that were counted tensor by tensor, of models of 20M to 1B parameters: it is within 2%.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import TrainingConfig
from olmo_sparsity.models.losses import rows_per_chunk
from olmo_sparsity.training.estimate.kept_bytes import kept_bytes

RESIDUAL_BYTES = 4
"""Bytes of a number of the residual stream, which is in fp32 with each precision."""

WIDTHS_OUTSIDE_OF_LAYERS = 10
"""Vectors of the model's width that each token keeps before the first layer and after the last one:
embedding, last norm, and their gradients."""

PEAK_OF_RECOMPUTED_LAYER = 1.4
"""The peak of a layer that is computed again, as a multiple of the activations that it keeps: its
gradients are there, too. Of 29 vectors of the width that a layer of the C4 configs keeps, these
were 40."""


def activation_bytes(
    sizes: ModelConfig, training: TrainingConfig, micro_batch_size: int, device: str = "cpu"
) -> float:
    """Return the bytes of activations at the peak of a step: those that are kept for the backward
    pass, and what the loss or a layer that is computed again has on top.

    Args:
        sizes: The section `model`.
        training: The section `training`.
        micro_batch_size: Sequences in a micro-batch, each of `training.length` tokens.
        device: The type of the device, on which the size of a chunk of logits depends.
    """
    num_tokens = micro_batch_size * training.length
    layer = _bytes_of_layer(sizes, training, num_tokens)
    vectors_bytes = num_tokens * sizes.d_model * _bytes_of_activation(training)
    outside_bytes = WIDTHS_OUTSIDE_OF_LAYERS * vectors_bytes
    loss_bytes = _loss_bytes(sizes, training, num_tokens, device)

    budget = training.activation_memory_budget
    if budget is not None and budget < 1.0:
        # The compiler keeps this share of what lies between a layer's input and all that the layer
        # would keep, and computes the rest again.
        kept_by_layer = layer.input + budget * (layer.kept - layer.input)
        kept = kept_by_layer * sizes.n_layers + outside_bytes
        return kept + max(loss_bytes, PEAK_OF_RECOMPUTED_LAYER * layer.kept)

    num_again = num_recomputed(sizes, training)
    kept = layer.kept * (sizes.n_layers - num_again) + outside_bytes
    if num_again == 0:
        return kept + loss_bytes
    # Layers that are computed again keep their input alone until the backward pass comes to them.
    # The loss is done by then, so not both of these are on top.
    kept_inputs = num_again * layer.input
    return kept + kept_inputs + max(loss_bytes, PEAK_OF_RECOMPUTED_LAYER * layer.kept)


class _LayerBytes(NamedTuple):
    """What a layer keeps for the backward pass, of all tokens of a micro-batch."""

    kept: float
    """Bytes of all activations that the layer keeps, if it is not computed again."""

    input: int
    """Bytes of its input, from which it can be computed again."""


def _bytes_of_layer(sizes: ModelConfig, training: TrainingConfig, num_tokens: int) -> _LayerBytes:
    """Return the bytes that a layer keeps."""
    bytes_of_token = kept_bytes(sizes, training.precision, training.compile)
    return _LayerBytes(
        kept=num_tokens * bytes_of_token, input=num_tokens * sizes.d_model * RESIDUAL_BYTES
    )


def _bytes_of_activation(training: TrainingConfig) -> int:
    """Return the bytes of a number that a product of matrices returns."""
    return 2 if training.precision == "bf16" else 4


def _loss_bytes(sizes: ModelConfig, training: TrainingConfig, num_tokens: int, device: str) -> int:
    """Return the bytes of a chunk of logits and of their gradients. The logits of all tokens are
    never there at once: with 50,000 words they would be larger than all activations."""
    vocab_size = sizes.embedding_size or sizes.vocab_size
    num_rows = min(num_tokens, rows_per_chunk(vocab_size, torch.device(device), training.compile))
    # Compiled, logits and their gradients in the precision of the run. Otherwise four tensors of
    # this shape are there at once, in fp32.
    bytes_of_logit = 2 * _bytes_of_activation(training) if training.compile else 4 * 4
    return num_rows * vocab_size * bytes_of_logit


def num_recomputed(sizes: ModelConfig, training: TrainingConfig) -> int:
    """Return the number of layers whose forward pass is computed again in the backward pass."""
    if not training.activation_checkpointing:
        return 0
    return math.ceil(sizes.n_layers / training.checkpoint_every)


def share_recomputed(sizes: ModelConfig, training: TrainingConfig) -> float:
    """Return the share of the layers' forward pass that is computed twice. With a budget it is the
    largest share that it can be: to keep half of the activations, the compiler computes the
    cheapest operations again, which take less than half of the time."""
    if training.activation_memory_budget is not None:
        return 1.0 - training.activation_memory_budget
    return num_recomputed(sizes, training) / sizes.n_layers
