"""The figure shows what the table says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.errors import DataError
from study.tasks import figure
from study.tasks.figure import main
from study.tasks.results import Row, read_results, write_results
from study.tasks.schemes import SCHEMES


def row(**changes: Any) -> Row:
    given: dict[str, Any] = {
        "task": "addition",
        "scheme": "ppc",
        "seed": 1,
        "train_k": None,
        "test_k": None,
        "length": 10,
        "token_accuracy": 0.9,
        "id_accuracy": 0.8,
        "exact_match": 0.7,
        "low": 0.6,
        "high": 0.75,
        "teacher_forced": 0.95,
        "num_samples": 100,
    }
    return Row(**given | changes)


def write(folder: Path, rows: list[Row]) -> Path:
    folder.mkdir()
    write_results(folder, rows, {"settings": {"train_lengths": [5, 20]}})
    return folder


def drawn(folder: Path) -> Any:
    return figure._figure([read_results(folder)], [""])


def test_every_scheme_has_a_curve(tmp_path: Path) -> None:
    rows = [row(scheme=scheme, length=length) for scheme in SCHEMES for length in (10, 40)]
    exact = drawn(write(tmp_path / "run", rows)).axes[0]
    assert len({line.get_label() for line in exact.lines}) == len(SCHEMES)


@pytest.mark.parametrize("share", [float("nan"), 1.5, -0.1])
def test_what_is_no_share_is_not_drawn(tmp_path: Path, share: float) -> None:
    folder = write(tmp_path / "run", [row(length=10), row(length=40, token_accuracy=share)])
    with pytest.raises(DataError, match="ppc, seed 1, length 40 has an accuracy that is not"):
        figure.draw([folder], tmp_path / "figure.png")


def test_a_table_that_no_manifest_vouches_for_is_not_drawn(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [row()])
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"run is damaged: manifest\.json is missing"):
        figure.draw([folder], tmp_path / "figure.png")


def test_a_curve_is_the_mean_over_seeds_and_its_band_spans_them(tmp_path: Path) -> None:
    rows = [
        row(seed=seed, length=length, exact_match=value)
        for seed, values in ((1, (1.0, 0.6)), (2, (0.8, 0.2)))
        for length, value in zip((10, 40), values, strict=True)
    ]
    drawing = drawn(write(tmp_path / "run", rows))
    responses, tokens = drawing.axes
    (line,) = responses.get_lines()
    np.testing.assert_allclose(line.get_xydata(), [[10, 0.9], [40, 0.4]])
    (band,) = responses.collections
    (path,) = band.get_paths()
    assert {(10, 0.8), (10, 1.0), (40, 0.2), (40, 0.6)} <= {
        (round(x), round(y, 6)) for x, y in path.vertices
    }
    (shaded,) = responses.patches
    assert (shaded.get_x(), shaded.get_width()) == (5, 15)
    assert [line.get_ydata()[0] for line in tokens.get_lines()] == pytest.approx([0.9, 0.8, 0.95])
    assert "seeds 1, 2" in drawing.get_suptitle()


def test_one_seed_shows_its_own_interval(tmp_path: Path) -> None:
    drawing = drawn(write(tmp_path / "run", [row(), row(length=20)]))
    (path,) = drawing.axes[0].collections[0].get_paths()
    assert {0.6, 0.75} <= {round(y, 6) for _, y in path.vertices}
    assert "Wilson" in drawing.get_suptitle()


def test_k_makes_panels(tmp_path: Path) -> None:
    rows = [
        row(
            task="sparse_parity",
            scheme=scheme,
            train_k=train_k,
            test_k=test_k,
            id_accuracy=None,
            exact_match=0.1 * train_k + 0.01 * test_k,
        )
        for scheme in ("rope", "pose")
        for train_k in (4, 6)
        for test_k in (2, 5, 8)
    ]
    drawing = drawn(write(tmp_path / "run", rows))
    assert len(drawing.axes) == 6
    assert [axis.get_title() for axis in drawing.axes[:3]] == [
        "k = 2",
        "k = 5 (unseen)",
        "k = 8 (unseen)",
    ]
    for axis, value in zip(drawing.axes, (0.42, 0.45, 0.48, 0.62, 0.65, 0.68), strict=True):
        values = [line.get_ydata()[0] for line in axis.get_lines() if len(line.get_xdata()) == 1]
        assert values == pytest.approx([value, value])


def test_the_command_draws_equal_results_as_equal_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [row(), row(length=20)])
    for name in ("a.svg", "b.svg", "c.png"):
        assert main([str(folder), "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").stat().st_size > 5000


def test_several_results_share_a_figure_and_say_which_is_which(tmp_path: Path) -> None:
    folders = [write(tmp_path / name, [row(), row(length=20)]) for name in ("full", "without")]
    results = [read_results(folder) for folder in folders]
    drawing = figure._figure(results, ["full", "without"])
    (legend,) = drawing.legends
    assert [text.get_text().split(", ")[0] for text in legend.get_texts()] == ["full", "without"]


def test_what_cannot_be_drawn_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "one", [row()])
    other = write(tmp_path / "other", [row(task="needle")])
    for words, message in (
        ([str(one), "--out", "x.gif"], "a figure ends in .png"),
        ([str(one), str(other), "--out", "x.png"], "of several tasks (addition, needle)"),
        ([str(one), "--labels", "a,b", "--out", "x.png"], "2 labels for 1 results"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
