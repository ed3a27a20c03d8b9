"""Describe the losses of an evaluation: a row for each range of positions.

    {"from": 0, "to": 128, "loss": 3.2911, "bits_per_byte": 1.1021, "num_tokens": 32512,
     "num_documents": 256}
    {"from": 128, "to": 256, "loss": 3.1470, …}

evaluation/evaluate.py makes such rows. Lists of them are in metrics.jsonl as `heldout`, as
`by_place`, and in `by_corpus`; loss_table.py, curves.py and writers.py read them. Nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

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


def format_losses(rows: Sequence[LossRow]) -> str:
    """Return the losses of the ranges as one line: `[0, 128) 3.2911 · [128, 256) 3.1470`."""
    return " · ".join(f"[{row['from']}, {row['to']}) {row['loss']:.4f}" for row in rows)


def range_in_words(row: LossRow) -> str:
    """Return a range in words, with its last position: `0 … 127` for from=0 and to=128."""
    return f"{row['from']} … {row['to'] - 1}"
