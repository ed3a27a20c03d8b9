"""What is stored, and what the docs say of it."""

from __future__ import annotations

import numpy as np
import pandas as pd

from study.pages.stored import others
from study.theory.settings import SETTINGS

STORED = pd.DataFrame(others()["theory_quick"]["table"])


def test_bounds_hold_wherever_they_apply() -> None:
    """With constant 1, up to the noise of what is sampled."""
    bounds = STORED[["bound_stated", "bound_improved"]].astype(float)
    allowed = (bounds * (1 + 1e-5)).ge(STORED.risk, axis=0)
    assert (allowed | bounds.isna()).all(axis=None)
    assert bounds.notna().sum().sum() > 40


def test_the_quick_table_holds_every_case() -> None:
    cases = STORED.groupby(["setting", "num_places", "objective"]).seeds.max()
    for k in (1, 2, 3):
        assert all(
            cases[setting, k, "mixture"] >= 5 for setting in ("local", "nonlocal", "coupled")
        )
        assert cases["local", k, "minimax"] >= 5
    assert set(STORED.setting) == set(SETTINGS)
    assert not np.isnan(STORED.risk).any()
