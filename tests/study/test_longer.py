import re

import numpy as np
import pandas as pd
import pytest

from study import longer
from study.longer import (
    CHOOSERS,
    LEAST_GAP,
    MODELS,
    NEVER,
    STORED,
    TRAINED,
    permuted_slope,
    slope_of,
    smallest_k,
    summary_of,
    verdicts_of,
)
from study.pages.stored import ROOT


def planted(rng: np.random.Generator, of_pose: float, of_null: float = 0.0) -> pd.DataFrame:
    """Targets whose penalty rises by `of_pose` a doubling of k under PoSE, and with the gap."""
    size = 3000
    k = 2.0 ** rng.integers(0, 7, size)
    targets = pd.DataFrame({"k": k, "document": rng.integers(0, 320, size)})
    targets["gap"] = rng.exponential(1.0, size) + 0.2 * np.log2(k)
    targets["target"] = rng.integers(200, 1000, size)
    targets["log_depth"] = np.log2(targets.target)
    for name in ("log_distance", "log_count"):
        targets[name] = rng.normal(size=size)
    targets["part"], targets["bigram"] = rng.random(size) < 0.5, rng.random(size) < 0.5
    noise = lambda: rng.normal(scale=0.3, size=size) + 0.5 * targets.gap  # noqa: E731
    for name in MODELS:
        rises = of_pose if name in TRAINED["pose"] else 0.0
        targets[name] = noise() + rises * np.log2(k) + 3 * (name in TRAINED["rope"])
        targets[f"gain_{name}"] = targets[name]
    for name in CHOOSERS:
        targets[f"null_{name}"] = noise() + of_null * np.log2(k)
        targets[f"k_{name}"] = k
    return targets


def test_smallest_k_that_gives_back_nine_tenths() -> None:
    reductions = np.array([[0.9, 0.95], [0.5, 0.9], [0.5, 0.6], [1.2, 0.1]])
    assert smallest_k(reductions, pd.Index([1, 2]), np.ones(4)).tolist() == [1, 2, 64, 1]


@pytest.mark.parametrize(
    ("of_pose", "of_null", "expected"),
    [
        (0.08, 0.0, ("yes", "yes", "yes")),
        (0.0, 0.0, ("no", "yes", "yes")),
        (0.03, 0.05, ("open", "yes", "no")),
    ],
)
def test_verdicts_follow_the_planted_slope(
    of_pose: float, of_null: float, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longer, "DRAWS", 200)
    monkeypatch.setattr(longer, "PERMUTATIONS", 20)
    targets = planted(np.random.default_rng(0), of_pose, of_null)
    summary = summary_of(targets).set_index("model")
    pose = summary.loc[[*TRAINED["pose"]]]
    assert (abs(pose.slope - of_pose) < 0.012).all()
    assert (pose.slope_high - pose.slope_low < 0.02).all()
    assert tuple(verdicts_of(summary.reset_index(), targets).values()) == expected
    few = verdicts_of(summary.reset_index(), targets[targets.document < 200])
    assert set(few.values()) == {"void"}


def test_slope_is_the_one_of_least_squares_and_permuted_k_has_none() -> None:
    targets = planted(np.random.default_rng(1), 0.05)
    line = np.polyfit(np.log2(targets.k), targets[TRAINED["pose"][0]], 1)
    found = slope_of(targets, TRAINED["pose"][0], controls=("log_count",))
    assert found["slope"] == pytest.approx(line[0], abs=1e-2)
    assert abs(permuted_slope(targets, TRAINED["pose"][0])) < 0.02


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_the_pages_say_how_many_predictions_need_distant_text(page: str) -> None:
    """Of the targets drawn from all tokens, as they are stored."""
    targets = pd.read_parquet(STORED).query("target_set == 'every'")
    gains = targets[targets.gap >= LEAST_GAP]
    few, never = (gains.k <= 2).mean(), (gains.k == NEVER).mean()
    text = (ROOT / page).read_text()
    assert f"Of {len(targets):,} tokens" in text
    assert f"{len(gains) / len(targets):.0%} gain {LEAST_GAP} nats or more" in text
    sentence = re.search(
        r"one or two tokens .*? (\d+%)(?: of these)?, (?:and )?32 do not for (\d+%)", text, re.I
    )
    assert sentence is not None
    assert sentence.groups() == (f"{few:.0%}", f"{never:.0%}")
