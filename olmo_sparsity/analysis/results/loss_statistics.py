"""Compute numbers over all tokens that were measured, whether they were chosen as targets or not.

    losses of one measurement      → `mean_gap`, `longppl`
    losses of two models           → `gap_difference`
    losses of one model with       → `savings_of_longer_window` → `mean_saving`, and of two models
    two long windows                                              `saving_difference`

Two tokens, with the losses of one model in long windows of 256 and of 512 tokens, in nats:

    document  target   loss_long of 256   loss_long of 512   saved
           1      18                4.0                3.5     0.5
           1      19                2.0                2.1    −0.1     `mean_saving`: 0.2

compare.py, curves.py and measurement/summing_up.py call these functions. Never imports torch.
"""

from __future__ import annotations

from typing import Literal, TypedDict

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.intervals import NO_INTERVAL, Bootstrapped, Interval, resample
from olmo_sparsity.analysis.results.reported import MIN_DOCUMENTS
from olmo_sparsity.analysis.results.student_t import width_ratio
from olmo_sparsity.analysis.results.target_rows import KEYS, SplitDocuments, whole_documents

LSD_NATS = 2.0
LCL_NATS = 2.0
"""LongPPL (Fang et al. 2024): a token is key if the long context lowers its loss by more than
`LSD_NATS`, to below `LCL_NATS`."""

LARGEST_EXPONENT = 700
"""The largest loss of which a perplexity is computed: e to the power of 710 overflows a double."""


# --- one measurement ------------------------------------------------------------------------------


def mean_gap(losses: pd.DataFrame, split_documents: SplitDocuments | None = None) -> Interval:
    """Return the mean of L_short − L_long over all tokens, in nats, and its bootstrap interval over
    documents.

    Args:
        losses: The table of losses.
        split_documents: The parts of documents that were split, which are resampled together.
    """
    gaps = (losses.loss_short - losses.loss_long).astype(float)
    sums_by_document = _sums_by_document(gaps, losses.document, split_documents)
    return _mean_of_tokens(sums_by_document).interval()


class LongPPL(TypedDict):
    """The section `longppl` of meta.json."""

    key_share: float
    """The fraction of tokens that are key tokens."""

    num_key_tokens: int
    longppl: float | None
    """The perplexity of key tokens; None without key tokens."""

    ppl: float
    """The perplexity of all tokens."""


def longppl(losses: pd.DataFrame) -> LongPPL:
    """Return LongPPL, the perplexity of key tokens, and the perplexity of all tokens, both with
    the long window. Both are over all documents together; the authors' package averages within each
    text."""
    gap = losses.loss_short - losses.loss_long
    key_losses = losses.loss_long[(gap > LSD_NATS) & (losses.loss_long < LCL_NATS)]
    return {
        "key_share": len(key_losses) / len(losses),
        "num_key_tokens": len(key_losses),
        # No key token has a loss above `LCL_NATS`, so this does not overflow.
        "longppl": float(np.exp(key_losses.mean())) if len(key_losses) else None,
        "ppl": float(np.exp(min(losses.loss_long.mean(), LARGEST_EXPONENT))),
    }


# --- two measurements, token by token -------------------------------------------------------------


def gap_difference(
    first: pd.DataFrame, second: pd.DataFrame, split_documents: SplitDocuments | None = None
) -> Interval:
    """Return the mean gap of a first model minus that of a second one, over the tokens that both
    measured, in nats a token, and its paired interval.

    Args:
        first: Losses of the first model: columns document, target, loss_short and loss_long.
        second: Losses of the second one, of the same text in the same tokens.
        split_documents: The parts of documents that were split, which are resampled together.
    """
    shared = _shared_tokens(first, second)
    first_gap = (shared.loss_short_of_first - shared.loss_long_of_first).astype(float)
    second_gap = (shared.loss_short_of_second - shared.loss_long_of_second).astype(float)
    return _paired_mean(first_gap - second_gap, shared.document, split_documents)


SavingColumn = Literal["saved", "more_than_unrelated"]
"""A column of `savings_of_longer_window`."""


def savings_of_longer_window(longer: pd.DataFrame, shorter: pd.DataFrame) -> pd.DataFrame:
    """Return how much lower the loss of a model is with a longer long window than with a shorter
    one, in nats, at each token that both measured. The columns are document, target and

        saved                 L_shorter − L_longer
        more_than_unrelated   saved, minus what is saved with another document's text as distant
                              text: the effect of a longer window whatever text it holds. NaN where
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
    savings: pd.DataFrame,
    column: SavingColumn = "saved",
    split_documents: SplitDocuments | None = None,
) -> Interval:
    """Return the mean saving of a model's longer window, in nats a token, and its paired interval.

    Args:
        savings: The rows of `savings_of_longer_window`.
        column: The column that is averaged. Tokens without a value do not count.
        split_documents: The parts of documents that were split, which are resampled together.
    """
    measured = savings[savings[column].notna()]
    return _paired_mean(measured[column], measured.document, split_documents)


def saving_difference(
    first: pd.DataFrame,
    second: pd.DataFrame,
    column: SavingColumn = "saved",
    split_documents: SplitDocuments | None = None,
) -> Interval:
    """Return the mean saving of a first model minus that of a second one, over the tokens of both,
    in nats a token, and its paired interval.

    Args:
        first: The rows of `savings_of_longer_window` of the first model.
        second: Those of the second model.
        column: The column that is averaged. Tokens without a value do not count.
        split_documents: The parts of documents that were split, which are resampled together.
    """
    shared = _shared_tokens(first, second)
    differences = shared[f"{column}_of_first"] - shared[f"{column}_of_second"]
    has_value = differences.notna()
    return _paired_mean(differences[has_value], shared.document[has_value], split_documents)


def _shared_tokens(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each token that both tables have, with the columns of both:
    `loss_long_of_first`, `loss_long_of_second`, …"""
    return first.merge(second, on=KEYS, suffixes=("_of_first", "_of_second"))


def _paired_mean(
    differences: pd.Series, documents: pd.Series, split_documents: SplitDocuments | None
) -> Interval:
    """Return the mean of differences between two measurements, and its interval over documents.

    The interval is paired: as each value is a difference at one token, a resample draws the same
    documents for both measurements. All three numbers are NaN without a difference, and the ends of
    the interval with fewer than `MIN_DOCUMENTS` documents.

    Args:
        differences: A difference for each token, in nats.
        documents: The document of each token.
        split_documents: The parts of documents that were split, which are resampled together.
    """
    if differences.empty:
        return NO_INTERVAL
    sums_by_document = _sums_by_document(differences, documents, split_documents)
    interval = _mean_of_tokens(sums_by_document).interval()
    num_documents = len(sums_by_document)
    if num_documents < MIN_DOCUMENTS:
        return interval.without_ends()
    # A bootstrap over few documents is too narrow.
    return interval.stretched(width_ratio(num_documents))


# --- means over tokens, resampled by document -----------------------------------------------------


def _sums_by_document(
    values: pd.Series, documents: pd.Series, split_documents: SplitDocuments | None
) -> pd.DataFrame:
    """Return a row for each whole document, with the sum of its values and its number of tokens.

    Args:
        values: A value for each token.
        documents: The document of each token.
        split_documents: The parts of documents that were split.
    """
    table = pd.DataFrame({"value": values, "num_tokens": 1.0})
    return table.groupby(whole_documents(documents, split_documents).to_numpy()).sum()


def _mean_of_tokens(sums_by_document: pd.DataFrame) -> Bootstrapped:
    """Return the mean over all tokens, as a ratio of two sums: documents differ in their number of
    tokens, so a mean over documents would be another number."""
    sum_of_values, num_tokens = resample(sums_by_document)
    return sum_of_values / num_tokens
