"""Windows, blocks and units are arithmetic: whatever the numbers, they count what they say."""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.windows import NOTHING, Units, Windows, span_width
from olmo_sparsity.errors import ConfigError

settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")


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


@given(windows_and_length(), st.data())
def test_position_ids_are_places_behind_the_prefix(
    given: tuple[Windows, int], data: st.DataObject
) -> None:
    """The prefix and some far places, then the window; with all far places, each once."""
    windows, length = given
    for block in windows.blocks(np.arange(length)):
        last = data.draw(st.none() | st.integers(1, block.num_targets))
        num_inputs = len(block.tokens) - block.num_targets + (last or block.num_targets) - 1
        every = [*block.earlier(np.arange(block.num_far)), *block.near(last)]
        assert every == list(range(num_inputs))
        assert block.earlier(NOTHING).tolist() == list(range(len(windows.prefix)))
        some = block.earlier(np.array([block.num_far - 1]))
        assert block.tokens[some].tolist() == [*windows.prefix, block.far_F[-1]]


@given(windows_and_length())
def test_another_far_part_changes_nothing_else(given: tuple[Windows, int]) -> None:
    windows, length = given
    for block in windows.blocks(np.arange(length)):
        other = -1 - np.arange(block.num_far)
        changed = block.with_far(other)
        assert changed.far_F.tolist() == other.tolist()
        end = len(windows.prefix) + block.num_far
        assert changed.tokens[end:].tolist() == block.tokens[end:].tolist()
        assert (changed.start, changed.windows) == (block.start, block.windows)
        assert changed.with_far(block.far_F).tokens.tolist() == block.tokens.tolist()


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


@st.composite
def some_units(draw: st.DrawFn) -> tuple[Units, int]:
    num_far = draw(st.integers(1, 20))
    if draw(st.booleans()):
        return Units.of_spans(num_far, draw(st.integers(1, num_far))), num_far
    runs = draw(st.lists(st.integers(0, 2), min_size=num_far, max_size=num_far))
    return Units.of_runs(np.array(runs)), num_far


@given(some_units(), st.data())
def test_places_of_chosen_units_are_sorted_and_there_once(
    given: tuple[Units, int], data: st.DataObject
) -> None:
    units, num_far = given
    chosen = data.draw(st.lists(st.integers(0, len(units) - 1), unique=True))
    places, by_hand = units.places(*chosen), places_of(units)
    assert places.dtype.kind == "i"
    assert places.tolist() == sorted({place for unit in chosen for place in by_hand[unit]})
    assert set(places.tolist()) <= set(range(num_far))


@given(some_units(), st.integers(1, 3), st.sampled_from([np.float32, np.float64]), st.data())
def test_totals_equal_a_loop(
    given: tuple[Units, int], num_targets: int, dtype: type, data: st.DataObject
) -> None:
    units, num_far = given
    seed = data.draw(st.integers(0, 99))
    scores_TF = np.random.default_rng(seed).normal(size=(num_targets, num_far)).astype(dtype)
    found_TU = units.total(scores_TF)
    assert found_TU.shape == (num_targets, len(units))
    for row, scores_F in enumerate(scores_TF):
        expected = [sum(float(scores_F[place]) for place in unit) for unit in places_of(units)]
        np.testing.assert_allclose(found_TU[row], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("units", "width"),
    [("tokens", 1), ("span:2", 2), ("span:16", 16), ("words", None), ("sentences", None)],
)
def test_the_width_of_units(units: str, width: int | None) -> None:
    assert span_width(units) == width


@pytest.mark.parametrize(
    "units", ["", "token", "span", "span:", "span:1", "span:0", "span:-2", "span:x", "word:2"]
)
def test_units_that_are_none_are_refused(units: str) -> None:
    with pytest.raises(ConfigError, match=f"units={units} is none of tokens"):
        span_width(units)
