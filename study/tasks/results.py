"""Read, write and format the table of a task experiment. Never imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.tables_of_rows import markdown, read_rows, write_rows

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


def write_results(folder: Path, rows: list[Row], meta: dict[str, Any]) -> None:
    write_rows(folder / TABLE, rows, meta)


def read_results(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    return read_rows(folder / TABLE, Row, "python -m study.tasks CONFIG")


def wilson(share: float, count: int) -> tuple[float, float]:
    """95% interval of a share of `count` independent yes-or-no answers."""
    z = 1.959964
    centre = share + z**2 / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count
    low, high = (centre - half) / scale, (centre + half) / scale
    # At a share of 0 or 1, one end is that share up to rounding.
    return max(0.0, min(share, low)), min(1.0, max(share, high))


# --- the table as text ----------------------------------------------------------------------------


def format_table(rows: list[Row]) -> str:
    """Markdown: a line per scheme and k, a column per length. A cell has the mean of exact_match
    over seeds, and the lowest and highest end of all seeds' intervals."""
    lengths = sorted({row.length for row in rows})
    cells: dict[tuple[str, ...], dict[int, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: (row.train_k or 0, row.test_k or 0)):
        ks = [str(k) for k in (row.train_k, row.test_k) if k is not None]
        cells.setdefault((row.scheme, *ks), {}).setdefault(row.length, []).append(row)
    names = ["scheme"]
    names += ["trained k ≤"] if any(row.train_k is not None for row in rows) else []
    names += ["k"] if any(row.test_k is not None for row in rows) else []
    lines = [names + [str(length) for length in lengths]]
    for name, by_length in cells.items():
        lines.append([*name, *(format_cell(by_length.get(length, [])) for length in lengths)])
    return markdown(lines)


def format_cell(rows: list[Row]) -> str:
    if not rows:
        return ""
    mean = sum(row.exact_match for row in rows) / len(rows)
    low, high = min(row.low for row in rows), max(row.high for row in rows)
    return f"{mean:.3f} [{low:.2f}, {high:.2f}]"
