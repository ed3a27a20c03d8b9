"""Figure 2 shows what the tables hold, also where these lack rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from olmo_sparsity.analysis.report.figures import curves_of, draw_figure2, draw_headline
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.errors import ConfigError
from tests.support.fake_results import META, UNITS

HOSTILE = r"$\frac{1$ <b>&amp;</b> 模型 ]]> _x^"


def test_every_format_is_written_without_its_date(results: Results, tmp_path: Path) -> None:
    hostile = replace(results, meta=replace(META, model={"name": HOSTILE}))
    for suffix, head in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        path, again = (tmp_path / name / f"figure{suffix}" for name in "ab")
        draw_figure2([hostile], path)
        draw_figure2([hostile], again)
        assert path.read_bytes().startswith(head)
        assert path.read_bytes() == again.read_bytes()
    draw_figure2([replace(results, summary=results.summary.iloc[:0])], tmp_path / "none.png")


@pytest.mark.parametrize(
    ("name", "number", "labels"), [("jpg", 1, None), ("png", 0, None), ("png", 2, ["one"])]
)
def test_what_cannot_be_drawn_is_refused(
    results: Results, tmp_path: Path, name: str, number: int, labels: list[str] | None
) -> None:
    with pytest.raises(ConfigError):
        draw_figure2([results] * number, tmp_path / f"figure.{name}", labels)


def test_recovery_and_removal_are_those_of_the_first_selector(results: Results) -> None:
    figure = draw_headline(curves_of([results], ["a model"]))
    row = results.summary.query("target_set == 'gap'").iloc[0]
    said = [figure.get_suptitle(), *(t.get_text() for t in figure.legends[0].get_texts())]
    size = f"n = {row.num_targets:,} targets, {row.num_documents} documents"
    for wanted in (size, "a model, add one, tokens", "unrelated text", "placebo", "95%"):
        assert wanted in "\n".join(said)
    rows = results.summary.query("target_set == 'gap' and selector == 'add_one'")
    columns = (("recovery", "foreign"), ("removal", "placebo_removal"))
    for axes, names in zip(figure.axes, columns, strict=True):
        drawn = [tuple(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) > 2]
        for (_, of_units), column in product(rows.groupby("units"), names):
            assert tuple(of_units.sort_values("k")[column]) in drawn
        assert len(drawn) == 2 * len(UNITS)
    two = [results, replace(results, summary=rows.assign(num_targets=7))]
    legend = draw_headline(curves_of(two, ["one", "two"])).legends[0].get_texts()
    assert any("two" in t.get_text() and "n = 7 targets" in t.get_text() for t in legend)
