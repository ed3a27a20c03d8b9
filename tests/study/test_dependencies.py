"""Kinds of far tokens: words put together from pieces, families, enrichment over the base rate."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity.analysis.inputs.windows import Windows
from olmo_sparsity.analysis.results.statistics import summarize
from olmo_sparsity.analysis.results.tables import SCHEMAS
from study.dependencies import (
    BANDS,
    KINDS,
    Words,
    measure_dependencies,
    parts_of_words,
    stems,
)

WINDOWS = Windows(12, 4)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("teacher", "teaching", True),
        ("nation", "nations", True),
        ("run", "runs", False),  # three letters are no family
        ("interest", "internal", False),
        ("national", "nations", True),  # the letters are equal for longer than the stem
        ("sikma", "sikma", True),
        ("2017", "2018", False),
    ],
)
def test_families(one: str, other: str, expected: bool) -> None:
    assert bool(stems(one) & stems(other)) is expected


def words(pieces: list[str], ids: list[int] | None = None) -> Words:
    return Words(pd.DataFrame({"token_id": ids or list(range(len(pieces))), "text": pieces}))


def test_tokens_know_the_word_they_are_part_of() -> None:
    found = words(["The", " bas", "", "ket", "ball,", " she", " said", ".", "  ", "Ann", "\n"])
    assert found.spellings[found.spelling].tolist() == [
        *("the", "basketball", "basketball", "basketball", "basketball", "she", "said", "said"),
        *("", "ann", ""),  # white space alone is no word
    ]


def test_what_part_of_a_word_a_token_is() -> None:
    pieces = [
        *("Sta", "tion", " Sta", "tion", "s,"),
        *(" 19", "98", ".", "\n", "New", "’", "t"),
        *(" of", " (The", " tree"),
    ]
    assert parts_of_words(pieces).tolist() == [
        *("first_piece", "later_piece", "first_piece", "later_piece", "later_piece"),
        *("first_piece", "later_piece", "no_word", "no_word", "word", "no_word", "word"),
        *("function_word", "function_word", "word"),
    ]
    assert parts_of_words(["a", "", "b"]).tolist() == ["first_piece", "later_piece", "later_piece"]


def test_kinds_in_their_order_of_precedence() -> None:
    pieces = ["Of", " Paris", " of", " 1999", " Teacher", " tree", " Paris", " the", " teaching"]
    found = words(pieces, [0, 1, 2, 3, 4, 5, 1, 7, 8])
    assert found.kinds(6, slice(0, 6)).tolist() == [
        *("function_word", "equal", "function_word", "number", "name", "other")
    ]
    assert found.kinds(8, slice(1, 5)).tolist() == [
        *("name", "function_word", "number", "same_family")
    ]


def test_what_begins_a_sentence_is_no_name_and_white_space_is_of_no_kind_but_equal() -> None:
    found = words(["Paris", " is", ".", " Paris", "\n", " Is", " Paris", "\n"], [*range(7), 4])
    assert found.kinds(7, slice(0, 7)).tolist() == [
        *("other", "function_word", "function_word", "other", "equal", "function_word", "name")
    ]
    assert found.kinds(0, slice(3, 5)).tolist() == ["same_family", "other"]


def fake_tables(
    rank_all: bool, ks: tuple[int, ...] = (1, 2, 4), windows: Windows = WINDOWS
) -> dict[str, pd.DataFrame]:
    """Two dozen documents; influential are all far tokens, or those equal to the target. Beside
    what is asked of the document's own single tokens stand rows that must not be counted."""
    generator = np.random.default_rng(0)
    tokens, losses, targets, influence, recovery = [], [], [], [], []
    for document in range(24):
        ids = generator.integers(0, 5, 16)
        for place, token in enumerate(ids):
            tokens.append((document, place, token, f" w{'abcde'[token]}rd"))
        for target in range(12, 16):
            losses.append((document, target, ids[target], 2.0, 1.0, False, 2.0, False))
            start = target - (target - 12) % windows.stride
            far = np.arange(start - 12, start - 4)
            equal = far[ids[far] == ids[target]]
            chosen = generator.permutation(far) if rank_all else equal
            others = [
                ("placebo", "tokens", "own"),
                ("document", "span:2", "own"),
                ("document", "tokens", "foreign"),
            ]
            for part in ("document", "placebo"):
                targets.append((document, target, part, "gap"))
            for about, places in [
                (("document", "tokens", "own"), chosen),
                *((other, far) for other in others),
            ]:
                part, units, control = about
                for rank, place in enumerate(places[: max(ks)], start=1):
                    influence.append(
                        (
                            document,
                            target,
                            part,
                            units,
                            "s",
                            control,
                            rank,
                            place,
                            place + 1,
                            "?",
                            0.1,
                        )
                    )
            for k in ks:
                for part, units in (
                    ("document", "tokens"),
                    ("placebo", "tokens"),
                    ("document", "span:2"),
                ):
                    is_asked = part == "document" and units == "tokens"
                    for control, loss in (("own", 1.2), ("foreign", 1.7)):
                        loss = loss + 0.01 * k if is_asked else 0.0
                        recovery.append(
                            (document, target, part, units, "s", control, 0, k, k, loss, None)
                        )
    rows = {
        "tokens": tokens,
        "losses": losses,
        "targets": [(*target, target[1] + 1) for target in targets],
        "influence": influence,
        "recovery": recovery,
    }
    found = {name: pd.DataFrame(rows[name], columns=SCHEMAS[name].names) for name in rows}
    found["recovery"] = found["recovery"].astype({"loss_without": float})
    return found


def measured(tables: dict[str, pd.DataFrame], windows: Windows = WINDOWS) -> pd.DataFrame:
    return measure_dependencies(**tables, windows=windows).set_index(["k", "kind"])


def test_tokens_chosen_blindly_are_not_enriched() -> None:
    rows = measured(fake_tables(rank_all=True))
    assert list(rows.loc[1].index) == list(rows.loc[4].index) == [*KINDS, *BANDS]
    assert set(rows.index.get_level_values("k")) == {1, 4}
    assert (rows.target_set == "gap").all()
    for k in (1, 4):
        of_k = rows.loc[k]
        assert of_k.share.loc[list(KINDS)].sum() == pytest.approx(1)
        assert of_k.base_share.loc[list(BANDS)].sum() == pytest.approx(1)
        for kind in ("equal", "other", *BANDS):
            assert of_k.low[kind] < 1 < of_k.high[kind]
        assert of_k.base_share["name"] == 0
        assert np.isnan(of_k.enrichment["name"])


def test_tokens_chosen_for_being_equal_are_enriched_and_carry_the_excess() -> None:
    tables = fake_tables(rank_all=False)
    rows = measured(tables)
    own = tables["influence"].query("control == 'own' and units == 'tokens' and rank == 1")
    for k in (1, 4):
        assert rows.share[k, "equal"] == 1
        assert rows.low[k, "equal"] > 3
        assert rows.share[k, "other"] == 0
        assert rows.excess_recovery[k, "equal"] == pytest.approx(0.5)
        assert rows.num_targets[k, "equal"] == (own.far_part == "document").sum() > 0
        assert np.isnan(rows.excess_recovery[k, "other"])


def test_the_excess_is_that_of_its_k() -> None:
    tables = fake_tables(rank_all=False)
    recovery = tables["recovery"]
    is_more = (recovery.k == 4) & (recovery.control == "own") & (recovery.far_part == "document")
    recovery.loc[is_more & (recovery.units == "tokens"), "loss_set"] -= 0.3
    rows = measured(tables)
    assert rows.excess_recovery[1, "equal"] == pytest.approx(0.5)
    assert rows.excess_recovery[4, "equal"] == pytest.approx(0.8)
    assert rows.num_targets[1, "equal"] == rows.num_targets[4, "equal"]


def test_net_is_beyond_the_placebo_where_that_has_such_tokens() -> None:
    tables = fake_tables(rank_all=False)
    tables["losses"]["placebo_loss_long"] = 1.0
    recovery, influence = tables["recovery"], tables["influence"]
    of_placebo = recovery.far_part == "placebo"
    recovery.loc[of_placebo & (recovery.control == "own"), "loss_set"] = 1.5
    recovery.loc[of_placebo & (recovery.control == "foreign"), "loss_set"] = 1.7
    rows = measured(tables)
    # The placebo's first tokens are the farthest, and none has the target's text.
    assert rows.net[1, "far_third"] == pytest.approx(0.5 - 0.2)
    assert rows.net.drop("far_third", level="kind").isna().all()
    texts = tables["tokens"].set_index(["document", "place"]).text
    first = (influence.far_part == "placebo") & (influence["rank"] == 1)
    asked = pd.MultiIndex.from_frame(influence.loc[first, ["document", "target"]])
    influence.loc[first, "far_text"] = texts[asked].to_numpy()
    rows = measured(tables)
    for k in (1, 4):
        net = rows.loc[(k, "equal"), ["net", "net_low", "net_high"]].to_numpy(float)
        np.testing.assert_allclose(net, 0.5 - 0.2)
        assert np.isnan(rows.net[k, "other"])


def test_of_four_tokens_the_share_is_that_of_all_four() -> None:
    """The first is next to the window, the three others are the farthest."""
    tables = fake_tables(rank_all=True)
    own = tables["influence"]
    place = np.where(own["rank"] == 1, own.target - 5, own.target - 14 + own["rank"])
    tables["influence"] = own.assign(far_first=place, far_end=place + 1)
    rows = measured(tables)
    assert rows.share[1, "near_third"] == 1
    assert rows.share[4, "near_third"] == pytest.approx(1 / 4)
    assert rows.share[4, "middle_third"] == pytest.approx(1 / 4)
    assert rows.share[4, "far_third"] == pytest.approx(2 / 4)
    # Targets are told apart by their first token, at every k.
    assert rows.num_targets[1, "near_third"] == rows.num_targets[4, "near_third"] == 24 * 4
    assert rows.num_targets[4, "far_third"] == 0


@pytest.mark.parametrize(
    ("ks", "expected"), [((8,), {8}), ((2, 8), {2}), ((4, 8), {4}), ((1, 2), {1})]
)
def test_where_neither_one_nor_four_is_measured_the_smallest_k_is(
    ks: tuple[int, ...], expected: set[int]
) -> None:
    rows = measured(fake_tables(rank_all=True, ks=ks))
    assert set(rows.index.get_level_values("k")) == expected


STRIDES = pytest.mark.parametrize("windows", [WINDOWS, Windows(12, 4, 3)], ids=str)


@STRIDES
def test_of_all_far_tokens_the_shares_are_the_base_shares(windows: Windows) -> None:
    rows = measured(fake_tables(rank_all=True, ks=(8,), windows=windows), windows)
    np.testing.assert_allclose(rows.share, rows.base_share)
    occurs = rows.base_share > 0
    assert occurs.sum() == 2 + len(BANDS)
    np.testing.assert_allclose(rows.enrichment[occurs], 1)


@STRIDES
def test_the_bands_part_the_targets_and_their_excess_is_that_of_the_summary(
    windows: Windows,
) -> None:
    tables = fake_tables(rank_all=True, windows=windows)
    generator = np.random.default_rng(1)
    for name, column in (("losses", "loss_long"), ("recovery", "loss_set")):
        noise = generator.normal(0, 0.3, len(tables[name]))
        tables[name][column] += noise
    rows = measured(tables, windows)
    first = tables["influence"].query(
        "far_part == 'document' and units == 'tokens' and control == 'own' and rank == 1"
    )
    first = first.merge(tables["losses"], on=["document", "target"])
    starts = first.target - (first.target - 12) % windows.stride
    distance = starts - 4 - 1 - first.far_first  # 0 is next to the short window
    assert distance.between(0, 7).all()
    by_band = (first.loss_short - first.loss_long).groupby(distance * 3 // 8)
    summary = summarize(tables["losses"], tables["targets"], tables["recovery"])
    for k in (1, 4):
        bands = rows.loc[k].loc[list(BANDS)]
        assert bands.num_targets.sum() == len(first) == 24 * 4
        assert bands.num_targets.tolist() == by_band.size().tolist()
        excess = (bands.excess_recovery.to_numpy() * by_band.sum()).sum() / by_band.sum().sum()
        (whole,) = summary.query("k == @k and units == 'tokens'").excess
        assert excess == pytest.approx(whole)
        kinds = rows.loc[k].loc[list(KINDS)]
        assert kinds.num_targets.sum() == 24 * 4
