"""Run the sink check: find out whether a model needs a first token that every window shares.

Many models send unused attention to the first token of a text. If no prefix stands before each
window, the first token of the local window takes that place, until a distant token is added before
it: then the loss rises whatever the token says, and gaps and recoveries measure the missing sink.

`sink_check` compares the harm that a random distant token does in both cases:

    local window | targets                              without a prefix: how much does the
    random token | local window | targets               loss rise?

    line break | local window | targets                 after one: does it still rise?
    line break | random token | local window | targets
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.identity.use import with_model_in_use
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import NO_INDICES
from olmo_sparsity.text.windows import Windows

NUM_TRIED = 6
"""How many distant tokens are tried. They are spread over as many documents, or over fewer if there
are fewer. With SmolLM2 the check takes 2,000 token-forwards."""

LONG = 96
"""Tokens of the long window, at most."""

SHORT = 32
"""Tokens of the local window, at most."""

NUM_TARGETS = 16
"""Targets after the local window, at most."""

MIN_TOKENS = 16
"""Tokens that a document needs to be tried."""

HARM_NATS = 0.15
"""From this rise of the mean loss by a distant token drawn at random a prefix is recommended, if
one removes it. SmolLM2: 0.24 to 0.31 nats without a prefix, 0 with a line break as one."""


@with_model_in_use
def sink_check(
    scorer: Scorer, documents: Sequence[Document], prefix: Sequence[int], dummy: Sequence[int]
) -> dict[str, Any]:
    """Return whether the model needs a prefix, and why.

    Args:
        scorer: A scorer with states.
        documents: Documents to try it on.
        prefix: Token IDs of the prefix of the measurement; empty: none.
        dummy: Token IDs, such as those of a line break, that are tried before that prefix.

    Returns:
        `harm`, by how many nats a distant token drawn at random raises the mean loss of the
        targets; `harm_with_prefix`, the same after the dummy; `needs_prefix`, the verdict.
    """
    harm = _harm_of_random_token(scorer, documents, tuple(prefix))
    harm_with_dummy = _harm_of_random_token(scorer, documents, (*dummy, *prefix))
    needs_prefix = harm - harm_with_dummy > HARM_NATS
    return {"harm": harm, "harm_with_prefix": harm_with_dummy, "needs_prefix": needs_prefix}


def _harm_of_random_token(
    scorer: Scorer, documents: Sequence[Document], prefix: tuple[int, ...]
) -> float:
    """Return by how many nats a distant token drawn at random raises the mean loss, with a prefix
    before every window; 0 if no document is long enough."""
    # For each tried token two rows, one without it and one with it.
    rows = []
    long_enough = [document for document in documents if len(document.tokens) >= MIN_TOKENS]
    documents_to_try = long_enough[:NUM_TRIED]
    for document in documents_to_try:
        length = len(document.tokens)
        num_targets = min(NUM_TARGETS, length // 4)
        short = min(SHORT, length // 4)
        # The document's end, where the local window does not hold its beginning.
        start = length - num_targets
        windows = Windows(min(LONG, start), short, num_targets, prefix)
        context = scorer.context(windows.block(document.tokens, start, length))
        generator = stream(0, "sink", document.number)
        for index in generator.integers(
            windows.num_distant, size=NUM_TRIED // len(documents_to_try)
        ):
            rows += [context.set_row(NO_INDICES), context.set_row(np.array([index]))]
    if not rows:
        return 0.0
    losses = np.array([loss_W.mean() for loss_W in scorer.losses(rows)])
    loss_without = losses[0::2]
    loss_with = losses[1::2]
    return float((loss_with - loss_without).mean())
