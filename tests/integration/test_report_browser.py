"""The pages in a real browser: what lights up, what is spoken, what stays inert."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.analysis.explain.explanation import Explanation
from olmo_sparsity.analysis.report.report import write_explanation, write_report
from olmo_sparsity.analysis.results.results import Results
from tests.integration import needs
from tests.integration.browser import Browser
from tests.support.fake_results import META, fake_words, one_document
from tests.support.hostile import (
    HOSTILE,
    hostile_explanation,
    hostile_results,
    hostile_words,
    tiny_explanation,
)
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


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return tiny_explanation()


@pytest.fixture
def explained(browser: Browser, explanation: Explanation, tmp_path: Path) -> Iterator[Browser]:
    write_explanation(explanation, tmp_path / "explanation.html")
    browser.open(tmp_path / "explanation.html")
    yield browser
    assert browser.console() == []


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
        f"document == {FIRST} and target == {target} and far_part == 'document' and "
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


def panel(page: Browser) -> str:
    return page.run("return document.getElementById('panel').innerText")


def spoken(page: Browser) -> str:
    return page.run("return document.getElementById('live').textContent")


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
        rank_of, labels = ranks(rows.far_first, rows.far_end)
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
    assert page.run(POINTED) == list(range(first.far_first, first.far_end))
    assert page.run(CURRENT) == target
    assert "".join(fake_words(FIRST)[first.far_first : first.far_end]).strip() in panel(page)


def test_the_panel_has_the_numbers_of_the_target(page: Browser, results: Results) -> None:
    target = page.run(TARGETS)[4]
    page.hover(NODE, target)
    row = results.losses.query("document == @FIRST and target == @target").iloc[0]
    shown = panel(page)
    for value in (row.loss_short, row.loss_long, row.loss_short - row.loss_long):
        assert f"{value:.2f}" in shown
    rows = results.recovery.query(
        "document == @FIRST and target == @target and far_part == 'document' "
        "and units == 'tokens' and selector == 'add_one' and k == 8"
    )
    for control in ("own", "foreign"):
        assert f"{rows[rows.control == control].loss_set.mean():.2f}" in shown
    first = influence_of(results, target).iloc[0]
    assert f"{target - first.far_first} back" in shown
    assert f"{float(f'{first.influence:.4g}'):.2f}" in shown  # the page keeps four digits


def test_a_click_holds_and_escape_lets_go(page: Browser) -> None:
    one, other = page.run(TARGETS)[2:4]
    page.click(NODE, one)
    page.hover(NODE, other)
    assert page.run(CURRENT) == one
    assert page.run(f"{NODE}.getAttribute('aria-pressed')", one) == "true"
    page.press("Escape")
    assert page.run(CURRENT) is None
    assert page.run(LIT) == []
    assert "No target chosen" in panel(page)
    page.hover(NODE, one)
    assert page.run(CURRENT) == one


def test_filters_leave_what_they_say(page: Browser, results: Results) -> None:
    chosen = results.targets.query("document == @FIRST and far_part == 'document'")
    searched = sorted(set(chosen.target))
    assert page.run(TARGETS) == searched
    page.run(CHOOSE, "set", str(["gap", "bigram"].index("bigram")))
    assert page.run(TARGETS) == sorted(chosen.target[chosen.target_set == "bigram"])
    page.run(CHOOSE, "set", "")
    assert page.run(TARGETS) == searched
    count = page.run("return document.getElementById('count').textContent")
    assert count == f"{len(searched)} targets"


def test_the_keyboard_reaches_a_target_and_it_is_spoken(page: Browser, results: Results) -> None:
    page.run("document.getElementById('set').focus()")
    page.press("Tab")
    targets = page.run(TARGETS)
    reached = page.run(f"{PLACES} return placeOf.get(document.activeElement)")
    assert reached in targets
    assert page.run("return document.querySelectorAll('#text [tabindex=\"0\"]').length") == 1
    page.press("Home", "ArrowRight", "ArrowRight", "ArrowLeft")
    assert page.run(CURRENT) == targets[1]
    assert page.run(f"{PLACES} return placeOf.get(document.activeElement)") == targets[1]
    assert [one[0] for one in sorted(page.run(LIT), key=lambda one: int(one[1]))] == influence_of(
        results, targets[1]
    ).far_first.tolist()
    said = spoken(page)
    assert said.startswith(f"{fake_words(FIRST)[targets[1]].strip()}. Gap ")
    assert "Most influential: " in said
    page.press("Enter")
    assert page.run(f"{NODE}.getAttribute('aria-pressed')", targets[1]) == "true"
    page.press("End")
    assert page.run(CURRENT) == targets[-1]
    outline = page.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.press("Tab")  # out of the text, not through every target
    inside = "return document.getElementById('text').contains(document.activeElement)"
    assert not page.run(inside)


def test_every_control_has_a_name_and_every_part_a_landmark(page: Browser) -> None:
    unnamed = page.run("""
        return [...document.querySelectorAll('select, input, button, aside, section, form, svg')]
            .filter((node) => !(node.labels && node.labels.length)
                && !node.getAttribute('aria-label') && !node.getAttribute('aria-labelledby')
                && !node.textContent.trim()).map((node) => node.outerHTML.slice(0, 80));
    """)
    assert unnamed == []
    assert page.run("return document.querySelectorAll('main, header, aside').length") == 3
    assert page.run("return document.querySelectorAll('h1').length") == 1
    assert page.run("return document.querySelector('figure img').alt").startswith("Figure 2 for ")
    loaded = page.run("return document.querySelector('figure img').naturalWidth")
    assert loaded > 100


def test_a_target_of_two_tokens_is_one_run(explained: Browser, explanation: Explanation) -> None:
    spans = explanation.targets[["target", "end"]].to_numpy().tolist()
    covered = [place for first, end in spans for place in range(first, end)]
    assert explained.run(TARGETS) == covered
    buttons = f"{PLACES} return all('[role=button]').map((node) => placeOf.get(node))"
    assert explained.run(buttons) == [first for first, _ in spans]
    first, end = next(span for span in spans if span[1] > span[0] + 1)
    explained.press("Escape")
    explained.click(NODE, end - 1)  # any of its tokens
    looked_at = f"{PLACES} return all('.current').map((node) => placeOf.get(node))"
    assert explained.run(looked_at) == [first, end - 1]
    word = explanation.targets.set_index("target").text[first].strip()
    assert panel(explained).startswith(f"Target\n\n{word}\n\ntokens {first}:{end}")
    assert spoken(explained).startswith(f"{word}. Gap ")
    assert explained.run(f"{NODE}.getAttribute('aria-label')", first) == word
    assert explained.run("return document.activeElement.textContent.trim()") == word.split()[0]
    places = [span[0] for span in spans]
    at = places.index(first)
    explained.press("ArrowRight" if at + 1 < len(places) else "ArrowLeft")
    assert explained.run(CURRENT) == places[at + 1 if at + 1 < len(places) else at - 1]
    explained.press("Escape")
    assert explained.run(CURRENT) is None


@pytest.mark.parametrize("kind", ["results", "explanation"])
def test_hostile_text_does_nothing(
    kind: str, browser: Browser, results: Results, tmp_path: Path
) -> None:
    if kind == "results":
        write_report(hostile_results(results), tmp_path / "page.html")
    else:
        write_explanation(hostile_explanation(), tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    # A mark that turns the direction would turn the page around.
    words = [word.replace("\u202e", "⟨U+202E⟩") for word in hostile_words(60)]
    shown = browser.run("return document.getElementById('text').textContent")
    assert shown.startswith("".join(words))
    targets = browser.run(TARGETS)
    assert len(targets) == (30 if kind == "results" else 5)
    for target in targets[: len(HOSTILE)]:
        browser.click(NODE, target)
        browser.press("Escape")
        if kind == "results":
            assert browser.run(f"{NODE}.textContent", target) == words[target]
    for field in ("selector", "units", "set"):
        last = f"return document.getElementById('{field}').lastElementChild.value"
        browser.run(CHOOSE, field, browser.run(last))
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


@pytest.mark.parametrize("long", [2048, "all"])
def test_a_book_stays_responsive(browser: Browser, tmp_path: Path, long: int | str) -> None:
    words = [word for _ in range(60) for word in fake_words(0)][:30_000]
    assert len(words) == 30_000
    meta = replace(META, windows=META.windows | {"long": long, "short": 256})
    far_of = {
        target: [target - 300 - 100 * rank for rank in range(16)]
        for target in range(2048, len(words), 10)
    }
    results = one_document(words, far_of, meta)
    every = np.arange(2048, len(words), dtype=np.int32)
    losses = results.losses.iloc[[0] * len(every)].assign(target=every)
    write_report(replace(results, losses=losses), tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    assert len(browser.run(TARGETS)) == len(far_of)
    # A hover touches a few dozen elements, in the middle of the book too.
    touched = browser.run(f"""
        {PLACES}
        const observer = new MutationObserver(() => {{}}), touched = [];
        observer.observe(document.body,
            {{subtree: true, childList: true, attributes: true, characterData: true}});
        for (let place = 15008; place < 15200; place += 10) {{
            nodes[place].scrollIntoView({{block: 'center', behavior: 'instant'}});
            nodes[place].dispatchEvent(new PointerEvent('pointerover', {{bubbles: true}}));
            if (!nodes[place].classList.contains('current')) return 'not lit';
            touched.push(observer.takeRecords().length);
        }}
        return touched;
    """)
    assert isinstance(touched, list), touched
    assert 16 < max(touched) < 200
    # What is far from the window is not laid out.
    laid_out = "node.checkVisibility({contentVisibilityAuto: true})"
    num_laid_out = browser.run(f"{PLACES} return nodes.filter((node) => {laid_out}).length")
    assert 0 < num_laid_out < len(words) / 10
    assert browser.console() == []


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
    browser.emulate_width(None)
    browser.prefer(prefers_color_scheme="light")
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
