"""Show the held-out losses of a run as text: `olmo-sparsity losses RUN`.

    runs/mine, step 2400: held-out loss by position
    positions  documents  tokens  loss (nats)  perplexity  bits/byte
      0 … 127        256  32,512       3.2911     26.8725     1.1021
    128 … 255        256  32,768       3.1470     23.2660     1.0538
    loss by step, and how far it falls when a passage is read twice (induction)
    …

Place in the flow: metrics.jsonl (metrics.py) → **`loss_table`** → the command; curves.py draws the
same evaluations.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.training.metrics import read_own_lines

if TYPE_CHECKING:
    import pandas as pd

LARGEST_EXPONENT = 700
"""The largest loss whose perplexity is shown as it is: e to the power of 710 is no number."""


def loss_table(run_folder: str | Path) -> str:
    """Return the logged held-out losses of a run as text: the last evaluation in detail, then all
    evaluations. Each row has its numbers of documents and tokens. A note says where rows are of
    different documents, or steps were evaluated on different text, and must not be compared."""
    import pandas as pd

    rows = _evaluations(run_folder)
    last = rows[-1]

    # The last evaluation, in detail.
    in_detail = pd.DataFrame(
        _range_and_counts(part)
        | {
            "loss (nats)": part["loss"],
            "perplexity": math.exp(min(part["loss"], LARGEST_EXPONENT)),
            "bits/byte": part.get("bits_per_byte", math.nan),
        }
        for part in last["heldout"]
    )
    lines = [f"{run_folder}, step {last['step']}: held-out loss by position", _text(in_detail)]
    if len({part.get("num_documents") for part in last["heldout"]}) > 1:
        lines.append("rows are of different documents: compare runs within a row, not two rows")
    if "by_place" in last:
        by_place = pd.DataFrame(
            _range_and_counts(part)
            | {"loss (nats)": part["loss"], "standard error": part["standard_error"]}
            for part in last["by_place"]
        )
        lines += ["loss by place in the same documents, the farthest first", _text(by_place)]

    # All evaluations, with a mark at those that must not be compared with the last one.
    curves = losses_by_step(rows)
    is_other = [_identity_of_text(row) != _identity_of_text(last) for row in rows]
    if any(is_other):
        curves["sample"] = ["other" if other else "" for other in is_other]
    lines.append("loss by step, and how far it falls when a passage is read twice (induction)")
    lines.append(_text(curves))
    if any(is_other):
        lines.append("steps marked `other` were evaluated on other text than the last one")
    return "\n".join(lines)


def _range_and_counts(part: dict) -> dict[str, str]:
    """Return the columns for the range of a loss, and its numbers of documents and tokens. Earlier
    versions counted only tokens."""
    documents = part.get("num_documents")
    return {
        "positions": range_in_words(part),
        "documents": "–" if documents is None else f"{documents:,}",
        "tokens": f"{part['num_tokens']:,}",
    }


def _identity_of_text(row: dict) -> list[tuple]:
    """Return ranges and counts of an evaluation, which identify its text: evaluations with equal
    ones can be compared."""
    names = ("from", "to", "num_tokens", "num_documents")
    parts = [*row["heldout"], *row.get("by_place", ())]
    return [tuple(part.get(name) for name in names) for part in parts]


def _text(table: pd.DataFrame) -> str:
    """Return a table as text."""
    return table.to_string(index=False, float_format="{:.4f}".format, na_rep="nan")


def losses_by_step(rows: list[dict]) -> pd.DataFrame:
    """Return a table with a row for each evaluation: losses by position, the loss at the farthest
    places of `evaluation.documents`, and the induction drop."""
    import pandas as pd

    curves = []
    for row in rows:
        numbers = {"step": row["step"]}
        numbers |= {range_in_words(part): part["loss"] for part in row["heldout"]}
        if row.get("by_place"):
            farthest = row["by_place"][0]
            numbers[f"documents {range_in_words(farthest)}"] = farthest["loss"]
        numbers["induction"] = row.get("induction_drop", math.nan)
        curves.append(numbers)
    return pd.DataFrame(curves)


def range_in_words(part: dict) -> str:
    """Return a range in words, with its last position: `0 … 127` for from=0 and to=128."""
    return f"{part['from']} … {part['to'] - 1}"


def _evaluations(run_folder: str | Path) -> list[dict]:
    """Return the rows of held-out losses, at least one."""
    path = Path(run_folder) / "metrics.jsonl"
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; pass a trained run, or --text to read a model's losses on it"
        )
    rows = [line.row for line in read_own_lines(path) if "heldout" in line.row]
    if not rows:
        raise DataError(f"{path} holds no held-out loss yet; let the run reach an evaluation")
    return rows
