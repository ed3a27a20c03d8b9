"""Excess by distance adds up to the summary, and finds planted distances."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from olmo_sparsity.analysis.results.by_distance import split_by_distance
from olmo_sparsity.analysis.results.results import Results


@pytest.mark.parametrize("selector", ["add_one", "gradient"])
@pytest.mark.parametrize("k", [1, 4])
def test_the_bins_add_up_to_the_row(results: Results, selector: str, k: int) -> None:
    rows = results.summary.query(
        f"target_set == 'gap' and units == 'tokens' and selector == '{selector}' and k == {k}"
    )
    (row,) = rows.to_dict("records")
    bins = split_by_distance(results, row)
    assert len(bins) > 1
    for name in ("recovery", "unrelated", "excess", "placebo", "net"):
        assert bins[name].sum() == pytest.approx(row[name], rel=1e-6), name
    for name in ("share_units", "share_random"):
        assert bins[name].sum() == pytest.approx(1)


def test_the_excess_is_at_the_distance_at_which_it_was_planted(results: Results) -> None:
    """Units of all kinds are moved: those of the text to 40 tokens back, others to 100."""
    row = results.summary.query("target_set == 'gap' and selector == 'add_one' and k == 1").iloc[0]
    influence = results.influence
    is_own = (influence.control == "own") & (influence.distant_part == "document")
    back = np.where(is_own & (influence.selector == "add_one"), 40, 100)
    moved = replace(results, influence=influence.assign(distant_first=influence.target - back))
    bins = split_by_distance(moved, row).set_index("first")
    assert bins.recovery[32] == pytest.approx(row.recovery)
    assert bins.unrelated[64] == pytest.approx(row.unrelated)
    assert (bins.share_units[32], bins.share_random[64]) == (1.0, 1.0)
    assert bins.recovery[64] == 0


def test_without_enough_targets_bins_have_no_interval(results: Results) -> None:
    row = results.summary.query("target_set == 'gap' and selector == 'add_one' and k == 1").iloc[0]
    assert split_by_distance(results, row).net_low.notna().all()
    without = row.copy()
    without["net_low"] = np.nan
    assert split_by_distance(results, without).net_low.isna().all()


def test_without_unrelated_text_there_is_recovery_alone(results: Results) -> None:
    row = results.summary.query("target_set == 'gap' and selector == 'add_one' and k == 1").iloc[0]
    own = {
        name: getattr(results, name)[getattr(results, name).control == "own"]
        for name in ("recovery", "influence")
    }
    bins = split_by_distance(replace(results, **own), row)
    assert bins.recovery.sum() == pytest.approx(row.recovery)
    assert bins.excess.isna().all()
