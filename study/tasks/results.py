"""Read and format the table of a task experiment. Without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from study.tables_of_rows import markdown, read_rows

TABLE = "accuracy.parquet"


@dataclass(frozen=True)
class Row:
    """One trained model, tested at one length (and one k)."""

    task: str
    scheme: str
    seed: int
    train_k: int | None
    test_k: int | None
    """None: the task has no k, or draws it itself."""

    length: int
    token_accuracy: float
    """Share of correct response tokens in free-running generation."""

    id_accuracy: float | None
    """The same of the response's position IDs, or its labels. None: this scheme predicts none."""

    exact_match: float
    """Share of samples with a fully correct response, free-running; a wrong ID that is fed back
    (ppc) is an error."""

    low: float
    high: float
    """Wilson's 95% interval of exact_match, for this one model."""

    teacher_forced: float
    """Share of correct response tokens given the true ones before them."""

    num_samples: int


def read_results(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows of an experiment's table, and what is stored about it."""
    return read_rows(folder / TABLE, Row, "python -m study.tasks CONFIG")


class ShareInterval(NamedTuple):
    low: float
    high: float


def wilson(share: float, count: int) -> ShareInterval:
    """Return Wilson's 95% interval of a share of `count` independent yes-or-no answers:

    (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n), with share p and count n.
    """
    z = 1.959964
    centre = share + z**2 / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count
    low = (centre - half) / scale
    high = (centre + half) / scale
    # At a share of 0 or 1, one end is that share up to rounding.
    return ShareInterval(max(0.0, min(share, low)), min(1.0, max(share, high)))


def format_table(rows: list[Row]) -> str:
    """Return a Markdown table with a line for each scheme and k, and a column for each length. A
    cell has the mean of exact_match over seeds, and the lowest and highest end of all seeds'
    intervals."""
    table = pd.DataFrame(rows).astype({"train_k": "Int64", "test_k": "Int64"})
    names = {"scheme": "scheme", "train_k": "trained k ≤", "test_k": "k"}
    keys = [key for key in names if table[key].notna().any()]
    table = table.sort_values(["train_k", "test_k"], kind="stable")
    cells = table.groupby([*keys, "length"], sort=False).agg(
        {"exact_match": "mean", "low": "min", "high": "max"}
    )
    shown = cells.apply(lambda cell: "{:.3f} [{:.2f}, {:.2f}]".format(*cell), axis=1)
    order = shown.index.droplevel("length").unique()
    by_length = shown.unstack().loc[order].fillna("").reset_index()
    header = [names.get(column, str(column)) for column in by_length]
    return markdown([header, *by_length.astype(str).values.tolist()])
