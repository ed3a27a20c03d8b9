"""Figures are those of the stored results, and take any measurement."""

from __future__ import annotations

import copy
import re

import pytest
from matplotlib.figure import Figure

from olmo_sparsity.drawing import render
from study.pages import write_figures
from study.pages.stored import FIGURES, ROOT, SHOWN
from study.pages.write_figures import DRAWN, STYLE, forest


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
    pages = [
        (ROOT / f"docs/{page}.md").read_text()
        for page in ("results", "results_prose", "results_models", "results_tasks")
    ]
    assert sum(f"](figures/{name}.svg)" in page for page in pages) == 1


def marks(figure: Figure) -> int:
    """Points of the panel of net excess, and squares where there is no placebo."""
    return sum(line.get_marker() in ("o", "s") for line in figure.axes[1].lines)


def test_one_more_measurement_is_one_more_row(monkeypatch: pytest.MonkeyPatch) -> None:
    before = marks(forest())
    shown = copy.deepcopy(SHOWN)
    name = "packages_seed4_contextual"
    shown["figures"]["forest"].append({"title": "Transfer", "of": {f"{name} + {name}": "A and B"}})
    monkeypatch.setattr(write_figures, "SHOWN", shown)
    figure = forest()
    assert marks(figure) == before + 2  # k = 1 and k = 4
    assert [line for line in figure.axes[1].lines if line.get_marker() == "s"]
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert [label for label in labels if label.startswith("A and B, n = ")]
