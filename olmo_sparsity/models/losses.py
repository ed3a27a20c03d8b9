"""Compute per-token losses for evaluation, without the logits of a whole batch, which are by far
the largest tensor of a small model. Tokens are unembedded in chunks:

    hidden_ND ─ C tokens at a time ─> logits_CV ─> nll_C ─ joined ─> nll_BL

The loss of a training step, with its gradients, is in training_loss.py.

Dimension key: B batch, L length, N = B·L tokens, C tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from olmo_sparsity.models.document_attention import DocumentStarts
from olmo_sparsity.models.language_model import LanguageModel
from olmo_sparsity.text.vocabulary import IGNORED

MIN_CHUNK = 128
"""Fewest tokens of a chunk. With fewer, adding up the gradient of the weights, which is as large
for a small chunk as for a large one, would take most of the time of training."""

CHUNK_BYTES_ON_CPU = 4 * 2**20
"""Size of the fp32 logits of a chunk. They should stay in cache: 4 MiB was fastest of 2 … 64
MiB."""

CHUNK_BYTES_ON_GPU = 256 * 2**20
"""The same on a GPU, which needs larger products to be busy."""

COMPILED_CHUNK_LOGITS = 2**29
"""Number of logits of a chunk that the compiler computes. It keeps the logits and their gradient,
and nothing else of this size: in bf16, 8,192 tokens with a vocabulary of 50,304 take 1.5 GiB."""


def rows_per_chunk(vocab_size: int, device: torch.device, compiled: bool = False) -> int:
    """Return how many tokens to unembed at once. `compiled`: whether the compiler computes a chunk
    (`compile_losses` of training_loss.py)."""
    if device.type == "cuda" and compiled:
        num_tokens = max(MIN_CHUNK, COMPILED_CHUNK_LOGITS // vocab_size)
        # A power of two, so that the matrix product has no partly filled tiles.
        return 2 ** int(math.log2(num_tokens))
    chunk_bytes = CHUNK_BYTES_ON_CPU if device.type == "cpu" else CHUNK_BYTES_ON_GPU
    bytes_per_token = 4 * vocab_size
    return max(MIN_CHUNK, chunk_bytes // bytes_per_token)


@torch.no_grad()
def token_losses(
    model: LanguageModel,
    tokens_BL: Tensor,
    positions_BL: Tensor,
    labels_BL: Tensor,
    documents: DocumentStarts | None = None,
) -> Tensor:
    """Return nll_BL, the loss of each token's label in nats, fp32. It is 0 where the label is
    IGNORED."""
    hidden_ND = model.hidden(tokens_BL, positions_BL, documents=documents).flatten(0, 1)
    chunk_size = rows_per_chunk(model.vocab_size, hidden_ND.device)

    # Ignored tokens are computed, too: to leave them out, the host would wait for their number.
    hidden_chunks = hidden_ND.split(chunk_size)
    label_chunks = labels_BL.flatten().split(chunk_size)
    nll_chunks = []
    for hidden_CD, labels_C in zip(hidden_chunks, label_chunks, strict=True):
        # In fp32 also for a model in bf16, whose logits have two to three significant digits.
        logits_CV = model.unembed(hidden_CD).float()
        nll_C = F.cross_entropy(logits_CV, labels_C, ignore_index=IGNORED, reduction="none")
        nll_chunks.append(nll_C)
    return torch.cat(nll_chunks).view_as(labels_BL)


def repetition_losses(
    losses: Callable[[Tensor, Tensor, Tensor], Tensor], passages_BL: Tensor
) -> Tensor:
    """Return nll_B2: the mean loss of each passage, and of its repetition directly after it. A
    model that copies has the lower loss there:

        tokens   a b c d a b c d
        labels   b c d - b c d -      the means are over b c d, once and again

    The first token of a passage is left out, as it has no context the first time. `losses`:
    function (tokens_BL, positions_BL, labels_BL) that returns nll_BL."""
    length = passages_BL.shape[1]
    tokens_BL = passages_BL.repeat(1, 2)
    positions_BL = torch.arange(2 * length, device=passages_BL.device).expand_as(tokens_BL)

    labels_BL = tokens_BL.roll(-1, 1)
    labels_BL[:, length - 1 :: length] = IGNORED

    nll_BL = losses(tokens_BL, positions_BL, labels_BL)
    # Not `mean`, which would count the ignored label of each passage.
    return nll_BL.unflatten(1, (2, length)).sum(-1) / (length - 1)


def place_edges(length: int) -> list[int]:
    """Return the edges of four ranges of a sequence, by which losses are averaged: 0, 128, 256, 512
    and 1024 for a length of 1,024. A model that uses its context has the smallest loss in the last
    range."""
    return [0, length // 8, length // 4, length // 2, length]
