"""Estimate what the evaluations of a run take: seconds, and memory of a device.

    seconds_of_evaluation(config, hardware)    # one forward pass over all that is evaluated:

    held-out sequences    num_sequences of each corpus × evaluation.length
    long documents        evaluation.documents × evaluation.document_length
    passages, read twice  64 of each corpus × training.length

Tasks of lm_eval are counted by their memory alone (device_memory.py), as the lengths of their texts
are not known. evaluation/evaluate.py evaluates; pauses.py asks for the seconds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.models.losses import rows_per_chunk
from olmo_sparsity.training.estimate.activation_memory import RESIDUAL_BYTES
from olmo_sparsity.training.estimate.compute import (
    SHARE_OF_FORWARD,
    flops_per_token,
    share_of_peak,
)
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.meta_model import without_memory
from olmo_sparsity.training.evaluation.evaluate import NUM_PASSAGES


def evaluation_length(config: RunConfig) -> int:
    """Return the number of tokens of an evaluated sequence."""
    return config.evaluation.length or 2 * config.largest_length


def sequences_at_once(config: RunConfig, hardware: Hardware) -> int:
    """Return the number of held-out sequences that each process evaluates at once."""
    num_of_process = math.ceil(config.evaluation.num_sequences / hardware.num_processes)
    return min(config.evaluation.batch_size, num_of_process)


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
    number_bytes = 2 if config.training.precision == "bf16" else 4

    # There all the time: the residual stream, and what is added to it.
    residual_bytes = 2 * num_tokens * sizes.d_model * RESIDUAL_BYTES
    # The peak of a layer is in its MLP: what the first product returns, and the activation of it.
    # SwiGLU multiplies one half of the first by the other half.
    mlp_width = sizes.mlp_hidden_size or sizes.mlp_ratio * sizes.d_model
    activated_width = mlp_width // 2 if sizes.activation_type == "swiglu" else mlp_width
    mlp_bytes = num_tokens * (mlp_width + activated_width) * number_bytes
    # After the layers: logits of a chunk, in fp32 and in the precision of the run, and the log of
    # their softmax.
    vocab_size = sizes.embedding_size or sizes.vocab_size
    num_rows = min(num_tokens, rows_per_chunk(vocab_size, torch.device(hardware.device_type)))
    logits_bytes = num_rows * vocab_size * (4 + 4 + number_bytes)
    return residual_bytes + max(mlp_bytes, logits_bytes)
