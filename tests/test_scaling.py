"""Scaling on paper: docs/scaling.md is what the formulas give. That the formulas are what DeepSpeed
holds and sends is tested in integration/test_engines.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from olmo_sparsity.training.scaling import (
    ENGINES,
    GPU_BYTES,
    Plan,
    choose,
    render_tables,
    sent_bytes,
    state_bytes,
)

ROOT = Path(__file__).parents[1]


def test_the_tables_of_the_docs_are_what_the_formulas_give() -> None:
    assert render_tables(ROOT / "configs") in (ROOT / "docs/scaling.md").read_text()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_more_processes_never_hold_more(precision: str) -> None:
    for engine in ENGINES:
        totals = [state_bytes(engine, 10**6, n, precision).total for n in (1, 2, 8, 64)]
        assert totals == sorted(totals, reverse=True)
    stages = [state_bytes(f"zero{stage}", 10**6, 8, precision).total for stage in (1, 2, 3)]
    assert stages == sorted(stages, reverse=True)
    alone = {state_bytes(f"zero{stage}", 10**6, 1, precision).total for stage in (1, 2, 3)}
    assert len(alone) == 1, "one process holds everything, whatever the stage"


def test_one_process_sends_nothing_and_micro_batches_cost_zero_2_and_3() -> None:
    for engine in ENGINES:
        assert sent_bytes(engine, 10**6, 1, "bf16", 4) == 0
        grows = sent_bytes(engine, 10**6, 8, "bf16", 4) > sent_bytes(engine, 10**6, 8, "bf16", 1)
        assert grows == (engine in ("zero2", "zero3"))


def test_what_does_not_fit_is_not_chosen() -> None:
    big = Plan("ddp", memory=2 * GPU_BYTES, sent=1.0, compute_s=1.0, sending_s=0.0)
    small = Plan("zero3", memory=GPU_BYTES / 2, sent=9.0, compute_s=1.0, sending_s=1.0)
    assert choose([big, small]) is small
