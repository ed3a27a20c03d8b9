"""Characters of spans of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from olmo_sparsity.analysis.measurement.token_alignment import character_spans

TEXTS = ["A", " night", " ", "train", "\n", "\n"]


@pytest.mark.parametrize(
    ("first", "end", "characters"),
    [
        (0, 1, "A"),  # a single character, the first of the text
        (0, 2, "A night"),
        (1, 2, "night"),
        (1, 3, "night"),
        (2, 4, "train"),
        (3, 6, "train"),
    ],
)
def test_spans_of_characters_have_no_white_space_around_them(
    first: int, end: int, characters: str
) -> None:
    begin_N, stop_N = character_spans(TEXTS, np.array([first]), np.array([end]))
    assert "".join(TEXTS)[begin_N[0] : stop_N[0]] == characters


@pytest.mark.parametrize(("first", "end"), [(2, 3), (4, 5), (4, 6)])
def test_a_span_of_white_space_ends_before_it_begins(first: int, end: int) -> None:
    begin_N, stop_N = character_spans(TEXTS, np.array([first]), np.array([end]))
    assert stop_N[0] < begin_N[0]


def test_white_space_at_the_beginning_of_a_text_is_an_empty_span() -> None:
    begin_N, stop_N = character_spans([" ", "night"], np.array([0, 0]), np.array([1, 2]))
    assert begin_N.tolist() == [1, 1]
    assert stop_N.tolist() == [0, 6]
