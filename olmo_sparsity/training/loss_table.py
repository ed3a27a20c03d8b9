"""Show the held-out losses of a run as text: `olmo-sparsity losses RUN`.

    runs/mine, step 2400: held-out loss by position
    positions  documents  tokens  loss (nats)  perplexity  bits/byte
      0 … 127        256  32,512       3.2911     26.8725     1.1021
    128 … 255        256  32,768       3.1470     23.2660     1.0538
    loss by step, and how far it falls when a passage is read twice (induction)
    …

metrics.jsonl (written by metrics.py) → `loss_table` → text, which the command prints
                                        `losses_by_step` → a table, which curves.py draws
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.training.metrics import read_own_lines

if TYPE_CHECKING:
    import pandas as pd

LARGEST_EXPONENT = 700
"""The largest loss of which a perplexity is computed: e to the power of 710 overflows a double."""

LossOfRange = TypedDict(
    "LossOfRange",
    {
        "from": int,  # the first position or place
        "to": int,  # one past the last
        "loss": float,  # mean, in nats a token
        "num_tokens": int,
        "num_documents": NotRequired[int],  # earlier versions counted only tokens
        "bits_per_byte": NotRequired[float],  # by position
        "standard_error": NotRequired[float],  # by place
    },
)
"""The loss of one range, as a line of metrics.jsonl holds it."""


def loss_table(run_folder: str | Path) -> str:
    """Return the logged held-out losses of a run as text: the last evaluation in detail, then all
    evaluations. Each row has its numbers of documents and tokens. A note says where rows are of
    different documents, or steps were evaluated on different text, and must not be compared."""
    evaluations = _read_evaluations(run_folder)
    last_evaluation = evaluations[-1]
    return "\n".join(
        [
            f"{run_folder}, step {last_evaluation['step']}: held-out loss by position",
            *_last_in_detail(last_evaluation),
            *_all_steps(evaluations),
        ]
    )


def _read_evaluations(run_folder: str | Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that hold held-out losses. Raise DataError if there is
    none."""
    path = Path(run_folder) / "metrics.jsonl"
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; pass a trained run, or --text to read a model's losses on it"
        )
    evaluations = [line.row for line in read_own_lines(path) if "heldout" in line.row]
    if not evaluations:
        raise DataError(f"{path} holds no held-out loss yet; let the run reach an evaluation")
    return evaluations


def _last_in_detail(evaluation: dict[str, Any]) -> list[str]:
    """Return the tables of one evaluation: losses by position and, if they were evaluated, by place
    in long documents."""
    import pandas as pd

    losses: list[LossOfRange] = evaluation["heldout"]
    by_position = pd.DataFrame(
        _columns_of_range(row)
        | {
            "loss (nats)": row["loss"],
            "perplexity": math.exp(min(row["loss"], LARGEST_EXPONENT)),
            "bits/byte": row.get("bits_per_byte", math.nan),
        }
        for row in losses
    )
    lines = [_aligned(by_position)]
    if len({row.get("num_documents") for row in losses}) > 1:
        lines.append("rows are of different documents: compare runs within a row, not two rows")
    if "by_place" in evaluation:
        by_place = pd.DataFrame(
            _columns_of_range(row)
            | {"loss (nats)": row["loss"], "standard error": row["standard_error"]}
            for row in evaluation["by_place"]
        )
        lines += ["loss by place in the same documents, the farthest first", _aligned(by_place)]
    return lines


def _columns_of_range(row: LossOfRange) -> dict[str, Any]:
    """Return the first columns of a table: a range, and its numbers of documents and tokens."""
    num_documents = row.get("num_documents")
    return {
        "positions": range_name(row),
        "documents": "–" if num_documents is None else f"{num_documents:,}",
        "tokens": f"{row['num_tokens']:,}",
    }


def range_name(row: LossOfRange) -> str:
    """Return the name of a range, with its last position: "0 … 127" for from=0 and to=128."""
    return f"{row['from']} … {row['to'] - 1}"


def _aligned(table: pd.DataFrame) -> str:
    """Return a table as text in aligned columns."""
    return table.to_string(index=False, float_format="{:.4f}".format, na_rep="nan")


def _all_steps(evaluations: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of all evaluations, in which those of other text than the last one are
    marked."""
    table = losses_by_step(evaluations)
    identity_of_last = _identity_of_text(evaluations[-1])
    is_other = [_identity_of_text(row) != identity_of_last for row in evaluations]
    if any(is_other):
        table["sample"] = ["other" if other else "" for other in is_other]
    lines = ["loss by step, and how far it falls when a passage is read twice (induction)"]
    lines.append(_aligned(table))
    if any(is_other):
        lines.append("steps marked `other` were evaluated on other text than the last one")
    return lines


def losses_by_step(evaluations: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return a table with a row for each evaluation: losses by position, the loss at the farthest
    places of `evaluation.documents`, and the induction drop.

    step  0 … 127  128 … 255  documents 3968 … 4095  induction
    1200     3.50       3.41                   3.39       0.41
    2400     3.29       3.15                   3.02       1.90
    """
    import pandas as pd

    rows = []
    for evaluation in evaluations:
        numbers = {"step": evaluation["step"]}
        numbers |= {range_name(row): row["loss"] for row in evaluation["heldout"]}
        if evaluation.get("by_place"):
            farthest = evaluation["by_place"][0]
            numbers[f"documents {range_name(farthest)}"] = farthest["loss"]
        numbers["induction"] = evaluation.get("induction_drop", math.nan)
        rows.append(numbers)
    return pd.DataFrame(rows)


def _identity_of_text(evaluation: dict[str, Any]) -> list[tuple]:
    """Return ranges and counts of an evaluation, which identify its text: two evaluations can be
    compared if theirs are equal."""
    names = ("from", "to", "num_tokens", "num_documents")
    rows = [*evaluation["heldout"], *evaluation.get("by_place", ())]
    return [tuple(row.get(name) for name in names) for row in rows]
