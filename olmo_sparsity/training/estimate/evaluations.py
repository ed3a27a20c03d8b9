"""Estimate what the evaluations of a run take: tokens, seconds, memory of a device.

Tasks of lm_eval are counted by their memory alone, as the lengths of their texts are not known.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.models.losses import rows_per_chunk
from olmo_sparsity.training.estimate.compute import (
    SHARE_OF_FORWARD,
    flops_per_token,
    share_of_peak,
)
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.memory_formulas import RESIDUAL_BYTES, without_memory
from olmo_sparsity.training.evaluate import NUM_PASSAGES


def evaluation_length(config: RunConfig) -> int:
    """Return the number of tokens of an evaluated sequence."""
    return config.evaluation.length or 2 * config.largest_length


def sequences_at_once(config: RunConfig, hardware: Hardware) -> int:
    """Return the number of held-out sequences that each process evaluates at once."""
    num_own = math.ceil(config.evaluation.num_sequences / hardware.num_processes)
    return min(config.evaluation.batch_size, num_own)


class _EvaluatedText(NamedTuple):
    """Sequences of equal length that an evaluation reads."""

    num_sequences: int
    length: int
    """Tokens of each."""


def seconds_of_evaluation(config: RunConfig, hardware: Hardware) -> float:
    """Return the seconds of one evaluation on known GPUs. Collectives are not counted."""
    gpu = hardware.gpu
    assert gpu is not None
    evaluation = config.evaluation
    num_corpora = max(1, len(config.data.corpora))
    heldout = _EvaluatedText(num_corpora * evaluation.num_sequences, evaluation_length(config))
    document_length = evaluation.document_length or config.largest_length
    documents = _EvaluatedText(evaluation.documents, document_length)
    # A passage and its repetition together are as long as a training sequence.
    passages = _EvaluatedText(num_corpora * NUM_PASSAGES, config.training.length)
    model = without_memory(config.model)
    flops = 0.0
    for num_sequences, length in (heldout, documents, passages):
        # Processes share the sequences, and wait for the one that has most.
        num_tokens = math.ceil(num_sequences / hardware.num_processes) * length
        flops += SHARE_OF_FORWARD * flops_per_token(model, config.model, length) * num_tokens
    expected = share_of_peak(count_parameters(model), config.training.compile)
    return flops / (expected.share * gpu.tflops * 1e12)


def bytes_in_forward(config: RunConfig, hardware: Hardware) -> float:
    """Return the bytes of activations at the peak of an evaluation's forward pass, which keeps
    nothing for a backward pass: computed, not compared with a measured peak."""
    sizes = config.model
    num_tokens = sequences_at_once(config, hardware) * evaluation_length(config)
    bytes_of_number = 2 if config.training.precision == "bf16" else 4
    # The peak of a layer is in its MLP: what the first product returns, and the activation of it.
    # Beside them are the residual stream and what is added to it.
    width_of_mlp = sizes.mlp_hidden_size or sizes.mlp_ratio * sizes.d_model
    num_activated = width_of_mlp // 2 if sizes.activation_type == "swiglu" else width_of_mlp
    in_mlp = num_tokens * (width_of_mlp + num_activated) * bytes_of_number
    residual = 2 * num_tokens * sizes.d_model * RESIDUAL_BYTES
    # Logits of a chunk, in fp32 and in the precision of the run, and the log of their softmax.
    vocab_size = sizes.embedding_size or sizes.vocab_size
    chunk = rows_per_chunk(vocab_size, torch.device(hardware.device_type))
    logits = min(num_tokens, chunk) * vocab_size * (4 + 4 + bytes_of_number)
    return residual + max(in_mlp, logits)
