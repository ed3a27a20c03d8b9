"""Choose the targets to evaluate, from the losses or from the text alone.

    set       a token is a candidate if                                     chosen by
    gap       distant text lowers its loss by at least the threshold        choose_targets
    bigram    it and the token before it occur together in distant text     choose_targets
    every     always; the model is not asked                                targets_by_text

`Plan.select_targets` calls both functions. Each draws from the candidates at random, and returns a
table of targets (target_tables.py). Targets that a user names are in named_targets.py.

`fit_threshold` fits the threshold on documents with an even number (the threshold half), and
targets are chosen in documents with an odd one (the report half). So no target has a part in its
own threshold. But a target of the set `gap` is still chosen for its large gap, and that may be
large by chance. The placebo measures how much such chance recovers: its targets are chosen by the
same rules, from the gaps with an unrelated text in place of the distant context.

Dimension key: T targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.target_tables import TARGET_COLUMNS
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.target_rows import (
    DOCUMENT,
    KEYS,
    distant_part_losses,
    half_of,
)
from olmo_sparsity.base.streams import stream
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import NO_INDICES
from olmo_sparsity.text.windows import Block


def fit_threshold(losses: pd.DataFrame, share: float, min_gap: float) -> float | None:
    """Return the smallest gap that makes a token a target, in nats. Return None for share=1, where
    any gap does.

    Args:
        losses: Losses of the threshold half of the documents.
        share: The fraction of these tokens whose gap is as large as the returned one, or larger.
        min_gap: A smaller gap is not returned, even if fewer tokens reach it.
    """
    if share == 1.0:
        return None
    gaps = (losses.loss_short - losses.loss_long).to_numpy()
    gap_of_share = float(np.quantile(gaps, 1 - share))
    return max(gap_of_share, min_gap)


def choose_targets(
    losses: pd.DataFrame, threshold: float | None, settings: Settings
) -> pd.DataFrame:
    """Choose the targets of the sets `gap` and `bigram` in the documents of the report half, for
    the document's own distant context and for the placebo's.

    Each set has at most `max_targets` targets of a document, drawn at random. `bigram` also has at
    most as many as `gap` has on average: the fraction `share` of the document's tokens.

    Args:
        losses: Losses of all documents.
        threshold: The smallest gap of a target, in nats. None if targets may have any gap.
        settings: The settings of the measurement.
    """
    reported = losses[losses.document.map(half_of) == "report"]
    candidates = distant_part_losses(reported)
    num_tokens = reported.groupby("document").size()
    # "all" is infinite, and a slice needs a whole number.
    max_targets = int(min(settings.max_targets_of_set, len(losses)))
    max_of_gap = pd.Series(max_targets, num_tokens.index)
    # In a text that repeats itself, most tokens would be targets of `bigram`.
    max_of_bigram = np.ceil(settings.share * num_tokens).clip(upper=max_targets).astype(int)

    smallest_gap = -np.inf if threshold is None else threshold
    has_large_gap = candidates.gap >= smallest_gap
    by_gap = _draw_of_documents(candidates[has_large_gap], "gap", max_of_gap, settings.seed)
    by_bigram = _draw_of_documents(
        candidates[candidates.bigram], "bigram", max_of_bigram, settings.seed
    )

    chosen = pd.concat([by_gap, by_bigram])[TARGET_COLUMNS]
    # Each set has random streams of its own, so leaving one out changes nothing in the other.
    chosen = chosen[chosen.target_set.isin(settings.sets)]
    return chosen.sort_values(TARGET_COLUMNS, ignore_index=True)


def _draw_of_documents(
    candidates: pd.DataFrame, target_set: str, max_by_document: pd.Series, seed: int
) -> pd.DataFrame:
    """Draw targets at random from the candidates of each document and distant part, and add the
    column `target_set`.

    Args:
        candidates: Rows of `distant_part_losses` that may become targets.
        target_set: The name of their target set.
        max_by_document: The largest number of targets that are drawn from a document, for each
            distant part; indexed by the document's number.
        seed: The seed of the measurement.
    """
    drawn_rows = [candidates[:0]]
    for (document, distant_part), group in candidates.groupby(["document", "distant_part"]):
        # A stream for each document, so that the draw does not depend on which others are measured.
        generator = stream(seed, "targets", document, target_set, distant_part)
        drawn = generator.permutation(len(group))[: max_by_document[document]]
        drawn_rows.append(group.iloc[np.sort(drawn)])
    return pd.concat(drawn_rows).assign(target_set=target_set)


def targets_by_text(documents: Sequence[Document], settings: Settings) -> pd.DataFrame:
    """Choose the targets of the set `every`, without a model. Each token of the documents has the
    same chance, so `max_targets` limits the mean number of a document, not that of each."""
    places_of_documents = [places_of(sampled_blocks(document, settings)) for document in documents]
    num_places = sum(map(len, places_of_documents))
    max_targets = min(num_places, settings.max_targets_of_set * len(documents))
    # The fraction of the tokens of each document that become targets.
    rate = 0.0
    if "every" in settings.sets:
        rate = min(settings.share, max_targets / max(num_places, 1))

    rows = []
    for document, places_T in zip(documents, places_of_documents, strict=True):
        # A stream for each document, so that the draw does not depend on which others are measured.
        generator = stream(settings.seed, "every", document.number)
        order = generator.permutation(len(places_T))
        # The random number rounds up or down, so that the mean over documents is the rate.
        num_drawn = int(rate * len(places_T) + generator.random()) if rate else 0
        for place in places_T[order[:num_drawn]]:
            rows.append((document.number, int(place), DOCUMENT, "every"))
    chosen = pd.DataFrame(rows, columns=TARGET_COLUMNS).astype(dict.fromkeys(KEYS, int))
    return chosen.sort_values(TARGET_COLUMNS, ignore_index=True)


def sampled_blocks(document: Document, settings: Settings) -> list[Block]:
    """Draw the fraction `sample` of a document's blocks, and return them in order. Each block of
    each document has the same chance, so that means, quantiles and shares over their targets
    estimate those over all targets."""
    blocks = list(settings.windows.blocks(document.tokens))
    if settings.sample == 1:
        return blocks
    generator = stream(settings.seed, "blocks", document.number)
    # Rounded up or down at random: rounding down would leave short documents without a block.
    num_drawn = int(settings.sample * len(blocks) + generator.random())
    drawn = np.sort(generator.permutation(len(blocks))[:num_drawn])
    return [blocks[index] for index in drawn]


def places_of(blocks: Sequence[Block]) -> np.ndarray:
    """Return the places of the targets of all blocks."""
    places = [NO_INDICES]
    for block in blocks:
        places.append(block.start + np.arange(block.num_targets))
    return np.concatenate(places)
