"""What an explanation costs is counted before it runs."""

from __future__ import annotations

from typing import Any

import pytest

from olmo_sparsity import estimate_cost, explain
from olmo_sparsity.analysis.selectors.influence import SELECTORS
from tests.support.explanations import SHORT, TEXT, asked, make_model, make_tokenizer


def counted(model: Any, **given: Any) -> Any:
    given = {"text": TEXT, "short": SHORT, "k": 3} | given
    return estimate_cost(explain, model, make_tokenizer(), **given)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.mark.parametrize("units", ["tokens", "span:4"])
@pytest.mark.parametrize("selector", sorted(SELECTORS))
@pytest.mark.parametrize("far_states", ["contextual", "isolated"])
def test_the_count_is_what_is_spent(model: Any, far_states: str, selector: str, units: str) -> None:
    given = {"at": ["w7 w8"], "selector": selector, "units": units, "far_states": far_states}
    cost = counted(model, **given)
    # Which rows these rules evaluate depends on losses.
    off = {"pairs": 0.2, "add_one_screened": 0.02}.get(selector, 0)
    assert cost.token_forwards == pytest.approx(asked(model, **given).token_forwards, rel=off)
    assert f"{cost.token_forwards:,}" in str(cost)
    assert cost.flops == 2 * cost.num_parameters * cost.token_forwards
