"""A process reads its rank from the variables of its launcher."""

from __future__ import annotations

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.launch import Launch, read_launch

pytestmark = pytest.mark.usefixtures("no_launcher")


def step(*values: object) -> dict[str, object]:
    names = "PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID", "STEP_TASKS_PER_NODE", "STEP_ID"
    return {f"SLURM_{name}": value for name, value in zip(names, [*values, 0], strict=True)}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Launch()),
        ({"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}, Launch(3, 4, 1, 2)),
        ({"RANK": 1, "WORLD_SIZE": 2}, Launch(1, 2, 0, 1)),
        ({"RANK": 2, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_SIZE": 2}, Launch(2, 4, 0, 2)),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 8}, Launch()),  # the batch shell is none of the eight
        (step(5, 8, 1, 1, "4(x2)"), Launch(5, 8, 1, 4)),
        (step(6, 7, 0, 3, "2(x3),1"), Launch(6, 7, 0, 1)),
    ],
)
def test_rank_and_number_of_processes_are_those_of_the_launcher(
    variables: dict[str, object], expected: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert read_launch() == expected


@pytest.mark.parametrize(("name", "missing"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_half_of_a_launcher_is_rejected(
    name: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=rf"sets {name}, but not {missing}.*unset {name}"):
        read_launch()
