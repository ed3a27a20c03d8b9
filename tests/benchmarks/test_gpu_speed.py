"""The benchmark of a GPU's first minutes runs to its end on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_speed import BEFORE, PARTS, main


def test_every_part_runs(tmp_path: Path) -> None:
    assert main(["--small", "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {part.__name__ for part in PARTS} <= {row["part"] for row in rows if "took_s" in row}
    steps = [row for row in rows if row["part"] == "step 60m"]
    assert len(steps) == len(BEFORE) + 1
    for row in steps:  # what was before gives the same numbers
        found = pytest.approx(steps[0]["third_loss_and_norm"], rel=1e-5)
        assert row["third_loss_and_norm"] == found


def test_nothing_is_begun_without_time_for_it(tmp_path: Path) -> None:
    assert main(["--small", "--out", str(tmp_path), "--seconds", "5"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert all("skipped" in row for row in rows)
    assert len(rows) == len(PARTS)
