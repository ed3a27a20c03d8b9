"""Verdicts on planted tables: a known interaction, none, and too few models."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from study.by_k import (
    counted,
    models_of_parity,
    slope,
    verdicts_of_parity,
    verdicts_of_planted,
    verdicts_of_rope,
)
from study.pages.stored import ROOT, task_rows, tasks
from study.tasks.parity import SparseParity
from study.tasks.results import Row

KS = (1, 2, 3, 4, 6, 8, 16)
OTHERS = ("_mastery", "_1_chunk", "_biases", "_unscaled")


def parity(fall: float, beyond: str = "counts", noise: float = 0.004) -> pd.DataFrame:
    """Five models of each K that lose `fall` a doubling of k at 500 tokens, half of it at 200."""
    rng = np.random.default_rng(0)
    rows = []
    for train_k in (2, 4):
        for seed in range(5):
            for k in KS:
                at = 1.0 if k <= train_k or beyond == "knows" else counted(k, train_k)
                row = {"train_k": train_k, "seed": seed, "k": k, 50: at}
                row |= {n: at - of * np.log2(k) * fall for n, of in ((200, 0.5), (500, 1.0))}
                rows.append(row | {200: row[200] - 0.5 * (beyond == "knows" and k > train_k)})
    table = pd.DataFrame(rows)
    table[[200, 500]] += rng.normal(0, noise, (len(table), 2))
    return table


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (parity(0.08), ("yes", "no", "yes", "no", "yes", "yes")),
        (parity(0.0), ("no", "no", "yes", "yes", "yes", "yes")),
        (parity(0.05, noise=0.15), ("open", "open", "open", "no", "yes", "yes")),
        (parity(0.0, "knows"), ("no", "no", "yes", "yes", "no", "no")),
    ],
    ids=["interaction", "null", "noise", "length fails beyond K"],
)
def test_parity_is_judged_as_planted(table: pd.DataFrame, expected: tuple[str, ...]) -> None:
    assert tuple(verdicts_of_parity(models_of_parity(table)).values()) == expected


def test_models_that_do_not_know_all_are_left_out() -> None:
    table = parity(0.08)
    table.loc[(table.train_k == 4) & (table.k == 3) & (table.seed > 1), 50] = 0.98
    models = models_of_parity(table)
    assert models.known.tolist() == [True] * 7 + [False] * 3
    found = verdicts_of_parity(models)
    assert [name for name in found if found[name] != "void"] == ["E32"]


def test_a_counter_is_right_as_often_as_when_it_counts() -> None:
    for k, limit in ((3, 2), (6, 3), (5, 7)):
        samples = SparseParity().sample(np.random.default_rng(0), 20_000, 40, k)
        ones = (samples.prompt_BP[:, ::2] == 3) & (samples.prompt_BP[:, 1::2] == 1)
        said = np.minimum(ones.sum(1), limit) % 2
        right = (said == samples.response_BR[:, 0]).mean()
        assert counted(k, limit) == pytest.approx(right, abs=0.015)
    assert slope(pd.Series([0.1, 0.0, -0.1]), pd.Series([1, 2, 4])) == pytest.approx(-0.1)


def planted(falls: dict[int, float], rope: float = 0.1, known: float = 0.99) -> pd.DataFrame:
    rows = []
    for k, fall in falls.items():
        for scheme, seed, task in (
            (scheme, seed, task)
            for scheme in ("pose", "rope")
            for seed in (81, 82)
            for task in ("local", "scattered")
        ):
            far = known - fall - 0.005 * seed % 0.01 if scheme == "pose" else rope
            row = {"task": task, "scheme": scheme, "seed": seed, "k": k, 256: known, 1024: far}
            rows.append(row)
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (planted({1: 0.02, 8: 0.3}), ("yes", "yes", "yes")),
        (planted({1: 0.02, 2: 0.1, 4: 0.3, 8: 0.4}), ("open", "open", "yes")),
        (planted({1: 0.02, 8: 0.05}), ("no", "no", "yes")),
        (planted({1: 0.02, 8: 0.12}), ("open", "open", "yes")),
        (planted({1: 0.2, 8: 0.5}, rope=0.6), ("open", "open", "no")),
        (planted({1: 0.0, 8: 0.3}, known=0.94), ("void", "void", "void")),
    ],
    ids=["interaction", "two pieces fail", "null", "weak", "one piece fails", "not known"],
)
def test_planted_pieces_are_judged_as_planted(
    table: pd.DataFrame, expected: tuple[str, ...]
) -> None:
    assert tuple(verdicts_of_planted(table).values()) == expected


def test_placements_are_judged_apart_and_a_model_short_is_void() -> None:
    table = planted({1: 0.02, 8: 0.3})
    table.loc[(table.task == "local") & (table.k == 8), 1024] = 0.97
    assert tuple(verdicts_of_planted(table).values()) == ("yes", "no", "no")
    table.loc[(table.task == "scattered") & (table.k == 8) & (table.seed == 81), 256] = 0.9
    assert tuple(verdicts_of_planted(table).values()) == ("void", "no", "void")


def test_twice_the_length_with_rope_alone() -> None:
    table = planted({1: 0.0, 8: 0.0}).query("scheme == 'rope'")
    expected = {(0.99, 0.8): "yes yes", (0.98, 0.86): "open open", (0.99, 0.97): "no no"}
    for (one, eight), verdicts in (expected | {(0.6, 0.3): "yes no"}).items():
        table[512] = np.where(table.k == 1, one, eight) - 0.01 * (table.seed == 82)
        assert " ".join(verdicts_of_rope(table).values()) == verdicts
    table.loc[(table.task == "local") & (table.k == 8) & (table.seed == 81), 256] = 0.9
    for some in (table, table[table.k == 1], table[table.task == "scattered"]):
        assert " ".join(verdicts_of_rope(some).values()) == "void void"


def test_the_page_counts_earlier_models_as_they_are_stored() -> None:
    """docs/longer.md: those that know k = 2 and 4 at 50 tokens, with PoSE and scaled queries."""
    lost = []
    for name in tasks():
        if not name.startswith("sparse_parity") or name.endswith(OTHERS):
            continue
        rows = pd.DataFrame(task_rows(name)).query("scheme == 'pose' and train_k >= 4")
        right = rows.pivot_table("exact_match", ["train_k", "seed"], ["test_k", "length"])
        if {(k, n) for k in (2, 4) for n in (50, 200)} <= {*right.columns}:
            known = right[right[[(2, 50), (4, 50)]].min(axis=1) >= 0.99]
            lost += [(m[2, 50] - m[2, 200], m[4, 50] - m[4, 200]) for _, m in known.iterrows()]
    two, four = np.array(lost).T
    assert (len(lost), (four > two + 1e-9).sum(), (four - two >= 0.05 - 1e-9).sum()) == (36, 33, 15)
    assert [round(mean, 3) for mean in (two.mean(), four.mean())] == [0.004, 0.084]
    text = (ROOT / "docs/longer.md").read_text()
    assert "36 earlier models" in text
    assert "k = 2 loses 0.004 on average and k = 4 0.084" in text
    wrong = sum(round(1000 * (1 - row.exact_match)) for row in at_four_times("planted_8"))
    assert (wrong, [row.exact_match for row in at_four_times("planted_1")]) == (67, [1.0] * 4)


def at_four_times(name: str) -> list[Row]:
    return [row for row in task_rows(name) if row.scheme == "pose" and row.length == 1024]
