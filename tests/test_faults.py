"""A small share of the faults that `make faults` tries at length."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests import faults, fuzz


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> fuzz.World:
    return faults.make_world(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(("kind", "count"), [("damage", 12), ("kill", 2), ("race", 1)])
def test_a_fault_changes_no_number_without_a_word(world: fuzz.World, kind: str, count: int) -> None:
    trials = [faults.run_trial(world, kind, number) for number in range(count)]
    assert not (failed := [f"{done}: {failure}" for done, failure in trials if failure]), failed


def test_the_injector_sees_other_numbers_and_what_is_left_over(
    world: fuzz.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halve(folder: Path, random: object) -> str:
        path = folder / "losses.parquet"
        pq.write_table(pq.read_table(path)[:5], path)
        return "halved"

    monkeypatch.setattr("analysis.results.verify_manifest", lambda *_: None)
    monkeypatch.setattr(faults, "damage", halve)
    done, failure = faults.run_trial(world, "damage", list(faults.SCENES).index("report"))
    assert "other rows" in str(failure), done
    monkeypatch.undo()

    monkeypatch.setattr("olmo_sparsity.model.exchange.remove_partial", lambda folder: None)
    number = list(faults.MAKINGS).index("export")
    monkeypatch.setattr(faults, "_num_operations", {"export": 6})
    found = [faults.run_trial(world, "kill", number + 5 * i)[1] for i in range(4)]
    assert any("left over" in str(failure) for failure in found), found
