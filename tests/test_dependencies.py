"""Kinds of far tokens: words put together from pieces, families, enrichment over the base rate."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.dependencies import BANDS, KINDS, TOP, Words, measure_dependencies, same_family

WINDOWS = {"long": 12, "short": 4, "stride": 1}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("teacher", "Teaching", True),
        ("nation", "nations", True),
        ("run", "runs", False),  # three letters are no family
        ("interest", "internal", False),
        ("Sikma", "Sikma", True),
        ("2017", "2018", False),
    ],
)
def test_families(one: str, other: str, expected: bool) -> None:
    assert same_family(one, other) is expected


def words(pieces: list[str], ids: list[int] | None = None) -> Words:
    frame = pd.DataFrame({"token_id": ids or list(range(len(pieces))), "text": pieces})
    return Words.of(frame)


def test_tokens_know_the_word_they_are_part_of() -> None:
    found = words(["The", " bas", "ket", "ball,", " she", " said", ".", " It", "  ", "rained"])
    assert found.word == [
        *("The", "basketball", "basketball", "basketball", "she", "said", "said"),
        *("It", "It", "rained"),
    ]
    assert [w for w, first in zip(found.word, found.starts_sentence, strict=True) if first] == [
        "The",
        "It",
        "It",
    ]


def test_kinds_in_their_order_of_precedence() -> None:
    pieces = ["Of", " Paris", " of", " 1999", " teacher", " tree", " Paris", " the", " teaching"]
    found = words(pieces, [0, 1, 2, 3, 4, 5, 1, 7, 8])
    kinds = [found.kind(far, 6) for far in range(6)]
    assert kinds == ["function_word", "equal", "function_word", "number", "other", "other"]
    assert found.kind(4, 8) == "same_family"
    assert found.kind(1, 8) == "name"


def fake_tables(rank_all: bool) -> dict[str, pd.DataFrame]:
    """Two dozen documents; influential are all far tokens, or those equal to the target."""
    generator = np.random.default_rng(0)
    tokens, losses, influence, recovery = [], [], [], []
    for document in range(24):
        ids = generator.integers(0, 5, 16)
        for place, token in enumerate(ids):
            tokens.append((document, place, token, f" w{'abcde'[token]}rd"))
        for target in range(12, 16):
            losses.append((document, target, ids[target], 1.0, 2.0, "report"))
            far = np.arange(target - 12, target - 4)
            equal = far[ids[far] == ids[target]]
            chosen = generator.permutation(far)[:TOP] if rank_all else equal[:TOP]
            for rank, place in enumerate(chosen, start=1):
                influence.append((document, target, "s", "own", rank, place, ids[place], 0.1))
            for control, loss in (("own", 1.2), ("foreign", 1.7)):
                row = (document, target, "gap", "s", control, 0, 2, loss, None, None)
                recovery.append(row)
    return {
        "tokens": pd.DataFrame(tokens, columns=["document", "place", "token_id", "text"]),
        "losses": pd.DataFrame(
            losses,
            columns=["document", "target", "token_id", "loss_long", "loss_short", "half"],
        ),
        "influence": pd.DataFrame(
            influence,
            columns=["document", "target", "selector", "control", "rank", "far_position",
                     "far_token_id", "influence"],
        ),
        "recovery": pd.DataFrame(
            recovery,
            columns=["document", "target", "target_set", "selector", "control", "draw", "k",
                     "loss_set", "kl_set", "kl_short"],
        ),
    }  # fmt: skip


def measured(rank_all: bool) -> pd.DataFrame:
    return measure_dependencies(**fake_tables(rank_all), windows=WINDOWS).set_index("kind")


def test_tokens_chosen_blindly_are_not_enriched() -> None:
    rows = measured(rank_all=True)
    assert list(rows.index) == [*KINDS, *BANDS]
    assert rows.share.loc[list(KINDS)].sum() == pytest.approx(1)
    assert rows.base_share.loc[list(BANDS)].sum() == pytest.approx(1)
    for kind in ("equal", "other", *BANDS):
        assert rows.low[kind] < 1 < rows.high[kind]
    assert rows.base_share["name"] == 0
    assert np.isnan(rows.enrichment["name"])


def test_tokens_chosen_for_being_equal_are_enriched_and_carry_the_excess() -> None:
    rows = measured(rank_all=False)
    assert rows.share["equal"] == 1
    assert rows.low["equal"] > 3
    assert rows.share["other"] == 0
    assert rows.excess_recovery["equal"] == pytest.approx(0.5)
    assert rows.num_targets["equal"] > 0
    assert np.isnan(rows.excess_recovery["other"])


def test_bands_count_from_the_window() -> None:
    """With eight far tokens the two or three next to the window are near."""
    tables = fake_tables(rank_all=True)
    tables["influence"] = tables["influence"].assign(
        far_position=tables["influence"].target - 5
    )  # the far token next to the short window
    rows = measure_dependencies(**tables, windows=WINDOWS).set_index("kind")
    assert rows.share["near_third"] == 1
    assert rows.num_targets["near_third"] == 24 * 4
