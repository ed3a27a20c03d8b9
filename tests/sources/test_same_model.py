"""A baseline of another model is refused (same_model.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.sources.gate.answers import identity_in
from olmo_sparsity.sources.gate.gate import check, check_has_expectations
from tests.support.stored_answers import MODEL, RESTS_ON_A, write_run

OTHER_VALUES: list[dict[str, Any]] = [
    *({name: "other"} for name in MODEL),
    {"settings": {"draws": 8, "units": "words"}},
]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write_run(tmp_path / "out", RESTS_ON_A)


@pytest.mark.parametrize("identity", OTHER_VALUES)
def test_another_model_is_refused_before_anything_is_computed(
    questions: Callable[[Any], Path], tmp_path: Path, out: Path, identity: dict[str, Any]
) -> None:
    earlier = write_run(tmp_path / "earlier", RESTS_ON_A, **identity)
    with pytest.raises(ConfigError, match=str(*identity)):
        check_has_expectations(questions(None), out, identity_in(out), earlier)


@pytest.mark.parametrize("identity", OTHER_VALUES)
def test_another_model_is_refused_when_results_are_compared(
    questions: Callable[[Any], Path], tmp_path: Path, out: Path, identity: dict[str, Any]
) -> None:
    earlier = write_run(tmp_path / "earlier", RESTS_ON_A, **identity)
    with pytest.raises(ConfigError, match=str(*identity)):
        check(questions(None), out, earlier)


@pytest.mark.parametrize("identity", OTHER_VALUES)
def test_another_model_is_noted_if_it_is_allowed(
    questions: Callable[[Any], Path], tmp_path: Path, out: Path, identity: dict[str, Any]
) -> None:
    earlier = write_run(tmp_path / "earlier", RESTS_ON_A, **identity)
    report = check(questions(None), out, earlier, allow_other_model=True)
    assert not report.failures
    assert str(*identity) in report.notes[0]


def test_other_draws_are_the_same_model(
    questions: Callable[[Any], Path], tmp_path: Path, out: Path
) -> None:
    earlier = write_run(tmp_path / "earlier", RESTS_ON_A, settings={"draws": 16})
    assert not check(questions(None), out, earlier).notes
