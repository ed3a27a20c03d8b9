"""A small share of the faults that `make faults` tries at length."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from olmo_sparsity.disk.lock import LOCK, Owner
from tests import faults, fuzz


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fuzz.World]:
    with pytest.MonkeyPatch.context() as patch:  # the first shard does not wait for the other
        patch.setattr("olmo_sparsity.analysis.measurement.PATIENCE_S", 0)
        yield faults.make_world(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(
    ("trial", "count"),
    [
        (faults.damaged_folder, 10),
        (faults.transplant, 10),
        (faults.kill, 3),
        (faults.limit, 3),
        (faults.race, 1),
    ],
)
def test_a_fault_changes_no_number_without_a_word(
    world: fuzz.World, trial: fuzz.Trial, count: int
) -> None:
    trials = [fuzz.run_trial(world, trial, number) for number in range(count)]
    assert not (failed := [f"{done}: {failure}" for done, failure in trials if failure]), failed


@pytest.mark.parametrize("name", ["prepare", "task", "measuring"])
def test_a_finished_folder_loses_the_lock_of_a_killed_owner(
    world: fuzz.World, tmp_path: Path, name: str
) -> None:
    making = faults.MAKINGS[name]
    folder = shutil.copytree(world.folder / making.folder, tmp_path / making.folder)
    gone = replace(Owner.here(), pid=2**22 + 1)
    (folder / LOCK).write_text(json.dumps(asdict(gone)))
    fuzz.succeed(making.words(world, folder, tmp_path))
    assert not (folder / LOCK).exists()


def test_the_injector_sees_other_numbers_and_what_is_left_over(
    world: fuzz.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halve(folder: Path, random: object) -> str:
        path = folder / "losses.parquet"
        pq.write_table(pq.read_table(path)[:5], path)
        return "halved"

    monkeypatch.setattr("olmo_sparsity.analysis.results.verify_manifest", lambda *_: None)
    monkeypatch.setattr(faults, "damage", halve)
    done, failure = fuzz.run_trial(
        world, faults.damaged_folder, list(faults.SCENES).index("report")
    )
    assert "other rows" in str(failure), done

    def exchange(folder: Path, twin: Path, random: object) -> str:
        shutil.copy(twin / "results/losses.parquet", folder)
        return "exchanged"

    monkeypatch.setattr(faults, "transplant_into", exchange)
    done, failure = fuzz.run_trial(world, faults.transplant, list(faults.SCENES).index("report"))
    assert "other rows" in str(failure), done
    monkeypatch.undo()

    monkeypatch.setattr("olmo_sparsity.model.exchange.remove_partial", lambda folder: None)
    number = list(faults.MAKINGS).index("exporting")
    monkeypatch.setattr(faults, "_num_operations", {"exporting": 6})
    found = [fuzz.run_trial(world, faults.kill, number + 5 * i)[1] for i in range(4)]
    assert any("left over" in str(failure) for failure in found), found
