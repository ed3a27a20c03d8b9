"""The command's work from YAML to table, and what its objectives learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity.base.errors import ConfigError, UserError
from olmo_sparsity.base.locks import locked
from study.pages.stored import others
from study.theory import planted as P
from study.theory.experiment import run
from study.theory.learning import learn
from study.theory.results import read_results
from study.theory.settings import SETTINGS, LearningConfig
from study.theory.sparse_attention import KeyShape
from tests.study.theory.support import TINY, enumerated_risk, parity


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
        ("output=''", "output='' is blank"),
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
    assert ((bounds * (1 + 1e-5)).ge(STORED.risk, axis=0) | bounds.isna()).all(axis=None)
    assert bounds.notna().sum().sum() > 40


def test_the_quick_table_holds_every_case() -> None:
    cases = STORED.groupby(["setting", "num_places", "objective"]).seeds.max()
    for k in (1, 2, 3):
        for setting in ("local", "nonlocal", "coupled"):
            assert cases[setting, k, "mixture"] >= 5
        assert cases["local", k, "minimax"] >= 5
    assert set(STORED.setting) == set(SETTINGS)
    assert not np.isnan(STORED.risk).any()


def test_learning_finds_the_planted_pair_and_seeds_do_not_share() -> None:
    data, shape = parity(P.translated_shapes([(0, 1)]), rate=0.01), KeyShape(2, 2)
    config = LearningConfig(num_steps=120, batch_per_length=16)
    both = learn(data, shape, 8, "mixture", config, [3, 4])
    alone = learn(data, shape, 8, "mixture", config, [4])
    # Sums over a longer batch round differently, and Adam carries that on.
    between_runs = (both.log_key_RPC[1] - alone.log_key_RPC[0]).abs().max()
    assert between_runs < 0.03 < (both.log_key_RPC[1] - both.log_key_RPC[0]).abs().max()
    assert enumerated_risk(both, data, 8).max() < 0.05


def test_minimax_lowers_the_worst_length() -> None:
    data = parity(P.drifting_shapes([(0, 1), (0, 2)], switch_length=8, rare=0.05), rate=0.1)
    worst = {}
    for objective in ("mixture", "minimax"):
        model = learn(data, KeyShape(2, 3), 8, objective, LearningConfig(num_steps=200), [0])
        worst[objective] = max(enumerated_risk(model, data, n)[0] for n in range(4, 9))
    assert worst["minimax"] < 0.85 * worst["mixture"]
