"""Numbers of a page that name their row hold what the row holds.

A comment binds the numbers before it in its line, back to the comment before:

    0.93, net 0.55 <!-- prose_wikipedia_contextual_seed1 gap add_one 1: recovery net -->
    0.99 and 0.97 <!-- source_rivals rival=AT2: one either -->
    0.28 [0.15, 0.43] <!-- real.md#differences difference=one sentence − one token: recovery[] -->

It names a measurement, its units (the first that it has, unless given), target set, selector and k,
then columns of its summary (`net[]`: net, net_low, net_high; `long`, `short`: its windows;
`millions` of parameters; `threshold` of its targets, in nats; `check`: the induction check, in
percent). `gap/whole` are the targets of a set that are such a part of a word. Or a stored table and
values that its row has, then columns; or a task result and values, then lengths: exact match, the
mean over seeds (`200[]`: with the lowest and highest end of their intervals). `first + second` is
the mean of two directions of transfer.

Or it names a page (of docs/tables, or a path: `benchmarks/README.md`), a heading, and the cells
that rows of its tables have, then headers, up to their first comma if that is enough (in both `*`
is any text, `?` a character): the first number of the cell, `[]` all numbers of it, `[2]` the
second. In a block of printed text each line is a row: `in`, the line without indentation above it,
`line`, up to its colon, and its `numbers`. Several rows give a number each; `min(…)`, `max(…)`,
`mean(…)` and `range(…)`, the lowest and the highest, are over all of them; `minus(…)` is of a loss
that is called a cost, `name (2)` the second column of a name. Braces stand for several rows:
`{one,other}_seed1`.

A number of a column `threshold` is one of the row of docs/thresholds.md with that name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
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
    read_ladder,
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


def without_code(text: str) -> str:
    return re.sub(r"\]\([^)]*\)|`[^`]*`|<!--.*?-->", "", text)


def shown_numbers(text: str) -> list[str]:
    """Without links and code, as they are written."""
    return NUMBER.findall(without_code(text))


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
        assert numbers, (row, column)
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
    numbers = {"millions": meta["model"]["num_parameters"] / 1e6, **meta["targets"]}
    if check := meta.get("induction"):
        numbers["check"] = 100 * check["drop"] / check["loss_first"]
    return {**found, **meta["windows"], **numbers}


# --- tables of docs/tables ------------------------------------------------------------------------


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
    header, at = re.fullmatch(r"(.*?)(\[\d*\])?", column).groups()  # type: ignore[union-attr]
    cells = [cell for name, cell in row.items() if matches(header, name)]
    cells = cells or [cell for name, cell in row.items() if matches(header, name.split(", ")[0])]
    assert len(cells) <= 1 or "*" in header, (column, list(row))
    found = [[float(number.replace(",", "")) for number in NUMBER.findall(cell)] for cell in cells]
    if at == "[]":
        return [number for numbers in found for number in numbers]
    return [numbers[int((at or "[1]")[1:-1]) - 1] for numbers in found]


def matches(pattern: str, text: str) -> bool:
    """`*` is any text, `?` a character."""
    pattern = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return bool(re.fullmatch(pattern, text))


# --- pages ----------------------------------------------------------------------------------------


def bound_in(line: str) -> Iterator[tuple[str, str, str]]:
    """Each row and columns that a comment names, and the text before it; at last the rest."""
    end = 0
    for match in BOUND.finditer(line):
        before, end = line[end : match.start()], match.end()
        yield match[1], match[2], before
    yield "", "", line[end:]


def bound() -> Iterator[tuple[str, str, str, str]]:
    for page in WRITTEN:
        for line in page.read_text(encoding="utf-8").splitlines():
            yield from ((page.name, *found) for found in bound_in(line) if found[0])


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


# --- numbers that name no row ---------------------------------------------------------------------

RECORDS = {"log.md", "thresholds.md"}
"""Pages of dated entries that nobody edits."""
FREE = {
    "README.md": "5% 40% 0.9 2.0",
    "development.md": "4.7 1.0 4.53 0.11 5.5 2.14 3.32",
    "engines.md": "0.05 0.5 0.05 0.5 0.95 0.97",
    "explain.md": "0.1",
    "gate.md": "1.0 3%",
    "long_documents.md": "80% 3% 1.2 40%",
    "measure.md": "0.1 89% 13% 0.9",
    "paper_map.md": "1.4 0.05",
    "results.md": "0.2 0.1 0.1 0.3",
    "results_models.md": "0.1 0.001 −0.003 0.004 0.021 0.22% 0.7 0.9 0.001 −0.003 0.004",
    "results_prose.md": "0.67 0.64 0.87",
    "results_sources.md": "0.83 0.05 0.05 0.85 1.00 0.90 1.00 0.05 0.88 0.1",
    "results_tasks.md": "0.9 0.99",
    "scaling.md": "13% 5% 25% 85% 1% 40% 45% 48% 55% 1.2",
    "sources.md": "0.3 0.02 5% 0.1 5% 6% 0.05",
    "text.md": "1.7M 0.6",
    "theory.md": "0.5 0.2% 1% 5% 5%",
    "train.md": "1.4 0.1 3.2 2.5 0.1",
}
"""The numbers of a page that name no row: defaults, versions and the like. Take one out when you
bind it or remove it."""
MEANT = re.compile(
    r"(Theorem|Proposition|Definition|Assumption|Python|PyTorch|SLURM|Llama|Llama-|Qwen 2,|arXiv)"
    r" ?[\d.]+( to 3\.13)?|\b(95|15|10)%"  # of intervals, of the induction check, of targets
)
UNITS = re.compile(NUMBER.pattern + r"(?!\.?\d)[%M]?")


@cache
def lines_of(page: Path) -> list[tuple[str, str, str]]:
    """Lines without blocks of code: of a row of a table its first cell, that of the column
    `threshold`, and the rest."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found, header = [], []
    for line in text.splitlines():
        cells = line.split("|") if line.startswith("|") else []
        header = header or [cell.strip() for cell in cells] if cells else []
        threshold = cells.pop(header.index("threshold")) if "threshold" in header else ""
        found.append((cells[1] if cells else "", threshold, "|".join(cells) or line))
    return found


def free_numbers(page: Path) -> Iterator[str]:
    """Numbers with a point, and percentages, that name no row; but thresholds and sizes of models,
    which other tests compare."""
    for _, _, line in lines_of(page):
        for row, columns, before in bound_in(line):
            num_bound = len(list(stored_numbers(row, columns_of(row, columns)))) if row else 0
            text = without_code(before)
            if num_bound:
                text = text[: list(NUMBER.finditer(text))[-num_bound].start()]
            free = UNITS.findall(MEANT.sub("", text))
            yield from (n for n in free if re.search(r"[.%]", n) and n not in sizes())


@cache
def sizes() -> set[str]:
    """Parameters of the stored models, as pages write them."""
    stored = [line["meta"]["model"]["num_parameters"] for line in measurements().values()]
    stored += read_ladder("ladder_contextual", 1).num_parameters.tolist()
    return {f"{size / 1e6:.{digits}f}M" for size in stored for digits in (1, 2)}


@pytest.mark.parametrize("page", [page for page in WRITTEN if page.name not in RECORDS])
def test_no_number_without_its_row(page: Path) -> None:
    assert " ".join(free_numbers(page)) == FREE.get(page.name, "")


@cache
def thresholds() -> dict[str, str]:
    """By the name of a claim; the first of them were written to the page of claims."""
    pages = (ROOT / f"docs/{name}.md" for name in ("paper_map", "thresholds"))
    lines = (
        re.findall(r"(?m)^\| \**([A-Z]\d+)\** \|[^|]*\|([^|]*)", page.read_text()) for page in pages
    )
    return {name: threshold for page in lines for name, threshold in page}


def with_those_named(names: set[str]) -> set[str]:
    """With claims that their thresholds name: `S1's condition`."""
    text = " ".join(thresholds()[name] for name in names)
    more = names | (set(CLAIM.findall(text)) & thresholds().keys())
    return with_those_named(more) if more > names else names


CLAIM = re.compile(r"\b(?!C4|H200)[A-Z]\d+\b")


@pytest.mark.parametrize("page", [page for page in WRITTEN if page.name not in RECORDS])
def test_thresholds_are_those_that_were_written_first(page: Path) -> None:
    for first, threshold, _ in lines_of(page):
        names = {first.strip(" *"), *CLAIM.findall(first + threshold)} & thresholds().keys()
        written = " ".join(thresholds()[name] for name in with_those_named(names))
        decimals = {number for number in NUMBER.findall(threshold) if "." in number}
        assert decimals <= set(NUMBER.findall(written)), (first, threshold)


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
