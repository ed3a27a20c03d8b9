"""The page holds the results, asks nobody for anything, and shows untrusted text as text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from olmo_sparsity.analysis.explain.explanation import Explanation
from olmo_sparsity.analysis.report.page import json_for_html
from olmo_sparsity.analysis.report.report import write_report
from olmo_sparsity.analysis.results.by_distance import split_by_distance
from olmo_sparsity.analysis.results.chosen_units import ranked_units_with_distance
from olmo_sparsity.analysis.results.conclusion import conclude, quoted_row_of
from olmo_sparsity.analysis.results.notes import INTERVALS, describe_intervals
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.shown_columns import page_columns, terminal_columns
from olmo_sparsity.analysis.results.summary import describe
from olmo_sparsity.analysis.results.view import DIRECTIONS, format_interval, format_number, sentence
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.sources.attribution import Attribution
from tests.support.explanations import TEXT
from tests.support.fake_results import DOCUMENTS, KS, META, UNITS, WIDTHS, fake_words
from tests.support.hostile import (
    HOSTILE,
    hostile_explanation,
    hostile_results,
    hostile_words,
    tiny_explanation,
)
from tests.support.sources import asked, with_verdicts


class Page(HTMLParser):
    """What an HTML parser sees: elements, the text of the page, the insides of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[dict, str]] = []
        self.open: dict[str, str | None] = {}
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open = dict(attrs) | {"tag": tag}

    def handle_endtag(self, tag: str) -> None:
        self.open = {}

    def handle_data(self, data: str) -> None:
        self.inside.append((self.open, data))
        if self.open.get("tag") not in ("script", "style"):
            self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def data(self, name: str) -> dict:
        return json.loads("".join(text for attrs, text in self.inside if attrs.get("id") == name))

    def source(self, tag: str) -> str:
        return "".join(t for a, t in self.inside if a.get("tag") == tag and "type" not in a)


@pytest.fixture(scope="module")
def page(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(results, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return tiny_explanation()


@pytest.fixture(scope="module")
def explained(explanation: Explanation, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(explanation, tmp_path_factory.mktemp("explained"))


def page_of(results: Results | Explanation, folder: Path, max_documents: int | None = None) -> Page:
    out = folder / "deep" / "report.html"
    if isinstance(results, Explanation):
        results.to_html(out)
    else:
        write_report(results, out, max_documents)
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    return Page(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", ["page", "explained"])
def test_only_the_named_script_and_style_may_run(kind: str, request: pytest.FixtureRequest) -> None:
    page: Page = request.getfixturevalue(kind)
    policy = next(a["content"] for _, a in page.elements if "http-equiv" in a)
    assert policy
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.source(tag).encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    for tag, attributes in page.elements:
        assert "style" not in attributes, f"<{tag} style> would be refused"
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "srcset", "href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), f"<{tag} {name}={value[:80]}>"


def test_the_page_lists_ks_units_and_the_documents_with_targets(page: Page) -> None:
    data = page.data("page-data")
    assert data["ks"] == list(KS)
    assert data["units"] == list(UNITS)
    with_targets = [(number, f"{number}.txt") for number in DOCUMENTS[1::2]]
    assert [(entry["id"], entry["name"]) for entry in data["documents"]] == with_targets


OWN = "document == 3 and distant_part == 'document'"
"""Rows of one document, without the placebo's."""


def test_the_page_holds_a_text_with_its_targets_and_their_losses(
    page: Page, results: Results
) -> None:
    data = page.data("page-data")
    document = page.data("document-3")
    assert "".join(document["text"]) == "".join(fake_words(3))
    assert document["ends"] == {}, "all targets are single tokens"
    losses = results.losses.query("document == 3").set_index("target")
    sets = results.targets.query(OWN).groupby("target").target_set.agg(set)
    assert [entry["target"] for entry in document["chosen"]] == sets.index.tolist()
    for entry in document["chosen"]:
        target = entry["target"]
        assert entry["short"] == pytest.approx(losses.loss_short[target], abs=6e-5)
        assert {data["sets"][number] for number in entry["sets"]} == sets[target]


@pytest.mark.parametrize("units", UNITS)
def test_the_page_holds_what_a_selector_found_for_each_target(
    page: Page, results: Results, units: str
) -> None:
    data = page.data("page-data")
    place = f"{data['units'].index(units)} {data['selectors'].index('add_one')}"
    rows = f"{OWN} and selector == 'add_one' and units == {units!r}"
    losses = results.recovery.query(f"{rows} and k == 4")
    means = losses.groupby(["target", "control"]).loss_set.mean()  # over draws
    ranked = results.influence.query(f"{rows} and control == 'own'").sort_values("rank")
    for entry in page.data("document-3")["chosen"]:
        target = entry["target"]
        found = entry["found"][place]
        assert found.keys() == {"own", "unrelated"}
        for control, side in found.items():
            expected = means[target, control]
            assert side["loss"][KS.index(4)] == pytest.approx(expected, abs=1e-4)
        firsts = ranked.distant_first[ranked.target == target]
        assert found["own"]["first"] == firsts.tolist()
        assert set(found["own"]["width"]) == {WIDTHS[units]}


def test_what_is_left_out_is_counted(results: Results, tmp_path: Path) -> None:
    targets = results.targets[~results.targets.document.isin([1, 5])]
    page = page_of(replace(results, targets=targets), tmp_path, max_documents=3)
    assert "3 of 10 measured documents" in page.text
    shown = [document["id"] for document in page.data("page-data")["documents"]]
    assert shown == [3, 7, 9]  # those with chosen targets first


def test_the_page_holds_the_verdict_and_its_intervals(page: Page, results: Results) -> None:
    assert conclude(results) in page.text
    row = results.summary.iloc[0]
    cells = {text for attributes, text in page.inside if attributes.get("tag") == "td"}
    assert format_interval(row.net, row.net_low, row.net_high) in cells
    assert format_interval(row.recovery, row.low, row.high) in cells


def test_the_row_of_the_sentence_is_marked_and_distances_are_counted(
    page: Page, results: Results
) -> None:
    assert [row["class"] for row in page.of("tr") if "quote" in (row.get("class") or "")] == [
        "group quote"
    ]
    row = results.summary.loc[quoted_row_of(results)]
    assert (row.selector, row.units, row.k) == ("add_one", "tokens", 1)
    bins = split_by_distance(results, row)
    (far,) = bins[bins["first"] == 128].to_dict("records")
    assert far["share_units"] > 0
    shares = f"{far['share_units']:.0%}{far['share_random']:.0%}"
    recovery = format_number(far["recovery"]) + format_number(far["unrelated"])
    assert f"128 to 255{shares}{recovery}" in page.text
    ranked = ranked_units_with_distance(results.targets, results.influence)
    ranked = ranked.query(
        "target_set == 'gap' and units == 'tokens' and selector == 'add_one' and rank == 1"
    )
    assert ranked.distance.median() == row.distance


def test_distances_of_targets_without_a_gap_have_no_bars(
    page: Page, results: Results, tmp_path: Path
) -> None:
    short = results.losses.loss_short
    without_gap = results.losses.assign(loss_long=short, placebo_loss_long=short)
    page_without_gap = page_of(replace(results, losses=without_gap), tmp_path)
    assert "tokens back" in page_without_gap.text
    assert "as bars" in page.text
    assert "as bars" not in page_without_gap.text


def test_page_and_terminal_call_a_column_by_the_same_words() -> None:
    words = {column.name: display.heading for column, display in page_columns()}
    for has_net in (True, False):
        for column, display in terminal_columns(has_net):
            assert words.get(column.name, display.heading) == display.heading
    assert words["placebo"] == "placebo excess"
    assert words["placebo_recovery"] == "placebo recovery"


def test_the_page_names_its_intervals_as_the_terminal_does(page: Page, results: Results) -> None:
    """Five documents: those of net excess are by Student's t."""
    row = results.summary.loc[quoted_row_of(results)]
    said = describe_intervals(row, True)
    assert "Student's t" in said
    assert sentence(said) in page.text
    assert said in describe(results)
    assert INTERVALS in page.text


def test_the_page_explains_each_of_its_columns(page: Page) -> None:
    headings = {text for attributes, text in page.inside if attributes.get("tag") == "th"}
    for column, display in page_columns():
        assert display.heading in headings
        assert f"{display.heading} ({column.name}){column.meaning.replace('`', '')}" in page.text


def test_a_missing_prefix_is_told_in_terminal_and_page(results: Results, tmp_path: Path) -> None:
    sink = {"harm": 0.31, "harm_with_prefix": -0.03, "needs_prefix": True}
    warned = replace(results, meta=replace(results.meta, sink=sink))
    for shown in (describe(warned), page_of(warned, tmp_path).text):
        assert re.search(r"loss by 0.31 nats \([-−]0.03 after a line break\)", shown)
    assert "line break" not in describe(results)


def test_an_explanation_says_whether_to_believe_it(
    explanation: Explanation, explained: Page, tmp_path: Path
) -> None:
    check = explanation.checked
    assert check is not None
    assert f"{check.verdict}." in explained.text
    for row in check.table.itertuples():
        said = f"{row.own:.2f}{row.unrelated:.2f}{row.unrelated_most:.2f}{row.better} of 3"
        assert said.replace("-", "−") in explained.text
    unchecked = page_of(replace(explanation, checked=None), tmp_path).text
    assert "Not checked against unrelated texts:" in unchecked
    assert "{{" not in unchecked


@pytest.mark.parametrize("name", ["tokens", "targets", "influence", "recovery", "summary"])
def test_a_table_without_rows_makes_a_page_all_the_same(
    results: Results, tmp_path: Path, name: str
) -> None:
    page_of(replace(results, **{name: getattr(results, name).iloc[:0]}), tmp_path)


@pytest.fixture(scope="module", params=["results", "explanation"])
def hostile(
    request: pytest.FixtureRequest, results: Results, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """The kind of a page of hostile text, and its file."""
    folder = tmp_path_factory.mktemp("hostile")
    page_of(
        hostile_results(results) if request.param == "results" else hostile_explanation(), folder
    )
    return request.param, folder / "deep" / "report.html"


def test_hostile_text_adds_no_element_and_no_script(
    hostile: tuple[str, Path], page: Page, explained: Page
) -> None:
    kind, path = hostile
    harmless = page if kind == "results" else explained
    written = Page(path.read_text(encoding="utf-8"))
    # One document here, ten there; tables have rows of their own. Nothing else may differ.
    assert {tag for tag, _ in written.elements} == {tag for tag, _ in harmless.elements}
    assert sum(tag == "script" for tag, _ in written.elements) == 3
    assert written.source("script") == harmless.source("script")
    for _, attributes in written.elements:
        assert not [name for name in attributes if name.startswith(("on", "autofocus"))]


def test_hostile_text_is_shown_as_it_is(hostile: tuple[str, Path]) -> None:
    kind, path = hostile
    written = Page(path.read_text(encoding="utf-8"))
    (document,) = written.data("page-data")["documents"]
    shown = written.data(f"document-{document['id']}")["text"]
    assert len(shown) >= 60
    assert shown == [word.replace("\u202e", "⟨U+202E⟩") for word in hostile_words(len(shown))]
    if kind == "results":
        assert HOSTILE[2] in written.data("page-data")["selectors"]
        assert document["name"] == HOSTILE[2]


def test_hostile_text_ends_no_script(hostile: tuple[str, Path]) -> None:
    raw = hostile[1].read_text(encoding="utf-8")
    assert raw.count("</script>") == 3
    for data in re.findall(r'<script type="application/json".*?>(.*?)</script>', raw, re.DOTALL):
        assert not set(data) & set("<>&\u2028\u2029")


def test_the_page_of_an_explanation_holds_its_text_and_its_targets(
    explained: Page, explanation: Explanation
) -> None:
    document = explained.data("document-0")
    assert explained.data("page-data")["ks"] == [0, 1, 2, 3]
    assert "".join(document["text"]) == f"{TEXT} w3 w7 w8"
    spans = explanation.targets[["target", "end"]].to_numpy().tolist()
    wide = {str(target): end for target, end in spans if end > target + 1}
    assert 0 < len(wide) < len(spans)
    assert document["ends"] == wide
    assert [entry["target"] for entry in document["chosen"]] == [target for target, _ in spans]
    assert all(entry["sets"] == [] for entry in document["chosen"]), "they were named"


def test_the_page_of_an_explanation_holds_units_and_losses_and_those_of_unrelated_texts(
    explained: Page, explanation: Explanation
) -> None:
    assert explanation.checked is not None
    check = explanation.checked.table.set_index("target")
    units_of = explanation.distant.groupby("target")
    entries = explained.data("document-0")["chosen"]
    for entry, target in zip(entries, explanation.targets.itertuples(), strict=True):
        own = entry["found"]["0 0"]["own"]
        unrelated = entry["found"]["0 0"]["unrelated"]
        units = units_of.get_group(target.target)
        assert own["first"] == units["first"].tolist()
        assert set(own["width"]) == {3}
        np.testing.assert_allclose(own["loss"], [target.loss_short, *units.loss_set], atol=1e-4)
        expected = target.loss_short - check.unrelated[target.target]
        assert unrelated["loss"][-1] == pytest.approx(expected, abs=1e-4)


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text("<>&/!-scriptSCRIPT\u2028"))
@example(text="\u202a")
def test_json_comes_through_html_whole(text: str) -> None:
    """Marks of writing direction are shown by their numbers instead."""
    page = Page(f'<script type="application/json" id="x">{json_for_html({"t": text})}</script><p>')
    assert page.data("x") == {"t": text.translate(DIRECTIONS)}
    assert [tag for tag, _ in page.elements] == ["script", "p"]


@pytest.mark.accept
def test_every_format_is_written_without_its_date(results: Results, tmp_path: Path) -> None:
    from olmo_sparsity.analysis.report.figures import draw_figure2

    hostile = replace(
        results, meta=replace(META, model={"name": r"$\frac{1$ <b>&amp;</b> 模型 ]]> _x^"})
    )
    for suffix, head in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        path, again = (tmp_path / name / f"figure{suffix}" for name in "ab")
        draw_figure2([hostile], path)
        draw_figure2([hostile], again)
        assert path.read_bytes().startswith(head)
        assert path.read_bytes() == again.read_bytes()
    draw_figure2([replace(results, summary=results.summary.iloc[:0])], tmp_path / "none.png")


def test_what_cannot_be_drawn_is_refused(results: Results, tmp_path: Path) -> None:
    from olmo_sparsity.analysis.report.figures import draw_figure2

    for name, times, labels in (("jpg", 1, None), ("png", 0, None), ("png", 2, ["one"] * 3)):
        with pytest.raises(ConfigError):
            draw_figure2([results] * times, tmp_path / f"figure.{name}", labels)
    replaced = replace(
        results, meta=replace(META, windows=META.windows | {"distant_states": "replaced"})
    )
    with pytest.raises(DataError, match="draw them apart"):
        draw_figure2([results, replaced], tmp_path / "figure.png")


def test_recovery_and_removal_are_those_of_the_first_selector(results: Results) -> None:
    from olmo_sparsity.analysis.report.curves import curves_of
    from olmo_sparsity.analysis.report.figures import draw_panels

    figure = draw_panels(curves_of([results], ["a model"]))
    rows = results.summary.query("target_set == 'gap' and selector == 'add_one'")
    columns = (("recovery", "unrelated"), ("removal", "placebo_removal"))
    for axes, names, num_lines in zip(figure.axes[1:3], columns, (3, 2), strict=True):
        drawn = [tuple(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) > 2]
        for (_, of_units), column in product(rows.groupby("units"), names):
            assert tuple(of_units.sort_values("k")[column]) in drawn
        assert len(drawn) == num_lines * len(UNITS)


def test_a_single_k_shows_its_controls_as_markers_with_error_bars(results: Results) -> None:
    from olmo_sparsity.analysis.report.curves import curves_of
    from olmo_sparsity.analysis.report.figures import draw_panels

    single = replace(results, summary=results.summary.query("k == 1 and units == 'tokens'"))
    (curve,) = curves_of([single], ["a model"])
    by_k = draw_panels([curve]).axes[1]
    markers = {line.get_marker(): line for line in by_k.lines}
    row = curve.rows.iloc[0]
    for marker, column in (("x", "placebo_recovery"), ("+", "unrelated"), ("o", "recovery")):
        assert markers[marker].get_ydata().tolist() == [row[column]]
    assert len(by_k.containers) == 3, "an error bar for the value and for each control"


def test_a_figure_warns_of_few_documents_and_of_a_missing_placebo(results: Results) -> None:
    from olmo_sparsity.analysis.report.curves import curves_of
    from olmo_sparsity.analysis.report.figures import draw_panels

    def title_of(**changed: int) -> str:
        drawn = replace(results, summary=results.summary.assign(**changed))
        return draw_panels(curves_of([drawn], ["a model"])).get_suptitle()

    enough = {"num_documents": 30, "num_placebo_documents": 30, "num_placebo_targets": 30}
    enough |= {"num_targets": 30}
    assert "too few" not in title_of(**enough)
    too_few = "7 documents are too few to trust the interval"
    assert too_few in title_of(**enough | {"num_documents": 7})
    assert "no placebo targets" in title_of(**enough | {"num_placebo_targets": 0})


@pytest.mark.parametrize("num_results", [1, 2, 14])
@pytest.mark.parametrize("label", ["a model", "a model of 44 characters in its name, number"])
def test_all_words_of_a_figure_are_inside_it_and_its_panels_stay_high(
    results: Results, num_results: int, label: str
) -> None:
    import matplotlib

    from olmo_sparsity.analysis.report.curves import curves_of
    from olmo_sparsity.analysis.report.figure_style import SETTINGS
    from olmo_sparsity.analysis.report.figures import draw_panels
    from olmo_sparsity.base import drawing

    drawn = [
        replace(results, summary=results.summary.assign(num_documents=number + 1, num_targets=9))
        for number in range(num_results)
    ]
    labels = [f"{label} {n}" for n in range(num_results)]
    with matplotlib.rc_context(drawing.PRINT | SETTINGS):
        figure = draw_panels(curves_of(drawn, labels))
        figure.draw_without_rendering()
    (legend,) = figure.legends
    for text in [*legend.get_texts(), *figure.texts]:
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, text.get_text()
    words = " ".join(text.get_text().replace("\n", " ") for text in legend.get_texts())
    assert all(label in words for label in labels), "no name is shortened"
    height = figure.axes[0].get_position().height * figure.get_figheight()
    assert height > 1.2, "inches of the first panel"


def test_a_run_is_drawn_by_length_and_by_step_too(results: Results, tmp_path: Path) -> None:
    """By k: the longest windows at the last step. Equal places are curves of their own."""
    from olmo_sparsity.analysis.report.curves import curves_of
    from olmo_sparsity.analysis.report.figures import draw_figure2, draw_panels

    def at(run: str, long: int, step: int, recovery: float) -> Results:
        model = {"name": f"runs/{run}/checkpoints/step{step}", "trained": {"step": step}}
        meta = replace(META, model=model, windows=META.windows | {"long": long})
        return replace(results, meta=meta, summary=results.summary.assign(recovery=recovery))

    places = ((16, 9, 0.1), (64, 9, 0.2), (64, 5, 0.3), (64, 7, 0.4))
    every = [at(run, *place) for run in "ab" for place in places]
    curves = curves_of(every, [run for run in "ab" for _ in places])
    assert [curve.rows.length.iloc[0] for curve in curves] == [64, 64]
    figure = draw_panels(curves)
    _, by_k, _, by_length, by_step, _ = figure.axes
    assert set(by_k.lines[0].get_ydata()) == {0.2}
    for axes, wanted in ((by_length, {16: 0.1, 64: 0.2}), (by_step, {5: 0.3, 7: 0.4, 9: 0.2})):
        assert dict(zip(*axes.lines[0].get_data(), strict=True)) == wanted
    draw_figure2(every, tmp_path / "figure.svg", ["RoPE", "PoSE"])
    assert "RoPE" in (tmp_path / "figure.svg").read_text()
    same = curves_of([*every[:2], every[0]], ["a"] * 3)
    assert [curve.rows.length.iloc[0] for curve in same] == [16, 64, 16]


def test_transfer_is_drawn_beside_the_first_curve_that_has_rows(results: Results) -> None:
    from olmo_sparsity.analysis.report.curves import curves_of

    def of_run(run: str, **changes: Any) -> Results:
        meta = replace(META, model={"name": f"runs/{run}/checkpoints/step9"})
        return replace(results, meta=replace(meta, **changes))

    empty = replace(of_run("a"), summary=results.summary.iloc[:0])
    transfer = of_run("b", targets=META.targets | {"choices": {}})
    (curve,) = curves_of([empty, of_run("b"), transfer], ["RoPE"] * 3)
    assert len(curve.transferred) == len(curve.rows)


def test_shares_of_a_gap_that_is_nearly_zero_are_cut_and_no_gap_has_no_control(
    results: Results,
) -> None:
    from olmo_sparsity.analysis.report.curves import curves_of
    from olmo_sparsity.analysis.report.figures import draw_panels

    without_gap = results.summary.assign(recovery=np.nan, placebo_recovery=40.0)
    nearly_without = results.summary.assign(recovery=30.0)
    axes = draw_panels(curves_of([replace(results, summary=without_gap)], ["a"])).axes[1]
    assert all(40.0 not in line.get_ydata() for line in axes.lines)
    axes = draw_panels(curves_of([replace(results, summary=nearly_without)], ["a"])).axes[1]
    assert axes.get_ylim()[1] < 2
    assert any("cut at 1.75" in text.get_text() for text in axes.texts)


def test_four_panels_fill_two_rows_and_each_has_a_letter(results: Results) -> None:
    from olmo_sparsity.analysis.report.curves import curves_of
    from olmo_sparsity.analysis.report.figures import draw_panels

    lengths = [
        replace(results, meta=replace(META, windows=META.windows | {"long": long}))
        for long in (16, 64)
    ]
    figure = draw_panels(curves_of(lengths, ["a", "a"]))
    assert [axes.get_title(loc="left")[:3] for axes in figure.axes] == ["(a)", "(b)", "(c)", "(d)"]


def test_placebo_targets_are_drawn_beside_own_ones(results: Results) -> None:
    """Recovery at targets that an unrelated text seemed to help, by units of that text."""
    from olmo_sparsity.analysis.report.curves import curves_of
    from olmo_sparsity.analysis.report.figures import draw_panels

    (curve,) = curves_of([results], ["a model"])
    losses = results.losses.set_index(["document", "target"])
    rows = results.recovery.query(
        "distant_part == 'placebo' and control == 'own' and units == 'tokens' and k == 1"
    )
    rows = rows[rows.selector == curve.rows.selector.iloc[0]]
    chosen = results.targets.query("distant_part == 'placebo' and target_set == 'gap'")
    rows = rows.merge(chosen[["document", "target"]]).join(losses, on=["document", "target"])
    expected = (rows.loss_short - rows.loss_set).sum()
    expected /= (rows.loss_short - rows.placebo_loss_long).sum()
    drawn = curve.rows.query("units == 'tokens' and k == 1").placebo_recovery.iloc[0]
    assert drawn == pytest.approx(expected, rel=1e-5)
    by_k = draw_panels([curve]).axes[1]
    assert any(drawn in line.get_ydata() for line in by_k.lines if line.get_linestyle() == ":")


def test_the_gap_is_drawn_by_length_and_lengths_beyond_the_trained_one_are_shaded(
    results: Results,
) -> None:
    from olmo_sparsity.analysis.report.curves import curves_of
    from olmo_sparsity.analysis.report.figures import draw_panels

    trained = {"step": 9, "length": 32, "positions": "pose"}
    every = [
        replace(
            results,
            meta=replace(
                META,
                model={"name": "runs/a", "trained": trained},
                windows=META.windows | {"long": long},
            ),
        )
        for long in (16, 64)
    ]
    axes = draw_panels(curves_of(every, ["a", "a"])).axes[0]
    reported = results.reported
    gap = (reported.loss_short - reported.loss_long).mean()
    line = axes.containers[0].lines[0]
    assert list(line.get_xdata()) == [16, 64]
    assert list(line.get_ydata()) == pytest.approx([gap, gap], rel=1e-5)
    (span,) = axes.patches
    assert span.get_x() == 32


def test_the_colour_belongs_to_the_scheme_not_to_the_order(results: Results) -> None:
    from olmo_sparsity.analysis.report.curves import curves_of
    from olmo_sparsity.analysis.report.figure_style import Missing
    from olmo_sparsity.analysis.report.figures import colors_of

    def of(positions: str) -> Results:
        model = {"name": f"runs/{positions}", "trained": {"positions": positions}}
        return replace(results, meta=replace(META, model=model))

    pair = [of("contiguous"), of("pose")]
    colors = colors_of(curves_of(pair, ["RoPE", "PoSE"]))
    assert colors == colors_of(curves_of(pair[::-1], ["PoSE", "RoPE"]))
    missing = [Missing("RoPE", "it diverged", positions="contiguous")]
    assert colors == colors_of(curves_of(pair[1:], ["PoSE"]), missing)
    assert len(set(colors.values())) == 2


def test_measurements_that_differ_in_more_than_length_are_curves_of_their_own(
    results: Results, tmp_path: Path
) -> None:
    from olmo_sparsity.analysis.report.curves import curves_of
    from olmo_sparsity.analysis.report.figures import draw_figure2

    every = [
        replace(results, meta=replace(META, windows=META.windows | {"long": long, "short": short}))
        for long, short in ((16, 8), (64, 16))
    ]
    curves = curves_of(every, ["a", "a"])
    assert [curve.label for curve in curves] == ["a, short=8", "a, short=16"]
    draw_figure2([results, results], tmp_path / "equal.svg", ["one", "one"])


def test_runs_whose_names_end_alike_are_told_apart_in_the_legend(
    results: Results, tmp_path: Path
) -> None:
    from olmo_sparsity.analysis.report.figures import draw_figure2

    end = "seeds/of/the/same/model/and/text/in/a/folder/with/a/long/name/step9"
    names = [f"/disk/{scheme}/{end}" for scheme in ("pose", "rope")]
    every = [replace(results, meta=replace(META, model={"name": name})) for name in names]
    draw_figure2(every, tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text()
    for scheme in ("se", "pe"):  # as few letters more as it takes
        assert drawn.count(f"…{scheme}/{end}, add one, tokens") == 1


def test_the_legend_says_that_seeds_of_one_label_have_a_line_each(
    results: Results, tmp_path: Path
) -> None:
    from olmo_sparsity.analysis.report.figures import draw_figure2

    every = [
        replace(results, meta=replace(META, model={"name": f"{label}_seed{seed}"}))
        for label, seed in (("PoSE", 0), ("PoSE", 1), ("PoSE", 2), ("RoPE", 0))
    ]
    draw_figure2(every, tmp_path / "figure.svg", ["PoSE_0", "PoSE_0", "PoSE_0", "RoPE_0"])
    drawn = (tmp_path / "figure.svg").read_text()
    assert "PoSE_0, add one, tokens (3 runs, a line each)" in drawn
    assert "RoPE_0, add one, tokens" in drawn
    assert "RoPE_0, add one, tokens (" not in drawn


def test_a_missing_point_says_its_reason(results: Results, tmp_path: Path) -> None:
    from olmo_sparsity.analysis.report.figure_style import Missing
    from olmo_sparsity.analysis.report.figures import draw_figure2

    point = Missing("PoSE", "no target has a gap large enough", 64, 5)
    draw_figure2([results], tmp_path / "figure.svg", None, [point])
    assert "PoSE (64, step 5): no target has a gap" in (tmp_path / "figure.svg").read_text()


def written(found: Attribution, folder: Path) -> str:
    found.to_html(folder / "new" / "answer.html")
    return (folder / "new" / "answer.html").read_text()


def test_every_statement_has_its_verdict_and_numbers(tmp_path: Path) -> None:
    found = with_verdicts(asked())
    page = written(found, tmp_path)
    with pytest.raises(ConfigError, match=r"answer\.txt must end in \.html"):
        found.to_html(tmp_path / "answer.txt")
    panels = page.split('<section class="panel"')[1:]
    for panel, row in zip(panels, found.statements.itertuples(), strict=True):
        assert row.verdict[1:] in panel
        for cell in found.matrix.loc[row.Index].itertuples():
            for value in (cell.gives, cell.lost):
                assert f"<td>{format_number(value)}</td>" in panel
    assert re.findall(r"<sup>(.*?)</sup>", page) == ["1", "1 or 3", "1 + 2"]


def test_nothing_runs_and_nothing_is_loaded(tmp_path: Path) -> None:
    found = with_verdicts(asked())
    names = [f"{i} {text}" for i, text in enumerate(HOSTILE)]
    found.prompt.names[:] = ["".join(names[0:6]), "".join(names[6:12]), "".join(names[12:])]
    found.layout.document.__dict__["texts"] = np.resize(
        HOSTILE, len(found.layout.document.tokens)
    ).tolist()
    page = written(found, tmp_path)
    tags = Page(page)
    assert not tags.of("script")
    assert not tags.of("img")
    for _, attributes in tags.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    style = page.split("<style>")[1].split("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = [tag["content"] for tag in tags.of("meta") if "http-equiv" in tag]
    assert f"{policy}".startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
    assert page.count("<style>") == page.count("</style>") == 1
