"""`Attribution.relies_on`, the assertion of one answer (attribution.py)."""

from __future__ import annotations

from typing import Any

import pytest

from olmo_sparsity.base.errors import ConfigError
from tests.support.sources import asked, with_verdicts


def test_an_answer_relies_on_the_sources_that_verdicts_name() -> None:
    found = with_verdicts(asked())
    assert found.relies_on("a")
    assert found.relies_on("a", statement=0)
    assert found.relies_on("c", statement=1)
    assert not found.relies_on("c", statement=0)
    assert not found.relies_on(None)
    assert found.sources.statements.tolist() == [(0, 1, 2), (2,), (1,)]


def test_an_assertion_shows_what_was_found_in_what_pytest_prints() -> None:
    found = with_verdicts(asked())
    assert "'w1 w2 w3', relies on a (8.0 nats)" in repr(found.relies_on("b", statement=0))
    assert len(repr(found.relies_on("b"))) <= 240


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"source": "d"}, "no source is named d; the names are a, b, c"),
        ({"source": "a", "statement": 3}, "statement=3 must be a whole number from 0 to 2"),
    ],
)
def test_an_assertion_about_what_is_not_there_is_an_error(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_verdicts(asked()).relies_on(**wrong)
