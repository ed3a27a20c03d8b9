"""Numbers of a page that name their row hold what the row holds.

A comment binds the numbers before it in its line, back to the comment before:

    0.93, net 0.55 <!-- prose_wikipedia_contextual_seed1 gap add_one 1: recovery net -->
    0.99 and 0.97 <!-- source_rivals rival=AT2: one either -->

names a measurement, its units (the first that it has, unless given), target set, selector and k,
then columns of its summary (`net[]`: net, net_low, net_high; `long`, `short`: its windows); or a
stored table and values that its row has, then columns; or a task result and values, then lengths:
exact match, the mean over seeds (`200[]`: with the lowest and highest end of their intervals).
`first + second` is the mean of two directions of transfer, `first − second k` a difference of two
measurements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest

from docs import write_tables
from docs.stored import (
    ROOT,
    measurements,
    other_table,
    read_meta,
    read_summary,
    task_rows,
    tasks,
)

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BOUND = re.compile(r"<!-- ((?:(?! -->).)*?): ([\w, −\[\]-]+) -->")
ENDS = {False: [""], True: ["", "_low", "_high"]}
NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d,]*(?:\.\d+)?")


def shown_numbers(text: str) -> list[str]:
    """Without links and code, as they are written."""
    return NUMBER.findall(re.sub(r"\]\([^)]*\)|`[^`]*`|<!--.*?-->", "", text))


def stored_numbers(row: str, columns: list[str]) -> Iterator[float]:
    found: Any
    name, *values = re.split(r" (?=\w+=)", row)
    if difference := re.fullmatch(r"(\S+) − (\S+) (\d+)", row):
        found = write_tables.difference(difference[1], difference[2], int(difference[3]))
    elif values:
        rows = pd.DataFrame(task_rows(name)) if name in tasks() else other_table(name)
        rows = rows.rename_axis("index").reset_index()
        for key, value in (text.split("=", 1) for text in values):
            rows = rows[rows[key].astype(str) == value]
        if name in tasks():
            assert not rows.duplicated(["length", "seed"]).any(), row
            lengths = rows.groupby(rows.length.astype(str))
            found = dict(lengths.exact_match.mean())
            found |= dict(lengths.low.min().add_suffix("_low"))
            found |= dict(lengths.high.max().add_suffix("_high"))
        else:
            (found,) = rows.to_dict("records")
    else:
        *names, target_set, selector, k = row.split()
        meta = read_meta(names[0])
        units = meta.get("units", ["tokens"])
        chosen = names.pop() if names[-1] in units else units[0]
        found = read_summary(" ".join(names), target_set, chosen).loc[selector, int(k)]
        found = {**found, **meta["windows"]}
    yield from (float(found[column]) for column in columns)


def bound() -> Iterator[tuple[str, str, list[str], str]]:
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            end = 0
            for match in BOUND.finditer(line):
                before, end = line[end : match.start()], match.end()
                columns = re.split(", " if "," in match[2] else " ", match[2])
                columns = [c.replace("[]", end) for c in columns for end in ENDS[c.endswith("[]")]]
                yield page.name, match[1], columns, before


@pytest.mark.parametrize(("page", "row", "columns", "before"), list(bound()))
def test_numbers_are_those_of_the_row_they_name(
    page: str, row: str, columns: list[str], before: str
) -> None:
    written = shown_numbers(before)[-len(columns) :]
    assert len(written) == len(columns), (page, before)
    for text, value in zip(written, stored_numbers(row, columns), strict=True):
        digits = len(text.partition(".")[2])
        assert text.replace("−", "-").replace(",", "").lstrip("+") == f"{value:.{digits}f}", columns


def test_a_page_of_results_names_its_rows() -> None:
    pages = [page for page, row, *_ in bound() if "=" not in row]
    assert pages.count("README.md") >= 3
    assert pages.count("results.md") >= 5
    assert pages.count("results_prose.md") >= 5
    assert pages.count("results_models.md") >= 20
    assert {row.split()[0] for _, row, *_ in bound() if "=" not in row} <= set(measurements())
