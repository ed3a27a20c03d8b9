"""Look up the numbers of a stored result by the name of its row, for pages and claims.

`ROW: columns`, where ROW is one of

    MEASUREMENT [UNITS] SET SELECTOR K     a row of its summary; `gap/whole`: of a part of words;
                                           `first + second`: the mean of two directions
    TABLE key=value …                      a row of a benchmark's table, or of a task result, whose
                                           columns are then lengths
    RUN tokens=A-BM                        the evaluations of a training run after A to B million
                                           tokens; `RUN on TEXT`: with the check of that text
    PAGE.md#heading header=cell; …         rows of a table of a page, or lines of a printed block:
                                           `in` the line above, `line` up to its colon, `numbers`

`at_placebo` of a row of a summary is the recovery at placebo targets, those at which only an
unrelated text seemed to help.
`net[]` is a number with the ends of its interval, or all numbers of a cell; `net[2]` is its second.
Columns are separated by spaces, those of a page by `; `. In cells and headers `*` is any text.
`{a,b}` is two rows. `min(…)`, `max(…)`, `mean(…)` and `range(…)` are over all rows, `minus(…)`
turns the sign.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import translate
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd

from study.pages.stored import (
    PAGES,
    ROOT,
    other_table,
    read_by_part,
    read_counts,
    read_evaluations,
    read_meta,
    read_summary,
    task_rows,
    tasks,
)

NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d,]*(?:\.\d+)?")
OVER: dict[str, Callable[[list[float]], list[float]]] = {
    "min": lambda numbers: [min(numbers)],
    "max": lambda numbers: [max(numbers)],
    "mean": lambda numbers: [float(np.mean(numbers))],
    "range": lambda numbers: [min(numbers), max(numbers)],
    "minus": lambda numbers: [-number for number in numbers],
}


def stored_numbers(binding: str) -> Iterator[float]:
    """Yield the numbers that `ROW: columns` names, in their order."""
    row, columns = binding.rsplit(": ", 1)
    found = [numbers for name in one_each(row) for numbers in rows_named(name)]
    if not found:
        raise KeyError(f"no row is {row}")
    for column in columns.split("; " if ".md#" in row else " "):
        over = re.fullmatch(r"(min|max|mean|range|minus)\((.*)\)", column)
        values = [number for numbers in found for number in numbers(over[2] if over else column)]
        if not values:
            raise KeyError(f"{row} has no {column}")
        yield from OVER[over[1]](values) if over else values


def one_each(name: str) -> list[str]:
    """`a{b,c}` → ab, ac."""
    match = re.search(r"\{([^}]*)\}", name)
    if not match:
        return [name]
    before, after = name[: match.start()], name[match.end() :]
    options = re.split(r",(?! )", match[1])
    return [one for option in options for one in one_each(before + option + after)]


def rows_named(name: str) -> list[Callable[[str], list[float]]]:
    """Return rows as functions from a column to its numbers."""
    if page := re.fullmatch(r"(\S+\.md)#(\S+)(?: (.*))?", name):
        return [partial(cell_numbers, row) for row in rows_of_page(*page.groups(""))]
    if run := re.fullmatch(r"(.+) tokens=([\d.]+)-([\d.]+)M", name):
        rows = read_evaluations(run[1])
        trained = [row for row in rows if float(run[2]) <= row["millions"] <= float(run[3])]
        return [partial(row_numbers, row) for row in trained]
    if re.search(r" \w+=", name):
        return [partial(row_numbers, benchmark_row(name))]
    return [partial(summary_numbers, name)]


def summary_numbers(name: str, column: str) -> list[float]:
    if column == "at_placebo":  # not stored in summaries; its rows are read only for this column
        *names, target_set, selector, k = name.split()
        units = read_meta(names[0]).get("units", ["tokens"])
        chosen = names.pop() if names[-1] in units else units[0]
        counts = read_counts(" ".join(names), target_set, chosen, selector, int(k))
        return [counts["placebo_recovery"]]
    return row_numbers(summary_row(name), column)


def row_numbers(row: dict[str, Any], column: str) -> list[float]:
    ends = ["", "_low", "_high"] if column.endswith("[]") else [""]
    return [float(row[column.removesuffix("[]") + end]) for end in ends]


def summary_row(name: str) -> dict[str, Any]:
    *names, target_set, selector, k = name.split()
    meta = read_meta(names[0])
    units = meta.get("units", ["tokens"])
    chosen = names.pop() if names[-1] in units else units[0]
    target_set, _, part = target_set.partition("/")
    found: Any
    if part:
        found = read_by_part(" ".join(names), target_set, int(k)).loc[part]
        if (found.selector, found.units) != (selector, chosen):
            raise KeyError(f"no row is {name}")
    else:
        found = read_summary(" ".join(names), target_set, chosen).loc[selector, int(k)]
    numbers = {"millions": meta["model"]["num_parameters"] / 1e6, **meta["targets"]}
    if check := meta.get("induction"):
        numbers["check"] = 100 * check["drop"] / check["loss_first"]
    return {**found, **meta["windows"], **numbers}


def benchmark_row(name: str) -> dict[str, Any]:
    table, *values = re.split(r" (?=\w+=)", name)
    rows = pd.DataFrame(task_rows(table)) if table in tasks() else other_table(table)
    rows = rows.rename_axis("index").reset_index()
    for key, value in (text.split("=", 1) for text in values):
        rows = rows[rows[key].astype(str) == value]
    if table not in tasks():
        (row,) = rows.to_dict("records")
        return row
    if rows.duplicated(["length", "seed"]).any():
        raise KeyError(f"{name} names several settings")
    lengths = rows.groupby(rows.length.astype(str))
    ends = {"_low": lengths.low.min(), "_high": lengths.high.max()}
    means = dict(lengths.exact_match.mean())
    return means | {f"{at}{end}": n for end, found in ends.items() for at, n in found.items()}


# --- tables of pages ------------------------------------------------------------------------------


@cache
def tables_of_page(page: str) -> dict[str, list[dict[str, str]]]:
    """The rows of all tables and printed blocks below each heading, as written, by header."""
    found: dict[str, list[dict[str, str]]] = {}
    header: list[str] = []
    rows: list[dict[str, str]] = []
    block = above = ""
    path = next(path for path in (PAGES / page, ROOT / page) if path.exists())
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            block = line.removeprefix("```") or ("" if block else "any")
        elif block == "text":
            above = above if line.startswith(" ") else line
            name, _, numbers = line.strip().partition(": ")
            rows.append({"in": above, "line": name, "numbers": numbers or name})
        elif not block and line.startswith("#"):
            heading = re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
            rows = found.setdefault(heading, [])
        cells = [re.sub(r"[*`]", "", cell).strip() for cell in line.split("|")[1:-1]]
        if not cells:
            header = []
        elif not header:
            header = [f"{cell} (2)" if cell in cells[:i] else cell for i, cell in enumerate(cells)]
        elif set(cells[0]) != {"-"}:
            rows.append(dict(zip(header, cells, strict=True)))
    return found


def rows_of_page(page: str, heading: str, values: str) -> list[dict[str, str]]:
    rows = tables_of_page(page)[heading]
    for value in filter(None, values.split("; ")):
        header, cell = value.split("=", 1)
        rows = [row for row in rows if matches(cell, row.get(header, ""))]
    return rows


def cell_numbers(row: dict[str, str], column: str) -> list[float]:
    # Every string matches, as all parts of the expression may be empty.
    header, at = re.fullmatch(r"(.*?)(\[\d*\])?", column).groups()  # type: ignore[union-attr]
    cells = [cell for name, cell in row.items() if matches(header, name)]
    cells = cells or [cell for name, cell in row.items() if matches(header, name.split(", ")[0])]
    if len(cells) > 1 and "*" not in header:
        raise KeyError(f"{column} is ambiguous in {list(row)}")
    found = [[float(number.replace(",", "")) for number in NUMBER.findall(cell)] for cell in cells]
    if at == "[]":
        return [number for numbers in found for number in numbers]
    return [numbers[int((at or "[1]")[1:-1]) - 1] for numbers in found]


def matches(pattern: str, text: str) -> bool:
    return bool(re.fullmatch(translate(pattern.replace("[", "[[]")), text))
