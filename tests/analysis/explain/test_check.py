"""The check of an explanation: the same question asked of unrelated texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.analysis.explain.check import _unrelated
from olmo_sparsity.errors import DataError
from tests.support.explanations import FOREIGN, TEXT, asked, make_model, make_tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


def test_the_check_says_what_its_texts_are_worth(model: Any) -> None:
    """And keeps those that it is given."""
    e, other = asked(model), asked(model, foreign=FOREIGN[:1])
    assert str(e.check(draws=2, foreign=FOREIGN[:1])) == str(other.check(draws=2))
    given = {"at": "w8", "selector": "nearest"}
    found = asked(model, **given)
    ids = np.array(make_tokenizer(bos=False)(TEXT).input_ids)
    (others,) = _unrelated(found.model, [TEXT, *FOREIGN], found.document).items
    runs = {tuple(run) for run in np.lib.stride_tricks.sliding_window_view(others.tokens, 32)}
    assert tuple(ids[:32]) not in runs, "the text itself stands in for an unrelated one"
    with pytest.raises(DataError, match="share no passage"):
        asked(model, **given, foreign=[TEXT, TEXT]).check()
    assert "overlap" not in str(found.check(draws=8))
    few = asked(model, **given, foreign=[text[:900] for text in FOREIGN[:2]]).check(draws=8)
    assert f"overlap: there is text for {few.apart}" in str(few)
    # A target whose own units raise the loss depends on nothing.
    none = replace(few, table=few.table.assign(own=-1.0, better=0))
    assert none.num_beyond == 0
    # Nor does one whose loss all far tokens together raise.
    beyond = replace(few, table=few.table.assign(own=1.0, gap=1.0, better=0))
    assert beyond.num_beyond == len(few.table)
    hurt = replace(beyond, table=beyond.table.assign(gap=-2.63))
    assert hurt.num_beyond == 0
    assert f"at {len(few.table)} all distant tokens together raise the loss" in hurt.verdict
    assert "lose" not in beyond.verdict


@pytest.mark.parametrize(("at", "selector"), [("w7 w8", "add_one"), (None, "nearest")])
def test_the_check_asks_the_same_of_unrelated_texts(model: Any, at: Any, selector: str) -> None:
    found = asked(model, at=at, selector=selector, k=2)
    checked = found.check(draws=4)
    assert (checked.placebo is None) == (at is not None)
    assert checked.draws == 4
    by_target = found.far.groupby("target").loss_set.last()
    for row in checked.table.itertuples():
        own = found.targets.set_index("target").loss_short[row.target] - by_target[row.target]
        assert row.own == pytest.approx(own, abs=1e-5)
        assert row.foreign <= row.foreign_most
    value, low, high = checked.excess
    assert low <= value <= high
    assert value == pytest.approx((checked.table.own - checked.table.foreign).mean(), abs=1e-5)
    assert not checked.induction["has_induction"]  # random weights
    assert "copies little" in str(checked)


def test_of_targets_that_begin_alike_the_longest_is_asked_about(model: Any) -> None:
    found = asked(model, at=["w7", "w7 w8"], selector="random", k=2)
    assert found.targets.target.is_unique
    assert found.targets.iloc[-1].end == found.targets.iloc[-1].target + 2
    checked = found.check(draws=2)  # of the random rule, three draws are averaged
    assert len(checked.table) == len(found.targets)
