"""The last sentence of a measurement, and its table in a terminal."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.results.columns import SUMMARY
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.results import FILES, Results, read_results
from olmo_sparsity.analysis.results.statistics import (
    GROUPS,
    as_reported,
    median_distances,
    shares_of_all,
    summarize,
)
from olmo_sparsity.analysis.results.summary import (
    conclude,
    describe,
    describe_comparison,
    describe_gap,
    describe_induction,
    describe_noise,
    describe_placebo,
    format_summary,
    in_order,
    with_interval,
)
from olmo_sparsity.analysis.results.tables import SCHEMAS, write_json, write_table
from olmo_sparsity.base.files import write_manifest
from tests.support.measurements import losses_table

ROW: dict[str, Any] = {"target_set": "gap", "units": "tokens", "selector": "add_one", "k": 1}
ROW |= {"num_targets": 200, "num_placebo_targets": 90}
ROW |= {"num_documents": 50, "num_placebo_documents": 40}
ROW |= {"mean_ratio": 0.91, "share_enough": 0.52, "gap": 1.5, "unrelated": 0.16}
ROW |= {"recovery": 0.99, "low": 0.94, "high": 1.03}
ROW |= {"excess": 0.83, "excess_low": 0.8, "excess_high": 0.9, "excess_nats": 1.1}
ROW |= {"net": 0.48, "net_low": 0.34, "net_high": 0.63, "net_nats": 0.73}
ROW |= {"net_equal": 0.19, "net_equal_low": 0.03, "net_equal_high": 0.39}


def made_up(has_induction: bool = True, **changed: Any) -> Results:
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
    said = conclude(made_up())
    assert said.startswith("small: 1 distant token by add one recovers 0.99 of the gap of 200")
    equal = (
        "; net excess at equal gaps +0.19 [+0.03, +0.39] (at all gaps +0.48, +0.73 nats a target)"
    )
    assert f"{equal}: " in said
    assert said.endswith(": the targets depend on it beyond chance.")


@pytest.mark.parametrize("units", [["tokens", "sentences"], ["sentences", "tokens"]])
def test_the_units_that_were_named_first_come_first(units: list[str]) -> None:
    found = made_up()
    summary = pd.concat([found.summary.assign(units=name) for name in sorted(units)])
    found = replace(found, summary=summary, meta=replace(found.meta, units=units))
    assert f"1 distant {units[0][:-1]} by" in conclude(found)
    assert list(in_order(found).units.unique()) == units


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"net_equal": float("nan")}, "; net excess +0.48 [+0.34, +0.63] (+0.73 nats a target): "),
        ({"net_equal_low": 0.0}, ": cannot be told from chance."),
        ({"net_equal_low": -0.3, "net_equal_high": 0.0}, ": cannot be told from chance."),
        ({"net_equal_low": -0.3, "net_equal_high": -0.1}, ": less than by chance."),
        ({"placebo_recovery": 0.7}, "of the gap of 200 targets (of placebo targets 0.70); net"),
        ({"num_targets": 1}, "of the gap of 1 target; no verdict: 1 target in 50 documents; 10 in"),
        ({"num_targets": 9}, "; no verdict: 9 targets in 50 documents; 10 in 5 documents are the"),
        ({"num_documents": 4}, "; no verdict: 200 targets in 4 documents; 10 in 5 documents are"),
        ({"num_placebo_targets": 9}, "; no verdict: 9 placebo targets in 40 documents; 10 in 5"),
        ({"num_placebo_documents": 1}, "; no verdict: 90 placebo targets in 1 document; 10 in 5"),
        ({"share_all": 0.5}, "; no verdict: at 50% of the targets these are all distant tokens,"),
        ({"share_all": 0.4}, "chance; but at 40% of the targets these are all distant tokens."),
        ({"num_documents": 9}, "9 documents are too few to trust the interval."),
        ({"has_induction": False}, "; but the model copies little from its context."),
        ({"net_equal_low": float("nan")}, "; no verdict: too small gaps for an interval."),
        ({"net": float("nan")}, "excess over unrelated text +0.83 [+0.80, +0.90] (+1.10 nats a"),
        ({"target_set": "bigram"}, "excess over unrelated text +0.83 [+0.80, +0.90] (+1.10 nats"),
        ({"gap": 0.0}, "all distant tokens together do not lower the loss of these 200 targets"),
        ({"units": "words"}, "small: 1 distant word by"),
        ({"k": 3}, "small: 3 distant tokens by add one recover 0.99"),
        ({"units": "span:4"}, "small: 1 distant span:4 by"),
    ],
)
def test_what_is_doubtful_is_said(changed: dict[str, Any], said: str) -> None:
    found = made_up(**changed)
    kept = found.summary[found.summary.target_set == changed.get("target_set", "gap")]
    assert said in conclude(replace(found, summary=kept))


def test_what_is_not_doubtful_is_not_said() -> None:
    assert "too few" not in conclude(made_up(num_documents=10))
    alone = made_up(excess=float("nan"))
    alone = replace(alone, summary=alone.summary[1:])
    assert conclude(alone).endswith("recovers 0.99 of the gap of 200 targets (0.99 [0.94, 1.03]).")
    assert conclude(replace(alone, summary=alone.summary[:0])) == "No target was evaluated."
    assert [describe_noise(model) for model in ({}, {"batch_noise": 0.019})] == ["", ""]
    assert "0.02 nats" in describe_noise({"batch_noise": 0.02})
    few = [describe_placebo(pd.Series(ROW | {"num_placebo_documents": n})) for n in (24, 25)]
    assert ["fewer than 25" in said for said in few] == [True, False]
    found = {"loss_first": 4.0, "loss_repeated": 3.0, "drop": 1.0}
    for has, distant_states, said in (
        (False, "isolated", "below 15%"),
        (True, "isolated", "this model copies"),
        (True, "contextual", ""),
    ):
        first, *more = describe_induction(
            found | {"has_induction": has}, interpretation_of(distant_states)
        ).splitlines()
        assert "(25%)" in first
        assert said in " ".join(more)
        assert bool(more) == bool(said)


def test_a_description_has_all_of_the_main_set_and_least_of_others(results: Results) -> None:
    """A header again where the columns are others."""
    of_bigram = results.summary[results.summary.target_set == "bigram"]
    others = [of_bigram.assign(target_set=name, net=0.1) for name in ("digits", "bigram")]
    summary = pd.concat([results.summary[results.summary.target_set == "gap"], *others])
    said = describe(found := replace(results, summary=summary))
    lines = said.splitlines()
    assert lines[:2] == [conclude(found), ""]
    gap = results.losses.loss_short - results.losses.loss_long
    shown = f"mean gap {gap.mean():+.3f}, perplexity 9.10, LongPPL 2.50 (2.00% of {len(gap):,} "
    assert f"\nlosses: L_short {results.losses.loss_short.mean():.3f}, {shown}" in said
    assert "local 32, stride 16, distant units shown alone" in said
    assert "\ninduction: loss 4.31" in said
    rows = [line.split()[:3] for line in lines if line.startswith(tuple(results.meta.selectors))]
    assert len(rows) == (results.summary.target_set == "gap").sum() + 4
    assert rows[-4:] == [["add_one", "tokens", "1"], ["add_one", "span:4", "1"]] * 2
    assert [line.startswith("selector ") for line in lines].count(True) == 2
    assert "no net excess of bigram, digits: " in said
    for hint in ("left out", "reliability", "named targets"):
        assert hint not in said
    meta = replace(
        results.meta,
        counts={"documents_trained_on": 3, "documents_left": 1, "documents_measured": 4},
        induction={},
        reliability=[{"units": "tokens", "lds": 0.5, "lds_low": 0.4, "lds_high": 0.6}],
        targets=results.meta.targets | {"only_named": True},
        longppl=results.meta.longppl | {"longppl": None},
        windows=results.meta.windows | {"replacements": 4},
    )
    other = describe(replace(results, meta=meta, summary=summary[summary.target_set == "gap"]))
    for hint in ("\n3 documents left out", "4 unrelated texts (tokens): 0.50 [0.40, 0.60] ("):
        assert hint in other
    for hint in ("\nlosses of named targets", "no key tokens", "partial: 1 of 5 documents are"):
        assert hint in other
    for hint in ("induction:", "no net excess"):
        assert hint not in other
    assert "selector" not in describe(replace(results, summary=summary[:0]))
    added = describe(replace(results, summary=summary[summary.target_set == "digits"]))
    assert "\ndigits: " in added, "a set of somebody's own is the main one if it is alone"


@pytest.mark.parametrize("transfers", [False, True])
def test_a_comparison_has_the_rows_of_its_table(results: Results, transfers: bool) -> None:
    targets = results.meta.targets | {"choices": "b", "chosen_by": results.meta.model}
    found = replace(results, meta=replace(results.meta, targets=targets))
    table, said = describe_comparison(found, found, transfers)
    first, last = ("recovery", "excess_nats") if transfers else ("net", "net_nats")
    rows = said.removesuffix("\nfewer than 25 documents (own / placebo): t-based intervals")
    assert transfers == (rows == said)
    for line, row in zip(rows.splitlines()[2:], table.to_dict("records"), strict=True):
        for name, digits in ((first, 2), (last, 3)):
            ends = row[f"{name}_low"], row[f"{name}_high"]
            assert f"  {with_interval(row[name], *ends, digits=digits)}" in line
        assert line.startswith(row["target_set"])


REMOVAL = {"removal": 0.5, "removal_low": 0.4, "removal_high": 0.6}


@pytest.mark.parametrize(
    ("changed", "shown", "hidden"),
    [
        ({}, "+0.19 [+0.03, +0.39]", "too few"),
        ({"num_documents": 10, "num_placebo_targets": 10, "gap": 0.1}, "+0.19 [", "too few"),
        ({"num_documents": 9}, "+0.19 [+0.03, +0.39]", "no intervals"),
        ({"net_equal": float("nan"), "num_documents": 9}, "–", "no intervals"),
        ({"placebo_recovery": 0.713}, "     0.71   +0.83", "no intervals"),
        ({"distance": 1234.5}, "1,234", "no intervals"),
        ({"target_set": "bigram"} | REMOVAL, "0.50 [0.40, 0.60]", "+0.48"),  # no net excess
        ({"net": float("nan")} | REMOVAL, "0.50 [0.40, 0.60]", "of the placebo"),
        ({"net": float("nan"), "excess_nats": float("nan")} | REMOVAL, "–", "1.10"),
        ({"mean_ratio": float("nan"), "gap": 0.099}, "", "mean of ratios"),
    ],
)
def test_columns_are_those_that_mean_something(
    changed: dict[str, Any], shown: str, hidden: str
) -> None:
    table = format_summary(pd.DataFrame([ROW | changed]), "a set")
    assert ("mean of ratios 0.91, 52% of targets" in table) == ("mean_ratio" not in changed)
    assert ("compare in nats" in table) == (changed.get("gap") == 0.099)
    assert ("intervals are over documents" in table) == (changed.get("num_documents") == 9)
    assert (
        table.splitlines()[1:-2] + table.splitlines()[-1:]
        == (format_summary(pd.DataFrame([ROW | changed]), "a set", header=False).splitlines()[1:])
    )
    assert shown in table.splitlines()[-1]
    assert "0.99 [0.94, 1.03]" in table.splitlines()[-1]
    assert hidden not in table


ENDS = [end for column in SUMMARY if column.has_interval for end in (column.low, column.high)]


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({}, "net_equal"),
        ({"num_targets": 9}, "placebo"),
        ({"num_documents": 4}, "placebo"),
        ({"num_placebo_targets": 9}, "recovery"),
        ({"num_placebo_documents": 4}, "recovery"),
    ],
)
def test_below_the_minimum_there_is_no_interval(changed: dict[str, Any], kept: str) -> None:
    row = dict.fromkeys(ENDS, 0.1) | ROW | changed
    (found,) = as_reported(pd.DataFrame([row])).to_dict("records")
    has_ends = {
        column.name: not (pd.isna(found[column.low]) or pd.isna(found[column.high]))
        for column in SUMMARY
        if column.has_interval
    }
    of_both = {"net", "net_equal", "net_nats"}
    of_placebo = {"placebo", "placebo_recovery", "placebo_removal"}
    expected = dict.fromkeys(has_ends, True)
    if changed:
        without = of_both | (of_placebo if kept == "recovery" else expected.keys() - of_placebo)
        expected |= dict.fromkeys(without, False)
    assert has_ends == expected
    assert pd.isna(found["net_equal"]) == bool(changed)
    assert found["recovery"] == ROW["recovery"]
    table = format_summary(pd.DataFrame([found]), "a set")
    assert ("  no intervals: " in table) == bool(changed)


def test_terminal_page_and_parquet_have_the_same_intervals(
    results_folder: Path, results: Results
) -> None:
    """With 5 documents, by Student's t."""
    stored = pd.read_parquet(results_folder / "summary.parquet")
    row = stored.query("target_set == 'gap' and selector == 'add_one' and units == 'tokens'").iloc[
        0
    ]
    bootstrap = summarize(results.losses, results.targets, results.recovery)
    of_bootstrap = bootstrap.merge(pd.DataFrame([row[GROUPS]])).iloc[0]
    assert row.net - row.net_low > 1.5 * (of_bootstrap.net - of_bootstrap.net_low)
    assert with_interval(row.net_equal, row.net_equal_low, row.net_equal_high) in conclude(results)
    assert with_interval(row.net, row.net_low, row.net_high) in describe(results)
    pd.testing.assert_frame_equal(results.summary, stored)


def test_a_summary_of_an_earlier_version_is_completed(
    results_folder: Path, results: Results, tmp_path: Path
) -> None:
    folder = shutil.copytree(results_folder, tmp_path / "copy")
    bootstrap = summarize(results.losses, results.targets, results.recovery)
    added = ["placebo_recovery", "placebo_recovery_low", "placebo_recovery_high"]
    others = ["lds", "lds_low", "lds_high", "token_forwards_per_target"]
    old = bootstrap.drop(columns=added).merge(results.summary[[*GROUPS, *others]], on=GROUPS)
    schema = pa.schema([SCHEMAS["summary"].field(name) for name in old])
    write_table(folder / "summary.parquet", pa.Table.from_pandas(old, schema))
    write_json(folder / "meta.json", asdict(replace(results.meta, intervals="")))
    write_manifest(folder, FILES)
    found = read_results(folder).summary
    pd.testing.assert_frame_equal(found[[*results.summary]], results.summary, check_dtype=False)


def test_the_distance_is_that_of_the_units_and_all_distant_tokens_are_marked() -> None:
    """Targets 20 and 30 with 8 tokens of local window; unit 2 of target 20 is the first token."""
    targets = pd.DataFrame(
        [(1, 20, "document", "gap"), (1, 30, "document", "gap")],
        columns=["document", "target", "distant_part", "target_set"],
    )
    of_rank = {
        "distant_part": "document",
        "control": "own",
        "units": "words",
        "selector": "add_one",
    }
    places = [(20, 1, 10), (20, 2, 0), (30, 1, 15), (30, 2, 5)]
    influence = pd.DataFrame(places, columns=["target", "rank", "distant_first"])
    influence = influence.assign(document=1, **of_rank)
    medians = median_distances(targets, influence, [1, 2]).set_index("k").distance
    assert medians.to_dict() == {1: 12.5, 2: 17.5}
    rows = [(20, 1, 2), (20, 2, 12), (30, 1, 3), (30, 2, 21)]
    recovery = pd.DataFrame(rows, columns=["target", "k", "num_tokens"])
    recovery = recovery.assign(document=1, **of_rank)
    windows = {"long": "all", "short": 8, "stride": 1, "least": 8}
    shares = shares_of_all(targets, recovery, windows).set_index("k").share_all
    assert shares.to_dict() == {1: 0.0, 2: 0.5}  # 12 distant tokens of target 20, 22 of 30


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
    found = made_up()
    found.meta.targets["threshold"] = threshold
    found.meta.windows["sample"] = sample
    said = describe_gap(replace(found, losses=losses, targets=targets))
    assert f"distant text reduces the loss by {3 / sample:.0f} nats over" in said
    raised = losses.assign(loss_long=losses.loss_short + 1.0)
    said_of_raised = describe_gap(replace(found, losses=raised, targets=targets))
    assert f"distant text raises the loss by {4 / sample:.0f} nats over" in said_of_raised
    assert ("all 4 reported targets" if sample == 1 else "from 4 targets, 50.0% of all") in said
    assert f"an unrelated text +{0 / sample:.0f}; " in said
    assert describe_gap(replace(found, losses=losses[:1])) == "no target is reported"
    if threshold is None:
        assert said.endswith(f"the 25.0% evaluated gain +{2 / sample:.0f}")
    else:
        assert f"the 50.0% of largest gap gain +{3 / sample:.0f}; an unrelated" in said
        assert said.endswith("gains as much (1.00 nats) on 25.0%")
