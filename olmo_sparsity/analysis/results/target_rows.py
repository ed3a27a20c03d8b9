"""Find targets in the tables of a measurement, and look up their losses.

A target is identified by its document and the place of its first token (`KEYS`). Most targets are
single tokens; the column `end` is one past the last token of a target. The distant text before a
target, its *distant part*, is the document's own or the placebo's (`DISTANT_PARTS`).

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
DISTANT_PARTS = (DOCUMENT, PLACEBO)
"""The values of the column `distant_part`: which distant text precedes a target."""

SplitDocuments = Mapping[str, Sequence[int]]
"""With `--split-long`: the name of each document, and the numbers of its parts. Each part is a
document of the tables. A short document is its only part: {"a.txt": [2], "book.txt": [3, 4, 5]}."""


def whole_documents(document: pd.Series, split_documents: SplitDocuments | None) -> pd.Series:
    """Return for each row the number of the whole document that it belongs to, which is the number
    of the first part if the document was split. Intervals resample whole documents, because the
    parts of one document resemble each other.

    Args:
        document: The number of each row's document: 2, 3, 4, 5.
        split_documents: The parts of all documents; None or an empty mapping if none was split.
            With {"a.txt": [2], "book.txt": [3, 4, 5]} the result is 2, 3, 3, 3.
    """
    if not split_documents:
        return document
    first_part = {part: parts[0] for parts in split_documents.values() for part in parts}
    return document.map(first_part)


def half_of(document: int) -> str:
    """Return the half of the documents that a document belongs to: `threshold`, on which thresholds
    are fitted, or `report`, on which they are used and recovery is measured. Halves alternate, so
    that documents which are sorted by date or source are in both."""
    return "report" if document % 2 else "threshold"


def with_ends(targets: pd.DataFrame) -> pd.DataFrame:
    """Return the targets with a column `end`. A table without it has single tokens only, so their
    ends are one past the targets."""
    return targets if "end" in targets else targets.assign(end=targets.target + 1)


def has_spans(targets: pd.DataFrame) -> bool:
    """Return whether any target has several tokens."""
    return "end" in targets and bool((targets.end > targets.target + 1).any())


def tokens_of_targets(targets: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each token of each target, with its `place` in the document. A target at 18
    with the end 20 has two rows, with the places 18 and 19."""
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
    # A row of `losses` is about one token: there, `target` is the place of this token.
    losses_of_places = losses.rename(columns={"target": "place"})
    by_target = tokens.merge(losses_of_places, "left", on=["document", "place"]).groupby(KEYS)
    # A token without a row has NaN after the merge, which `count` does not count.
    if by_target.loss_short.count().ne(by_target.size()).any():
        raise DataError("the table losses lacks tokens of targets; measure again")

    loss_columns = list(losses.select_dtypes("floating"))
    # With `min_count`, a sum of unknown losses alone is NaN, not 0.
    sums = by_target[loss_columns].sum(min_count=1)
    summed = losses.set_index(KEYS)
    summed.loc[sums.index, loss_columns] = sums.astype(losses[loss_columns].dtypes)
    return summed.reset_index()


def distant_part_losses(losses: pd.DataFrame) -> pd.DataFrame:
    """Return two rows for each target, with its losses and its `gap`, in nats: one after the
    document's own distant text, and one after the placebo's."""
    loss_short = losses.loss_short.astype(float)
    rows_of_parts = []
    for distant_part, prefix in ((DOCUMENT, ""), (PLACEBO, "placebo_")):
        loss_long = losses[f"{prefix}loss_long"]
        rows = losses[KEYS].assign(
            distant_part=distant_part,
            loss_short=loss_short,
            loss_long=loss_long,
            gap=loss_short - loss_long,
        )
        # Only the choice of targets reads it, and tables of earlier measurements lack it.
        if "bigram" in losses:
            rows["bigram"] = losses[f"{prefix}bigram"]
        rows_of_parts.append(rows)
    return pd.concat(rows_of_parts, ignore_index=True)
