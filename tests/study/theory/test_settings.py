"""Settings that cannot be are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from olmo_sparsity.errors import ConfigError
from study.theory.experiment import run
from tests.study.theory.support import TINY


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY + f"output: {tmp_path}/run\nfigure: {tmp_path}/figure\n")
    return path


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "learning.num_step=3",
            "unknown key 'learning.num_step'; did you mean 'learning.num_steps'",
        ),
        ("train_lenght=3", "did you mean 'train_length'"),
        ("train_length=0", "train_length=0 must be at least 1"),
        ("train_length=x", "train_length"),
        ("seeds=[1,1]", r"seeds=\[1, 1\] holds one value twice"),
        ("test_multiples=[1,2,2]", "test_multiples=.* holds one value twice"),
        ("worst_case.seeds=[1,1]", "worst_case.seeds=.* holds one value twice"),
        ("worst_case.train_length=28", "worst_case.train_length=28 must be at most 27"),
        ("bridge.seeds=[1,1]", "bridge.seeds=.* holds one value twice"),
        ("bridge.seeds=[-1]", "bridge.seeds=.*-1"),
        ("bridge.schemes=[rope,rope]", "bridge.schemes=.* holds one value twice"),
        ("bridge.cases=[{setting: local, num_places: 7}]", r"bridge.cases\[0\].num_places=7"),
        (
            "bridge.cases=[{setting: local, num_places: 1, objective: minimax}]",
            r"bridge.cases\[0\].objective=minimax has no effect",
        ),
        (
            "cases=[{setting: local, num_places: 1},"
            "{setting: local, num_places: 1, train_length: 8, attention_places: 1}]",
            r"cases\[1\] is a duplicate",
        ),
        ("cases=[]", "cases is empty"),
        ("cases=[{setting: local, num_places: 7}]", r"num_places=7.*L/2=4"),
        ("cases=[{setting: nowhere, num_places: 1}]", "'nowhere' is not one of local"),
        ("cases=[{setting: order, num_places: 3}]", "must be 2"),
        ("cases=[{setting: local, num_places: 1, marker_rate: 1}]", r"must lie in \[0, 1\)"),
        ("cases=[{setting: local, num_place: 1}]", "num_place"),
        ("cases=[{setting: nonlocal_token_keys, num_places: 4}]", "GiB"),
        ("bridge.schemes=[alibi]", r"bridge.schemes\[0\] must be one of rope, pose"),
        ("bridge.cases=[{setting: nowhere, num_places: 1}]", "'nowhere' is not one of local"),
        ("train_length", "nor a setting with a value"),
        ("--figure=''", "figure='' must be a path with a name"),
        ("--output=.", r"output='\.' must be a path with a name"),
    ],
)
def test_bad_settings_are_refused(
    override: str, says: str, config_path: Path, tmp_path: Path
) -> None:
    long = ["--test_multiples=[1,40]"] if "GiB" in says else []
    with pytest.raises(ConfigError, match=says):
        run(str(config_path), [*long, f"--{override}"])
    assert not (tmp_path / "run").exists()
