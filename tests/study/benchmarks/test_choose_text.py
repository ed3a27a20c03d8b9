"""Made documents are what their kind says, and choices take half of the tokens."""

from __future__ import annotations

import random

import numpy as np
import pandas as pd
import pytest

from study.benchmarks.choose_text import (
    CHARACTERS,
    CHOICES,
    KINDS,
    PIECE,
    aurocs,
    choose,
    cut,
    make,
)


@pytest.fixture(scope="module")
def documents() -> list[str]:
    """Each has words of its own, and paragraphs."""
    rng = random.Random(0)
    words = [[f"{chr(97 + i // 26)}{chr(97 + i % 26)}{n}" for n in range(9)] for i in range(96)]
    lines = [" ".join(rng.choices(of, k=40)) for of in words for _ in range(40)]
    return ["\n".join(lines[40 * i : 40 * (i + 1)])[:CHARACTERS] for i in range(96)]


def test_documents_are_of_their_kinds(documents: list[str]) -> None:
    made = [row["text"] for row in make(documents, 0)]
    kinds = [row["kind"] for row in make(documents, 0)]
    assert kinds == list(KINDS) * 16
    pieces = [{text[p : p + PIECE] for p in range(0, CHARACTERS, PIECE)} for text in documents]
    owners = [dict.fromkeys(word[:2] for word in text.split() if len(word) == 3) for text in made]
    used = list[str]()
    for kind, text, before, of, owner in zip(kinds, made, documents, pieces, owners, strict=True):
        if kind == "whole":
            assert text == before
        elif kind == "joined":
            assert len(owner) >= CHARACTERS // PIECE  # words that a cut makes count as others'
            used += [text[p : p + PIECE] for p in range(0, CHARACTERS, PIECE)]
        elif kind == "shuffled":
            assert text != before
            assert sorted(text.split("\n")) == sorted(filter(None, before.split("\n")))
        else:
            assert text.count(before[:PIECE]) == CHARACTERS // PIECE // 2
            assert {text[p : p + PIECE] for p in range(0, CHARACTERS, PIECE)} < of
    joined = [of for of, kind in zip(pieces, kinds, strict=True) if kind == "joined"]
    assert sorted(used) == sorted(piece for of in joined for piece in of)


def test_cut_documents_do_not_overlap() -> None:
    text = "".join(f"{n:07d} " for n in range(2000))
    found = cut([text, "too short"], 0)
    assert sorted(found) == [text[i : i + CHARACTERS] for i in range(0, 16000, CHARACTERS)]
    assert found != sorted(found)


@pytest.fixture
def pool() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = [{"of": of, "kind": kind} for of in "abc" for _ in range(40) for kind in KINDS]
    pool = pd.DataFrame(rows).assign(tokens=rng.integers(900, 1100, len(rows)), text="")
    is_whole, is_boilerplate = pool.kind == "whole", pool.kind == "boilerplate"
    pool["net_gain"] = 2.0 * is_boilerplate + is_whole + rng.normal(0, 0.1, len(rows))
    pool["gzip"] = 0.5 - 0.2 * is_boilerplate + rng.normal(0, 0.01, len(rows))
    for name in ("gain", "key_share"):
        pool[name] = rng.normal(0, 1, len(rows))
    pool.loc[:5, "gain"] = None  # of a short document
    return pool


def test_choices_take_half_of_the_tokens_by_their_score(pool: pd.DataFrame) -> None:
    half = pool.groupby("of").tokens.sum() / 2
    chosen = {choice: choose(pool, choice, 1) for choice in CHOICES}
    for rows in chosen.values():
        of = rows.groupby("of").tokens.sum()
        assert ((of <= half) & (of > half - 1100)).all()
        assert not rows.index.duplicated().any()
    shares = {choice: rows.kind.value_counts(normalize=True) for choice, rows in chosen.items()}
    for choice in ("random_a", "random_b", "gain", "key_share"):
        assert abs(shares[choice]["whole"] - 0.5) < 0.12
    assert set(chosen["random_a"].index) != set(chosen["random_b"].index)
    assert set(chosen["random_a"].index) != set(choose(pool, "random_a", 2).index)
    assert set(chosen["net_gain"].index) == set(choose(pool, "net_gain", 2).index)
    assert shares["whole"]["whole"] > 0.98
    assert shares["net_gain"]["boilerplate"] > 0.32  # a third of a half: all of it
    assert shares["gzip"].get("boilerplate", 0) == 0
    assert shares["both"].get("boilerplate", 0) == 0
    assert shares["both"]["whole"] > 0.9


def test_areas_are_of_whole_documents_above_the_others(pool: pd.DataFrame) -> None:
    rows = aurocs(pool).set_index(["kind", "score"])
    assert rows.auroc["joined", "net_gain"] == 1
    assert rows.auroc["boilerplate", "net_gain"] == 0
    assert rows.auroc_low["joined", "gain"] < 0.5 < rows.auroc_high["joined", "gain"]
    assert rows.auroc["boilerplate", "gzip"] == 0
    assert rows.auroc["boilerplate", "gzip_middle"] > 0.85
    assert rows.more["joined", "gain"] == pytest.approx(1 - rows.auroc["joined", "gain"], abs=2e-4)
