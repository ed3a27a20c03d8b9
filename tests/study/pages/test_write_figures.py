"""The figure is that of the stored results."""

from __future__ import annotations

import re

import pytest

from olmo_sparsity.drawing import render
from study.pages.stored import FIGURES
from study.pages.write_figures import STYLE, forest


def parts(svg: str) -> tuple[list[str], list[float]]:
    """What is not a number, and the numbers; without the names that are hashes of them."""
    svg = re.sub(r"\b[mpC][0-9a-f]{10}\b", "", svg)
    number = r"(?<![\w#])-?\d+(?:\.\d+)?"
    return re.split(number, svg), [float(found) for found in re.findall(number, svg)]


def test_the_figure_is_that_of_the_stored_results() -> None:
    """Logarithms of another processor may differ in the last digit."""
    words, numbers = parts((FIGURES / "results_forest.svg").read_text())
    drawn_words, drawn_numbers = parts(render(forest, "svg", STYLE).decode())
    assert drawn_words == words, "run `python -m study.pages.write_figures`"
    assert drawn_numbers == pytest.approx(numbers, abs=1e-4)
