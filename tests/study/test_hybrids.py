"""A transformer and a hybrid compared by the losses of copies and new tokens."""

import numpy as np
import pandas as pd
import pytest

from study.hybrids import KEY, copied, summary_of


def test_copied_is_the_longest_run_that_stood_there_before() -> None:
    tokens = np.random.default_rng(0).integers(0, 3, 60).tolist()
    for at, (found, back) in enumerate(zip(*copied(tokens), strict=True)):
        runs = [tokens[at - n : at + 1] for n in range(min(8, at) + 1)]
        earlier = [any(tokens[e - len(r) : e] == r for e in range(len(r), at + 1)) for r in runs]
        assert found == sum(earlier) - 1
        assert tokens[at - back - found : at - back + 1] == runs[found][: found + 1]


def test_planted_differences_come_back() -> None:
    rng = np.random.default_rng(0)
    keys = {"document": np.repeat(np.arange(40), 50), "target": np.tile(np.arange(50), 40)}
    rows = pd.DataFrame({**keys, "copied": rng.integers(-1, 9, 2000), "back": 200})
    for name, gain in {"transformer_1": 0.1, "transformer_2": 0.3, "hybrid_1": 0.5}.items():
        rows[name] = 2 - gain * (rows.copied >= 2) + 0.01 * rng.standard_normal(2000)
    found = summary_of(rows.set_index(KEY)).set_index("group")
    assert found.difference["copies"] == pytest.approx(-0.3, abs=0.01)
    assert found.difference["copies beyond new"] == pytest.approx(-0.3, abs=0.01)
    assert (found.low < found.difference).all()
    assert (found.difference < found.high).all()
    assert found.pairs_low["copies"] == pytest.approx(-0.4, abs=0.01)
    assert found.tokens["copies"] == (rows.copied >= 2).sum()
