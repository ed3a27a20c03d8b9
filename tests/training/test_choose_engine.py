"""An engine that does not fit the processes is refused."""

from __future__ import annotations

import pytest

from olmo_sparsity.errors import UserError
from olmo_sparsity.training.choose_engine import check_engine
from olmo_sparsity.training.distributed import Processes
from tests.conftest import MakeConfig

TWO = Processes(rank=0, world_size=2, local_world_size=2)
ALONE = Processes()


@pytest.mark.parametrize(
    ("changes", "processes", "message"),
    [
        ({"engine__name": "single"}, TWO, "engine.name=single, but 2 processes"),
        ({"engine__name": "ddp"}, ALONE, "engine.name=ddp, but this is one process"),
        ({"training__batch_size": 5}, TWO, r"training\.batch_size=5 cannot be shared .* by 2"),
        (
            {"training__batch_size": 12, "training__micro_batch_size": 4},
            TWO,
            r"leaves 6 sequences .* training\.micro_batch_size=4; set that to 6",
        ),
        (
            {"engine__name": "zero2", "engine__deepspeed_config": "/nowhere/zero.json"},
            TWO,
            r"/nowhere/zero\.json: No such file or directory; engine\.deepspeed_config names",
        ),
    ],
)
def test_what_processes_cannot_share_is_refused(
    make_config: MakeConfig, changes: dict, processes: Processes, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_engine(make_config(**changes), processes)


def test_ddp_of_one_process_is_for_those_who_launched_it(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_engine(make_config(engine__name="ddp"), ALONE)
