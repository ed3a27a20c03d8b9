"""Run the sink check: find out whether a model needs a first token that every window shares.

Many models send unused attention to the first token of a text. If no prefix stands before each
window, the first token of the local window takes that place, until a distant token is added before
it: then the loss rises whatever the token says, and gaps and recoveries measure the missing sink.

`sink_check` compares the harm that a random distant token does in both cases:

    local window | targets                              without a prefix: how much does the
    random token | local window | targets               loss rise?

    line break | local window | targets                 after one: does it still rise?
    line break | random token | local window | targets

With SmolLM2, for which a line break is such a first token:

    {"harm": 0.28, "harm_with_prefix": 0.0, "needs_prefix": True}

plan.py runs the check for a measurement without a prefix, explain/answer.py for an explanation.

Dimension key: W targets of a row or block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from olmo_sparsity.analysis.results.meta import SinkCheck
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.identity.use import with_model_in_use
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import NO_INDICES
from olmo_sparsity.text.windows import Windows

NUM_TRIED = 6
"""How many distant tokens are tried, at most. Each document gets as many as the others: 6 documents
one each, 2 documents three each, 4 documents one each (4 in all, as 6 / 4 is rounded down). With
SmolLM2 the check takes 2,000 token-forwards."""

LONG = 96
"""Tokens of the long window, at most."""

SHORT = 32
"""Tokens of the local window, at most."""

NUM_TARGETS = 16
"""Targets after the local window, at most."""

MIN_TOKENS = 16
"""Tokens that a document needs to be tried."""

HARM_NATS = 0.15
"""A prefix is recommended if it makes the rise of the mean loss by a distant token drawn at random
smaller by more than this. SmolLM2: the rise is 0.24 to 0.31 nats without a prefix, and 0 with a
line break as one."""


@with_model_in_use
def sink_check(
    scorer: Scorer,
    documents: Sequence[Document],
    prefix: Sequence[int],
    tried_prefix: Sequence[int],
) -> SinkCheck:
    """Return whether the model needs a prefix, and the two numbers that decide it.

    Args:
        scorer: A scorer with states.
        documents: Documents to try it on.
        prefix: Token IDs of the prefix that the measurement has already; empty if it has none.
        tried_prefix: Token IDs, such as those of a line break, that are tried before `prefix`.
    """
    harm = _measure_harm(scorer, documents, tuple(prefix))
    harm_with_prefix = _measure_harm(scorer, documents, (*tried_prefix, *prefix))
    # The difference, not `harm` alone: a prefix is recommended only where it removes the harm.
    needs_prefix = harm - harm_with_prefix > HARM_NATS
    return {"harm": harm, "harm_with_prefix": harm_with_prefix, "needs_prefix": needs_prefix}


def _measure_harm(scorer: Scorer, documents: Sequence[Document], prefix: tuple[int, ...]) -> float:
    """Return by how many nats a distant token drawn at random raises the mean loss, with a prefix
    before every window; 0 if no document is long enough."""
    long_enough = [document for document in documents if len(document.tokens) >= MIN_TOKENS]
    documents_to_try = long_enough[:NUM_TRIED]
    if not documents_to_try:
        return 0.0
    num_tried_each = NUM_TRIED // len(documents_to_try)

    # For each tried token two rows: one without it, then one with it.
    rows = []
    for document in documents_to_try:
        length = len(document.tokens)
        num_targets = min(NUM_TARGETS, length // 4)
        # The targets are the document's end, where the local window does not hold its beginning,
        # which may be a sink by itself.
        start = length - num_targets
        # All targets are one block, so that a row gives the losses of all of them.
        windows = Windows(
            long=min(LONG, start),
            short=min(SHORT, length // 4),
            stride=num_targets,
            prefix=prefix,
        )
        context = scorer.context(windows.block(document.tokens, start, length))
        # The stream depends on the document alone: with and without the tried prefix the same
        # tokens are drawn, so that the two harms differ by the prefix only.
        generator = stream(0, "sink", document.number)
        for index in generator.integers(windows.num_distant, size=num_tried_each):
            rows.append(context.set_row(NO_INDICES))
            rows.append(context.set_row(np.array([index])))

    losses = np.array([loss_W.mean() for loss_W in scorer.losses(rows)])
    loss_without = losses[0::2]
    loss_with = losses[1::2]
    return float((loss_with - loss_without).mean())
