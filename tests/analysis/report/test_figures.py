"""Figure 2, and the figure of a page, show what the tables hold, also where these lack rows."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes

from olmo_sparsity.analysis.report.figures import (
    _figure,
    _headline,
    _of_main_set,
    draw_figure2,
    selectors_svg,
)
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.errors import ConfigError
from tests.support.fake_results import META, SELECTORS, THRESHOLD, UNITS

HOSTILE = r"$\frac{1$ <b>&amp;</b> 模型 ]]> _x^"


def texts_of(svg: bytes) -> str:
    root = ElementTree.fromstring(svg)
    return "\n".join(
        "".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")
    )


def panel(results: Results, name: str) -> Axes:
    figure = _figure(_of_main_set(results))
    (axes,) = [axes for axes in figure.axes if axes.get_title(loc="left").startswith(name)]
    return axes


def test_every_format_is_written_without_its_date(results: Results, tmp_path: Path) -> None:
    hostile = replace(results, meta=replace(META, model={"name": HOSTILE}))
    for suffix, head in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        path, again = (tmp_path / name / f"figure{suffix}" for name in "ab")
        draw_figure2([hostile], path)
        draw_figure2([hostile], again)
        assert path.read_bytes().startswith(head)
        assert path.read_bytes() == again.read_bytes()
    assert HOSTILE in texts_of((tmp_path / "a" / "figure.svg").read_bytes())


@pytest.mark.parametrize(
    ("name", "number", "labels"), [("jpg", 1, None), ("png", 0, None), ("png", 2, ["one"])]
)
def test_what_cannot_be_drawn_is_refused(
    results: Results, tmp_path: Path, name: str, number: int, labels: list[str] | None
) -> None:
    with pytest.raises(ConfigError):
        draw_figure2([results] * number, tmp_path / f"figure.{name}", labels)


def test_the_headline_shows_recovery_and_removal_of_own_and_unrelated_text(
    results: Results, tmp_path: Path
) -> None:
    figure = _headline([results], ["a model"])()
    row = results.summary.query("target_set == 'gap'").iloc[0]
    text = "\n".join(
        [figure.get_suptitle(), *(t.get_text() for t in figure.legends[0].get_texts())]
    )
    size = f"n = {row.num_targets:,} targets, {row.num_documents} documents"
    for wanted in (size, "a model, add one, tokens", "unrelated text", "placebo", "95%"):
        assert wanted in text
    rows = results.summary.query("target_set == 'gap' and selector == 'add_one'")
    columns = (("recovery", "foreign"), ("removal", "placebo_removal"))
    for axes, names in zip(figure.axes, columns, strict=True):
        drawn = [tuple(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) > 2]
        for (_, of_units), column in product(rows.groupby("units"), names):
            assert tuple(of_units.sort_values("k")[column]) in drawn
        assert len(drawn) == 2 * len(UNITS)
    two = [results, replace(results, summary=rows.assign(num_targets=7))]
    labels = [t.get_text() for t in _headline(two, ["one", "two"])().legends[0].get_texts()]
    assert any("two" in label and "n = 7 targets" in label for label in labels)
    draw_figure2([replace(results, summary=rows.iloc[:0])], tmp_path / "none.png")


def test_the_figure_of_a_page_names_windows_model_and_counts(results: Results) -> None:
    hostile = replace(results, meta=replace(META, model={"name": HOSTILE}))
    text, losses = texts_of(selectors_svg(hostile)), results.reported
    num_chosen = (losses.loss_short - losses.loss_long >= THRESHOLD).sum()
    by_placebo = (losses.loss_short - losses.placebo_loss_long >= THRESHOLD).mean()
    for wanted in (
        *(HOSTILE, "long 192, local 32", "stride 16", "5 documents"),
        f"{num_chosen:,} of {len(losses):,} targets",
        f"unrelated text: {by_placebo:.1%}",
        *(selector.replace("_", " ") for selector in SELECTORS),
        *("add one, span:4", f"gap ≥ {THRESHOLD:.2f}"),
    ):
        assert wanted in text, wanted


@pytest.mark.parametrize("name", ["losses", "targets", "summary", "removal"])
def test_what_was_not_measured_is_said(results: Results, name: str) -> None:
    if name == "removal":
        lacking = replace(results, summary=results.summary.assign(removal=np.nan))
    else:
        lacking = replace(results, **{name: getattr(results, name).iloc[:0]})
    figure = _figure(_of_main_set(lacking))
    assert "not measured" in {text.get_text() for axes in figure.axes for text in axes.texts}


def test_the_placebo_is_drawn_and_where_there_is_none_that_is_said(results: Results) -> None:
    dotted = [line for line in panel(results, "(d) Net").lines if line.get_linestyle() == ":"]
    assert sum(np.isfinite(line.get_ydata()).all() for line in dotted) == (
        len(SELECTORS) * len(UNITS)
    )
    columns = [name for name in results.summary if name.startswith(("placebo", "net"))]
    without = replace(results, summary=results.summary.assign(**dict.fromkeys(columns, np.nan)))
    assert panel(without, "(d) Excess; no placebo")


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


def test_colours_on_dark_are_others_for_the_same_drawing(results: Results) -> None:
    before = dict(matplotlib.rcParams)
    light, dark = selectors_svg(results).decode(), selectors_svg(results, dark=True).decode()
    assert dict(matplotlib.rcParams) == before  # nothing global changes
    color = r"#[0-9a-f]{6}\b"
    assert re.sub(color, "", light) == re.sub(color, "", dark)
    assert {"#ffffff", "#1a1a1a"}.isdisjoint(re.findall(color, dark))
