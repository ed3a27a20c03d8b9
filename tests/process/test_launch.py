"""Which process this is, by what each launcher leaves in the environment."""

from __future__ import annotations

import pytest

from olmo_sparsity.errors import ConfigError
from olmo_sparsity.process.launch import Launch, read_launch

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Launch()),
        ({"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}, Launch(3, 4, 1, 2)),
        ({"RANK": 1, "WORLD_SIZE": 2}, Launch(1, 2, 0, 1)),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 8}, Launch()),  # the batch shell is none of the eight
        ({"SLURM_STEP_ID": 0, "SLURM_PROCID": 5, "SLURM_STEP_NUM_TASKS": 8, "SLURM_LOCALID": 1,
          "SLURM_NODEID": 1, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, Launch(5, 8, 1, 4)),
        ({"SLURM_STEP_ID": 0, "SLURM_PROCID": 6, "SLURM_STEP_NUM_TASKS": 7, "SLURM_LOCALID": 0,
          "SLURM_NODEID": 3, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, Launch(6, 7, 0, 1)),
    ],
)  # fmt: skip
def test_launchers(
    variables: dict[str, object], expected: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert read_launch() == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "0"}, "not WORLD_SIZE"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK=two"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
    ],
)
def test_launchers_that_say_it_wrong(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=expected):
        read_launch()
