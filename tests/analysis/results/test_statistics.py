"""Recovery, excess and net excess from tables whose truth is known."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity.analysis.results import statistics, target_sums
from olmo_sparsity.analysis.results.intervals import percentile_interval
from olmo_sparsity.analysis.results.loss_statistics import longppl
from olmo_sparsity.analysis.results.rank_correlation import rank_correlations
from olmo_sparsity.analysis.results.reported import with_t_intervals
from olmo_sparsity.analysis.results.statistics import (
    mean_lds,
    summarize,
    summarize_pairs,
    weights_of_equal_gaps,
)
from olmo_sparsity.analysis.results.student_t import quantile, t_interval, tail
from olmo_sparsity.analysis.results.two_measurements import both_ways, net_differences
from olmo_sparsity.base.errors import DataError
from tests.support.measurements import losses_table, recovery_rows


def test_rank_correlations() -> None:
    x = np.array([[1.0, 2, 3, 4], [1, 1, 2, 2], [5, 5, 5, 5], [3, 1, 2, 4]])
    y = np.array([[10.0, 20, 30, 90], [1, 2, 3, 4], [1, 2, 3, 4], [-3, -1, -2, -4]])
    found = rank_correlations(x, y)
    np.testing.assert_allclose(found, [1, 4 / np.sqrt(4 * 5), np.nan, -1])
    y[0, 0] = np.nan  # a loss that is no number is not a loss that nothing changes
    np.testing.assert_allclose(rank_correlations(x, y, of_equal_values=0.0)[[0, 2]], [np.nan, 0])


def test_longppl_is_of_the_key_tokens() -> None:
    short, long = [5.0, 5.0, 3.0, 4.5, 5.0, 3.0], [1.0, 2.5, 0.9, 2.5, 2.0, 1.0]
    losses = pd.DataFrame({"loss_short": short, "loss_long": long})
    assert longppl(losses) == {  # key: gap above 2 and loss_long below 2
        "key_share": pytest.approx(1 / 3),
        "num_key_tokens": 2,
        "longppl": pytest.approx(np.exp(0.95)),
        "ppl": pytest.approx(np.exp(9.9 / 6)),
    }
    nothing = longppl(losses.assign(loss_long=800.0))
    assert (nothing["longppl"], nothing["ppl"]) == (None, np.exp(700.0))


def test_parts_of_a_document_are_counted_and_resampled_as_one() -> None:
    """Five parts of one document that are copies say no more than one of them."""
    keys = [(document, 20) for document in range(40)]
    losses = losses_table(
        document=[key[0] for key in keys], target=20, loss_short=2.0, loss_long=1.0
    )
    targets = pd.DataFrame(keys, columns=["document", "target"])
    targets = targets.assign(distant_part="document", target_set="gap")
    losses_with_unit = np.random.default_rng(0).uniform(1, 2, 8).repeat(5)
    rows = recovery_rows(keys, "own", losses_with_unit)
    rows += recovery_rows(keys, "unrelated", [2.0] * 40)
    parts = {f"book {number}": list(range(5 * number, 5 * number + 5)) for number in range(8)}

    (of_parts,) = summarize(losses, targets, pd.DataFrame(rows)).to_dict("records")
    (of_books,) = summarize(losses, targets, pd.DataFrame(rows), parts).to_dict("records")
    first_parts = targets[targets.document % 5 == 0]
    first_rows = pd.DataFrame(rows)[::5]
    (of_first_parts,) = summarize(losses, first_parts, first_rows).to_dict("records")

    assert (of_parts["num_documents"], of_books["num_documents"]) == (40, 8)
    assert of_books["num_targets"] == 40
    assert of_books["recovery"] == pytest.approx(of_parts["recovery"])
    for end in ("low", "high"):
        assert of_books[end] == pytest.approx(of_first_parts[end])
    assert of_books["high"] - of_books["low"] > 2 * (of_parts["high"] - of_parts["low"])


@pytest.mark.parametrize("gap", [1.0, 0.5, 0.4375])
def test_ratios_need_a_gap_and_nine_tenths_of_it_are_enough(
    gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (statistics, target_sums):
        monkeypatch.setattr(module, "NO_GAP_NATS", 0.5)  # sums of it are exact
    keys = [(document, 20) for document in range(1, 81, 2)]
    losses = losses_table(
        document=[key[0] for key in keys],
        target=20,
        loss_short=0.9 * gap,
        loss_long=0.9 * gap - gap,
    )
    targets = pd.DataFrame(keys, columns=["document", "target"])
    targets = targets.assign(distant_part="document", target_set="gap")
    rows = recovery_rows(keys, "own", [0.0, 0.4 * gap] * 20, num_tokens=2, loss_without=2.0)
    for draw, more in enumerate((-1.0, 1.0)):  # which are averaged
        rows += recovery_rows(keys, "unrelated", [0.9 * gap + more] * 40, draw=draw)
    (row,) = summarize(losses, targets, pd.DataFrame(rows)).to_dict("records")
    nothing = gap < 0.5
    assert np.isnan(row["low"]) == nothing
    assert row["share_enough"] == pytest.approx(np.nan if nothing else 0.5, nan_ok=True)
    assert row["recovery"] == pytest.approx(np.nan if nothing else 0.7, nan_ok=True)
    assert row["unrelated"] == pytest.approx(np.nan if nothing else 0.0, nan_ok=True, abs=1e-9)
    removal = (2.0 - (0.9 * gap - gap)) / gap
    assert row["removal"] == pytest.approx(np.nan if nothing else removal, nan_ok=True)
    assert row["mean_ratio"] == pytest.approx(np.nan if nothing else 0.7, nan_ok=True)
    assert (row["gap"], row["num_tokens"]) == (pytest.approx(gap), 2)
    assert (row["num_targets"], row["num_documents"], row["num_placebo_targets"]) == (40, 40, 0)
    for control in ("own", "unrelated"):
        lacking = [row for row in rows if (row["document"], row["control"]) != (3, control)]
        with pytest.raises(DataError, match="lacks rows of chosen targets"):
            summarize(losses, targets, pd.DataFrame(lacking))
    with pytest.raises(DataError, match=r"losses: 40 rows .* document 1, target 20; pass each"):
        summarize(pd.concat([losses, losses]), targets, pd.DataFrame(rows))


SUMMED = ("own_reduction", "unrelated_reduction", "removal_increase", "gap", "weight")


def rows_of_pairs(seed: int, num_documents: int = 12) -> pd.DataFrame:
    """Random ones of two sets, of which the second has no placebo. Some removals are unknown."""
    generator, rows = np.random.default_rng(seed), []
    kinds = [("gap", "document"), ("gap", "placebo"), ("bigram", "document")]
    for document, (target_set, part), k in product(range(num_documents), kinds, (1, 2)):
        for target in range(generator.integers(0, 4) if document else 3):
            own, unrelated, removed, gap = generator.random(4) + (part == "document")
            removed = np.nan if generator.random() < 0.1 and target else removed
            removed = np.nan if target_set == "bigram" and document == 0 else removed
            rows.append((document, target, part, target_set, k, own, unrelated, removed, gap))
    columns = ["document", "target", "distant_part", "target_set", "k", *SUMMED[:4]]
    rows_of = pd.DataFrame(rows, columns=columns)
    rows_of = rows_of.assign(units="tokens", selector="add_one", weight=1.0)
    return rows_of.assign(num_tokens_own=rows_of.k, whole_document=rows_of.document)


def sums(rows: pd.DataFrame, documents: list[int], weights: np.ndarray) -> dict[str, np.ndarray]:
    """Of all documents, then of each of 2,000 resamples."""
    num, found = len(documents), {}
    drawn = np.random.default_rng(0).multinomial(num, [1 / num] * num, 2000)
    for name in SUMMED:
        each = []
        for document in documents:
            own = zip(rows[name], weights, rows.document, strict=True)
            values = [value * weight for value, weight, of in own if of == document]
            known = [value for value in values if value == value]
            each.append(sum(known) if known or not values else np.nan)
        found[name] = np.array([[1] * num, *drawn]) @ each
    return found


def by_loops(
    own: pd.DataFrame, placebo: pd.DataFrame, documents: list[int]
) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, rows, weights in (
        ("", own, np.ones(len(own))),
        ("equal_", own, around(own.gap.tolist(), placebo.gap.tolist())),
        ("placebo_", placebo, np.ones(len(placebo))),
    ):
        of = sums(rows, documents, weights)
        with np.errstate(invalid="ignore", divide="ignore"):
            gap = np.where(of["gap"] < 1e-4 * of["weight"], np.nan, of["gap"])
            excess = of["own_reduction"] - of["unrelated_reduction"]
            found |= {
                f"{name}recovery": of["own_reduction"] / gap,
                f"{name}unrelated": of["unrelated_reduction"] / gap,
            }
            found |= {f"{name}excess": excess / gap, f"{name}removal": of["removal_increase"] / gap}
            found[f"{name}excess_nats"] = excess / of["weight"]
    net_equal = found["equal_excess"] - found["placebo_excess"]
    net_nats = found["excess_nats"] - found["placebo_excess_nats"]
    net, placebo_R = found["excess"] - found["placebo_excess"], found["placebo_excess"]
    return found | {"net": net, "net_equal": net_equal, "net_nats": net_nats, "placebo": placebo_R}


def around(own: list[float], placebo: list[float]) -> np.ndarray:
    """How much each own target weighs: every target of the placebo is compared with five."""
    order, num = sorted(range(len(own)), key=lambda i: own[i]), min(5, len(own))
    weights = np.zeros(len(own))
    for gap in placebo:
        first = sum(other < gap for other in own) - num // 2
        first = min(max(first, 0), len(own) - num)
        weights[order[first : first + num]] += 1 / num
    return weights


def interval_of(values: np.ndarray) -> list[float]:
    if not np.isfinite(values[0]) or np.isfinite(values[1:]).mean() < 0.98:
        return [np.nan] * 3
    return [values[0], *np.nanpercentile(values[1:], [2.5, 97.5])]


def test_summaries_and_comparisons_are_those_of_plain_loops() -> None:
    first, second = rows_of_pairs(0), rows_of_pairs(1, 9)
    ends = {"low": "recovery_low", "high": "recovery_high"}
    summary = summarize_pairs(first).rename(columns=ends)
    compared = net_differences(first, second)
    with pytest.raises(DataError, match="share no"):
        net_differences(first, second.assign(k=3))
    assert len(summary) == len(compared) == 4
    names = ("recovery", "unrelated", "excess", "removal", "excess_nats")
    tables = summary, compared, both_ways(first, second)
    for row, difference, mean in zip(*(t.to_dict("records") for t in tables), strict=True):
        of = [
            rows[(rows.target_set == row["target_set"]) & (rows.k == row["k"])]
            for rows in (first, second)
        ]
        parts = [
            [rows[rows.distant_part == part] for part in ("document", "placebo")] for rows in of
        ]
        documents = sorted({*of[0].document, *of[1].document})
        of_own = sorted({*parts[0][0].document, *parts[1][0].document})
        here, there = (by_loops(*part, of_own) for part in parts)
        for name in names:
            found = [mean[name], mean[f"{name}_low"], mean[f"{name}_high"]]
            values = interval_of((here[name] + there[name]) / 2)
            np.testing.assert_allclose(found, values, rtol=1e-9, err_msg=name)
        sizes = [len(part[0]) for part in parts]
        assert (mean["num_targets"], mean["num_documents"]) == (sum(sizes), len(of_own))
        assert mean["gap"] == pytest.approx(sum(part[0].gap.mean() for part in parts) / 2)
        alone = by_loops(*parts[0], sorted({*parts[0][0].document}))
        beyond = by_loops(*parts[0], sorted({*of[0].document}))
        other, one = (by_loops(*part, documents) for part in parts[::-1])
        expected = {name: beyond[name] for name in ("placebo", "net", "net_equal", "net_nats")}
        for name, values in ({name: alone[name] for name in names} | expected).items():
            found = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
            np.testing.assert_allclose(found, interval_of(values), rtol=1e-9, err_msg=name)
        for name in ("net", "net_equal", "net_nats"):
            found = [difference[name], difference[f"{name}_low"], difference[f"{name}_high"]]
            values = interval_of(one[name] - other[name])
            np.testing.assert_allclose(found, values, rtol=1e-9, atol=1e-12, err_msg=name)
        few = min(part[1].document.nunique() for part in parts)
        assert difference["num_placebo_documents"] == few
        assert row["num_tokens"] == row["k"]
        assert row["num_placebo_targets"] == len(parts[0][1])
        assert np.isnan(row["net"]) == (row["target_set"] == "bigram")
        assert np.isnan(row["removal"]) == (row["target_set"] == "bigram")


def test_an_interval_needs_a_value_and_98_of_100_resamples() -> None:
    values = np.arange(1001.0)
    assert percentile_interval(values, 7.0) == (7.0, 25.0, 975.0)
    assert np.isnan(percentile_interval(values, np.nan)).all()
    many = np.arange(2000.0)
    for num_missing, is_enough in ((40, True), (41, False)):
        some = np.where(many < num_missing, np.nan, many)
        assert np.isfinite(percentile_interval(some, 7.0)).all() == is_enough


def test_lds_is_the_mean_of_own_targets() -> None:
    keys = [(1, 5), (1, 6), (3, 5), (5, 9)]
    targets = pd.DataFrame(keys, columns=["document", "target"])
    targets = targets.assign(distant_part="document", target_set="gap")
    placebo = targets.assign(distant_part="placebo", document=7)
    lds = pd.DataFrame([*keys, (7, 5), (3, 6)], columns=["document", "target"])
    lds = lds.assign(units="tokens", selector="add_one", lds=[0.1, 0.3, 0.8, 0.4, 9.0, 9.0])
    (row,) = mean_lds(pd.concat([targets, placebo]), lds).to_dict("records")
    drawn = np.random.default_rng(0).multinomial(3, [1 / 3] * 3, 2000)
    means = drawn @ [0.4, 0.8, 0.4] / (drawn @ [2.0, 1.0, 1.0])
    found = [row["lds"], row["lds_low"], row["lds_high"]]
    np.testing.assert_allclose(found, [0.4, *np.percentile(means, [2.5, 97.5])])


@pytest.mark.parametrize("num_own", [1, 3, 6, 40])
def test_each_target_of_the_placebo_weighs_five_own_ones_of_about_its_gap(num_own: int) -> None:
    generator = np.random.default_rng(num_own)
    own, placebo = (pd.Series(generator.integers(0, 30, num) / 4.0) for num in (num_own, 25))
    expected = around(own.tolist(), placebo.tolist())
    np.testing.assert_allclose(weights_of_equal_gaps(own, placebo), expected)
    assert weights_of_equal_gaps(own, placebo[:0]).tolist() == [0.0] * num_own


@pytest.mark.parametrize(
    ("freedom", "critical"),
    [
        (1, [6.313752, 63.656741, 636.619249]),
        (2, [2.919986, 9.924843, 31.599055]),
        (3, [2.353363, 5.840909, 12.923979]),
        (4, [2.131847, 4.604095, 8.610302]),
        (7, [1.894579, 3.499483, 5.407883]),
    ],
)
def test_the_tail_is_that_of_students_t(freedom: int, critical: list[float]) -> None:
    """From its published tables."""
    chances = np.array([0.05, 0.005, 0.0005])
    assert tail(np.array(critical), freedom) == pytest.approx(chances, abs=1e-7)
    assert tail(-np.array(critical), freedom) == pytest.approx(1 - chances, abs=1e-7)
    assert [quantile(p, freedom) for p in chances] == pytest.approx(critical, rel=1e-6)


def test_a_mean_of_two_documents_has_an_interval_and_that_of_one_has_none() -> None:
    """The standard error of 1 and 3 is 1, and 97.5% of t with one degree of freedom is 12.706."""
    of_two = t_interval(np.array([1.0, 3.0]))
    assert of_two == pytest.approx((2.0, 2.0 - 12.706, 2.0 + 12.706), rel=1e-4)
    of_one = t_interval(np.array([1.0]))
    assert of_one == pytest.approx((1.0, np.nan, np.nan), nan_ok=True)


def test_intervals_of_few_documents_are_those_of_student() -> None:
    """97.5% of t with 4, 9, 23 and 2 degrees of freedom; two documents have none; 25 are enough."""
    rows = pd.DataFrame({"num_documents": [40, 40, 24, 3, 40, 40]})
    rows["num_placebo_documents"] = [5, 10, 40, 40, 2, 25]
    for name in ("net", "net_equal"):
        rows = rows.assign(**{name: 0.5, f"{name}_low": 0.5 - 1.96, f"{name}_high": 0.5 + 2 * 1.96})
    found = with_t_intervals(rows)
    expected = [2.776 * (5 / 4) ** 0.5, 2.262 * (10 / 9) ** 0.5, 2.069 * (24 / 23) ** 0.5]
    expected += [4.303 * (3 / 2) ** 0.5, np.nan, 1.96]
    np.testing.assert_allclose(0.5 - found.net_low, expected, rtol=2e-4)
    np.testing.assert_allclose(found.net_equal_high - 0.5, 2 * np.array(expected), rtol=2e-4)
