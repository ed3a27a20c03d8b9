"""Results: read back, compared, or refused by name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from numpy.typing import ArrayLike

from olmo_sparsity.analysis.measurement.parts import Parts
from olmo_sparsity.analysis.results import reported
from olmo_sparsity.analysis.results.columns import (
    SUMMARY,
    column_named,
    documentation_table,
    types_of_columns,
)
from olmo_sparsity.analysis.results.compare import compare
from olmo_sparsity.analysis.results.comparison_text import compare_with_remarks, describe_comparison
from olmo_sparsity.analysis.results.conclusion import quoted_row_of
from olmo_sparsity.analysis.results.loss_statistics import (
    gap_difference,
    mean_gap,
    mean_saving,
    saving_difference,
    savings_of_longer_window,
)
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.pairing import join_by_target
from olmo_sparsity.analysis.results.reported import with_t_intervals
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.schemas import SCHEMAS
from olmo_sparsity.analysis.results.shown_columns import (
    PAGE,
    TERMINAL,
    page_columns,
    terminal_columns,
)
from olmo_sparsity.analysis.results.statistics import ENOUGH, summarize
from olmo_sparsity.analysis.results.stored_results import FILES, read_results
from olmo_sparsity.analysis.results.summary import describe
from olmo_sparsity.analysis.results.target_rows import has_spans, losses_of_targets
from olmo_sparsity.analysis.results.two_measurements import net_differences
from olmo_sparsity.analysis.results.view import format_interval
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.manifest import write_manifest
from tests.support.parts import IDENTITY, flip_a_byte, truncate, write


def test_measurements_of_other_texts_are_not_compared(results: Results) -> None:
    other = replace(
        results,
        meta=replace(results.meta, data={"fingerprint": "b"}),
        tokens=results.tokens.assign(text="other "),
    )
    assert compare(results, results).net.abs().max() == 0
    noise = np.random.default_rng(0).normal(size=len(results.recovery))
    noisy = replace(results, recovery=results.recovery.assign(loss_set=noise))
    plain = net_differences(
        *(join_by_target(r.losses, r.targets, r.recovery) for r in (results, noisy))
    )
    widths = [
        table.net_nats_high - table.net_nats_low for table in (compare(results, noisy), plain)
    ]
    ratios = widths[0] / widths[1]  # 5 documents: 2.776 / 1.96 · √(5 / 4)
    assert 1.5 < ratios.min() <= ratios.max() < 1.7
    own = replace(results, targets=results.targets.query("distant_part == 'document'"))
    with pytest.raises(DataError, match=r"no placebo to compare; .*without --targets"):
        compare(results, own)
    with pytest.raises(DataError, match="other texts"):
        compare(results, other)


ROOT = Path(__file__).parents[3]


def test_the_difference_of_mean_gaps_is_of_the_tokens_that_both_measured() -> None:
    """A token or a document that one model alone measured does not count."""
    first = losses_of({0: [1.0, 3.0], 1: [2.0], 2: [50.0]})
    second = losses_of({0: [0.5, 1.0], 1: [4.0, 90.0]})
    gap = gap_difference(first, second)
    assert gap.value == pytest.approx((0.5 + 2.0 - 2.0) / 3)
    assert np.isnan([gap.low, gap.high]).all()  # of two documents


def test_the_interval_of_a_difference_of_mean_gaps_is_paired_over_documents() -> None:
    """Documents differ much and models little, so that intervals of each model overlap."""
    generator = np.random.default_rng(0)
    gaps = {document: generator.normal(document, 0.1, 20) for document in range(40)}
    first = losses_of(gaps)
    second = losses_of({document: gap - 0.2 for document, gap in gaps.items()})
    gap = gap_difference(first, second)
    assert gap == pytest.approx((0.2, 0.2, 0.2))
    assert mean_gap(first).low < mean_gap(second).high
    exchanged = gap_difference(second, first)
    assert exchanged == pytest.approx((-gap.value, -gap.high, -gap.low))


def test_a_longer_window_saves_what_the_loss_falls_at_the_same_tokens() -> None:
    """Each of 12 documents has a token that only the shorter window measured, and one that both
    did, where the longer window saves 0.25 nats in even documents and 0.75 in odd ones."""
    documents = list(range(12))
    both = {"document": documents, "target": [300] * 12, "loss_short": [9.0] * 12}
    shorter = pd.DataFrame(both | {"loss_long": [4.0] * 12, "placebo_loss_long": [6.0] * 12})
    unrelated = [6.25] * 11 + [np.nan]  # not measured in the last document
    longer = pd.DataFrame(both | {"loss_long": [3.75, 3.25] * 6, "placebo_loss_long": unrelated})
    alone = shorter.assign(target=100, loss_long=99.0)
    savings = savings_of_longer_window(longer, pd.concat([alone, shorter]))
    saved = mean_saving(savings)
    assert saved.value == pytest.approx(0.5)
    assert 0.25 < saved.low < 0.5 < saved.high < 0.75
    assert mean_saving(savings, "more_than_unrelated").value == pytest.approx(8.0 / 11)
    assert np.isnan(mean_saving(savings_of_longer_window(longer, alone)).value), "none is shared"
    # Another model saves 0.2 nats less at each token, so the paired interval is narrow.
    less = savings.assign(saved=savings.saved - 0.2)
    assert saving_difference(savings, less) == pytest.approx((0.2, 0.2, 0.2))


def losses_of(gaps: Mapping[int, ArrayLike]) -> pd.DataFrame:
    """Return losses of tokens with these gaps: document → the gaps of its tokens."""
    rows = [
        {"document": document, "target": target, "loss_short": 1 + gap, "loss_long": 1.0}
        for document, of_tokens in gaps.items()
        for target, gap in enumerate(np.asarray(of_tokens))
    ]
    return pd.DataFrame(rows)


def test_a_comparison_has_the_difference_of_mean_gaps(results: Results) -> None:
    lower = results.losses.assign(loss_long=results.losses.loss_long - 0.25)
    better = replace(results, losses=lower)
    table = compare_with_remarks(better, results, transfers=False)
    assert table.mean_gap.to_numpy() == pytest.approx(0.25)
    printed = describe_comparison(better, results, table, transfers=False)
    assert "L_short - L_long, mean of all measured tokens: +0.250 [+0.250, +0.250]" in printed


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink])
def test_a_damaged_file_is_named(
    results_folder: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder = shutil.copytree(results_folder, tmp_path / "copy")
    damage(folder / name)
    with pytest.raises(DataError, match=rf"^[^\n]*{name}[^\n]* makes it again[^\n]*$"):
        read_results(folder)


def test_a_measurement_whose_manifest_lists_fewer_files_is_of_another_version(
    results_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(results_folder, tmp_path / "copy")
    write_manifest(folder, [name for name in FILES if name != "costs.parquet"])
    with pytest.raises(DataError, match=r"another version: manifest\.json does not list costs"):
        read_results(folder)


def test_unfinished_and_unreadable_folders_are_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no measurement"):
        read_results(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(DataError, match="is a training run, not a measurement"):
        read_results(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    parts = Parts(tmp_path, IDENTITY)
    write(parts, 0)
    parts.flush()
    with pytest.raises(DataError, match=r"not finished .*; run the same"):
        read_results(tmp_path)
    windows = {"long": 16, "short": 6, "stride": 8, "distant_states": "isolated"}
    parts.write_final_tables({}, Meta(windows=windows))
    read_results(tmp_path)
    for text in ("{", "[]", "{}", '{"windows": 3}', '{"windows": {"long": 16}}', '{"ks": null}'):
        (tmp_path / "meta.json").write_text(text)
        with pytest.raises(DataError, match=r"meta\.json"):
            read_results(tmp_path)
        write_manifest(tmp_path, FILES)  # by somebody who changed it on purpose
        with pytest.raises(DataError, match=r"meta\.json: "):
            read_results(tmp_path)


def columns(schema: pa.Schema) -> str:
    """As the page has them: by type; `x[]` is x with x_low and x_high, `?` may be null."""
    of_type = defaultdict[str, list[str]](list)
    for field in schema:
        kind, (stem, _, end) = str(field.type), field.name.rpartition("_")
        null = "?" * field.nullable
        if end == "low" and stem in schema.names:
            of_type[kind][-1] = f"`{stem}[]{null}`"
        elif end != "high" or stem not in schema.names:
            of_type[kind].append(f"`{field.name}{null}`")
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in of_type.items())


def test_the_page_has_every_column_and_key() -> None:
    page = (ROOT / "docs/measure.md").read_text()
    for name, schema in SCHEMAS.items():
        if name != "summary":  # which has a table of its own
            assert f"| `{name}` | {columns(schema)} |\n" in page
    assert ", ".join(f"`{field.name}`" for field in fields(Meta)) in page


def test_losses_of_a_target_of_several_tokens_are_all_there() -> None:
    losses = pd.DataFrame({"document": 1, "target": [3, 4, 5], "loss_short": [1.0, 2.0, 4.0]})
    targets = pd.DataFrame({"document": 1, "target": [3, 5], "end": [5, 6]})
    assert has_spans(targets)
    assert not has_spans(targets[1:])
    assert losses_of_targets(losses, targets).loss_short.tolist() == [3.0, 2.0, 4.0]
    with pytest.raises(DataError, match="lacks tokens of targets"):
        losses_of_targets(losses[:1], targets)


@pytest.mark.accept
def test_the_table_is_split_by_groups(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row once more, from the documents of each group alone; small groups are counted."""
    groups = {"long\x1b": [1, 3], "": [5, 7, 9], "none of these": [0, 2]}
    by_group = replace(results, meta=replace(results.meta, data={"source": "x", "groups": groups}))
    assert "3 of 3 groups are not shown: at least 10 targets and 5" in describe(by_group)
    assert "\nlong" not in describe(by_group)
    monkeypatch.setattr(reported, "MIN_DOCUMENTS", 2)
    said = describe(
        replace(results, meta=replace(results.meta, data={"source": "x", "groups": groups}))
    )
    lines = said.splitlines()
    for name, numbers in (("long", groups["long\x1b"]), ("no group", groups[""])):
        (place,) = [i for i, line in enumerate(lines) if line.startswith(name)]
        own = [
            table[table.document.isin(numbers)]
            for table in (results.losses, results.targets, results.recovery)
        ]
        row = with_t_intervals(summarize(*own))
        row = row.query("target_set == 'gap' and selector == 'add_one' and units == 'tokens'").iloc[
            0
        ]
        assert f": {row.num_targets} targets in {row.num_documents} documents" in lines[place]
        shown = next(line for line in lines[place:] if line.startswith("add_one"))
        assert shown.split()[:4] == ["add_one", row.units, str(row.k), f"{row.recovery:.2f}"]
    assert "none of these" not in said
    assert "1 of 3 groups are not shown" in said
    assert "no group" not in describe(results)


def test_the_page_on_measuring_lists_the_columns_of_the_summary() -> None:
    lines = (ROOT / "docs/measure.md").read_text(encoding="utf-8").splitlines()
    rows = documentation_table().splitlines()
    # Row by row, so that a failure prints those that the page lacks.
    assert [row for row in rows if row not in lines] == []
    first = lines.index(rows[0])
    assert lines[first : first + len(rows)] == rows


def test_each_column_that_is_shown_is_a_column_of_the_summary() -> None:
    assert {*PAGE, *TERMINAL} <= {column.name for column in SUMMARY}


def test_tables_show_columns_in_the_order_of_their_lists() -> None:
    assert [column.name for column, _ in page_columns()] == list(PAGE)
    shown = {column.name for has_net in (True, False) for column, _ in terminal_columns(has_net)}
    assert shown == set(TERMINAL)


def test_each_heading_of_a_terminal_has_room() -> None:
    for has_net in (True, False):
        for column, display in terminal_columns(has_net):
            assert len(display.heading) <= display.width, column.name


def test_the_heading_of_the_share_of_targets_names_the_threshold() -> None:
    (heading,) = [
        display.heading for column, display in page_columns() if column.name == "share_enough"
    ]
    assert heading.endswith(f"≥ {ENOUGH}")
    assert f"at least {ENOUGH}" in column_named("share_enough").meaning


def test_each_column_of_a_measurement_has_its_entry(results_folder: Path) -> None:
    stored = pd.read_parquet(results_folder / "summary.parquet")
    assert [*stored] == [*types_of_columns()]


def test_each_number_that_is_computed_has_its_entry(results: Results) -> None:
    """A number without one would be computed, and stored nowhere."""
    computed = summarize(results.losses, results.targets, results.recovery)
    assert set(computed) <= set(types_of_columns())


def test_each_interval_that_is_computed_is_that_of_its_entry(results: Results) -> None:
    computed = summarize(results.losses, results.targets, results.recovery)
    with_interval = {name.removesuffix("_low") for name in computed if name.endswith("_low")}
    expected = {column.name for column in SUMMARY if column.has_interval and column.low in computed}
    assert with_interval | {"recovery"} == expected


ADDED = """
import sys
from pathlib import Path
from olmo_sparsity.analysis.results import columns, shown_columns

columns.SUMMARY += (
    columns.SummaryColumn(
        name="halved",
        type=columns.FLOAT64.or_null,
        meaning="half of `recovery`",
        has_interval=True,
        came_later=True,
    ),
)
shown_columns.TERMINAL["halved"] = shown_columns.Display(heading="half", width=20)
shown_columns.PAGE["halved"] = shown_columns.Display(heading="half of recovery")
from olmo_sparsity.analysis.results import statistics

ratios_before = statistics.ratios_of_sums


def ratios_with_halved(sums):
    computed = ratios_before(sums)
    return computed | {"halved": computed["recovery"] / 2}


statistics.ratios_of_sums = ratios_with_halved
from olmo_sparsity.analysis.report.report import write_report
from olmo_sparsity.analysis.results.stored_results import read_results
from olmo_sparsity.analysis.results.summary import describe

results = read_results(sys.argv[1])
write_report(results, Path(sys.argv[2]))
print(*results.summary.columns)
print(columns.documentation_table())
print(describe(results))
"""
"""Adds an entry and its computation, and reads a measurement that was stored without them."""


def test_a_column_that_is_added_to_the_list_is_in_table_terminal_page_and_docs(
    results_folder: Path, results: Results, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    words = [sys.executable, "-c", ADDED, str(results_folder), str(out)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    names, *lines = done.stdout.splitlines()
    assert names.split()[-3:] == ["halved", "halved_low", "halved_high"]
    assert "| `halved[]?` | double | half of `recovery` |" in lines
    row = results.summary.loc[quoted_row_of(results)]
    shown = format_interval(row.recovery / 2, row.low / 2, row.high / 2)
    (header, first) = next(pair for pair in pairwise(lines) if pair[0].startswith("selector"))
    assert header.split()[-1] == "half"
    assert first.endswith(shown.replace("−", "-"))
    page = out.read_text(encoding="utf-8")
    assert "half of recovery</th>" in page
    assert f"<td>{shown}</td>" in page


def test_the_stored_summary_has_the_ends_of_each_interval() -> None:
    names = SCHEMAS["summary"].names
    assert names[names.index("recovery") :][:3] == ["recovery", "low", "high"]
    assert names[names.index("net") :][:3] == ["net", "net_low", "net_high"]


def test_what_is_no_folder_is_refused() -> None:
    wrong: Any = None
    with pytest.raises(ConfigError, match="folder=None must be the name of a folder"):
        read_results(wrong)


def test_a_comparison_names_what_differs_and_refuses_replaced_beside_masked_text(
    results: Results,
) -> None:
    windows = results.meta.windows
    other = replace(results.meta, windows=windows | {"short": 16}, seed=3, dtype="bfloat16")
    changed = replace(results, meta=other)
    table = compare_with_remarks(results, changed, transfers=False)
    said = describe_comparison(results, changed, table, transfers=False)
    differ = "short 32 and 16; seed 0 and 3; dtype float32 and bfloat16"
    assert said.splitlines()[1] == f"measured with different {differ}"
    same = describe_comparison(results, results, table, transfers=False)
    assert "different" not in same
    replaced = replace(results.meta, windows=windows | {"distant_states": "replaced"})
    with pytest.raises(DataError, match="distant_states: isolated and replaced ask other"):
        compare(results, replace(results, meta=replaced))


def test_compare_tells_python_what_the_command_prints(
    results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    windows = results.meta.windows
    other = replace(results.meta, windows=windows | {"stride": windows["stride"] + 1})
    changed = replace(results, meta=other)
    table = compare(results, changed)
    line = f"measured with different stride {windows['stride']} and {windows['stride'] + 1}\n"
    assert capsys.readouterr().err == line
    shown = compare_with_remarks(results, changed, transfers=False)
    assert table.remark.any()  # of five documents
    pd.testing.assert_frame_equal(table, shown)
    compare(results, results)
    assert capsys.readouterr().err == ""


def test_texts_of_equal_length_are_not_taken_for_one_text(results: Results) -> None:
    meta = replace(results.meta, data={"fingerprint": "another text"})
    as_long = replace(results, tokens=results.tokens.assign(text="a"))
    other = replace(results, tokens=results.tokens.assign(text="b"), meta=meta)
    with pytest.raises(DataError, match="are of other texts"):
        compare(as_long, other)


def test_measurements_in_other_tokens_of_one_text_are_refused_with_a_way_out(
    results: Results,
) -> None:
    """The same characters, in tokens of other lengths."""
    in_pairs = results.tokens.sort_values("place").assign(text="ab")
    is_even = in_pairs.groupby("document").cumcount() % 2 == 0
    split_otherwise = in_pairs.assign(text=np.where(is_even, "aba", "b"))
    first = replace(results, tokens=in_pairs)
    meta = replace(results.meta, data={"fingerprint": "other tokens"})
    other = replace(results, tokens=split_otherwise, meta=meta)
    with pytest.raises(DataError, match=r"other tokens of one text.*--targets of the other"):
        compare(first, other)
