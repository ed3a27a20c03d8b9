"""A small share of the random malformed inputs that `make fuzz` tries at length."""

from __future__ import annotations

import pytest

from tests import fuzz


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> fuzz.World:
    return fuzz.make_world(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kind", fuzz.KINDS, ids=lambda kind: kind.__name__)
def test_malformed_input_is_answered_in_one_line(world: fuzz.World, kind: fuzz.Kind) -> None:
    first, step = fuzz.KINDS.index(kind), len(fuzz.KINDS)
    trials = [fuzz.run_trial(world, fuzz.spoilt_input, n) for n in range(first, 10 * step, step)]
    assert not (failed := [f"{done}: {failure}" for done, failure in trials if failure]), failed


@pytest.mark.parametrize(
    ("broken", "said"),
    [(lambda words: 2, "0 lines that say why"), (lambda words: {}[0], "KeyError")],
)
def test_the_fuzzer_sees_a_traceback_and_silence(
    world: fuzz.World, monkeypatch: pytest.MonkeyPatch, broken: object, said: str
) -> None:
    monkeypatch.setattr(fuzz, "main", broken)
    done, failure = fuzz.run_trial(world, fuzz.spoilt_input, 0)
    assert said in str(failure), done
