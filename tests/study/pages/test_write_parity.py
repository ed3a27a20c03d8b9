"""The paper's table of sparse parity on docs/results.md follows from the stored trials."""

from __future__ import annotations

from study.pages.write_parity import BEGIN, END, PAGE, with_tables


def test_the_page_has_the_table_of_the_stored_trials() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    assert with_tables(page) == page, "run `python -m study.pages.write_parity`"
