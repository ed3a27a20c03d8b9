"""Sum up the losses of all measured tokens: the mean gap, LongPPL, and what counts as copying.

These numbers are over every token that was measured, chosen as a target or not. Never imports
torch.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.intervals import Interval, resample
from olmo_sparsity.analysis.results.target_rows import Parts, whole_documents

INDUCTION_SHARE = 0.15
"""A model copies from its context if a passage, when it is repeated, costs it less by at least this
share. A share has the same meaning for any text and vocabulary; nats have not. Of the stored models
those that do not copy have 0.10 at most, those that do 0.17 or more."""

LSD_NATS = 2.0
LCL_NATS = 2.0
"""LongPPL (Fang et al. 2024): a token is key if the long context lowers its loss by more than
`LSD_NATS`, to below `LCL_NATS`."""

LARGEST_EXPONENT = 700
"""The exponential of a larger number overflows a double."""


def mean_gap(losses: pd.DataFrame, parts: Parts | None = None) -> Interval:
    """Return the mean of L_short − L_long over all tokens, in nats, and its interval over
    documents. `parts`: of documents that were split, which are resampled whole."""
    gaps = (losses.loss_short - losses.loss_long).astype(float)
    values = pd.DataFrame({"gap": gaps, "num_tokens": 1.0})
    sums_by_document = values.groupby(whole_documents(losses.document, parts).to_numpy()).sum()
    gap, num_tokens = resample(sums_by_document)
    return (gap / num_tokens).interval()


def longppl(losses: pd.DataFrame) -> dict[str, float | int | None]:
    """Return LongPPL, the perplexity of key tokens, and the perplexity of all targets. Both are
    over all targets together; the authors' package averages within each text."""
    gap = losses.loss_short - losses.loss_long
    key_losses = losses.loss_long[(gap > LSD_NATS) & (losses.loss_long < LCL_NATS)]
    return {
        "key_share": len(key_losses) / len(losses),
        "num_key_tokens": len(key_losses),
        "longppl": float(np.exp(key_losses.mean())) if len(key_losses) else None,
        "ppl": float(np.exp(min(losses.loss_long.mean(), LARGEST_EXPONENT))),
    }
