"""The command's work from YAML to figure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from olmo_sparsity import drawing
from olmo_sparsity.errors import ConfigError, DataError, UserError
from olmo_sparsity.folders import locked
from study.theory import figure
from study.theory.experiment import run
from study.theory.results import markdown_tables, read_results, summarise
from study.theory.settings import load_theory_config
from tests.study.theory.support import TINY


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY + f"output: {tmp_path}/run\nfigure: {tmp_path}/figure\n")
    return path


def test_from_config_to_figure(config_path: Path, tmp_path: Path) -> None:
    run(
        str(config_path),
        [
            "--worst_case.seeds=[0]",
            "--worst_case.num_steps=3",
            "--bridge.num_steps=3",
            "--bridge.num_strings=20",
            "--bridge.width=16",
            "--bridge.cases=[{setting: coupled, num_places: 2}]",
        ],
    )
    rows, meta = read_results(tmp_path / "run")
    assert {row.model for row in rows} == {"attention", "worst_case", "rope", "pose"}
    # Lengths 4 … 8 and 16, two seeds; the search at 16 only; the bridge with one seed, two schemes.
    assert len(rows) == 4 * 6 * 2 + 1 + 2 * 6
    for end in ("png", "csv", "md", "meta.json"):
        assert (tmp_path / f"figure.{end}").stat().st_size > 100
    assert meta["seeds"] == [0, 1]
    assert {"torch", "numpy"} <= meta["versions"].keys()

    longest = {(row.model, row.setting): row for row in rows if row.length == 16 and row.seed == 0}
    local, apart = longest["attention", "local"], longest["attention", "nonlocal"]
    assert local.method == "transfer"
    assert local.low == local.risk == local.high
    assert np.isfinite([local.bound_stated, local.bound_improved]).all()
    assert np.isnan([apart.bound_stated, apart.bound_improved]).all()
    assert "exceeds L/4" in apart.refusal
    assert longest["attention", "order"].risk == pytest.approx(0.5, abs=1e-6)

    text = (tmp_path / "figure.md").read_text()
    assert text == markdown_tables(summarise(rows), meta)
    assert "| coupled | 2 | over 2 | 8 | minimax |" in text
    again = drawing.render(lambda: figure._figure(summarise(rows), meta), "png", figure._SETTINGS)
    assert (tmp_path / "figure.png").read_bytes() == again


def test_one_process_at_a_time_computes_one_setting_in_a_folder(
    config_path: Path, tmp_path: Path
) -> None:
    cases = "--cases=[{setting: local, num_places: 1}]"
    run(str(config_path), [cases])
    with pytest.raises(ConfigError, match=r"run holds work with .*local_span=2 \(now 3\)"):
        run(str(config_path), [cases, "--local_span=3"])
    run(str(config_path), [cases, f"--figure={tmp_path}/elsewhere"])
    with (
        locked(tmp_path / "run"),
        pytest.raises(UserError, match="run is being written by process"),
    ):
        run(str(config_path), [cases])
    with pytest.raises(ConfigError, match="holds other files"):
        run(str(config_path), [cases, f"--output={tmp_path}"])


@pytest.mark.parametrize(
    "case",
    [
        "nonlocal_token_keys, num_places: 2",
        "drifting, num_places: 2",
        "nonlocal, num_places: 2, train_length: 10",
    ],
)
def test_cases_that_are_compared_with_nothing_are_drawn(
    case: str, config_path: Path, tmp_path: Path
) -> None:
    run(str(config_path), ["--local_span=3", f"--cases=[{{setting: {case}}}]"])
    assert (tmp_path / "figure.png").stat().st_size > 100


def test_the_fastest_growth_is_that_of_one_starting_point(
    config_path: Path, tmp_path: Path
) -> None:
    overrides = ["--worst_case.seeds=[0,1,2]", "--worst_case.num_steps=2"]
    run(str(config_path), ["--cases=[{setting: local, num_places: 1}]", *overrides])
    rows, _ = read_results(tmp_path / "run")
    (found,) = (s for s in summarise(rows) if s.model == "worst_case")
    growths = [row.risk / row.delta_worst for row in rows if row.model == "worst_case"]
    assert len(growths) == 3
    assert found.risk / found.delta_worst == max(growths)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_theory_config(tmp_path / "none.yaml", [])
    with pytest.raises(DataError, match=r"table.parquet; make it with"):
        read_results(tmp_path)
