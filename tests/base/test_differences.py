"""Settings are compared at their leaves, and each one that differs is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from olmo_sparsity.base.differences import differences, leaves


def test_leaves_are_the_dotted_keys_that_have_a_value() -> None:
    """An empty section, a plain list and an empty list are values."""
    nested = {"a": {"b": 1, "c": {}}, "d": [{"e": 2}, {"e": 3}], "f": [1, 2], "g": []}
    flat = {"a.b": 1, "a.c": {}, "d[0].e": 2, "d[1].e": 3, "f": [1, 2], "g": []}
    assert dict(leaves(nested)) == flat


def test_differences_name_each_leaf_that_was_changed_added_or_removed() -> None:
    stored = {"a": {"b": 1, "c": {}}, "d": [{"e": 2}, {"e": 3}], "f": [1, 2], "g": []}
    assert differences(stored, stored) == []
    current = {"a": {"b": 1, "c": {"x": 0}}, "d": [{"e": 2}], "f": [1, 3], "g": []}
    keys = [re.split("[= ]", line)[0] for line in differences(stored, current)]
    assert keys == ["a.c", "a.c.x", "d[1].e", "f"]


def test_one_path_in_several_spellings_is_one_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {"model": "runs/a", "texts": ["b/1", "b/2"]}
    assert not differences(paths, {"model": f"{tmp_path}/runs/a", "texts": ["./b/1", "b//2"]})
    for other in ({"model": "runs/b"}, {"texts": ["b/1", "c/2"]}, {"texts": ["b/1"]}):
        assert len(differences(paths, paths | other)) == 1
