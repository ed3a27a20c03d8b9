"""An engine that does not fit the processes is refused."""

from __future__ import annotations

import re

import pytest

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.config.sections import EngineConfig, TrainingConfig
from olmo_sparsity.training.engines.choose import check_engine


@pytest.mark.parametrize(
    ("name", "batch", "micro", "world_size", "named"),
    [
        ("single", 4, None, 2, "engine.name=single"),
        ("ddp", 4, None, 1, "engine.name=ddp"),
        (
            "auto",
            5,
            None,
            2,
            "training.batch_size=5 is not a multiple of the 2 processes; pass 4 or 6",
        ),
        ("auto", 4, None, 8, "training.batch_size=4 is not a multiple of the 8 processes; pass 8"),
        ("zero2", 4, None, 2, "/nowhere/zero.json"),
        ("auto", 12, 3, 2, ""),
        ("single", 4, 0, 1, ""),
    ],
)
def test_what_processes_cannot_share_is_refused(
    name: str,
    batch: int,
    micro: int | None,
    world_size: int,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    engine = EngineConfig(name=name, deepspeed_config="/nowhere/zero.json")  # type: ignore[arg-type]
    given = (engine, TrainingConfig(batch_size=batch, micro_batch_size=micro), world_size)
    if named:
        with pytest.raises(UserError, match=re.escape(named)):
            check_engine(*given)
    if name == "ddp":  # of one process is for those who launched it
        monkeypatch.setenv("WORLD_SIZE", "1")
    if not named or name == "ddp":
        check_engine(*given)
