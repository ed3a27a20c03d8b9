"""What is kept of a result is read back, and summaries follow from the stored rows.

`make results-check` (OLMO_SPARSITY_ALL_RESULTS=1) checks every measurement, not a sample.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity.analysis.results.pairing import join_by_target
from olmo_sparsity.analysis.results.statistics import GROUPS, summarize_pairs
from study.pages import keep_results, stored
from study.pages.stored import (
    evaluations,
    measurements,
    other_table,
    others,
    read_table,
    stored_tables,
)
from study.word_parts import parts_of_words
from tests.support.fake_results import write_fake_results

RANKED = pd.read_parquet(stored.RESULTS / "recovery.parquet", columns=["measurement", "selector"])
ALL = sorted(RANKED.measurement[RANKED.selector.str.startswith("add_one")].unique())
SAMPLE = [*ALL[:: len(ALL) // 19][:19], "smollm2_wikipedia", "smollm2_long_4096_sentences"]
CHECKED = ALL if os.environ.get("OLMO_SPARSITY_ALL_RESULTS") else list(dict.fromkeys(SAMPLE))


def summary_of(name: str) -> pd.DataFrame:
    """The rows of add_one in its forms, for which the rows of targets are stored."""
    shown = read_table("summary", name)
    shown = shown[shown.selector.str.startswith("add_one")]
    assert len(shown)
    return shown


@pytest.mark.parametrize("name", CHECKED)
def test_a_summary_follows_from_the_stored_rows(name: str) -> None:
    """Every number, with its interval."""
    losses, targets, recovery = stored_tables(name)
    if "loss_without" not in recovery:
        recovery["loss_without"] = np.nan
    rows = join_by_target(losses, targets, recovery)
    bare = rows.target_set == "planted_removed"  # without a gap: in units of that with marks
    rows.loc[bare, "gap"] = rows.gap[rows.target_set == "planted"].mean()
    found = summarize_pairs(rows).set_index(GROUPS).sort_index()
    shown = summary_of(name).set_index(GROUPS)
    columns = [column for column in found if column in shown]
    assert len(columns) > 25
    loosely: Any = {"check_dtype": False, "check_index_type": False, "atol": 6e-5, "rtol": 0}
    pd.testing.assert_frame_equal(found[columns], shown[columns].sort_index(), **loosely)


@pytest.mark.parametrize("name", CHECKED)
def test_the_headline_follows_without_code_of_the_package(name: str) -> None:
    """Net excess at targets of large gap."""
    losses, targets, recovery = stored_tables(name)
    summary = summary_of(name).query("target_set == 'gap'")
    key = ["document", "target"]
    rows = recovery.merge(losses, on=key)
    rows = rows.merge(targets[targets.target_set == "gap"], on=[*key, "distant_part"])
    for _, shown in summary.iterrows():
        at_k = rows[
            (rows.units == shown.units) & (rows.k == shown.k) & (rows.selector == shown.selector)
        ]
        excess, parts = {}, {}
        for part, long in (("document", "loss_long"), ("placebo", "placebo_loss_long")):
            some = at_k[at_k.distant_part == part]
            if not len(some):
                continue
            # Three unrelated draws of a target are one third each.
            lost = some.groupby(["control", *key]).loss_set.mean().unstack("control")
            if "unrelated" not in lost:  # choices of a model with another tokenizer
                continue
            gap = some.set_index(key).eval(f"loss_short - {long}").groupby(level=key).first()
            if gap.sum() <= 0:  # distant text raises the loss: there is nothing to recover
                continue
            if np.isnan(shown.excess) and part == "document":
                # A share is not shown if more than 2% of resamples of documents have no gap.
                gap_D = gap.groupby(level="document").sum().to_numpy()
                drawn = np.random.default_rng(1).integers(0, len(gap_D), (4000, len(gap_D)))
                assert (gap_D[drawn].sum(1) > 0).mean() < 0.985
                continue
            excess[part] = (lost.unrelated - lost.own).sum() / gap.sum()
            parts[part] = pd.DataFrame({"gap": gap, "nats": lost.unrelated - lost.own})
        if "document" not in excess:
            assert np.isnan(shown.excess)
            continue
        assert excess["document"] == pytest.approx(shown.excess, abs=1e-4)
        if "placebo" not in excess:
            continue
        assert excess["document"] - excess["placebo"] == pytest.approx(shown.net, abs=1e-4)
        # At equal gaps: to each target of the placebo the five own ones around it.
        own = parts["document"].sort_values("gap", kind="stable")
        below = own.gap.searchsorted(parts["placebo"].gap) - 2
        around = own.iloc[np.add.outer(below.clip(0, len(own) - 5), np.arange(5)).ravel()]
        of_equal = around.nats.sum() / around.gap.sum()
        if "net_equal" in shown:
            assert of_equal - excess["placebo"] == pytest.approx(shown.net_equal, abs=1e-3)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "stored"
    folder.mkdir()
    for module in (stored, keep_results):
        monkeypatch.setattr(module, "RESULTS", folder)
    stored.forget()
    yield folder
    stored.forget()


def test_a_kept_measurement_is_read_back(results: Path, tmp_path: Path) -> None:
    found = tmp_path / "found"
    write_fake_results(found)
    keep_results.keep(found, "second")
    keep_results.keep(found, "first", with_rows=False)
    before = read_table("recovery", "second")
    recovery = pd.read_parquet(found / "recovery.parquet").query("selector == 'add_one'")
    pd.testing.assert_frame_equal(before, recovery.reset_index(drop=True))
    pd.testing.assert_frame_equal(read_table("recovery", "second"), before)
    summary = pd.read_parquet(found / "summary.parquet").round(4)
    pd.testing.assert_frame_equal(read_table("summary", "first"), summary)
    assert "bigram" in read_table("losses", "second")
    assert list(measurements()) == ["first", "second"]
    mean = pd.read_parquet(found / "losses.parquet").loss_long.mean()
    assert measurements()["first"]["mean_losses"]["loss_long"]["mean"] == pytest.approx(
        mean, abs=1e-4
    )
    with pytest.raises(FileNotFoundError, match="no losses are stored of measurement first"):
        read_table("losses", "first")

    keep_results.keep(found, "second")  # replaces it
    assert list(measurements()) == ["first", "second"]


def test_tables_and_records_are_read_back(results: Path, tmp_path: Path) -> None:
    table = pd.DataFrame({"rule": ["a", "b"], "share": [0.5, np.nan], "targets": [3, 4]})
    table.to_csv(tmp_path / "table.csv", index=False)
    keep_results.keep(tmp_path / "table.csv", "table")
    pd.testing.assert_frame_equal(other_table("table"), table)
    for run in ("one", "other"):
        (tmp_path / "shares.json").write_text(json.dumps({run: {"share": 0.5}}))
        keep_results.keep(tmp_path / "shares.json", "shares")
    assert others()["shares"] == {"one": {"share": 0.5}, "other": {"share": 0.5}}
    heldout = [{"from": 0, "to": 256, "loss": 2.5, "num_tokens": 1024}]
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "heldout": heldout}]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keep_results.keep(tmp_path / "run", "run")
    assert evaluations() == {"run": rows[1:]}


def test_what_part_of_a_word_a_token_is() -> None:
    pieces = [
        *("Sta", "tion", " Sta", "tion", "s,"),
        *(" 19", "98", ".", "\n", "New", "’", "t"),
        *(" of", " (The", " tree"),
    ]
    assert parts_of_words(pieces).tolist() == [
        *("first_piece", "later_piece", "first_piece", "later_piece", "later_piece"),
        *("first_piece", "later_piece", "no_word", "no_word", "word", "no_word", "word"),
        *("function_word", "function_word", "word"),
    ]
    assert parts_of_words(["a", "", "b"]).tolist() == ["first_piece", "later_piece", "later_piece"]
