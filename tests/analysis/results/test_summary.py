"""The last sentence of a measurement, and its table in a terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from olmo_sparsity.analysis.results.results import Meta, Results
from olmo_sparsity.analysis.results.summary import (
    conclude,
    format_summary,
)
from olmo_sparsity.analysis.results.tables import SCHEMAS

ROW = {
    "target_set": "gap",
    "units": "tokens",
    "selector": "add_one",
    "k": 1,
    "num_targets": 200,
    "num_documents": 50,
    "num_placebo_targets": 90,
    "num_placebo_documents": 40,
    "mean_ratio": 0.91,
    "share_enough": 0.52,
    "gap": 1.5,
    "recovery": 0.99,
    "low": 0.94,
    "high": 1.03,
    "foreign": 0.16,
    "net": 0.48,
    "net_low": 0.34,
    "net_high": 0.63,
    "net_nats": 0.73,
    "net_equal": 0.19,
    "net_equal_low": 0.03,
    "net_equal_high": 0.39,
    "excess": 0.83,
    "excess_low": 0.8,
    "excess_high": 0.9,
    "excess_nats": 1.1,
}


def results(has_induction: bool = True, **changed: Any) -> Results:
    empty = {name: pd.DataFrame(columns=schema.names) for name, schema in SCHEMAS.items()}
    rows = pd.DataFrame([ROW | {"k": 4, "net": 0.9}, ROW | changed])
    meta = Meta(
        model={"name": "small"},
        data={"source": "prose"},
        selectors=["add_one"],
        induction={"has_induction": has_induction},
    )
    return Results(**empty | {"summary": rows}, meta=meta)


def test_the_last_sentence_says_how_much_and_whether_to_believe_it() -> None:
    said = conclude(results())
    assert said.startswith(
        "small: 1 distant token by add one recovers 0.99 of the gap of 200 targets"
    )
    assert "; net excess +0.48 [+0.34, +0.63] (+0.73 nats a target): " in said
    assert said.endswith(": the targets depend on it beyond chance.")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_placebo_documents": 8}, "; net excess +0.48 [+0.30, +0.67] (+0.73"),
        ({"net_low": -0.1}, ": no more than chance explains."),
        ({"net_low": -0.3, "net_high": -0.1}, ": less than by chance."),
        ({"num_documents": 9}, "chance; but 9 documents are too few to trust the interval."),
        ({"has_induction": False}, "; but the model copies little from its context."),
        ({"net_low": float("nan")}, "too few documents for an interval."),
        ({"net": float("nan")}, "excess over unrelated text +0.83 [+0.80, +0.90] (+1.10 nats a"),
        (
            {"gap": -0.2},
            "small: all distant tokens together do not lower the loss of these 200 targets",
        ),
        ({"units": "words"}, "small: 1 distant word by"),
        ({"units": "span:4"}, "small: 1 distant span:4 by"),
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
    assert "mean of ratios 0.91, 52% of targets" in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_without_a_placebo_excess_and_removal_stand_in_its_place() -> None:
    without = ROW | {
        "net": float("nan"),
        "net_nats": float("nan"),
        "num_placebo_targets": 0,
        "removal": 0.5,
        "removal_low": 0.4,
        "removal_high": 0.6,
    }
    shown = format_summary(pd.DataFrame([without]), "a name that recurs")
    assert "placebo" not in shown
    row = shown.splitlines()[-1]
    for part in ("0.99 [0.94, 1.03]", "+0.83 [+0.80, +0.90]", "0.50 [0.40, 0.60]", "+1.10"):
        assert part in row
    assert max(map(len, shown.splitlines())) <= 120


def test_targets_that_were_not_selected_by_their_gap_have_no_net_excess() -> None:
    rows = pd.DataFrame(
        [ROW | {"target_set": "bigram", "removal": 0.5, "removal_low": 0.4, "removal_high": 0.6}]
    )
    shown = format_summary(rows, "a pair that recurs")
    assert "+0.83 [+0.80, +0.90]" in shown
    assert "+0.48" not in shown
    said = conclude(replace(results(), summary=rows))
    assert "excess over unrelated text +0.83 [+0.80, +0.90] (+1.10 nats a target)" in said
