"""Windows, blocks and units are arithmetic: whatever the numbers, they count what they say."""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_sparsity.analysis.results.rank_correlation import rank_correlations
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.text.units import Units, span_width
from olmo_sparsity.text.windows import Windows
from tests.support.brute import KINDS, units_of


@st.composite
def windows_and_length(draw: st.DrawFn) -> tuple[Windows, int]:
    short = draw(st.integers(1, 8))
    long = draw(st.just("all") | st.integers(short + 1, short + 8))
    prefix = tuple(draw(st.lists(st.integers(900, 999), max_size=3)))
    all_of = long == "all"
    most = draw(st.none() | st.integers(short + 1, short + 8)) if all_of else None
    least = draw(st.integers(1, (most or 12) - short)) if all_of and (most or 12) > short else 1
    windows = Windows(long, short, draw(st.integers(1, 9)), prefix, most, least)
    return windows, draw(st.integers(0, 50))


def long_at(windows: Windows, start: int) -> int:
    """Return the tokens of the long window of a block at `start`."""
    if windows.long != "all":
        return windows.long
    return start if windows.max_tokens is None else min(start, windows.max_tokens)


@given(windows_and_length())
def test_blocks_cover_every_target_with_a_full_window_once(given: tuple[Windows, int]) -> None:
    windows, length = given
    blocks = list(windows.blocks(100 + np.arange(length)))
    targets = []
    for block in blocks:
        targets += block.targets_W.tolist()
    least = windows.short + windows.min_distant
    first_target = least if windows.long == "all" else windows.long
    assert targets == list(range(100 + first_target, 100 + length))
    assert windows.first_target == first_target
    for block, following in pairwise(blocks):
        assert following.start - block.start == windows.stride == block.num_targets
    for block in blocks:
        assert 0 < block.num_targets <= windows.stride
        places = block.start + np.arange(block.num_targets)
        assert windows.start_of(places).tolist() == [block.start] * block.num_targets


@given(windows_and_length())
def test_a_block_has_the_tokens_of_its_long_window_and_its_targets(
    given: tuple[Windows, int],
) -> None:
    windows, length = given
    document = 100 + np.arange(length)
    for block in windows.blocks(document):
        first = block.start - long_at(windows, block.start)
        end = block.start + block.num_targets
        assert block.tokens.tolist() == [*windows.prefix, *document[first:end].tolist()]
        assert block.distant_F.tolist() == document[first : block.start - windows.short].tolist()
        assert block.first_distant == first == windows.first_distant(block.start)
        assert windows.first_distant(np.array([block.start])).tolist() == [first]


@given(windows_and_length())
def test_the_windows_of_a_block_are_those_of_its_targets(given: tuple[Windows, int]) -> None:
    windows, length = given
    for block in windows.blocks(np.arange(length)):
        long = long_at(windows, block.start)
        assert (block.windows.long, block.windows.stride) == (long, block.num_targets)
        assert block.num_distant == len(block.distant_F) >= windows.least_distant


@given(windows_and_length())
def test_the_last_token_of_the_longest_block_is_no_input(given: tuple[Windows, int]) -> None:
    windows, length = given
    blocks = list(windows.blocks(np.arange(length)))
    if blocks and blocks[-1].num_targets == windows.stride:
        assert windows.num_positions(length) == max(len(block.tokens) for block in blocks) - 1


@given(windows_and_length(), st.data())
def test_a_block_gives_the_positions_of_its_inputs(
    given: tuple[Windows, int], data: st.DataObject
) -> None:
    windows, length = given
    for block in windows.blocks(100 + np.arange(length)):
        num_prefix, num_distant = len(windows.prefix), block.num_distant
        every = list(range(len(block.tokens)))
        inputs = every[num_prefix + num_distant : -1]  # the last target is no input
        assert block.positions_of_local().tolist() == inputs
        last = data.draw(st.integers(1, block.num_targets))
        assert block.positions_of_local(last).tolist() == inputs[: windows.short + last - 1]
        distant = np.flatnonzero(
            data.draw(st.lists(st.booleans(), min_size=num_distant, max_size=num_distant))
        )
        positions = [*range(num_prefix), *(num_prefix + distant)]
        assert block.positions_of_distant(distant).tolist() == positions
        changed = block.with_distant(-block.distant_F)
        assert changed.distant_F.tolist() == [-token for token in block.distant_F.tolist()]
        assert np.flatnonzero(changed.tokens != block.tokens).tolist() == [
            num_prefix + index for index in range(num_distant)
        ]


@pytest.mark.parametrize(
    "windows", [Windows(8, 8), Windows(8, 0), Windows("all", 4, 0), Windows("all", 4, max_tokens=4)]
)
def test_windows_that_mean_nothing_are_refused(windows: Windows) -> None:
    with pytest.raises(ConfigError, match="short="):
        windows.check()
    for good in (Windows(2, 1), Windows("all", 1), Windows("all", 4, max_tokens=5)):
        good.check()


def test_the_keys_of_stored_windows_stay() -> None:
    windows = Windows("all", 4, prefix=(7,), max_tokens=9, min_distant=2)
    assert windows.as_stored() == {
        "long": "all",
        "short": 4,
        "stride": 1,
        "prefix": (7,),
        "most": 9,
        "least": 2,
    }
    assert Windows.from_stored(windows.as_stored()) == windows


def test_windows_stored_by_an_earlier_release_are_read() -> None:
    stored = {"long": 12, "short": 4, "stride": 2}
    assert Windows.from_stored(stored) == Windows(12, 4, stride=2)


# --- units ----------------------------------------------------------------------------------------


RUNS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def indices_of(units: Units) -> list[list[int]]:
    return [list(range(a, b)) for a, b in zip(units.first, units.end, strict=True)]


@given(RUNS)
def test_runs_part_the_distant_tokens(runs: list[int]) -> None:
    """Neighbours with one number are a unit; the same number further on is another."""
    found = indices_of(Units.of_runs(np.array(runs)))
    assert [index for unit in found for index in unit] == list(range(len(runs)))
    assert [[runs[index] for index in unit] for unit in found] == [
        list(same) for _, same in groupby(runs)
    ]


@given(st.integers(0, 30), st.integers(1, 12))
def test_spans_are_all_runs_of_one_width(num_distant: int, width: int) -> None:
    units = Units.of_spans(num_distant, width)
    assert len(units) == max(0, num_distant - width + 1)
    found = indices_of(units)
    assert all(len(unit) == width for unit in found)
    assert all(a[1:] == b[:-1] for a, b in pairwise(found))
    if found:
        assert sorted({index for unit in found for index in unit}) == list(range(num_distant))
    assert indices_of(Units.of_tokens(num_distant)) == [[index] for index in range(num_distant)]


@given(RUNS, st.integers(1, 4), st.data())
def test_distant_indices_and_sums_are_those_of_the_units(
    runs: list[int], width: int, data: st.DataObject
) -> None:
    scores_TF = np.random.default_rng(0).integers(0, 99, (3, len(runs)))
    for units in (Units.of_runs(np.array(runs)), Units.of_spans(len(runs), width)):
        by_hand = indices_of(units)
        if not by_hand:
            continue
        total = [[scores_F[unit].sum() for unit in by_hand] for scores_F in scores_TF]
        assert units.sum_by_unit(scores_TF).tolist() == total
        chosen = data.draw(st.lists(st.integers(0, len(units) - 1), max_size=4))
        indices = sorted({index for unit in chosen for index in by_hand[unit]})
        assert units.distant_indices(*chosen).tolist() == indices
        first = data.draw(st.integers(0, len(units) - 1))
        end = data.draw(st.integers(first + 1, len(units)))
        expected = {index for unit in by_hand[first:end] for index in unit}
        assert units.run(first, end).tolist() == sorted(expected)


@pytest.mark.parametrize(
    "units", ["", "token", "span", "span:", "span:1", "span:0", "span:-2", "span:x", "word:2"]
)
def test_units_that_are_none_are_refused(units: str) -> None:
    known = {"tokens": 1, "span:2": 2, "span:12": 12, "words": None, "sentences": None}
    assert {name: span_width(name) for name in known} == known
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


def test_selectors_for_the_last_release_find_old_names() -> None:
    block = next(iter(Windows(8, 4).blocks(np.arange(12))))
    units = Units.of_tokens(block.num_distant)
    assert units.places(1, 3).tolist() == [1, 3]
    assert units.total(np.ones((1, 4))).tolist() == [[1, 1, 1, 1]]
    assert block.earlier(np.array([2])).tolist() == [2]
    assert block.local().tolist() == block.near().tolist() == [4, 5, 6, 7]
    assert block.first == block.first_distant == 0
