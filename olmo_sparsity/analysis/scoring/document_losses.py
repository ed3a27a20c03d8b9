"""Compute the losses of all targets of a document, with their long and with their local window.

    losses = context_losses(scorer, document, windows)
    gap = losses.loss_short - losses.loss_long          # nats; above 0 where distant text helps

    target  token_id  loss_short  loss_long
        16       371         5.2        5.1
        17        88         9.4        1.3         the long window helps with this token

This is the first phase of a measurement. Targets are chosen from this table.

Dimension key: T targets, F distant tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.models.identity.use import with_model_in_use
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.windows import Block, Windows


@torch.no_grad()
@with_model_in_use
def context_losses(
    scorer: Scorer,
    document: Document,
    windows: Windows,
    controls: Controls | None = None,
    blocks: Sequence[Block] | None = None,
) -> pd.DataFrame:
    """Return a table of L_long and L_short, with a row for each target.

    L_long − L_short is the paper's quantity (LongPPL's LSD is its negative).

    Args:
        scorer: The scorer of this document.
        document: The document.
        windows: Its windows.
        controls: Where the placebo's text comes from. With it the table has more columns: `bigram`,
            whether the target and the token before it recur among the distant tokens, and
            `placebo_loss_long` and `placebo_bigram`, the same with the placebo's text.
        blocks: The blocks whose targets are computed. Default: all blocks with a full long window.
    """
    blocks = list(windows.blocks(document.tokens) if blocks is None else blocks)
    if not blocks:
        return pd.DataFrame(columns=["target", "token_id", "loss_short", "loss_long"], dtype=float)
    # The same blocks, with another document's text as distant text.
    placebo_blocks = None
    if controls is not None:
        placebo_blocks = [
            block.with_distant(controls.placebo(document, block).tokens_F) for block in blocks
        ]
    losses = scorer.window_losses(windows, blocks, placebo_blocks)

    targets = np.concatenate(
        [np.arange(block.start, block.start + block.num_targets) for block in blocks]
    )
    columns = {
        "target": targets,
        "token_id": document.tokens[targets],
        "loss_short": losses.short_T,
        "loss_long": losses.long_T,
    }
    if placebo_blocks is not None and losses.placebo_long_T is not None:
        columns["placebo_loss_long"] = losses.placebo_long_T
        columns["bigram"] = np.concatenate([bigrams(block) for block in blocks])
        columns["placebo_bigram"] = np.concatenate([bigrams(block) for block in placebo_blocks])
    return pd.DataFrame(columns)


def bigrams(block: Block) -> np.ndarray:
    """Return for each target of a block whether its token and the one before it occur together
    among the distant tokens, and nowhere in the local window. The model is not asked."""
    tokens = block.tokens.astype(np.int64)
    # Each pair as one number: pairs[i] holds the tokens at the places i and i + 1.
    pairs = (tokens[:-1] << 32) + tokens[1:]
    first_distant = block.num_prefix
    first_local = first_distant + block.num_distant
    distant = set(pairs[first_distant : first_local - 1])
    recurs = []
    for target in range(block.num_before, block.num_before + block.num_targets):
        pair = pairs[target - 1]
        earlier_local = pairs[first_local : target - 1]
        recurs.append(pair in distant and pair not in earlier_local)
    return np.array(recurs)
