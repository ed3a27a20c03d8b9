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


@pytest.mark.parametrize("share", [float("nan"), 1.5, -0.1])
def test_what_is_no_share_is_not_drawn(tmp_path: Path, share: float) -> None:
    folder = write(tmp_path / "run", [row(length=10), row(length=40, token_accuracy=share)])
    with pytest.raises(DataError, match="ppc, seed 1, length 40 has an accuracy that is not"):
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
