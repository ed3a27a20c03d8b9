"""The page of an answer in a real browser: keyboard, narrow and wide, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration import needs
from tests.integration.browser import Browser
from tests.support.sources import asked, with_verdicts

pytestmark = needs(
    ("chromium", "chromedriver"), "chromium chromium-driver", "OLMO_SPARSITY_REQUIRE_BROWSER"
)

SHOWN = """return [...document.querySelectorAll('.panel')]
    .map((panel) => getComputedStyle(panel).display !== 'none')"""
RELIED_ON = """return [...document.querySelectorAll('details')]
    .map((source) => getComputedStyle(source).outlineStyle === 'solid')"""
OUTLINED = """return [...document.querySelectorAll('.matrix tbody tr')]
    .map((row) => getComputedStyle(row).outlineStyle === 'solid')"""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    path = tmp_path / "answer.html"
    with_verdicts(asked()).to_html(path)
    with closing(Browser(tmp_path / "profile", 1280)) as browser:
        browser.open(path)
        yield browser
        assert browser.console() == []


def test_arrow_keys_go_from_statement_to_statement(page: Browser) -> None:
    assert page.run(SHOWN) == page.run(OUTLINED) == [True, False, False]
    page.press("Tab", "ArrowRight")
    assert page.run("return document.activeElement.id") == "s1"
    assert page.run(SHOWN) == page.run(OUTLINED) == [False, True, False]
    assert page.run(RELIED_ON) == [True, False, True]
    page.press("ArrowLeft")
    assert page.run(SHOWN) == page.run(RELIED_ON) == [True, False, False]
    page.click("return document.querySelector('label[for=s2].statement')")
    assert page.run(SHOWN) == [False, False, True]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_and_is_legible(page: Browser, scheme: str, width: int) -> None:
    page.prefer(prefers_color_scheme=scheme)
    page.emulate_width(width)
    assert page.run("return document.documentElement.scrollWidth") == width
    side_by_side = """const [answer, matrix] = ['.answer', '.matrix'].map(
        (name) => document.querySelector(name).getBoundingClientRect());
        return matrix.left > answer.right"""
    assert page.run(side_by_side) == (width == 1280)
    # Statements of different sources have different colours; the paper has that of the scheme.
    colours = page.run("""return [...document.querySelectorAll('.statement')]
        .map((node) => getComputedStyle(node)).map((style) => style.backgroundImage
        + style.backgroundColor)""")
    assert len(set(colours)) == 3
    paper = page.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert paper == {"light": "rgb(250, 249, 246)", "dark": "rgb(21, 23, 26)"}[scheme]
