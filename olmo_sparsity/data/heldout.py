"""Make batches of held-out text, which evaluations read from its start.

Place in the flow: sequences.py → **`heldout_batches`** → training/evaluate.py.

Dimension key: B batch, L length.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.data.batches import Batch, number_documents
from olmo_sparsity.data.positions import restart
from olmo_sparsity.data.sequences import Sequences
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.text.vocabulary import IGNORED


def heldout_sequences(shards: TokenShards, length: int) -> Sequences:
    """Return held-out text, cut into sequences. Raise DataError if it is too short for one."""
    sequences = Sequences(shards, length)
    if len(sequences) == 0:
        raise DataError(
            f"{shards.paths[0].parent}: no held-out file holds {length:,} tokens, one evaluation "
            "sequence; prepare more text, or lower evaluation.length or training.length"
        )
    return sequences


def heldout_batches(
    shards: TokenShards,
    *,
    length: int,
    num_sequences: int,
    batch_size: int,
    mask_documents: bool = False,
    per_document: bool = False,
) -> Iterator[Batch]:
    """Yield batches of held-out text from its start, cut into sequences of `length` tokens.

    Args:
        num_sequences: How many sequences to yield at most, in all batches.
        mask_documents: Whether attention is restricted to a token's document.
        per_document: Whether position IDs begin at 0 in each document, if documents are masked.
            They are contiguous in either case.
    """
    sequences = heldout_sequences(shards, length)
    num_read = min(num_sequences, len(sequences))
    for start in range(0, num_read, batch_size):
        rows = range(start, min(start + batch_size, num_read))
        tokens_BL = torch.from_numpy(np.stack([sequences[row] for row in rows]))
        labels_BL = torch.full_like(tokens_BL, IGNORED)
        labels_BL[:, :-1] = tokens_BL[:, 1:]
        positions_BL = torch.arange(length).expand(len(rows), length)
        batch = Batch(tokens_BL, positions_BL, labels_BL)
        if mask_documents:
            documents_BL = number_documents(tokens_BL.numpy(), shards.eos_id)
            batch.documents_BL = torch.from_numpy(documents_BL)
            if per_document:
                batch.positions_BL = torch.from_numpy(restart(documents_BL))
        yield batch
