"""Find targets in the tables of a measurement, and their losses.

`KEYS` identify a target: its document, and the place of its first token. Two kinds of distant
context, `PARTS`, may precede it: the document's own, or the placebo's. Most targets are single
tokens; the column `end` is one past the last token of a target.

The table `losses` has a row for each token; `distant_part_losses` returns two for each:

    document  target  loss_short  loss_long  placebo_loss_long
           1      18         6.3        4.0                6.1

    document  target  distant_part  loss_short  loss_long   gap
           1      18  document             6.3        4.0   2.3
           1      18  placebo              6.3        6.1   0.2

Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from olmo_sparsity.base.errors import DataError

KEYS = ["document", "target"]
"""The columns that identify a target."""

DOCUMENT = "document"
PLACEBO = "placebo"
PARTS = (DOCUMENT, PLACEBO)
"""Kinds of distant context, as the column `distant_part` stores them."""


Parts = Mapping[str, Sequence[int]]
"""The name of each document that was split (`--split-long`), and the numbers of its parts, which
are the documents of the tables."""


def whole_documents(document: pd.Series, parts: Parts | None) -> pd.Series:
    """Return for each row the number of the whole document that it counts as. All parts of a split
    document count as its first part. Intervals resample whole documents, because parts of one
    resemble each other.

    `document`: the number of each row's document. `parts`: the parts of documents that were split.
    """
    if not parts:
        return document
    first_part = {part: numbers[0] for numbers in parts.values() for part in numbers}
    return document.map(first_part)


def half_of(document: int) -> str:
    """Return the half of the documents that a document belongs to: `threshold`, on which thresholds
    are fitted, or `report`, on which they are used and recovery is measured. Halves alternate, so
    that documents which are sorted by date or source are in both."""
    return "report" if document % 2 else "threshold"


def with_ends(targets: pd.DataFrame) -> pd.DataFrame:
    """Add the column `end`, one past a target's last token, where all are single tokens."""
    return targets if "end" in targets else targets.assign(end=targets.target + 1)


def has_spans(targets: pd.DataFrame) -> bool:
    """Return whether a target has several tokens."""
    return "end" in targets and bool((targets.end > targets.target + 1).any())


def tokens_of_targets(targets: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each token of each target, with its `place` in the document."""
    spans = with_ends(targets)[[*KEYS, "end"]].drop_duplicates(ignore_index=True)
    tokens = spans.loc[spans.index.repeat(spans.end - spans.target)]
    # The rows of a span have one index after `repeat`, so this numbers its tokens.
    return tokens.assign(place=tokens.target + tokens.groupby(level=0).cumcount())


def losses_of_targets(losses: pd.DataFrame, targets: pd.DataFrame) -> pd.DataFrame:
    """Return the table of losses with one change: for a target of several tokens, the row of its
    first token holds the sum over all its tokens."""
    if not has_spans(targets):
        return losses
    tokens = tokens_of_targets(targets)
    losses_of_places = losses.rename(columns={"target": "place"})
    by_target = tokens.merge(losses_of_places, "left", on=["document", "place"]).groupby(KEYS)
    # A token without a row has NaN after the merge, which `count` does not count.
    if by_target.loss_short.count().ne(by_target.size()).any():
        raise DataError("the table losses lacks tokens of targets; measure again")

    loss_columns = list(losses.select_dtypes("floating"))
    sums = by_target[loss_columns].sum(min_count=1)
    summed = losses.set_index(KEYS)
    summed.loc[sums.index, loss_columns] = sums.astype(losses[loss_columns].dtypes)
    return summed.reset_index()


def distant_part_losses(losses: pd.DataFrame) -> pd.DataFrame:
    """Return two rows for each target, with its losses and its `gap`: one in the document's own
    distant context, and one in that of the placebo."""
    short = losses.loss_short.astype(float)
    parts = []
    for part, name in zip(PARTS, ("", "placebo_"), strict=True):
        long = losses[f"{name}loss_long"]
        rows = losses[KEYS].assign(
            distant_part=part, loss_short=short, loss_long=long, gap=short - long
        )
        # Only the choice of targets reads it, and tables of earlier measurements lack it.
        if "bigram" in losses:
            rows["bigram"] = losses[f"{name}bigram"]
        parts.append(rows)
    return pd.concat(parts, ignore_index=True)
