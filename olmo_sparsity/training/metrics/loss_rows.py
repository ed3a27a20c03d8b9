"""Describe the losses of an evaluation: a row for each range of positions.

    {"from": 0, "to": 128, "loss": 3.2911, "bits_per_byte": 1.1021, "num_tokens": 32512,
     "num_documents": 256}
    {"from": 128, "to": 256, "loss": 3.1470, …}

evaluation/evaluate.py makes such rows. Lists of them are in metrics.jsonl as `heldout`, as
`by_place`, and in `by_corpus`; loss_table.py, curves.py and writers.py read them. Nothing here
imports torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NotRequired, TypedDict

LossRow = TypedDict(
    "LossRow",
    {
        "from": int,
        "to": int,  # the first position after the range
        "loss": float,  # mean over the tokens of the range, in nats
        "bits_per_byte": NotRequired[float],  # of `heldout` and `by_corpus`
        "standard_error": NotRequired[float],  # of `by_place`, over documents
        "num_tokens": int,
        "num_documents": NotRequired[int],  # earlier versions counted only tokens
    },
)


class EvaluationRow(TypedDict):
    """The row of an evaluation in metrics.jsonl."""

    step: int
    timestamp: str
    heldout: list[LossRow]
    """Loss by position; the mean over corpora, if there are several."""

    induction_drop: NotRequired[float]
    """In nats. Earlier versions did not measure it."""

    by_corpus: NotRequired[dict[str, list[LossRow]]]
    """Loss by position of each of several corpora, by its name."""

    by_place: NotRequired[list[LossRow]]
    """With `evaluation.documents`: loss by place, the farthest first."""

    lm_eval: NotRequired[dict[str, float]]
    """With `evaluation.lm_eval`: the value of each TASK/METRIC."""


def weighted_mean_rows(
    by_corpus: Mapping[str, Sequence[LossRow]], weights: Mapping[str, float]
) -> list[LossRow]:
    """Return a row for each range with the means over corpora, and the sums of their counts. In one
    range, with the weights 0.75 of web and 0.25 of code:

        web 3.2, code 2.0    0.75 · 3.2 + 0.25 · 2.0 = 2.9
        web 3.2 alone        3.2, where all documents of code are too short for the range

    Args:
        by_corpus: The rows of each corpus, by its name.
        weights: The weight of each corpus. One of 0 is evaluated, and not part of the mean.
    """
    rows_of_range: dict[tuple[int, int], list[_WeightedRow]] = defaultdict(list)
    for name, rows in by_corpus.items():
        weight = weights[name]
        if weight == 0:
            continue
        for row in rows:
            rows_of_range[row["from"], row["to"]].append(_WeightedRow(weight, row))
    return [_mean_row(rows_of_range[limits]) for limits in sorted(rows_of_range)]


class _WeightedRow(NamedTuple):
    """The losses of one corpus in a range of positions."""

    weight: float
    """The weight of the corpus in the mean."""

    row: LossRow


def _mean_row(weighted_rows: Sequence[_WeightedRow]) -> LossRow:
    """Return the mean of the corpora that have tokens in one range of positions. One of short
    documents may have none (`positions.per_document`), so weights are divided by their sum here."""
    total_weight = sum(weight for weight, _ in weighted_rows)
    first_row = weighted_rows[0].row
    return {
        "from": first_row["from"],
        "to": first_row["to"],
        "loss": sum(weight * row["loss"] for weight, row in weighted_rows) / total_weight,
        "bits_per_byte": (
            sum(weight * row["bits_per_byte"] for weight, row in weighted_rows) / total_weight
        ),
        "num_tokens": sum(row["num_tokens"] for _, row in weighted_rows),
        "num_documents": sum(row["num_documents"] for _, row in weighted_rows),
    }


def format_losses(rows: Sequence[LossRow]) -> str:
    """Return the losses of the ranges as one line: `[0, 128) 3.2911 · [128, 256) 3.1470`."""
    return " · ".join(f"[{row['from']}, {row['to']}) {row['loss']:.4f}" for row in rows)


def range_in_words(row: LossRow) -> str:
    """Return a range in words, with its last position: `0 … 127` for from=0 and to=128."""
    return f"{row['from']} … {row['to'] - 1}"
