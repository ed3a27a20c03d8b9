"""Figure 2 shows what the tables hold, for one model or several, and for tables that lack rows."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

from olmo_sparsity.analysis.report.figures import _drawing, _headline, draw_figure2, figure2_svg
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.errors import ConfigError
from tests.support.fake_results import META, SELECTORS, THRESHOLD, UNITS


@pytest.fixture(scope="module")
def svg(results: Results) -> bytes:
    return figure2_svg([results])


def texts_of(svg: bytes) -> str:
    root = ElementTree.fromstring(svg)
    return "\n".join(
        "".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")
    )


def panel(results: Results, name: str) -> Axes:
    figure = _drawing([results])()
    (axes,) = [axes for axes in figure.axes if axes.get_title(loc="left").startswith(name)]
    return axes


HOSTILE = r"$\frac{1$ <b>&amp;</b> 模型 ]]> _x^"


def test_every_format_is_written_without_its_date(
    results: Results, svg: bytes, tmp_path: Path
) -> None:
    hostile = replace(results, meta=replace(META, model={"name": HOSTILE}))
    for suffix, head, drawn in (
        (".png", b"\x89PNG", results),
        (".pdf", b"%PDF", hostile),
        (".svg", b"<?xml", results),
    ):
        path = tmp_path / f"folder{suffix}" / f"figure{suffix}"
        both = (path, draw_figure2([drawn], path))
        for written in both:
            assert written.read_bytes().startswith(head)
            assert b"Date" not in written.read_bytes()
    assert both[1].read_bytes() == svg  # the same each time


def test_the_headline_shows_recovery_and_removal_of_own_and_unrelated_text(
    results: Results, tmp_path: Path
) -> None:
    figure = _headline([results], ["a model"])()
    row = results.summary.query("target_set == 'gap'").iloc[0]
    text = "\n".join(
        [figure.get_suptitle(), *(t.get_text() for t in figure.legends[0].get_texts())]
    )
    size = (
        f"windows 192 / 32 tokens, n = {row.num_targets:,} targets, {row.num_documents} documents"
    )
    for wanted in (size, "a model, add one, tokens", "unrelated text", "placebo", "95%"):
        assert wanted in text
    rows = results.summary.query("target_set == 'gap' and selector == 'add_one'")
    for axes, columns in zip(
        figure.axes, (("recovery", "foreign"), ("removal", "placebo_removal")), strict=True
    ):
        drawn = [tuple(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) > 2]
        for (_, of_units), column in product(rows.groupby("units"), columns):
            assert tuple(of_units.sort_values("k")[column]) in drawn
        assert len(drawn) == 2 * len(UNITS)
    two = [results, replace(results, summary=rows.assign(num_targets=7))]
    names = [t.get_text() for t in _headline(two, ["one", "two"])().legends[0].get_texts()]
    assert any("two" in name and "n = 7 targets" in name for name in names)
    draw_figure2([replace(results, summary=rows.iloc[:0])], tmp_path / "none.png")


def test_another_format_is_refused(results: Results, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"figure\.jpg: a figure ends in \.png, \.pdf, \.svg"):
        draw_figure2([results], tmp_path / "figure.jpg")
    with pytest.raises(ConfigError, match="no results"):
        draw_figure2([], tmp_path / "figure.png")
    with pytest.raises(ConfigError, match="1 labels for 2 results"):
        draw_figure2([results] * 2, tmp_path / "figure.png", ["one"])


def test_text_stays_text_and_names_windows_model_and_counts(results: Results, svg: bytes) -> None:
    text = texts_of(svg)
    losses = results.reported
    num_chosen = (losses.loss_short - losses.loss_long >= THRESHOLD).sum()
    by_placebo = (losses.loss_short - losses.placebo_loss_long >= THRESHOLD).mean()
    for wanted in (
        *("runs/quick", "long 192, local 32", "stride 16", "5 documents", "unrelated text"),
        f"{num_chosen:,} of {len(losses):,} targets",
        f"unrelated text: {by_placebo:.1%}",
        *(selector.replace("_", " ") for selector in SELECTORS),
        *("add one, span:4", "equal", "L_short", "L_long", "gap ≥ 0.90", "number of distant units"),
        *("(d) Net excess", "(e) Excess by kind, k = 1"),
        *("(b) Enough? Only k distant units", "(c) Needed? All but these k"),
    ):
        assert wanted in text, wanted
    assert "$" not in text


def test_several_models_share_axes_and_keep_their_names(results: Results, tmp_path: Path) -> None:
    fewer = replace(results, dependencies=results.dependencies.iloc[3:5])
    diagnostics = draw_figure2([results, fewer], tmp_path / "two.svg", ["20M", "60M"])
    text = texts_of(diagnostics.read_bytes())
    assert "20M" in text
    assert "60M" in text
    assert text.count("equal") == 1


def test_shared_axes_hold_what_every_model_needs(results: Results) -> None:
    small = replace(
        results,
        losses=results.losses.groupby("document").head(2),
        summary=results.summary[results.summary.k <= 2],
    )
    alone, both = _drawing([results])(), _drawing([results, small])()
    for of_one, of_both in zip(alone.axes[:3], both.axes[0:6:2], strict=True):
        assert of_both.get_xlim()[1] >= of_one.get_xlim()[1]
    assert both.axes[0].get_ylim() == alone.axes[0].get_ylim()
    assert [text.get_text() for text in both.axes[2].get_xticklabels()] == [
        "1",
        "2",
        "4",
        "8",
        "16",
    ]


def test_a_name_is_never_a_formula_nor_markup(results: Results) -> None:
    hostile = replace(results, meta=replace(META, model={"name": HOSTILE}))
    assert HOSTILE in texts_of(figure2_svg([hostile]))


def test_what_was_not_measured_is_said(results: Results) -> None:
    names = ("losses", "targets", "summary", "dependencies")
    tables = {name: getattr(results, name).iloc[:0] for name in names}
    lacking = [replace(results, **{name: rows}) for name, rows in tables.items()]
    lacking.append(replace(results, summary=results.summary.assign(removal=np.nan)))
    for result in lacking:
        figure = _drawing([result])()
        assert "not measured" in {text.get_text() for axes in figure.axes for text in axes.texts}
    figure2_svg(lacking)
    figure2_svg([replace(results, **tables)])


def test_a_single_k_and_a_single_document_can_be_drawn(results: Results) -> None:
    one = replace(
        results,
        losses=results.losses[results.losses.document == 1],
        summary=results.summary.query("k == 4"),
    )
    assert "1 document" in texts_of(figure2_svg([one]))


def test_the_placebo_is_drawn_and_where_there_is_none_that_is_said(results: Results) -> None:
    def dotted(some: Results) -> int:
        lines = [line for line in panel(some, "(d)").lines if line.get_linestyle() == ":"]
        return sum(np.isfinite(line.get_ydata()).all() for line in lines)

    assert dotted(results) == len(SELECTORS) * len(UNITS)
    columns = [name for name in results.summary if name.startswith(("placebo", "net"))]
    without = replace(results, summary=results.summary.assign(**dict.fromkeys(columns, np.nan)))
    assert dotted(without) == 0
    text = texts_of(figure2_svg([without]))
    assert "no placebo" in text
    assert "net excess" not in text


def test_both_halves_are_shares_of_the_gap_of_the_chosen_targets(results: Results) -> None:
    """Draws of a target are averaged first, and bands hold the curves of own units."""
    rows = results.recovery[results.recovery.far_part == "document"]
    chosen = results.targets.query("far_part == 'document' and target_set == 'gap'")
    rows = rows.merge(chosen, on=["document", "target"])
    rows = rows.merge(results.losses[["document", "target", "loss_short", "loss_long"]])
    by = ["selector", "units", "control", "k"]
    values = ["loss_set", "loss_without", "loss_short", "loss_long"]
    means = rows.groupby([*by, "document", "target"])[values].mean().groupby(by).mean()
    gap = means.loss_short - means.loss_long
    recovery = ((means.loss_short - means.loss_set) / gap).unstack("k")
    removal = ((means.loss_without - means.loss_long) / gap).xs("own", level="control").unstack("k")
    for name, expected in (("(b)", recovery), ("(c)", removal)):
        axes = panel(results, name)
        drawn = [tuple(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) > 2]
        for curve in expected.itertuples(index=False, name=None):
            assert min(np.abs(np.subtract(curve, other)).max() for other in drawn) < 1e-5
        assert len(drawn) == 2 * len(SELECTORS) * len(UNITS)
        assert len(axes.collections) == len(SELECTORS) * len(UNITS)


def test_nats_of_all_tokens_are_drawn_where_they_are_measured(results: Results) -> None:
    titles = [axes.get_title(loc="left")[:3] for axes in _drawing([results])().axes]
    assert titles == ["(a)", "(b)", "(c)", "(d)", "(e)"]
    rows = results.summary[results.summary.target_set == "bigram"]
    every = rows.assign(target_set="every", gap=0.0625, excess_nats=0.01 * rows.k)
    both = replace(results, summary=pd.concat([results.summary, every]))
    axes = panel(both, "(f)")
    assert "all distant text: +0.062" in {text.get_text() for text in axes.texts}
    lines = [line for line in axes.lines if len(line.get_xdata()) > 2]
    assert len(lines) == len(SELECTORS) * len(UNITS)
    for line in lines:
        np.testing.assert_allclose(
            np.array(line.get_ydata(), float), 0.01 * np.array([1, 2, 4, 8, 16])
        )
    figure = _drawing([results, both])()
    assert len(figure.axes) == 12
    assert "not measured" in {text.get_text() for text in figure.axes[10].texts}


def test_colours_on_dark_are_others_for_the_same_drawing(results: Results, svg: bytes) -> None:
    before = dict(matplotlib.rcParams)
    light, dark = svg.decode(), figure2_svg([results], dark=True).decode()
    assert dict(matplotlib.rcParams) == before  # nothing global changes
    color = r"#[0-9a-f]{6}\b"
    assert re.sub(color, "", light) == re.sub(color, "", dark)
    assert {"#ffffff", "#1a1a1a"}.isdisjoint(re.findall(color, dark))
