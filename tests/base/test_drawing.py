"""Each curve of a figure has an entry of its own in the legend."""

from __future__ import annotations

import pytest

from olmo_sparsity.base.drawing import check_labels_differ, labels_of_folders, short_labels
from olmo_sparsity.base.errors import ConfigError


def test_a_long_label_is_the_end_of_the_name() -> None:
    name = "0123456789" * 4
    assert short_labels([name, "short"]) == {name: "…" + name[-29:], "short": "short"}


@pytest.mark.parametrize("others", [("/a/x", "/b/x"), ("/b/x", "/a/x")])
def test_labels_that_end_alike_keep_what_tells_them_apart(others: tuple[str, str]) -> None:
    names = [f"runs{other}{'y' * 40}" for other in others]
    labels = short_labels(names)
    for name, other in zip(names, others, strict=True):
        assert labels[name] == f"…{other[1:]}{'y' * 40}"


def test_a_name_that_is_the_end_of_another_is_told_apart_from_it() -> None:
    end = "y" * 30
    labels = short_labels([f"x{end}", end])
    assert labels == {f"x{end}": f"x{end}", end: end}


def test_folders_with_the_same_name_are_called_by_their_parents_too() -> None:
    folders = ["runs/a/seed1", "runs/b/seed1", "runs/b/seed2"]
    assert labels_of_folders(folders) == ["a/seed1", "b/seed1", "seed2"]


def test_a_folder_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="runs/a is named twice"):
        labels_of_folders(["runs/a", "runs/b", "runs/a/"])


def test_equal_labels_are_refused_with_a_remedy() -> None:
    check_labels_differ(["a", "b"])
    with pytest.raises(ConfigError, match="'a' is there twice; give each run a label of its own"):
        check_labels_differ(["a", "b", "a"])
