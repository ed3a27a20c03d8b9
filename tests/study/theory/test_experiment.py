"""The command's work from YAML to table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity.errors import ConfigError, UserError
from olmo_sparsity.folders import locked
from study.pages.stored import others
from study.theory.experiment import run
from study.theory.results import read_results
from study.theory.settings import SETTINGS
from tests.study.theory.support import TINY


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY + f"output: {tmp_path}/run\n")
    return path


def test_from_config_to_table(config_path: Path, tmp_path: Path) -> None:
    run(str(config_path), [])
    rows, meta = read_results(tmp_path / "run")
    assert len(rows) == 4 * 6 * 2  # lengths 4 … 8 and 16, two seeds
    assert meta["config"]["seeds"] == [0, 1]
    assert {"torch", "numpy"} <= meta["versions"].keys()

    longest = {(row.model, row.setting): row for row in rows if row.length == 16 and row.seed == 0}
    local, apart = longest["attention", "local"], longest["attention", "nonlocal"]
    assert local.low <= local.risk <= local.high
    assert np.isfinite([local.bound_stated, local.bound_improved]).all()
    assert np.isnan([apart.bound_stated, apart.bound_improved]).all()
    assert "exceeds L/4" in apart.refusal
    order = longest["attention", "order"]
    assert order.low <= 0.5 <= order.high


def test_one_process_at_a_time_computes_one_setting_in_a_folder(
    config_path: Path, tmp_path: Path
) -> None:
    cases = "--cases=[{setting: local, num_places: 1}]"
    run(str(config_path), [cases])
    with pytest.raises(ConfigError, match=r"run holds work with .*local_span=2 \(now 3\)"):
        run(str(config_path), [cases, "--local_span=3"])
    run(str(config_path), [cases])
    with (
        locked(tmp_path / "run"),
        pytest.raises(UserError, match="run is being written by process"),
    ):
        run(str(config_path), [cases])
    with pytest.raises(ConfigError, match="holds other files"):
        run(str(config_path), [cases, f"--output={tmp_path}"])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("cases=[{setting: somewhere, num_places: 1}]", "'somewhere' is not one of local"),
        ("cases=[{setting: order, num_places: 3}]", "num_places=3 must be 2"),
        ("cases=[{setting: local, num_places: 5}]", "num_places=5 must lie between 1 and"),
        ("output=''", "output='' must be a path"),
    ],
)
def test_bad_settings_are_refused(
    override: str, says: str, config_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        run(str(config_path), [f"--{override}"])
    assert not (tmp_path / "run").exists()


STORED = pd.DataFrame(others()["theory_quick"]["table"])


def test_bounds_hold_wherever_they_apply() -> None:
    """With constant 1, up to the noise of what is sampled."""
    bounds = STORED[["bound_stated", "bound_improved"]].astype(float)
    allowed = (bounds * (1 + 1e-5)).ge(STORED.risk, axis=0)
    assert (allowed | bounds.isna()).all(axis=None)
    assert bounds.notna().sum().sum() > 40


def test_the_quick_table_holds_every_case() -> None:
    cases = STORED.groupby(["setting", "num_places", "objective"]).seeds.max()
    for k in (1, 2, 3):
        for setting in ("local", "nonlocal", "coupled"):
            assert cases[setting, k, "mixture"] >= 5
        assert cases["local", k, "minimax"] >= 5
    assert set(STORED.setting) == set(SETTINGS)
    assert not np.isnan(STORED.risk).any()
