"""Numbers of a page that name their row hold what the row holds.

A comment binds the numbers before it in its line, back to the comment before:

    0.93, net 0.55 <!-- prose_wikipedia_contextual_seed1 gap add_one 1: recovery net -->
    0.99 and 0.97 <!-- source_rivals rival=AT2: one either -->
    0.28 [0.15, 0.43] <!-- real.md#differences difference=one sentence − one token: recovery[] -->

It names a measurement, its units (the first that it has, unless given), target set, selector and k,
then columns of its summary (`net[]`: net, net_low, net_high; `long`, `short`: its windows;
`millions` of parameters). `gap/whole` are the targets of a set that are such a part of a word. Or a
stored table and values that its row has, then columns; or a task result and values, then lengths:
exact match, the mean over seeds (`200[]`: with the lowest and highest end of their intervals).
`first + second` is the mean of two directions of transfer.

Or it names a table of docs/tables by page and heading, and the cells that its rows have, then
headers, up to their first comma if that is enough (in both `*` is any text, `?` a character): the
first number of the cell, `[]` all numbers of it, `[2]` the second. Several rows give a number each;
`min(…)`, `max(…)`, `mean(…)` and `range(…)`, the lowest and the highest, are over all of them;
`minus(…)` is of a loss that is called a cost, `name (2)` the second column of a name. Braces stand
for several rows: `{one,other}_seed1`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest

from docs.stored import (
    PAGES,
    ROOT,
    measurements,
    other_table,
    read_by_part,
    read_meta,
    read_summary,
    task_rows,
    tasks,
)

WRITTEN = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BOUND = re.compile(r"<!-- ((?:(?! -->).)*?): ((?:(?! -->|: ).)+) -->")
ENDS = {False: [""], True: ["", "_low", "_high"]}
NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d,]*(?:\.\d+)?")
OVER: dict[str, Callable[[list[float]], list[float]]] = {
    "min": lambda numbers: [min(numbers)],
    "max": lambda numbers: [max(numbers)],
    "mean": lambda numbers: [float(np.mean(numbers))],
    "range": lambda numbers: [min(numbers), max(numbers)],
    "minus": lambda numbers: [-number for number in numbers],
}


def shown_numbers(text: str) -> list[str]:
    """Without links and code, as they are written."""
    return NUMBER.findall(re.sub(r"\]\([^)]*\)|`[^`]*`|<!--.*?-->", "", text))


def one_each(name: str) -> list[str]:
    """Of `a{b,c}`: ab, ac."""
    match = re.search(r"\{([^}]*)\}", name)
    if not match:
        return [name]
    before, after = name[: match.start()], name[match.end() :]
    return [
        one for option in re.split(r",(?! )", match[1]) for one in one_each(before + option + after)
    ]


def columns_of(row: str, names: str) -> list[str]:
    return names.split("; " if ".md#" in row else " ")


def stored_numbers(row: str, columns: list[str]) -> Iterator[float]:
    rows = [found for name in one_each(row) for found in found_rows(name)]
    assert rows, f"no row is {row}"
    for column in columns:
        over = re.fullmatch(r"(min|max|mean|range|minus)\((.*)\)", column)
        numbers = [number for found in rows for number in found(over[2] if over else column)]
        yield from OVER[over[1]](numbers) if over else numbers


def found_rows(name: str) -> list[Callable[[str], list[float]]]:
    """Rows as functions from a column to its numbers."""
    if page := re.fullmatch(r"(\S+\.md)#(\S+)(?: (.*))?", name):
        return [
            lambda column, row=row: cell_numbers(row, column)
            for row in rows_of_page(*page.groups(""))
        ]
    row = stored_row(name)

    def numbers(column: str) -> list[float]:
        ends = ENDS[column.endswith("[]")]
        return [float(row[column.removesuffix("[]") + end]) for end in ends]

    return [numbers]


def stored_row(row: str) -> dict[str, Any]:
    found: Any
    name, *values = re.split(r" (?=\w+=)", row)
    if values:
        rows = pd.DataFrame(task_rows(name)) if name in tasks() else other_table(name)
        rows = rows.rename_axis("index").reset_index()
        for key, value in (text.split("=", 1) for text in values):
            rows = rows[rows[key].astype(str) == value]
        if name not in tasks():
            (found,) = rows.to_dict("records")
            return found
        assert not rows.duplicated(["length", "seed"]).any(), row
        lengths = rows.groupby(rows.length.astype(str))
        found = dict(lengths.exact_match.mean())
        found |= dict(lengths.low.min().add_suffix("_low"))
        return found | dict(lengths.high.max().add_suffix("_high"))
    *names, target_set, selector, k = row.split()
    meta = read_meta(names[0])
    units = meta.get("units", ["tokens"])
    chosen = names.pop() if names[-1] in units else units[0]
    target_set, _, part = target_set.partition("/")
    if part:
        found = read_by_part(" ".join(names), target_set, int(k)).loc[part]
        assert (found.selector, found.units) == (selector, chosen), row
    else:
        found = read_summary(" ".join(names), target_set, chosen).loc[selector, int(k)]
    millions = meta["model"]["num_parameters"] / 1e6
    return {**found, **meta["windows"], "millions": millions}


# --- tables of docs/tables ------------------------------------------------------------------------


@cache
def tables_of_page(page: str) -> dict[str, list[dict[str, str]]]:
    """The rows of all tables below each heading, as written, by header."""
    found: dict[str, list[dict[str, str]]] = {}
    header: list[str] = []
    for line in (PAGES / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            rows = found[re.sub(r"[^\w\- ]", "", line[3:].lower()).replace(" ", "-")] = []
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
    header, at = re.fullmatch(r"(.*?)(\[\d*\])?", column).groups()  # type: ignore[union-attr]
    cells = [cell for name, cell in row.items() if matches(header, name)]
    cells = cells or [cell for name, cell in row.items() if matches(header, name.split(", ")[0])]
    assert cells, (column, list(row))
    assert len(cells) == 1 or "*" in header, (column, list(row))
    found = [[float(number.replace(",", "")) for number in NUMBER.findall(cell)] for cell in cells]
    if at == "[]":
        return [number for numbers in found for number in numbers]
    return [numbers[int((at or "[1]")[1:-1]) - 1] for numbers in found]


def matches(pattern: str, text: str) -> bool:
    """`*` is any text, `?` a character."""
    pattern = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return bool(re.fullmatch(pattern, text))


# --- pages ----------------------------------------------------------------------------------------


def bound() -> Iterator[tuple[str, str, str, str]]:
    for page in WRITTEN:
        for line in page.read_text(encoding="utf-8").splitlines():
            end = 0
            for match in BOUND.finditer(line):
                before, end = line[end : match.start()], match.end()
                yield page.name, match[1], match[2], before


@pytest.mark.parametrize(("page", "row", "columns", "before"), list(bound()))
def test_numbers_are_those_of_the_row_they_name(
    page: str, row: str, columns: str, before: str
) -> None:
    stored = list(stored_numbers(row, columns_of(row, columns)))
    written = shown_numbers(before)[-len(stored) :]
    assert len(written) == len(stored), (page, before)
    for text, value in zip(written, stored, strict=True):
        digits = len(text.partition(".")[2])
        found = f"{value:.{digits}f}"
        if float(found) == 0:  # without the sign of a number that was rounded
            text, found = text.lstrip("−-+"), found.lstrip("-")
        assert text.replace("−", "-").replace(",", "").lstrip("+") == found, columns


def test_a_page_of_results_names_its_rows() -> None:
    rows = [(page, row) for page, row, *_ in bound()]
    pages = [page for page, row in rows if "=" not in row]
    assert pages.count("README.md") >= 3
    assert pages.count("results.md") >= 5
    assert pages.count("results_prose.md") >= 5
    assert pages.count("results_models.md") >= 20
    assert sum(page == "theory.md" for page, _ in rows) >= 5
    named = {name.split()[0] for _, row in rows if "=" not in row for name in one_each(row)}
    assert {name for name in named if ".md#" not in name} <= set(measurements())


def test_a_table_is_read_by_its_headers() -> None:
    row = "theory.md#the-attention-class setting=nonlocal; k={2,3}; objective=mixture"
    assert list(stored_numbers(row, ["risk at 8L", "range(k)"])) == [0.409, 0.4789, 2, 3]
    row = "real.md#differences difference=no prefix*"
    low, high = stored_numbers(row, ["recovery[2]", "recovery[3]"])
    assert list(stored_numbers(row, ["recovery[]"]))[1:] == [low, high]
    for wrong in ("real.md#differences difference=no", "real.md#differences recovery=1"):
        with pytest.raises(AssertionError, match="no row is"):
            list(stored_numbers(wrong, ["recovery"]))
    with pytest.raises(AssertionError, match="excess"):
        list(stored_numbers("real.md#differences", ["excess"]))
