"""Windows, blocks and units are arithmetic: whatever the numbers, they count what they say."""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_sparsity.analysis.inputs.windows import Units, Windows, span_width
from olmo_sparsity.analysis.results.statistics import rank_correlations
from olmo_sparsity.errors import ConfigError
from tests.support.brute import KINDS, units_of


@st.composite
def windows_and_length(draw: st.DrawFn) -> tuple[Windows, int]:
    short = draw(st.integers(1, 8))
    long = draw(st.just("all") | st.integers(short + 1, short + 8))
    prefix = tuple(draw(st.lists(st.integers(900, 999), max_size=3)))
    return Windows(long, short, draw(st.integers(1, 9)), prefix), draw(st.integers(0, 50))


@given(windows_and_length())
def test_blocks_cover_every_target_with_a_full_window_once(given: tuple[Windows, int]) -> None:
    windows, length = given
    document = 100 + np.arange(length)
    blocks = list(windows.blocks(document))
    targets = [target for block in blocks for target in block.targets_W.tolist()]
    first_target = windows.short + 1 if windows.long == "all" else windows.long
    assert targets == list(range(100 + first_target, 100 + length))
    for block in blocks:
        first = 0 if windows.long == "all" else block.start - windows.long
        assert block.first == first
        text = document[first : block.start + block.num_targets].tolist()
        assert block.tokens.tolist() == [*windows.prefix, *text]
        assert block.far_F.tolist() == document[first : block.start - windows.short].tolist()
        assert block.num_targets <= windows.stride
        places = block.start + np.arange(block.num_targets)
        assert windows.start_of(places).tolist() == [block.start] * block.num_targets
    assert all(b.start - a.start == windows.stride == a.num_targets for a, b in pairwise(blocks))


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (Windows(8, 8), "short=8 must be below long=8"),
        (Windows(8, 0), "at least 1"),
        (Windows("all", 4, 0), "at least 1"),
    ],
)
def test_windows_that_mean_nothing_are_refused(windows: Windows, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        windows.check()
    Windows("all", 4, 2).check()


@given(windows_and_length())
def test_as_many_positions_are_needed_as_are_used(given: tuple[Windows, int]) -> None:
    windows, length = given
    blocks = list(windows.blocks(np.arange(length)))
    used = max((len(block.tokens) - 1 for block in blocks), default=0)
    if windows.long == "all" or length >= windows.long + windows.stride:
        assert used == (windows.num_positions(length) if blocks else 0)


# --- units ----------------------------------------------------------------------------------------


RUNS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def places_of(units: Units) -> list[list[int]]:
    return [list(range(a, b)) for a, b in zip(units.first, units.end, strict=True)]


@given(RUNS)
def test_runs_part_the_far_places(runs: list[int]) -> None:
    """Neighbours with one number are a unit; the same number further on is another."""
    found = places_of(Units.of_runs(np.array(runs)))
    assert [place for unit in found for place in unit] == list(range(len(runs)))
    assert [[runs[place] for place in unit] for unit in found] == [
        list(same) for _, same in groupby(runs)
    ]


@given(st.integers(0, 30), st.integers(1, 12))
def test_spans_are_every_run_of_so_many(num_far: int, width: int) -> None:
    units = Units.of_spans(num_far, width)
    assert len(units) == max(0, num_far - width + 1)
    found = places_of(units)
    assert all(len(unit) == width for unit in found)
    assert all(a[1:] == b[:-1] for a, b in pairwise(found))
    if found:
        assert sorted({place for unit in found for place in unit}) == list(range(num_far))
    assert places_of(Units.of_tokens(num_far)) == [[place] for place in range(num_far)]


@pytest.mark.parametrize(
    "units", ["", "token", "span", "span:", "span:1", "span:0", "span:-2", "span:x", "word:2"]
)
def test_units_that_are_none_are_refused(units: str) -> None:
    with pytest.raises(ConfigError, match=f"units={units} is none of tokens"):
        span_width(units)


@pytest.mark.parametrize("kind", KINDS)
def test_halves_have_the_same_number_of_units_that_do_not_overlap(kind: str) -> None:
    units, by_hand = units_of(kind)
    kept = units.halves(200, np.random.default_rng(0))
    apart = by_hand[::3] if kind == "span:3" else by_hand
    assert (kept.sum(1) == len(apart) // 2).all()
    assert [by_hand[unit] for unit in np.flatnonzero(kept.any(0))] == apart
    # So scores that say nothing predict nothing, not even where every unit helps.
    generator = np.random.default_rng(1)
    helps, scores = generator.random((300, len(units))), generator.random((300, len(units)))
    assert abs(rank_correlations(scores @ kept.T, helps @ kept.T).mean()) < 0.1
