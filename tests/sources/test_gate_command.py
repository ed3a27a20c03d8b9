"""Exit codes of `olmo-sparsity attribute --gate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from olmo_sparsity.command.cli import main
from tests.support.sources import SOURCES, saved


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    """The command, with one decoy for each source of a model that knows nothing."""
    folder, decoys = saved(tmp_path)

    def run(out: str, records: list[dict[str, Any]], *more: str) -> int:
        path = tmp_path / "q.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        words = ["attribute", folder, "--questions", str(path), "--out", str(tmp_path / out)]
        return main([*words, "--draws", "4", "--decoys", decoys, *more])

    return run


RECORD = {"sources": SOURCES, "question": "w20", "answer": ["w30"]}


def test_the_command_exits_with_1_where_a_check_fails(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("out", [RECORD | {"expect": "none"}], "--gate") in (0, 1)
    (named,) = pd.read_parquet(tmp_path / "out" / "statements.parquet").sources
    wrong = "a" if "a" not in named else "none"
    assert run("out", [RECORD | {"expect": wrong}], "--gate") == 1  # nothing is measured again
    assert "1 of 1 checks of `expect` failed: failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("expect", "options"),
    [
        ({}, ["--gate"]),  # nothing is expected
        ({"expect": {"source": "a"}}, ["--gate", "--dry-run"]),
        ({"expect": "a"}, ["--gate", "--baseline", "OUT"]),
        ({"expect": "a"}, ["--gate", "--shard", "0/2"]),
        ({"expect": "a"}, ["--gate", "--margin", "nan"]),
        ({}, ["--margin", "1"]),  # without a gate
        ({}, ["--allow-other-model", "--gate"]),  # without a baseline
    ],
)
def test_the_command_exits_with_2_where_nothing_could_be_checked(
    run: Any, tmp_path: Path, expect: dict[str, Any], options: list[str]
) -> None:
    words = [str(tmp_path / "out") if word == "OUT" else word for word in options]
    assert run("out", [RECORD | expect], *words) == 2
