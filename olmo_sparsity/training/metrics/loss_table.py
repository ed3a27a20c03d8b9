"""Show the held-out losses of a run as text: `olmo-sparsity losses RUN`.

    runs/mine, step 2400: held-out loss by position
    positions  documents  tokens  loss (nats)  perplexity  bits/byte
      0 … 127        256  32,512       3.2911     26.8725     1.1021
    128 … 255        256  32,768       3.1470     23.2660     1.0538
    loss by step, and how far it falls when a passage is read twice (induction)
    …

metrics.jsonl (written by metrics.py) → `describe_losses` → text, which the command prints
                                        `losses_by_step` → a table, which curves.py draws

A *position* is the position ID of a target in its held-out sequence, or in its document with
`positions.per_document`. A *place* is the index of a target in its document; losses by place are
those of `evaluation.documents`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.training.metrics.loss_rows import EvaluationRow, LossRow, range_in_words
from olmo_sparsity.training.metrics.read import read_lines_of_run

if TYPE_CHECKING:
    import pandas as pd

LARGEST_EXPONENT = 700
"""The largest loss, in nats, whose perplexity is shown as it is: e to the power of 710 overflows a
float. Of larger losses the perplexity of this one is shown."""


def describe_losses(run_folder: str | Path) -> str:
    """Return the logged held-out losses of a run as text: the last evaluation in detail, with the
    numbers of documents and tokens of each range, then all evaluations. A note says which rows must
    not be compared with each other, as they are of different text."""
    evaluations = _read_evaluations(run_folder)
    last_evaluation = evaluations[-1]
    lines = [f"{run_folder}, step {last_evaluation['step']}: held-out loss by position"]
    lines += _describe_last(last_evaluation)
    lines.append("loss by step, and how far it falls when a passage is read twice (induction)")
    lines += _describe_steps(evaluations)
    return "\n".join(lines)


def _read_evaluations(run_folder: str | Path) -> list[EvaluationRow]:
    """Return the rows of held-out losses in metrics.jsonl. Raise DataError if there is none."""
    path = Path(run_folder) / "metrics.jsonl"
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; pass a trained run, or --text to read a model's losses on it"
        )
    evaluations = [line.row for line in read_lines_of_run(path) if "heldout" in line.row]
    if not evaluations:
        raise DataError(f"{path} holds no held-out loss yet; let the run reach an evaluation")
    return cast(list[EvaluationRow], evaluations)


def _describe_last(evaluation: EvaluationRow) -> list[str]:
    """Return the tables of the last evaluation: by position, and by place if it was evaluated."""
    import pandas as pd

    by_position = pd.DataFrame(
        _range_and_counts(row)
        | {
            "loss (nats)": row["loss"],
            "perplexity": math.exp(min(row["loss"], LARGEST_EXPONENT)),
            "bits/byte": row.get("bits_per_byte", math.nan),
        }
        for row in evaluation["heldout"]
    )
    lines = [_aligned(by_position)]
    if len({row.get("num_documents") for row in evaluation["heldout"]}) > 1:
        lines.append("rows are of different documents: compare runs within a row, not two rows")
    if "by_place" in evaluation:
        by_place = pd.DataFrame(
            _range_and_counts(row)
            | {"loss (nats)": row["loss"], "standard error": row["standard_error"]}
            for row in evaluation["by_place"]
        )
        lines += ["loss by place in the same documents, the farthest first", _aligned(by_place)]
    return lines


def _range_and_counts(row: LossRow) -> dict[str, Any]:
    """Return the columns for the range of a loss, and its numbers of documents and tokens. Runs of
    earlier versions counted only tokens."""
    documents = row.get("num_documents")
    return {
        "positions": range_in_words(row),
        "documents": "–" if documents is None else f"{documents:,}",
        "tokens": f"{row['num_tokens']:,}",
    }


def _describe_steps(evaluations: Sequence[EvaluationRow]) -> list[str]:
    """Return the table of all evaluations, with a mark at those that must not be compared with the
    last one, and a note if there are any."""
    table = losses_by_step(evaluations)
    last_ranges = _ranges_and_counts(evaluations[-1])
    has_other_text = [_ranges_and_counts(evaluation) != last_ranges for evaluation in evaluations]
    if not any(has_other_text):
        return [_aligned(table)]
    table["sample"] = ["other" if is_other else "" for is_other in has_other_text]
    note = "steps marked `other` were evaluated on other text than the last one"
    return [_aligned(table), note]


def _ranges_and_counts(evaluation: EvaluationRow) -> list[tuple[int | None, ...]]:
    """Return all ranges and counts of an evaluation. Two evaluations in which they differ have read
    different text. If they are equal, the text is taken to be the same."""
    rows = [*evaluation["heldout"], *evaluation.get("by_place", ())]
    return [
        (row["from"], row["to"], row.get("num_tokens"), row.get("num_documents")) for row in rows
    ]


def _aligned(table: pd.DataFrame) -> str:
    """Return a table as text in aligned columns."""
    return table.to_string(index=False, float_format="{:.4f}".format, na_rep="nan")


def losses_by_step(evaluations: Sequence[EvaluationRow]) -> pd.DataFrame:
    """Return a table with a row for each evaluation: losses by position, the loss at the farthest
    places of `evaluation.documents`, and the induction drop.

    step  0 … 127  128 … 255  documents 3968 … 4095  induction
    1200     3.50       3.41                   3.39       0.41
    2400     3.29       3.15                   3.02       1.90
    """
    import pandas as pd

    rows = []
    for evaluation in evaluations:
        numbers: dict[str, float] = {"step": evaluation["step"]}
        numbers |= {range_in_words(row): row["loss"] for row in evaluation["heldout"]}
        if evaluation.get("by_place"):
            farthest = evaluation["by_place"][0]
            numbers[f"documents {range_in_words(farthest)}"] = farthest["loss"]
        numbers["induction"] = evaluation.get("induction_drop", math.nan)
        rows.append(numbers)
    return pd.DataFrame(rows)
