"""Numbers of a page that name their row hold what the row holds.

A comment binds the numbers before it in its line, back to the comment before:

    0.93, net 0.55 <!-- prose_wikipedia_contextual_seed1 gap add_one 1: recovery net -->
    0.99 and 0.97 <!-- source_rivals rival=AT2: one either -->

names a measurement, target set, selector and k, then columns of its summary (`long`, `short`: its
windows); or a stored table of a benchmark, one of its rows, then columns. `first + second` is the
mean of two directions of transfer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from docs.stored import ROOT, measurements, other_table, read_meta, read_summary

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BOUND = re.compile(r"<!-- ((?:(?! -->).)*?): ([\w, −-]+) -->")
NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d,]*(?:\.\d+)?")


def shown_numbers(text: str) -> list[str]:
    """Without links and code, as they are written."""
    return NUMBER.findall(re.sub(r"\]\([^)]*\)|`[^`]*`|<!--.*?-->", "", text))


def stored_numbers(row: str, columns: list[str]) -> Iterator[float]:
    if "=" in row:
        name, _, (key, value) = *row.partition(" ")[:2], row.partition(" ")[2].split("=", 1)
        table = other_table(name)
        (found,) = (r for _, r in table.iterrows() if str(r[key]) == value)
        yield from (float(found[column]) for column in columns)
        return
    name, target_set, selector, k = row.rsplit(" ", 3)
    found = read_summary(name, target_set).loc[selector, int(k)]
    windows = read_meta(name)["windows"]
    yield from (float(windows[c] if c in windows else found[c]) for c in columns)


def bound() -> Iterator[tuple[str, str, list[str], str]]:
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            end = 0
            for match in BOUND.finditer(line):
                before, end = line[end : match.start()], match.end()
                columns = re.split(", " if "," in match[2] else " ", match[2])
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
    assert {row.split()[0] for _, row, *_ in bound() if "=" not in row} <= set(measurements())
