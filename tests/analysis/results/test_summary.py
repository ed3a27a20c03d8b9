"""The last sentence of a measurement, and its table in a terminal."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.results.chosen_units import median_distances, shares_with_all_distant
from olmo_sparsity.analysis.results.columns import SUMMARY, column_named
from olmo_sparsity.analysis.results.comparison_text import (
    compare_with_remarks,
    describe_comparison,
)
from olmo_sparsity.analysis.results.conclusion import conclude, summary_in_order_of_units
from olmo_sparsity.analysis.results.doubts import with_remarks
from olmo_sparsity.analysis.results.intervals import BOOTSTRAP
from olmo_sparsity.analysis.results.json_values import write_as_json
from olmo_sparsity.analysis.results.loss_statistics import mean_gap
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.notes import (
    INTERVALS,
    describe_gap,
    describe_induction,
    describe_intervals,
    describe_noise,
)
from olmo_sparsity.analysis.results.reported import as_reported
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.schemas import SCHEMAS
from olmo_sparsity.analysis.results.statistics import GROUPS, summarize
from olmo_sparsity.analysis.results.stored_results import FILES, read_results
from olmo_sparsity.analysis.results.student_t import FEW_FOR_BOOTSTRAP
from olmo_sparsity.analysis.results.summary import describe
from olmo_sparsity.analysis.results.tables import write_table
from olmo_sparsity.analysis.results.terminal_table import format_summary
from olmo_sparsity.analysis.results.view import with_interval
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.manifest import write_manifest
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
    assert list(summary_in_order_of_units(found).units.unique()) == units


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"net_equal": float("nan")}, "; net excess +0.48 [+0.34, +0.63] (+0.73 nats a target): "),
        ({"net_equal_low": 0.0}, ": cannot be told from chance."),
        ({"net_equal_low": -0.3, "net_equal_high": 0.0}, ": cannot be told from chance."),
        ({"net_equal_low": -0.3, "net_equal_high": -0.1}, ": less than by chance."),
        ({"placebo_recovery": 0.7}, "of the gap of 200 targets (of placebo targets 0.70); net"),
        (
            {"num_targets": 1},
            "of the gap of 1 target; no verdict: 1 target in 50 documents; at least",
        ),
        ({"num_targets": 9}, "; no verdict: 9 targets in 50 documents; at least 10 targets and 5"),
        ({"num_documents": 4}, "; no verdict: 200 targets in 4 documents; at least 10 targets and"),
        ({"num_placebo_targets": 9}, "; no verdict: 9 placebo targets in 40 documents; at least"),
        ({"num_placebo_documents": 1}, "; no verdict: 90 placebo targets in 1 document; at least"),
        ({"share_all": 0.5}, "; no verdict: at 50% of the targets these are all distant tokens,"),
        ({"share_all": 0.4}, "chance; but at 40% of the targets these are all distant tokens."),
        (
            {"num_documents": 9},
            "target). No verdict: 9 documents are too few to trust the interval.",
        ),
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


def test_ten_documents_are_enough_to_trust_an_interval() -> None:
    assert "too few" not in conclude(made_up(num_documents=10))


def test_without_unrelated_text_the_conclusion_is_the_recovery() -> None:
    alone = made_up(excess=float("nan"))
    alone = replace(alone, summary=alone.summary[1:])
    assert conclude(alone).endswith("recovers 0.99 of the gap of 200 targets (0.99 [0.94, 1.03]).")


def test_without_targets_nothing_is_concluded() -> None:
    found = made_up()
    assert conclude(replace(found, summary=found.summary[:0])) == "No target was evaluated."


@pytest.mark.parametrize(
    ("model", "said"),
    [({}, ""), ({"batch_noise": 0.019}, ""), ({"batch_noise": 0.02}, "by up to 0.02 nats")],
)
def test_only_loud_noise_is_said(model: dict[str, float], said: str) -> None:
    assert said in describe_noise(model)
    assert bool(describe_noise(model)) == bool(said)


@pytest.mark.parametrize(
    ("has_induction", "distant_states", "said"),
    [
        (False, "isolated", "below 15%"),
        (True, "isolated", "this model copies"),
        (True, "contextual", ""),
    ],
)
def test_what_copying_means_for_the_measurement_is_said(
    has_induction: bool, distant_states: str, said: str
) -> None:
    check = {"loss_first": 4.0, "loss_repeated": 3.0, "drop": 1.0, "has_induction": has_induction}
    first, *others = describe_induction(check, interpretation_of(distant_states)).splitlines()
    assert "(25%)" in first
    assert said in " ".join(others)
    assert bool(others) == bool(said)


BOOTSTRAP_ONLY = "intervals: 95%, by a bootstrap over documents"


@pytest.mark.parametrize(
    ("changed", "has_net", "said"),
    [
        ({}, True, BOOTSTRAP_ONLY),
        ({"num_placebo_documents": 25}, True, BOOTSTRAP_ONLY),
        (
            {"num_placebo_documents": 24},
            True,
            f"{BOOTSTRAP_ONLY}; of net excess by Student's t, over 24 doc",
        ),
        (
            {"num_documents": 20},
            True,
            f"{BOOTSTRAP_ONLY}; of net excess by Student's t, over 20 documents",
        ),
        ({"num_placebo_documents": 24}, False, BOOTSTRAP_ONLY),
        (
            {"num_documents": 9},
            False,
            f"{BOOTSTRAP_ONLY}; 9 documents are too few to trust the interval",
        ),
        (
            {"num_documents": 4},
            True,
            "no intervals: 200 targets in 4 documents; at least 10 targets",
        ),
        ({"num_placebo_documents": 4}, False, BOOTSTRAP_ONLY),
    ],
)
def test_the_interval_that_is_printed_is_named(
    changed: dict[str, Any], has_net: bool, said: str
) -> None:
    described = describe_intervals(pd.Series(ROW | changed), has_net)
    assert described.startswith(said)
    assert ("Student" in described) == ("Student" in said)
    assert ("too few" in described) == ("too few" in said)


def test_the_interval_that_is_named_is_the_one_that_is_computed() -> None:
    """With 24 documents, and not with 25, `as_reported` stretches that of net excess."""
    for num_documents in (24, 25):
        row = ROW | {"num_placebo_documents": num_documents}
        (reported,) = as_reported(pd.DataFrame([row])).to_dict("records")
        is_stretched = reported["net_high"] > ROW["net_high"]
        assert ("Student" in describe_intervals(pd.Series(row), True)) == is_stretched
        assert reported["excess_high"] == ROW["excess_high"]


def test_docs_name_the_intervals_as_page_and_terminal_do() -> None:
    docs = (Path(__file__).parents[3] / "docs/measure.md").read_text(encoding="utf-8")
    assert INTERVALS in docs
    assert f"fewer than {FEW_FOR_BOOTSTRAP} documents" in INTERVALS
    assert describe_intervals(pd.Series(ROW), True) == f"intervals: {BOOTSTRAP}"
    assert INTERVALS.startswith(f"Intervals are {BOOTSTRAP}.")


@pytest.fixture(scope="module")
def with_other_sets(results: Results) -> Results:
    """With a set of somebody's own, `digits`, whose placebo says nothing, as that of `bigram`."""
    summary = results.summary
    of_bigram = summary[summary.target_set == "bigram"]
    others = [of_bigram.assign(target_set=name, net=0.1) for name in ("digits", "bigram")]
    return replace(results, summary=pd.concat([summary[summary.target_set == "gap"], *others]))


def test_a_description_begins_with_the_conclusion(with_other_sets: Results) -> None:
    assert describe(with_other_sets).splitlines()[:2] == [conclude(with_other_sets), ""]


def test_a_description_says_how_it_was_measured(with_other_sets: Results) -> None:
    said = describe(with_other_sets)
    losses = with_other_sets.losses
    num_documents = losses.document.nunique()
    place = f"{len(losses):,} tokens of {num_documents} measured documents, both halves"
    shown = "perplexity 9.10, LongPPL 2.50 (2.00% of these tokens)"
    assert f"\nlosses, {place}: L_short {losses.loss_short.mean():.3f}, {shown}" in said
    # The only mean gap of all tokens is that of the reported half, which the figure draws.
    value, *_ = mean_gap(with_other_sets.reported)
    num_reported = with_other_sets.reported.document.nunique()
    assert f"tokens of {num_reported} documents: mean gap {value:+.3f} nats; in total" in said
    assert said.count("mean gap +") == 1
    assert "local 32, stride 16, distant units shown alone" in said
    assert "\ninduction: loss 4.31" in said


def test_a_description_has_all_rows_of_the_main_set_and_the_first_of_others(
    with_other_sets: Results,
) -> None:
    lines = describe(with_other_sets).splitlines()
    selectors = tuple(with_other_sets.meta.selectors)
    rows = [line.split()[:3] for line in lines if line.startswith(selectors)]
    assert len(rows) == (with_other_sets.summary.target_set == "gap").sum() + 4
    assert rows[-4:] == [["add_one", "tokens", "1"], ["add_one", "span:4", "1"]] * 2


def test_a_description_has_a_header_again_where_the_columns_are_others(
    with_other_sets: Results,
) -> None:
    lines = describe(with_other_sets).splitlines()
    assert [line.startswith("selector ") for line in lines].count(True) == 2
    assert any(line.startswith("no net excess of bigram, digits: ") for line in lines)


def test_a_set_of_somebodys_own_is_the_main_one_if_it_is_alone(with_other_sets: Results) -> None:
    summary = with_other_sets.summary
    alone = replace(with_other_sets, summary=summary[summary.target_set == "digits"])
    assert "\ndigits: " in describe(alone)


def test_without_targets_a_description_has_no_table(with_other_sets: Results) -> None:
    without = replace(with_other_sets, summary=with_other_sets.summary[:0])
    assert "selector" not in describe(without)


@pytest.mark.parametrize(
    ("changed", "hint"),
    [
        ({"counts": {"documents_trained_on": 3}}, "\n3 documents left out"),
        (
            {"counts": {"documents_left": 1, "documents_measured": 4}},
            "partial: 1 of 5 documents are",
        ),
        (
            {"reliability": [{"units": "tokens", "lds": 0.5, "lds_low": 0.4, "lds_high": 0.6}]},
            "reliability of 4 unrelated texts (tokens): 0.50 [0.40, 0.60] (",
        ),
        ({"targets": {"threshold": 1.0, "only_named": True}}, "\nlosses of named targets"),
        ({"longppl": {"longppl": None, "ppl": 9.1, "key_share": 0.0}}, "no key tokens"),
    ],
)
def test_a_description_says_what_is_special_and_only_then(
    results: Results, changed: dict[str, Any], hint: str
) -> None:
    windows = results.meta.windows | {"replacements": 4}
    special = replace(results, meta=replace(results.meta, windows=windows, **changed))
    assert hint in describe(special)
    assert hint not in describe(results)


def test_without_the_check_a_description_says_nothing_of_induction(results: Results) -> None:
    unchecked = replace(results, meta=replace(results.meta, induction={}))
    assert "induction:" not in describe(unchecked)


@pytest.mark.parametrize("transfers", [False, True])
def test_a_comparison_has_the_rows_of_its_table(results: Results, transfers: bool) -> None:
    targets = results.meta.targets | {"choices": "b", "chosen_by": results.meta.model}
    found = replace(results, meta=replace(results.meta, targets=targets))
    table = compare_with_remarks(found, found, transfers)
    said = describe_comparison(found, found, table, transfers)
    first, last = ("recovery", "excess_nats") if transfers else ("net", "net_nats")
    *lines, intervals = said.splitlines()
    rows = [line for line in lines if not line.startswith("  *: ")]
    assert intervals.startswith("intervals: 95%, by a bootstrap over documents")
    assert intervals.endswith(
        "by Student's t in rows of fewer than 25 documents (own / placebo)"
    ) == (not transfers)
    shown = rows[-len(table) :]
    for line, row in zip(shown, table.to_dict("records"), strict=True):
        for name, digits in ((first, 2), (last, 3)):
            ends = row[f"{name}_low"], row[f"{name}_high"]
            assert f"  {with_interval(row[name], *ends, digits=digits)}" in line
        assert line.startswith(row["target_set"])


def test_a_comparison_without_intervals_says_why_in_one_line(results: Results) -> None:
    """As the table of one measurement does, instead of dashes alone."""
    whole = compare_with_remarks(results, results, transfers=False)
    assert "no intervals" not in describe_comparison(results, results, whole, transfers=False)
    reported = results.targets[results.targets.distant_part == "document"].document.unique()
    few = results.targets[results.targets.document.isin(reported[:3])]
    recovery = results.recovery[results.recovery.document.isin(few.document)]
    of_three = replace(results, targets=few, recovery=recovery)
    table = compare_with_remarks(of_three, results, transfers=False)
    said = describe_comparison(of_three, results, table, transfers=False)
    assert table.net_nats_low.isna().all()
    placebo = few[few.distant_part == "placebo"].document.nunique()
    assert placebo < 5
    *_, reason, remedy = said.splitlines()
    assert re.fullmatch(
        r"  \*: no intervals: \d+ targets in 3 documents; at least 10 targets and 5 documents are "
        r"needed(; .*)?",
        reason,
    )
    assert remedy.endswith("measure more documents (--max-documents)")


@pytest.mark.parametrize(
    ("changed", "remark"),
    [
        ({}, ""),
        ({"num_documents": 7}, "7 documents are too few to trust the interval"),
        ({"num_targets": 9}, "no intervals: 9 targets in 50 documents; at least 10 targets and 5"),
        ({"num_placebo_targets": 0}, "no placebo targets, so no net excess"),
        ({"target_set": "every"}, "no net excess: these targets were not selected by their gap"),
    ],
)
def test_a_comparison_warns_as_a_measurement_does(changed: dict[str, Any], remark: str) -> None:
    (row,) = with_remarks(pd.DataFrame([ROW | changed]), has_net=True).to_dict("records")
    assert row["remark"].startswith(remark)
    assert bool(row["remark"]) == bool(remark)


def test_a_comparison_prints_its_remarks_below_the_table(results: Results) -> None:
    table = compare_with_remarks(results, results, transfers=False)
    said = describe_comparison(results, results, table, transfers=False)
    remarks = set(table.remark) - {""}
    assert any("too few" in remark for remark in remarks)
    assert {line.removeprefix("  *: ") for line in said.splitlines() if "  *: " in line} == remarks
    assert {"num_targets", "num_placebo_targets"} <= set(table)


REMOVAL = {"removal": 0.5, "removal_low": 0.4, "removal_high": 0.6}


@pytest.mark.parametrize(
    ("changed", "shown", "hidden"),
    [
        ({}, "+0.19 [+0.03, +0.39]", "too few"),
        ({"num_documents": 10, "num_placebo_targets": 10, "gap": 0.1}, "+0.19 [", "too few"),
        ({"num_documents": 9}, "+0.19 [+0.03, +0.39]", "no intervals"),
        ({"net_equal": float("nan"), "num_documents": 9}, "–", "no intervals"),
        ({"placebo_recovery": 0.713}, "     0.71       0.16   +0.83", "no intervals"),
        ({"placebo": 0.35}, " +0.35    +0.48", "no intervals"),
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
    assert ("too few to trust the interval" in table) == (changed.get("num_documents") == 9)
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
    write_as_json(folder / "meta.json", asdict(replace(results.meta, intervals="")))
    write_manifest(folder, FILES)
    found = read_results(folder).summary
    pd.testing.assert_frame_equal(found[[*results.summary]], results.summary, check_dtype=False)


def test_a_later_column_that_a_measurement_lacks_is_computed_and_no_interval_stretched_again(
    results_folder: Path, results: Results, tmp_path: Path
) -> None:
    folder = shutil.copytree(results_folder, tmp_path / "copy")
    without = results.summary.drop(columns=[*column_named("placebo_recovery").names, "distance"])
    schema = pa.schema([SCHEMAS["summary"].field(name) for name in without])
    write_table(folder / "summary.parquet", pa.Table.from_pandas(without, schema))
    write_manifest(folder, FILES)
    pd.testing.assert_frame_equal(read_results(folder).summary, results.summary)


def test_a_column_of_the_first_version_that_is_absent_is_an_error(
    results_folder: Path, results: Results, tmp_path: Path
) -> None:
    folder = shutil.copytree(results_folder, tmp_path / "copy")
    without = results.summary.drop(columns="net")
    schema = pa.schema([SCHEMAS["summary"].field(name) for name in without])
    write_table(folder / "summary.parquet", pa.Table.from_pandas(without, schema))
    write_manifest(folder, FILES)
    with pytest.raises(DataError, match="column net must be double, not absent"):
        read_results(folder)


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
    shares = shares_with_all_distant(targets, recovery, windows).set_index("k").share_all
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
    assert f"distant text reduces the loss by {3 / sample:.0f} nats, an unrelated text" in said
    half = "reported" if threshold is None else "reported half"
    assert said.startswith(f"{half}, 4 tokens of 1 document: mean gap +0.750 nats; in total")
    raised = losses.assign(loss_long=losses.loss_short + 1.0)
    said_of_raised = describe_gap(replace(found, losses=raised, targets=targets))
    assert f"distant text raises the loss by {4 / sample:.0f} nats, an unrel" in said_of_raised
    assert ("in total, estimated from a sample of 50.0%, distant" in said) == (sample == 0.5)
    assert "an unrelated text reduces the loss by 0 nats; " in said
    assert describe_gap(replace(found, losses=losses[:1])) == "no target is reported"
    if threshold is None:
        assert said.endswith(f"the 25.0% evaluated gain +{2 / sample:.0f}")
    else:
        assert f"the 50.0% of largest gap gain +{3 / sample:.0f}; an unrelated" in said
        assert said.endswith("gains as much (1.00 nats) on 25.0%")
