"""A small share of the random malformed inputs that `make fuzz` tries at length."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fuzz


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> fuzz.World:
    return fuzz.make_world(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kind", fuzz.KINDS, ids=lambda kind: kind.__name__)
def test_malformed_input_is_answered_in_one_line(world: fuzz.World, kind: fuzz.Kind) -> None:
    first, step = fuzz.KINDS.index(kind), len(fuzz.KINDS)
    answers = {number: fuzz.run_case(world, number) for number in range(first, 10 * step, step)}
    failed = [f"{number} ({done}): {bug}" for number, (done, bug) in answers.items() if bug]
    assert not failed, "\n".join(failed)


def test_the_fuzzer_sees_a_traceback_and_a_loss(
    world: fuzz.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(words: list[str]) -> int:
        raise KeyError("a bug")

    monkeypatch.setattr(fuzz, "main", broken)
    done, failure = fuzz.run_case(world, 0)
    assert "KeyError" in str(failure), done
    monkeypatch.undo()

    monkeypatch.setattr(fuzz, "main", lambda words: 2)
    assert "0 lines that say why" in str(fuzz.run_case(world, 0)[1])
    monkeypatch.undo()

    shorter = tmp_path / "shorter"
    words = ["measure", world.run["run_folder"], "--out", str(shorter), *fuzz.MEASURE]
    fuzz.expect(0, fuzz.run_command([*words, "--max-documents=6"]))
    with pytest.raises(fuzz.Failure, match="other rows"):
        fuzz.same_results(shorter, world.folder / "results")
