"""What is stored, and what the docs say of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from study.theory.cases import SETTINGS
from study.theory.results import markdown_tables
from tests.study.theory.support import read_summary

ROOT = Path(__file__).parents[3]


def test_bounds_hold_wherever_they_apply() -> None:
    """With constant 1, up to the noise of what is sampled."""
    applies = 0
    for summary in read_summary(ROOT / "docs/figures/theory_quick.csv"):
        for bound in (summary.bound_stated, summary.bound_improved):
            if not np.isnan(bound):
                applies += 1
                assert summary.risk <= bound * (1 + 1e-5), summary
    assert applies > 40


def test_stored_tables_are_made_from_the_stored_summaries() -> None:
    for name in ("theory_quick", "theory_bridge"):
        stored = read_summary(ROOT / f"docs/figures/{name}.csv")
        meta = json.loads((ROOT / f"docs/figures/{name}.meta.json").read_text())
        assert markdown_tables(stored, meta) == (ROOT / f"docs/figures/{name}.md").read_text()


def test_a_bound_that_does_not_apply_is_not_taken_apart() -> None:
    stored = read_summary(ROOT / "docs/figures/theory_quick.csv")
    meta = json.loads((ROOT / "docs/figures/theory_quick.meta.json").read_text())
    refused = [replace(s, local_span=s.train_length, refusal="L_local exceeds L/4") for s in stored]
    assert "the bound at" in markdown_tables(stored, meta)
    assert "the bound at" not in markdown_tables(refused, meta)


def test_the_quick_table_holds_every_panel() -> None:
    summaries = read_summary(ROOT / "docs/figures/theory_quick.csv")
    stored = {(s.setting, s.num_places, s.objective): s.num_seeds for s in summaries}
    for k in (1, 2, 3):
        for setting in ("local", "nonlocal", "coupled"):
            assert stored[setting, k, "mixture"] >= 5
        assert stored["local", k, "minimax"] >= 5
    assert {setting for setting, _, _ in stored} == set(SETTINGS)
