"""Make batches of held-out text, which evaluations read from its start.

    heldout_batches(heldout, length=4096, num_sequences=512, batch_size=8)
    # 64 batches: sequences 0 to 7, 8 to 15, …; at each evaluation the same

Held-out text is neither shuffled nor given skips in its position IDs, so that evaluations of
different steps and runs can be compared.

Place in the flow: sequences.py → **`heldout_batches`** → training/evaluation/evaluate.py.

Dimension key: B batch, L length.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.data.batches import Batch, next_tokens, number_documents
from olmo_sparsity.data.positions import restart
from olmo_sparsity.data.sequences import Sequences
from olmo_sparsity.data.shards import TokenShards


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
    # A short held-out text has fewer sequences than are configured. All of them are read once.
    num_read = min(num_sequences, len(sequences))
    for start in range(0, num_read, batch_size):
        rows = range(start, min(start + batch_size, num_read))
        tokens_BL = np.stack([sequences[row] for row in rows])
        batch = Batch(
            tokens_BL=torch.from_numpy(tokens_BL),
            positions_BL=torch.arange(length).expand(len(rows), length),
            labels_BL=torch.from_numpy(next_tokens(tokens_BL)),
        )
        # As in training, so that the loss is that of the task the model is trained for.
        if mask_documents:
            documents_BL = number_documents(tokens_BL, shards.eos_id)
            batch.documents_BL = torch.from_numpy(documents_BL)
            if per_document:
                batch.positions_BL = torch.from_numpy(restart(documents_BL))
        yield batch
