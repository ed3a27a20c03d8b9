"""Figure 2 says what the tables say, for one model or several, and for tables that lack rows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
import pytest

from analysis.figures import _PRINT, _chosen, _figure, _loss_curves, draw_figure2, figure2_svg
from analysis.results import Results
from olmo_sparsity.errors import ConfigError
from tests.fake_results import KS, META, SELECTORS, THRESHOLD, UNITS, fake_results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return fake_results(tmp_path_factory.mktemp("fake"))


def texts_of(svg: bytes) -> str:
    root = ElementTree.fromstring(svg)
    return "\n".join(
        "".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")
    )


def test_every_format_is_written_the_same_each_time(results: Results, tmp_path: Path) -> None:
    for suffix, head in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        path = tmp_path / f"folder{suffix}" / f"figure{suffix}"
        draw_figure2([results], path)
        first = path.read_bytes()
        assert first.startswith(head)
        if suffix != ".png":  # whose bytes hold no date
            draw_figure2([results], path)
            assert path.read_bytes() == first


def test_another_format_is_refused(results: Results, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"figure\.jpg: a figure ends in \.png, \.pdf, \.svg"):
        draw_figure2([results], tmp_path / "figure.jpg")
    with pytest.raises(ConfigError, match="no results"):
        draw_figure2([], tmp_path / "figure.png")
    with pytest.raises(ConfigError, match="1 labels for 2 results"):
        draw_figure2([results] * 2, tmp_path / "figure.png", ["one"])


def test_text_stays_text_and_names_windows_model_and_counts(results: Results) -> None:
    text = texts_of(figure2_svg([results]))
    losses = results.reported
    num_chosen = (losses.loss_short - losses.loss_long >= THRESHOLD).sum()
    by_placebo = (losses.loss_short - losses.placebo_loss_long >= THRESHOLD).mean()
    for wanted in (
        *("runs/quick", "long 192, short 32", "stride 16", "5 documents", "foreign control"),
        f"{num_chosen:,} of {len(losses):,} targets",
        f"unrelated text: {by_placebo:.1%}",
        *(selector.replace("_", " ") for selector in SELECTORS),
        *("add one, span:4", "equal", "L_short", "L_long", "gap ≥ 0.90", "number of far units"),
        *("(c) Net of foreign and placebo", "(d) Excess by kind, k = 1"),
    ):
        assert wanted in text, wanted
    assert "$" not in text


def test_several_models_share_axes_and_keep_their_names(results: Results, tmp_path: Path) -> None:
    fewer = replace(results, dependencies=results.dependencies.iloc[3:5])
    draw_figure2([results, fewer], tmp_path / "two.svg", ["20M", "60M"])
    text = texts_of((tmp_path / "two.svg").read_bytes())
    assert "20M" in text
    assert "60M" in text
    assert text.count("equal") == 1


def test_a_name_is_never_a_formula_nor_markup(results: Results, tmp_path: Path) -> None:
    name = r"$\frac{1$ <b>&amp;</b> 模型 ]]> _x^"
    hostile = replace(results, meta=replace(META, model={"name": name}))
    assert name in texts_of(figure2_svg([hostile]))
    draw_figure2([hostile], tmp_path / "figure.pdf", [name])


@pytest.mark.parametrize("name", ["losses", "targets", "recovery", "summary", "dependencies"])
def test_what_was_not_measured_is_said(results: Results, name: str) -> None:
    empty = replace(results, **{name: getattr(results, name).iloc[:0]})
    wanted = "not measured" if name in ("summary", "dependencies") else "no targets chosen"
    assert wanted in texts_of(figure2_svg([empty]))
    figure2_svg([empty, results])


def test_a_single_k_and_a_single_document_can_be_drawn(results: Results) -> None:
    one = replace(
        results,
        losses=results.losses[results.losses.document == 1],
        recovery=results.recovery.query("k == 4 and document == 1 and selector == 'add_one'"),
        summary=results.summary.query("k == 4"),
    )
    assert "1 document" in texts_of(figure2_svg([one]))


def test_the_placebo_is_drawn_and_where_there_is_none_that_is_said(results: Results) -> None:
    def dotted(some: Results) -> int:
        figure = _figure([some], ["one"], _PRINT)
        (axes,) = [axes for axes in figure.axes if axes.get_title(loc="left").startswith("(c)")]
        lines = [line for line in axes.lines if line.get_linestyle() == ":"]
        return sum(np.isfinite(line.get_ydata()).all() for line in lines)

    assert dotted(results) == len(SELECTORS) * len(UNITS)
    columns = [name for name in results.summary if name.startswith(("placebo", "net"))]
    without = replace(results, summary=results.summary.assign(**dict.fromkeys(columns, np.nan)))
    assert dotted(without) == 0
    text = texts_of(figure2_svg([without]))
    assert "no placebo" in text
    assert "net excess" not in text


def test_nothing_global_changes(results: Results) -> None:
    before = dict(matplotlib.rcParams)
    figure2_svg([results], dark=True)
    assert dict(matplotlib.rcParams) == before
    code = "import sys, analysis.figures, analysis.report; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert printed == "False\n"


def test_curves_are_means_over_targets_with_draws_averaged_first(results: Results) -> None:
    chosen = _chosen(results)
    curves = _loss_curves(chosen)
    assert set(curves) == set(product(SELECTORS, UNITS, ("own", "foreign")))
    for name, rows in chosen.groupby(["selector", "units", "control"]):
        curve = curves[name]
        assert tuple(curve.k) == KS
        expected = rows[rows.k == 4].groupby(["document", "target"]).loss_set.mean().mean()
        at_4 = curve[curve.k == 4].iloc[0]
        assert at_4["mean"] == pytest.approx(expected)
        assert at_4.low <= at_4["mean"] <= at_4.high


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(60):
        num_documents, num_targets = 40, 5
        level = rng.normal(2, 0.5, num_documents)  # targets of one document are alike
        loss = level[:, None] + rng.normal(0, 0.2, (num_documents, num_targets))
        document, target = np.indices(loss.shape)
        chosen = pd.DataFrame(
            {"document": document.ravel(), "target": target.ravel(), "loss_set": loss.ravel()}
        ).assign(selector="add_one", units="tokens", control="own", k=1, loss_short=5.0)
        curve = _loss_curves(chosen)["add_one", "tokens", "own"].iloc[0]
        hits += curve.low <= 2 <= curve.high
    assert hits >= 50
