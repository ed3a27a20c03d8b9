"""Figures are those of the stored results, and a page shows each."""

from __future__ import annotations

import re

import pytest

from olmo_sparsity.drawing import render
from study.pages.stored import FIGURES, ROOT
from study.pages.write_figures import DRAWN, STYLE


def parts(svg: str) -> tuple[list[str], list[float]]:
    """What is not a number, and the numbers; without the names that are hashes of them."""
    svg = re.sub(r"\b[mpC][0-9a-f]{10}\b", "", svg)
    number = r"(?<![\w#])-?\d+(?:\.\d+)?"
    return re.split(number, svg), [float(found) for found in re.findall(number, svg)]


@pytest.mark.parametrize("name", DRAWN)
def test_figures_are_those_of_the_stored_results(name: str) -> None:
    """Logarithms of another processor may differ in the last digit."""
    words, numbers = parts((FIGURES / f"{name}.svg").read_text())
    drawn_words, drawn_numbers = parts(render(DRAWN[name], "svg", STYLE).decode())
    assert drawn_words == words, "run `python -m study.pages.write_figures`"
    assert drawn_numbers == pytest.approx(numbers, abs=1e-4)


@pytest.mark.parametrize("name", DRAWN)
def test_a_page_shows_every_figure(name: str) -> None:
    page = (ROOT / "docs/results.md").read_text()
    assert page.count(f"](figures/{name}.svg)") == 1
