"""The pages in a real browser: what lights up, what is spoken, what stays inert."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.analysis.report.report import write_report
from olmo_sparsity.analysis.results.results import Results
from tests.integration import needs
from tests.integration.browser import Browser
from tests.support.fake_results import META, fake_words
from tests.support.hostile import HOSTILE, hostile_results, hostile_words
from tests.support.sources import asked, with_verdicts

pytestmark = needs(
    ("chromium", "chromedriver"), "chromium chromium-driver", "OLMO_SPARSITY_REQUIRE_BROWSER"
)

# Finds what a test needs among the elements of the text.
PLACES = """
    const nodes = [...document.querySelectorAll('#text .chunk > span')];
    const placeOf = new Map(nodes.map((node, place) => [node, place]));
    const all = (selector) => [...document.querySelectorAll('#text ' + selector)]
        .filter((node) => placeOf.has(node));
"""
LIT = f"""{PLACES}
    return all('.far').map((node) => [placeOf.get(node), node.dataset.rank,
        Number(node.style.getPropertyValue('--share')),
        parseFloat(getComputedStyle(node).borderBottomWidth)]);
"""
FIRST = 1  # the first document with chosen targets
CURRENT = f"{PLACES} const node = all('.current')[0]; return node ? placeOf.get(node) : null"
TARGETS = f"{PLACES} return all('.target').map((node) => placeOf.get(node))"
POINTED = f"{PLACES} return all('.pointed').map((node) => placeOf.get(node))"
NODE = f"{PLACES} return nodes[arguments[0]]"
CHOOSE = """
    const [id, value] = arguments, field = document.getElementById(id);
    field.value = value;
    field.dispatchEvent(new Event('input', {bubbles: true}));
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with closing(Browser(tmp_path_factory.mktemp("profile"))) as started:
        yield started


@pytest.fixture(scope="module")
def report(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(results, path)
    return path


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Browser]:
    browser.open(report)
    browser.run(CHOOSE, "document", "0")
    yield browser
    assert browser.console() == []


def influence_of(
    results: Results, target: int, selector: str = "add_one", units: str = "tokens"
) -> Any:
    return results.influence.query(
        f"document == {FIRST} and target == {target} and distant_part == 'document' and "
        f"selector == {selector!r} and units == {units!r} and control == 'own'"
    ).sort_values("rank")


def ranks(firsts: Iterable[int], ends: Iterable[int]) -> tuple[dict[int, int], dict[int, int]]:
    """The rank of the unit that each place shows, and those that are written, by place."""
    rank_of: dict[int, int] = {}
    for rank, (first, end) in enumerate(zip(firsts, ends, strict=True), start=1):
        for place in range(first, end):
            rank_of.setdefault(place, rank)
    written = {rank: place for place, rank in sorted(rank_of.items(), reverse=True)}
    return rank_of, {place: rank for rank, place in written.items()}


@pytest.mark.parametrize(
    ("selector", "units"), [("add_one", "tokens"), ("attention", "tokens"), ("add_one", "span:4")]
)
def test_pointing_lights_up_the_right_units(
    page: Browser, results: Results, selector: str, units: str
) -> None:
    """Units may overlap: the first is on top."""
    page.run(CHOOSE, "selector", str(META.selectors.index(selector)))
    page.run(CHOOSE, "units", str(META.units.index(units)))
    for target in page.run(TARGETS)[3:6]:
        page.hover(NODE, target)
        assert page.run(CURRENT) == target
        rows = influence_of(results, target, selector, units)
        rank_of, labels = ranks(rows.distant_first, rows.distant_end)
        lit = page.run(LIT)
        assert [one[0] for one in lit] == sorted(rank_of)
        assert {place: int(rank) for place, rank, *_ in lit if rank} == labels
        shares = (rows.influence / rows.influence.max()).tolist()
        expected = [shares[rank_of[one[0]] - 1] for one in lit]
        np.testing.assert_allclose([one[2] for one in lit], expected, atol=1e-3)
        widths = [one[3] for one in sorted(lit, key=lambda one: rank_of[one[0]])]
        assert widths == sorted(widths, reverse=True)  # not by colour alone
        assert widths[0] > widths[-1] + 2
    page.click("return document.querySelector('#panel .ranked button')")
    first = rows.iloc[0]
    assert page.run(POINTED) == list(range(first.distant_first, first.distant_end))
    assert page.run(CURRENT) == target
    shown = page.run("return document.getElementById('panel').innerText")
    assert "".join(fake_words(FIRST)[first.distant_first : first.distant_end]).strip() in shown


def test_the_keyboard_reaches_a_target_and_it_is_spoken(page: Browser, results: Results) -> None:
    page.run("document.getElementById('set').focus()")
    page.press("Tab")
    targets, focused = page.run(TARGETS), f"{PLACES} return placeOf.get(document.activeElement)"
    assert page.run(focused) in targets
    assert page.run("return document.querySelectorAll('#text [tabindex=\"0\"]').length") == 1
    page.press("Home", "ArrowRight", "ArrowRight", "ArrowLeft")
    assert page.run(CURRENT) == page.run(focused) == targets[1]
    assert [one[0] for one in sorted(page.run(LIT), key=lambda one: int(one[1]))] == influence_of(
        results, targets[1]
    ).distant_first.tolist()
    said = page.run("return document.getElementById('live').textContent")
    assert said.startswith(f"{fake_words(FIRST)[targets[1]].strip()}. Gap ")
    assert "Most influential: " in said
    page.press("Enter")
    assert page.run(f"{NODE}.getAttribute('aria-pressed')", targets[1]) == "true"
    page.press("End")
    assert page.run(CURRENT) == targets[-1]
    assert page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Tab")  # out of the text, not through every target
    inside = "return document.getElementById('text').contains(document.activeElement)"
    assert not page.run(inside)


def test_hostile_text_does_nothing(browser: Browser, results: Results, tmp_path: Path) -> None:
    write_report(hostile_results(results), tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    # A mark that turns the direction would turn the page around.
    words = [word.replace("\u202e", "⟨U+202E⟩") for word in hostile_words(60)]
    shown = browser.run("return document.getElementById('text').textContent")
    assert shown.startswith("".join(words))
    targets = browser.run(TARGETS)
    assert len(targets) == 30
    for target in targets[: len(HOSTILE)]:
        browser.click(NODE, target)
        browser.press("Escape")
        assert browser.run(f"{NODE}.textContent", target) == words[target]
    assert browser.run("return typeof canary") == "undefined"
    assert browser.run("return document.querySelectorAll('script').length") == 3
    assert browser.run("return document.querySelectorAll('#text *, #panel *').length") > 60
    tags = "return [...new Set([...document.querySelectorAll('#text *')].map((n) => n.localName))]"
    assert sorted(browser.run(tags)) == ["div", "span"]
    assert browser.console() == []
    # The policy would stop what escaping might miss.
    browser.run("""
        const script = document.createElement('script');
        script.textContent = 'globalThis.canary = 1';
        document.body.append(script);
        const image = document.createElement('div');
        image.innerHTML = '<img src="data:," onerror="globalThis.canary = 1">';
        document.body.append(image);
    """)
    assert browser.run("return typeof canary") == "undefined"
    assert all("Content Security Policy" in line for line in browser.console())


# --- an answer and its sources --------------------------------------------------------------------

SHOWN = """return [...document.querySelectorAll('.panel')]
    .map((panel) => getComputedStyle(panel).display !== 'none')"""
RELIED_ON = """return [...document.querySelectorAll('details')]
    .map((source) => getComputedStyle(source).outlineStyle === 'solid')"""
OUTLINED = """return [...document.querySelectorAll('.matrix tbody tr')]
    .map((row) => getComputedStyle(row).outlineStyle === 'solid')"""


@pytest.fixture
def answer(browser: Browser, tmp_path: Path) -> Iterator[Browser]:
    with_verdicts(asked()).to_html(tmp_path / "answer.html")
    browser.open(tmp_path / "answer.html")
    yield browser
    assert browser.console() == []


def test_arrow_keys_go_from_statement_to_statement(answer: Browser) -> None:
    assert answer.run(SHOWN) == answer.run(OUTLINED) == [True, False, False]
    answer.press("Tab", "ArrowRight")
    assert answer.run("return document.activeElement.id") == "s1"
    assert answer.run(SHOWN) == answer.run(OUTLINED) == [False, True, False]
    assert answer.run(RELIED_ON) == [True, False, True]
    answer.press("ArrowLeft")
    assert answer.run(SHOWN) == answer.run(RELIED_ON) == [True, False, False]
    answer.click("return document.querySelector('label[for=s2].statement')")
    assert answer.run(SHOWN) == [False, False, True]
