"""The two kinds of long window answer the same questions, and the local window has one default."""

from __future__ import annotations

import numpy as np
import pytest

from olmo_sparsity.config.windows import (
    AllEarlierText,
    FixedWindow,
    LongWindow,
    default_local,
    long_window,
)


def test_a_number_is_a_fixed_window_and_all_is_all_earlier_text() -> None:
    assert long_window(96) == FixedWindow(96)
    assert long_window("all", max_tokens=512, min_distant=8) == AllEarlierText(512, 8)
    assert sorted(map(long_window, (96, "all", 24)), key=lambda window: window.sort_key) == [
        FixedWindow(24),
        FixedWindow(96),
        AllEarlierText(),
    ]


@pytest.mark.parametrize(
    ("window", "tokens_before", "first_tokens"),
    [
        (FixedWindow(8), [8, 8], [2, 32]),
        (AllEarlierText(), [10, 40], [0, 0]),
        (AllEarlierText(max_tokens=12), [10, 12], [0, 28]),
    ],
)
def test_a_window_ends_before_its_target(
    window: LongWindow, tokens_before: list[int], first_tokens: list[int]
) -> None:
    places = [10, 40]
    assert [window.tokens_before(place) for place in places] == tokens_before
    assert [window.first_token(place) for place in places] == first_tokens
    assert window.first_token(np.array(places)).tolist() == first_tokens


def test_targets_begin_where_enough_tokens_are_distant() -> None:
    assert FixedWindow(8).first_target(local=3) == 8
    assert FixedWindow(8).min_num_distant(local=3) == 5
    assert AllEarlierText(min_distant=2).first_target(local=3) == 5
    assert AllEarlierText(min_distant=2).min_num_distant(local=3) == 2


def test_the_local_window_is_at_most_a_quarter_of_a_short_text() -> None:
    lengths = (None, 1000, 128, 40, 3)
    assert [default_local(32, length) for length in lengths] == [32, 32, 32, 10, 1]
