"""Recovery, excess and net excess from tables whose truth is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity.analysis.results.statistics import (
    NO_GAP_NATS,
    beyond_controls,
    both_ways,
    longppl,
    pair,
    rank_correlations,
    summarize,
    summarize_pairs,
    with_t_intervals,
)
from tests.support.measurements import losses_table, recovery_rows


def test_rank_correlations() -> None:
    x = np.array([[1.0, 2, 3, 4], [1, 1, 2, 2], [5, 5, 5, 5], [3, 1, 2, 4]])
    y = np.array([[10.0, 20, 30, 90], [1, 2, 3, 4], [1, 2, 3, 4], [-3, -1, -2, -4]])
    found = rank_correlations(x, y)
    np.testing.assert_allclose(found, [1, 4 / np.sqrt(4 * 5), np.nan, -1])
    y[0, 0] = np.nan  # a loss that is no number is not a loss that nothing changes
    np.testing.assert_allclose(rank_correlations(x, y, of_equal_values=0.0)[[0, 2]], [np.nan, 0])


def test_longppl_is_of_the_key_tokens() -> None:
    losses = pd.DataFrame(
        {"loss_short": [5.0, 5.0, 3.0, 4.5], "loss_long": [1.0, 2.5, 0.9, 2.5]}
    )  # key: gap above 2 and loss_long below 2
    assert longppl(losses) == {
        "key_share": 0.5,
        "num_key_tokens": 2,
        "longppl": pytest.approx(np.exp(0.95)),
        "ppl": pytest.approx(np.exp(6.9 / 4)),
    }


def test_recovery_is_a_ratio_of_sums_excess_is_paired_and_net_is_beyond_the_placebo() -> None:
    keys = [(1, 20), (1, 21), (3, 20)]
    losses = losses_table(
        document=[1, 1, 3],
        target=[20, 21, 20],
        loss_short=[5.0, 4.0, 3.0],
        loss_long=[1.0, 2.0, 2.0],
        placebo_loss_long=[3.0, 4.0, 2.0],
    )
    rows = recovery_rows(keys, "own", [2.0, 3.0, 3.0])
    rows += recovery_rows(keys, "foreign", [4.0, 4.0, 3.0])
    rows += recovery_rows(keys, "foreign", [3.0, 4.0, 3.0], draw=1)
    placebo = [(1, 20), (3, 20)]
    rows += recovery_rows(placebo, "own", [4.0, 2.0], far_part="placebo")
    rows += recovery_rows(placebo, "foreign", [4.5, 2.5], far_part="placebo")
    targets = pd.DataFrame(
        [(*key, "document", "gap") for key in keys] + [(*key, "placebo", "gap") for key in placebo],
        columns=["document", "target", "far_part", "target_set"],
    )
    recovery = pd.DataFrame(rows)
    first = recovery.eval("control == 'own' and far_part == 'document' and target == 20")
    recovery.loc[first, "loss_without"] = [3.0, 2.5]  # of document 1, and of document 3
    recovery.loc[recovery.eval("control == 'own'") & ~first, "loss_without"] = 2.0
    (row,) = summarize(losses, targets, recovery).to_dict("records")
    assert row["removal"] == pytest.approx((2.0 + 0.5 + 0.0) / 7)
    assert row["placebo_removal"] == pytest.approx((-1.0 + 0.0) / (2 + 1))
    assert row["recovery"] == pytest.approx((3 + 1 + 0) / (4 + 2 + 1))
    assert row["foreign"] == pytest.approx(1.5 / 7)
    assert row["excess"] == pytest.approx(2.5 / 7)
    assert row["gap"] == pytest.approx(7 / 3)
    assert row["excess_nats"] == pytest.approx(2.5 / 3)
    # Resamples hold the first document only, the second only, or both.
    assert row["excess_nats_low"] == pytest.approx(0)
    assert row["excess_nats_high"] == pytest.approx(2.5 / 2)
    assert (row["num_targets"], row["num_documents"], row["num_placebo_targets"]) == (3, 2, 2)
    assert row["num_placebo_documents"] == 2
    assert row["mean_ratio"] == pytest.approx((3 / 4 + 1 / 2 + 0) / 3)
    assert row["share_enough"] == 0
    assert row["low"] <= row["recovery"] <= row["high"]
    assert row["placebo"] == pytest.approx((0.5 + 0.5) / (2 + 1))
    assert row["net"] == pytest.approx(2.5 / 7 - 1 / 3)
    assert row["net_equal"] == pytest.approx(row["net"]), "three own targets stand around any"
    assert row["net_nats"] == pytest.approx(2.5 / 3 - 0.5)
    # Resampled together: with the first document alone .5/2 is taken from 2.5/6.
    assert row["net_high"] == pytest.approx(2.5 / 6 - 0.5 / 2)
    assert row["net_low"] == pytest.approx(0 - 0.5)


@pytest.mark.parametrize("gap", [10.0, 9e-5])
def test_ratios_need_a_gap_and_nine_tenths_of_it_are_enough(gap: float) -> None:
    documents = [*range(1, 81, 2)]
    keys = [(document, 20) for document in documents]
    losses = losses_table(
        document=documents, target=[20] * 40, loss_short=[10.0] * 40, loss_long=[10.0 - gap] * 40
    )
    targets = pd.DataFrame(
        [(*key, "document", "gap") for key in keys],
        columns=["document", "target", "far_part", "target_set"],
    )
    rows = recovery_rows(keys, "own", [10 - 0.9 * gap, 10 - 0.5 * gap] * 20)
    rows += recovery_rows(keys, "foreign", [10.0] * 40)
    (row,) = summarize(losses, targets, pd.DataFrame(rows)).to_dict("records")
    nothing = gap < NO_GAP_NATS
    assert np.isnan(row["low"]) == nothing
    assert row["share_enough"] == pytest.approx(np.nan if nothing else 0.5, nan_ok=True)
    assert row["recovery"] == pytest.approx(np.nan if nothing else 0.7, nan_ok=True)


def test_at_equal_gaps_nothing_is_left_of_what_the_gap_explains() -> None:
    """Units of the own text and of the placebo give back the same share at any gap, more where it
    is larger; the own targets have larger gaps."""
    generator = np.random.default_rng(0)
    parts = {}
    for part, largest in (("own", 4.0), ("placebo", 2.0)):
        gap = generator.uniform(0.1, largest, 600)
        sums = {"own": gap**2 / 4, "foreign": 0.0, "removed": gap, "gap": gap, "targets": 1.0}
        parts[part] = pd.DataFrame(sums).assign(document=np.arange(600) // 10)
    found = beyond_controls(parts["own"], parts["placebo"])
    assert found["net_low"] > 0.3
    assert found["net_equal"] == pytest.approx(0, abs=0.01)
    assert found["net_equal_low"] < 0 < found["net_equal_high"]


def test_intervals_of_few_documents_are_those_of_student() -> None:
    """97.5% of t with 4, 9, 23 and 2 degrees of freedom; two documents have none; 25 are enough."""
    rows = pd.DataFrame({"num_documents": [40, 40, 24, 3, 40, 40]})
    rows["num_placebo_documents"] = [5, 10, 40, 40, 2, 25]
    for name in ("net", "net_equal"):
        rows = rows.assign(**{name: 0.5, f"{name}_low": 0.5 - 1.96, f"{name}_high": 0.5 + 2 * 1.96})
    found = with_t_intervals(rows)
    expected = [2.776 * (5 / 4) ** 0.5, 2.262 * (10 / 9) ** 0.5, 2.069 * (24 / 23) ** 0.5]
    expected += [4.17 * (3 / 2) ** 0.5, np.nan, 1.96]  # 4.303: the expansion is 3% short there
    np.testing.assert_allclose(0.5 - found.net_low, expected, rtol=0.01)
    np.testing.assert_allclose(found.net_equal_high - 0.5, 2 * np.array(expected), rtol=0.01)


def test_transfer_is_the_mean_of_both_ways_and_resamples_a_document_for_both() -> None:
    """The first recovers 3 of 6 nats, the second 8 of 10, on targets of their own."""
    documents = [*range(1, 61, 2)]

    def rows(places: list[int], gap: float, shares: list[float]) -> pd.DataFrame:
        keys = [(document, place) for document in documents for place in places]
        losses = losses_table(
            document=[key[0] for key in keys],
            target=[key[1] for key in keys],
            loss_short=[20.0] * len(keys),
            loss_long=[20.0 - gap] * len(keys),
        )
        targets = pd.DataFrame(
            [(*key, "document", "gap") for key in keys],
            columns=["document", "target", "far_part", "target_set"],
        )
        own = [20 - share * gap for share in shares * (len(keys) // len(shares))]
        found = recovery_rows(keys, "own", own)
        return pair(losses, targets, pd.DataFrame(found))

    first, second = rows([20], 6.0, [0.2, 0.8]), rows([20, 21], 10.0, [1.4, 0.2])
    (mean,) = both_ways(first, second).to_dict("records")
    assert mean["recovery"] == pytest.approx((0.5 + 0.8) / 2)
    assert (mean["num_targets"], mean["num_documents"], mean["gap"]) == (90, 30, 8)
    (alone,) = both_ways(first, first).to_dict("records")
    (one,) = summarize_pairs(first).to_dict("records")
    for end in ("recovery_low", "recovery_high"):  # not of two independent halves
        assert alone[end] == pytest.approx(one[end.removeprefix("recovery_")])
    assert alone["recovery_low"] < 0.5 < alone["recovery_high"]
