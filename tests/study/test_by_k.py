"""Verdicts on answers that need k tokens, E24 and E30 to E35, follow from the stored rows.

No row of a claim can express these rules, which study/records/thresholds.md registered. To judge
new results by them: `python -m study.by_k`, as at commit 3aae006e.
"""

from __future__ import annotations

from math import comb

import numpy as np
import pandas as pd
import pytest

from study.claims import read_claims
from study.pages.stored import ROOT, task_rows, tasks
from study.tasks.parity import SparseParity
from study.tasks.results import Row
from study.theory.results import half_width

CLAIMS = read_claims()
OTHERS = ("_mastery", "_1_chunk", "_biases", "_unscaled")


def of_parity() -> pd.DataFrame:
    """Return accuracy by (train_k, seed, k) and length. All models know each k ≤ K at 50 tokens."""
    rows = pd.DataFrame(task_rows("sparse_parity_mastery"))
    right = rows.pivot(index=["train_k", "seed", "test_k"], columns="length", values="exact_match")
    assert len(right.groupby(["train_k", "seed"])) == 10
    assert (right.query("test_k <= train_k")[50] >= 0.99).all()
    return right


@pytest.mark.parametrize(("name", "length"), [("E30", 500), ("E31", 200)])
def test_the_change_at_a_doubling_of_k(name: str, length: int) -> None:
    own = of_parity().query("train_k == 4 and test_k <= 4")
    changes = (own[length] - own[50]).unstack("seed")
    slopes = np.polyfit(np.log2(changes.index.get_level_values("test_k")), changes, 1)[0]
    mean, half = slopes.mean(), half_width(slopes)
    grows = mean <= -0.05 and mean + half < 0
    verdict = "yes" if grows else "no" if abs(mean) + half <= 0.05 else "open"
    assert verdict == CLAIMS[name].verdict
    if name == "E30":
        text = f"slope {mean:.3f} [{mean - half:.2f}, {mean + half:.2f}] at 500 tokens"
        assert text.replace("-", "−") == CLAIMS[name].note


def by_share(holds: pd.Series) -> str:
    """Return the verdict on a condition that each model meets or misses."""
    return "yes" if holds.mean() >= 0.8 else "no" if holds.mean() <= 0.2 else "open"


def test_what_each_model_keeps_and_how_far_it_counts() -> None:
    right = of_parity()
    own = right.query("test_k <= train_k")
    keeps = (own[200] - own[50]).groupby(["train_k", "seed"]).min() >= -0.05
    fails = right.query("test_k > train_k").loc[lambda rows: rows[200] < 0.9, 50] < 0.99
    off = {
        model: min(counting_off(rows, limit) for limit in range(1, 2 * model[0] + 1))
        for model, rows in right[50].groupby(["train_k", "seed"])
    }
    found = {
        "E32": by_share(keeps[2]),
        "E33": by_share(keeps[4]),
        "E34": by_share(fails.groupby(["train_k", "seed"]).mean() >= 0.9),
        "E35": by_share(pd.Series(off) <= 0.05),
    }
    assert found == {name: CLAIMS[name].verdict for name in found}


def counted(k: int, limit: int) -> float:
    """The accuracy of a model that counts the marked ones no further than a limit."""
    right = (n for n in range(k + 1) if (n - min(n, limit)) % 2 == 0)
    return sum(comb(k, n) for n in right) / 2**k


def counting_off(right: pd.Series, limit: int) -> float:
    return max(abs(right - [counted(k, limit) for k in right.index.get_level_values("test_k")]))


def test_a_counter_is_right_as_often_as_when_it_counts() -> None:
    for k, limit in ((3, 2), (6, 3), (5, 7)):
        samples = SparseParity().sample(np.random.default_rng(0), 20_000, 40, k)
        ones = (samples.prompt_BP[:, ::2] == 3) & (samples.prompt_BP[:, 1::2] == 1)
        right = (np.minimum(ones.sum(1), limit) % 2 == samples.response_BR[:, 0]).mean()
        assert counted(k, limit) == pytest.approx(right, abs=0.015)


def test_eight_pieces_with_rope_alone_against_eight_errors_of_one() -> None:
    one, eight = (
        pd.DataFrame(task_rows(f"planted_rope_{k}")).pivot(
            index=["task", "seed"], columns="length", values="exact_match"
        )
        for k in (1, 8)
    )
    assert min(one[256].min(), eight[256].min()) >= 0.95
    pairs = one[512].reset_index("seed").merge(eight[512].reset_index("seed"), on="task")
    worse = pairs["512_y"] < pairs["512_x"] ** 8
    verdict = "yes" if worse.all() else "open" if worse.any() else "no"
    assert (len(pairs), verdict) == (18, CLAIMS["E24"].verdict)


def test_the_page_counts_earlier_models_as_they_are_stored() -> None:
    """study/longer.md: those that know k = 2 and 4 at 50 tokens, with PoSE and scaled queries."""
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
    text = (ROOT / "study/longer.md").read_text()
    assert "36 earlier models" in text
    assert "k = 2 loses 0.004 on average and k = 4 0.084" in text
    wrong = sum(round(1000 * (1 - row.exact_match)) for row in at_four_times("planted_8"))
    assert (wrong, [row.exact_match for row in at_four_times("planted_1")]) == (67, [1.0] * 4)


def at_four_times(name: str) -> list[Row]:
    return [row for row in task_rows(name) if row.scheme == "pose" and row.length == 1024]
