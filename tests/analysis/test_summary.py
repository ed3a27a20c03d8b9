"""The last sentence of a measurement, and its table in a terminal."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from olmo_sparsity.analysis.results import Meta, Results
from olmo_sparsity.analysis.summary import conclude, format_summary
from olmo_sparsity.analysis.tables import SCHEMAS

ROW = {
    "target_set": "gap", "units": "tokens", "selector": "add_one", "k": 1, "num_targets": 200,
    "num_documents": 50, "num_placebo_targets": 90, "gap": 1.5, "recovery": 0.99, "low": 0.94,
    "high": 1.03, "foreign": 0.16, "net": 0.48, "net_low": 0.34, "net_high": 0.63,
    "net_nats": 0.73, "net_equal": 0.19, "net_equal_low": 0.03, "net_equal_high": 0.39,
    "excess": 0.83, "excess_low": 0.8, "excess_high": 0.9, "excess_nats": 1.1,
    "hit_rate": float("nan"),
}  # fmt: skip


def results(has_induction: bool = True, **changed: Any) -> Results:
    empty = {name: pd.DataFrame(columns=schema.names) for name, schema in SCHEMAS.items()}
    rows = pd.DataFrame([ROW | {"k": 4, "net": 0.9}, ROW | changed])
    meta = Meta(
        model={"name": "small"}, data={"source": "prose"}, selectors=["add_one"],
        induction={"has_induction": has_induction},
    )  # fmt: skip
    return Results(**empty | {"summary": rows}, meta=meta)


def test_the_last_sentence_says_how_much_and_whether_to_believe_it() -> None:
    said = conclude(results())
    assert said.startswith(
        "small: 1 far token by add one gives back 0.99 of the gap of 200 targets"
    )
    assert "+0.48 [+0.34, +0.63] (+0.73 nats) beyond the controls" in said
    assert said.endswith("so they depend on it beyond chance.")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"net_low": -0.1}, ", which chance explains."),
        ({"net_low": -0.3, "net_high": -0.1}, ", less than chance."),
        ({"num_documents": 9}, "chance; but 9 documents are too few to trust the interval."),
        ({"has_induction": False}, "; but the model does not copy from its context."),
        ({"net_low": float("nan")}, "there is no interval to judge it by."),
        ({"net": float("nan")}, "+0.83 [+0.80, +0.90] (+1.10 nats) beyond the controls"),
        (
            {"gap": -0.2},
            "small: all far tokens together do not lower the loss of these 200 targets",
        ),
        ({"units": "words"}, "small: 1 far word by"),
        ({"units": "span:4"}, "small: 1 far span:4 by"),
    ],
)
def test_what_is_doubtful_is_said(changed: dict[str, Any], said: str) -> None:
    assert said in conclude(results(**changed))


def test_few_targets_at_equal_gaps_are_not_a_number() -> None:
    for changed in ({"num_documents": 9}, {"num_placebo_targets": 9}):
        shown = format_summary(pd.DataFrame([ROW | changed]), "large gap")
        assert "too few" in shown.splitlines()[-1]
        assert "+0.19" not in shown
    shown = format_summary(pd.DataFrame([ROW]), "large gap")
    assert "+0.19 [+0.03, +0.39]" in shown
    assert max(map(len, shown.splitlines())) <= 120
