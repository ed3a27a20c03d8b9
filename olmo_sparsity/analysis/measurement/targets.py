"""Choose the targets to evaluate: by their gap, by the text alone, or those of another measurement.

    choose_targets       by the losses: a large gap, or a bigram that recurs
    targets_by_text      by chance alone, from all tokens
    targets_with_window  those of another measurement

`Plan.select_targets` calls the first two. Targets that a user names are in named_targets.py.

Each returns a table with the columns `COLUMNS`. Here token 18 of document 1 is in two sets, and
token 25 is a target of the placebo:

    document  target  distant_part  target_set
           1      18  document      bigram
           1      18  document      gap
           1      25  placebo       gap

Thresholds are fitted on documents with an even number and used on documents with an odd one. So the
threshold does not depend on the reported targets, but their choice does: targets with a large gap
are chosen by their own outcome. The placebo measures that effect. Its targets are chosen by the
same rules from the gaps with an unrelated text in place of the distant context.

Dimension key: T targets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.options import MIN_GAP, Settings
from olmo_sparsity.analysis.results.target_rows import (
    KEYS,
    distant_part_losses,
    half_of,
    has_spans,
    with_ends,
)
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.streams import stream
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import NO_INDICES, Spans, span_width
from olmo_sparsity.text.windows import Block, Windows

COLUMNS = [*KEYS, "distant_part", "target_set"]
"""Columns of a table of targets: document, target (the place of its first token), distant part,
target set. Targets of several tokens have the column `end`, too."""


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
    """Choose targets in the documents of the report half, by their gap (set `gap`) or by the text
    (set `bigram`), for the document's own distant context and for the placebo's.

    Each set has at most `max_targets` targets of a document, drawn at random, and `bigram` also at
    most the `share` of all tokens of the document, as `gap` has on average.

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

    def max_by_gap(document: int) -> int:
        return max_targets

    def max_by_bigram(document: int) -> int:
        # As many as `gap` has on average, also in a text that repeats itself.
        return min(int(np.ceil(settings.share * num_tokens[document])), max_targets)

    smallest_gap = -np.inf if threshold is None else threshold
    has_large_gap = candidates.gap >= smallest_gap
    by_gap = _draw_of_documents(candidates[has_large_gap], "gap", max_by_gap, settings.seed)
    by_bigram = _draw_of_documents(
        candidates[candidates.bigram], "bigram", max_by_bigram, settings.seed
    )

    chosen = pd.concat([by_gap, by_bigram])[COLUMNS]
    # Each set has random streams of its own, so leaving one out changes nothing in the other.
    chosen = chosen[chosen.target_set.isin(settings.sets)]
    return chosen.sort_values(COLUMNS, ignore_index=True)


def targets_by_text(documents: Sequence[Document], settings: Settings) -> pd.DataFrame:
    """Choose the targets of the set `every`, which needs no model: each token of the documents has
    the same chance. Therefore `max_targets` limits the mean of all documents, not each of them."""
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
            rows.append((document.number, int(place), "document", "every"))
    chosen = pd.DataFrame(rows, columns=COLUMNS).astype(dict.fromkeys(KEYS, int))
    return chosen.sort_values(COLUMNS, ignore_index=True)


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


def _draw_of_documents(
    candidates: pd.DataFrame, target_set: str, max_of_document: Callable[[int], int], seed: int
) -> pd.DataFrame:
    """Draw targets at random from the candidates of each document and distant part, and add the
    column `target_set`.

    Args:
        candidates: Rows of `distant_part_losses` that may become targets.
        target_set: The name of their target set.
        max_of_document: Returns the largest number of targets that are drawn from a document, by
            its number.
        seed: The seed of the measurement.
    """
    drawn_rows = [candidates[:0]]
    for (document, distant_part), group in candidates.groupby(["document", "distant_part"]):
        # A stream for each document, so that the draw does not depend on which others are measured.
        generator = stream(seed, "targets", document, target_set, distant_part)
        drawn = generator.permutation(len(group))[: max_of_document(int(document))]
        drawn_rows.append(group.iloc[np.sort(drawn)])
    return pd.concat(drawn_rows).assign(target_set=target_set)


def targets_with_window(
    targets: pd.DataFrame, windows: Windows, same_settings: bool
) -> pd.DataFrame:
    """Return the targets of another measurement of the same text, without those that have no full
    long window here. So two models are compared at the same targets.

    Args:
        targets: The table of the other measurement.
        windows: The windows of this measurement.
        same_settings: Whether windows, seed and controls are those of the other measurement. If
            not, the unrelated texts differ, and so would the placebo: its targets are left out.
    """
    is_kept = targets.target >= windows.first_target
    if not same_settings:
        is_kept &= targets.distant_part == "document"
    return targets[is_kept].sort_values(COLUMNS, ignore_index=True)


def first_target_place(windows: Windows, units: str) -> int:
    """Return the first place of a text at which a target has a full window and a distant unit."""
    # Spans have a fixed width. Of other units one token may be enough.
    return max(windows.first_target, windows.short + (span_width(units) or 1))


def largest_gaps(losses: pd.DataFrame, column: str = "loss_long", num_targets: int = 8) -> Spans:
    """Return the tokens of one document with the largest gaps, without gaps below `MIN_GAP`. If all
    are below, return the one with the largest.

    Args:
        losses: Losses of a document.
        column: The column of the loss with the long window, which is another for the placebo.
        num_targets: The largest number of tokens to return.
    """
    if not len(losses):
        return []
    gaps = (losses.loss_short - losses[column]).set_axis(losses.target).nlargest(num_targets)
    large = gaps[gaps >= MIN_GAP]
    if not len(large):
        large = gaps[:1]
    return [(int(place), int(place) + 1) for place in sorted(large.index)]


def targets_fingerprint(targets: pd.DataFrame) -> str:
    """Return the SHA-256 of a table of targets."""
    # Without targets of several tokens `end` is left out, as earlier versions did not store it.
    columns = [*COLUMNS, "end"] if has_spans(targets) else COLUMNS
    return hashlib.sha256(targets[columns].to_csv(index=False).encode()).hexdigest()


def targets_of_document(targets: pd.DataFrame, document: Document) -> dict[str, np.ndarray]:
    """Return the targets of one document: distant part → an array of two columns, with a row for
    each target, its first place and one past its last. A target in several sets has one row."""
    rows = with_ends(targets[targets.document == document.number])
    groups = rows.groupby("distant_part")[["target", "end"]]
    return {str(part): np.unique(spans.to_numpy(), axis=0) for part, spans in groups}


def check_all_evaluated(folder: Path, targets: pd.DataFrame, recovery: pd.DataFrame) -> None:
    """Raise DataError if a target has no row in the table recovery.

    Args:
        folder: The folder of the measurement, for the error.
    """
    # Losses of two runs may differ in their last digits, so that a target close to the threshold is
    # chosen by only one of them.
    keys = [*KEYS, "distant_part"]
    evaluated = pd.MultiIndex.from_frame(recovery[keys])
    missing = pd.MultiIndex.from_frame(targets[keys]).difference(evaluated)
    if len(missing):
        document, target, _ = missing[0]
        raise DataError(
            f"{folder}: {len(missing)} targets were not evaluated, such as {target} of document "
            f"{document}, as losses changed; delete {folder / 'parts/recovery'}, and run it again"
        )
