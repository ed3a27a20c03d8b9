"""The last sentence of a measurement, and its table in a terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from olmo_sparsity.analysis.results.results import Meta, Results
from olmo_sparsity.analysis.results.summary import (
    conclude,
    describe_gap,
    format_summary,
    in_order,
)
from olmo_sparsity.analysis.results.tables import SCHEMAS
from tests.support.measurements import losses_table

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
    assert said.startswith("small: 1 distant token by add one recovers 0.99 of the gap of 200")
    assert "; net excess +0.48 [+0.34, +0.63] (+0.73 nats a target): " in said
    assert said.endswith(": the targets depend on it beyond chance.")


@pytest.mark.parametrize("units", [["tokens", "sentences"], ["sentences", "tokens"]])
def test_the_units_that_were_named_first_come_first(units: list[str]) -> None:
    found = results()
    summary = pd.concat([found.summary.assign(units=name) for name in sorted(units)])
    found = replace(found, summary=summary, meta=replace(found.meta, units=units))
    assert f"1 distant {units[0][:-1]} by" in conclude(found)
    assert list(in_order(found).units.unique()) == units


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_placebo_documents": 8}, "; net excess +0.48 [+0.30, +0.67] (+0.73"),
        ({"net_low": -0.1}, ": no more than chance explains."),
        ({"net_low": -0.3, "net_high": -0.1}, ": less than by chance."),
        ({"num_documents": 9}, "9 documents are too few to trust the interval."),
        ({"has_induction": False}, "; but the model copies little from its context."),
        ({"net_low": float("nan")}, "too few documents for an interval."),
        ({"net": float("nan")}, "excess over unrelated text +0.83 [+0.80, +0.90] (+1.10 nats a"),
        ({"target_set": "bigram"}, "excess over unrelated text +0.83 [+0.80, +0.90] (+1.10 nats"),
        ({"gap": -0.2}, "all distant tokens together do not lower the loss of these 200 targets"),
        ({"units": "words"}, "small: 1 distant word by"),
        ({"k": 4}, "small: 4 distant tokens by"),
        ({"units": "span:4"}, "small: 1 distant span:4 by"),
    ],
)
def test_what_is_doubtful_is_said(changed: dict[str, Any], said: str) -> None:
    found = results(**changed)
    kept = found.summary[found.summary.target_set == changed.get("target_set", "gap")]
    assert said in conclude(replace(found, summary=kept))


REMOVAL = {"removal": 0.5, "removal_low": 0.4, "removal_high": 0.6}


@pytest.mark.parametrize(
    ("changed", "shown", "hidden"),
    [
        ({}, "+0.19 [+0.03, +0.39]", "too few"),
        ({"num_documents": 9}, "too few", "+0.19"),
        ({"num_placebo_targets": 9}, "too few", "+0.19"),
        ({"target_set": "bigram"} | REMOVAL, "0.50 [0.40, 0.60]", "+0.48"),  # no net excess
        ({"net": float("nan")} | REMOVAL, "0.50 [0.40, 0.60]", "placebo"),
    ],
)
def test_columns_are_those_that_mean_something(
    changed: dict[str, Any], shown: str, hidden: str
) -> None:
    table = format_summary(pd.DataFrame([ROW | changed]), "a set")
    assert "mean of ratios 0.91, 52% of targets" in table
    assert shown in table.splitlines()[-1]
    assert "0.99 [0.94, 1.03]" in table.splitlines()[-1]
    assert hidden not in table


@pytest.mark.parametrize("threshold", [1.0, None])
@pytest.mark.parametrize("sample", [1.0, 0.5])
def test_gaps_are_summed_over_the_reported_targets(threshold: float | None, sample: float) -> None:
    """Of document 1, as document 0 only set the threshold; a sample stands for all."""
    losses = losses_table(
        document=[0, 1, 1, 1, 1],
        target=[20, 20, 21, 22, 23],
        loss_short=[9.0, 5.0, 4.0, 3.0, 2.0],
        loss_long=[0.0, 3.0, 3.0, 2.5, 2.5],
        placebo_loss_long=[9.0, 4.0, 5.0, 3.0, 2.0],
    )
    targets = pd.DataFrame([(1, 20, "document", "gap", 21)], columns=SCHEMAS["targets"].names)
    found = results()
    found.meta.targets["threshold"] = threshold
    found.meta.windows["sample"] = sample
    said = describe_gap(replace(found, losses=losses, targets=targets))
    assert f"reduces the loss by +{3 / sample:.0f} nats over" in said
    assert ("all 4 reported targets" if sample == 1 else "from 4 targets, 50.0% of all") in said
    assert f"an unrelated text +{0 / sample:.0f}; " in said
    if threshold is None:
        assert said.endswith(f"the 25.0% evaluated gain +{2 / sample:.0f}")
    else:
        assert f"the 50.0% of largest gap gain +{3 / sample:.0f}; an unrelated" in said
        assert said.endswith("gains as much (1.00 nats) on 25.0%")
