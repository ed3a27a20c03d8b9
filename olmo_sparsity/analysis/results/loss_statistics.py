"""Sum up the losses of all measured tokens: the mean gap, LongPPL, and what counts as copying.

These numbers are over every token that was measured, chosen as a target or not. Never imports
torch.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.intervals import NO_INTERVAL, Interval, resample
from olmo_sparsity.analysis.results.reported import MIN_DOCUMENTS
from olmo_sparsity.analysis.results.student_t import width_ratio
from olmo_sparsity.analysis.results.target_rows import KEYS, Parts, whole_documents

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
    documents.

    Args:
        parts: The parts of documents that were split, which are resampled whole.
    """
    gaps = (losses.loss_short - losses.loss_long).astype(float)
    values = pd.DataFrame({"gap": gaps, "num_tokens": 1.0})
    sums_by_document = values.groupby(whole_documents(losses.document, parts).to_numpy()).sum()
    gap, num_tokens = resample(sums_by_document)
    return (gap / num_tokens).interval()


def gap_difference(
    first: pd.DataFrame, second: pd.DataFrame, parts: Parts | None = None
) -> Interval:
    """Return the mean gap of a first model minus that of a second one, in nats a token, over the
    tokens that both measured, and its interval (`_paired_mean`).

    Args:
        first: Losses of the first model: columns document, target, loss_short and loss_long.
        second: Losses of the second one, of the same text in the same tokens.
        parts: The parts of documents that were split, which are resampled whole.
    """
    shared = _shared_tokens(first, second)
    first_gap = (shared.loss_short_of_first - shared.loss_long_of_first).astype(float)
    second_gap = (shared.loss_short_of_second - shared.loss_long_of_second).astype(float)
    return _paired_mean(first_gap - second_gap, shared.document, parts)


SavingColumn = Literal["saved", "more_than_unrelated"]
"""A column of `savings_of_longer_window`."""


def savings_of_longer_window(longer: pd.DataFrame, shorter: pd.DataFrame) -> pd.DataFrame:
    """Return how much lower the loss of a model is with a longer long window than with a shorter
    one, in nats, at each token that both measured. The columns are document, target and

        saved                 L_shorter − L_longer
        more_than_unrelated   saved, minus the same with another document's text as distant text,
                              which is what a longer window does whatever stands in it; NaN where
                              the loss with unrelated text was not measured

    Args:
        longer: Losses with the longer window: columns document, target, loss_long and
            placebo_loss_long.
        shorter: Losses of the same model with the shorter window, of the same text.
    """
    shared = _shared_tokens(shorter, longer)
    losses = shared.drop(columns=KEYS).astype(float)
    saved = losses.loss_long_of_first - losses.loss_long_of_second
    saved_by_unrelated = losses.placebo_loss_long_of_first - losses.placebo_loss_long_of_second
    return shared[KEYS].assign(saved=saved, more_than_unrelated=saved - saved_by_unrelated)


def mean_saving(
    savings: pd.DataFrame, column: SavingColumn = "saved", parts: Parts | None = None
) -> Interval:
    """Return the mean of a column of `savings_of_longer_window` and its interval (`_paired_mean`).
    Tokens without a value do not count."""
    measured = savings[savings[column].notna()]
    return _paired_mean(measured[column], measured.document, parts)


def saving_difference(
    first: pd.DataFrame,
    second: pd.DataFrame,
    column: SavingColumn = "saved",
    parts: Parts | None = None,
) -> Interval:
    """Return the mean of a column for a first model minus that for a second one, over the tokens of
    both, and its interval (`_paired_mean`).

    Args:
        first: The rows of the first model, as `savings_of_longer_window` returns them.
        second: The rows of the second model.
        column: The column. Tokens without a value do not count.
        parts: The parts of documents that were split, which are resampled whole.
    """
    shared = _shared_tokens(first, second)
    differences = shared[f"{column}_of_first"] - shared[f"{column}_of_second"]
    has_value = differences.notna()
    return _paired_mean(differences[has_value], shared.document[has_value], parts)


def _shared_tokens(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each token that both measured, with the losses of both."""
    return first.merge(second, on=KEYS, suffixes=("_of_first", "_of_second"))


def _paired_mean(values: pd.Series, documents: pd.Series, parts: Parts | None) -> Interval:
    """Return the mean of differences and its interval; NaN if there are none.

    The interval is paired: each value is a difference at one token, so a resample of documents
    draws the same ones for both measurements. With fewer than `MIN_DOCUMENTS` documents there is
    none, and its ends are NaN.

    Args:
        values: A difference for each token.
        documents: The document of each token.
        parts: The parts of documents that were split, which are resampled whole.
    """
    if values.empty:
        return NO_INTERVAL
    table = pd.DataFrame({"value": values, "num_tokens": 1.0})
    sums_by_document = table.groupby(whole_documents(documents, parts).to_numpy()).sum()
    sum_of_values, num_tokens = resample(sums_by_document)
    mean = (sum_of_values / num_tokens).interval()
    num_documents = len(sums_by_document)
    if num_documents < MIN_DOCUMENTS:
        return mean._replace(low=float("nan"), high=float("nan"))
    # A bootstrap over few documents is too narrow.
    stretch = width_ratio(num_documents)
    return Interval(
        mean.value,
        mean.value + stretch * (mean.low - mean.value),
        mean.value + stretch * (mean.high - mean.value),
    )


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
