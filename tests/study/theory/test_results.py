"""What is stored, and what the docs say of it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from study.pages.stored import others
from study.theory.results import growth_table
from study.theory.settings import SETTINGS

STORED = pd.DataFrame(others()["theory_quick"]["table"])


def test_bounds_hold_wherever_they_apply() -> None:
    """With constant 1, up to the noise of what is sampled."""
    bounds = STORED[["bound_stated", "bound_improved"]].astype(float)
    allowed = (bounds * (1 + 1e-5)).ge(STORED.risk, axis=0)
    assert (allowed | bounds.isna()).all(axis=None)
    assert bounds.notna().sum().sum() > 40


def test_growth_is_the_risk_over_the_worst_risk_of_training() -> None:
    row = STORED[STORED.model == "worst_case"].iloc[-1]
    assert row.length == 8 * row.train_length
    *_, last = growth_table(STORED).splitlines()
    numbers = [float(cell) for cell in last.split("|")[1:-1]]
    assert numbers == pytest.approx([8, row.risk / row.delta_worst, 64], abs=0.05)


def test_the_quick_table_holds_every_case() -> None:
    cases = STORED.groupby(["setting", "num_places", "objective"]).seeds.max()
    for k in (1, 2, 3):
        assert all(
            cases[setting, k, "mixture"] >= 5 for setting in ("local", "nonlocal", "coupled")
        )
        assert cases["local", k, "minimax"] >= 5
    assert set(STORED.setting) == set(SETTINGS)
    assert not np.isnan(STORED.risk).any()
