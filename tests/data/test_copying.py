"""How often copying would help: against a loop that looks back token by token."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.command.cli import main
from olmo_sparsity.data import copying
from olmo_sparsity.data.copying import Copying, count_copies, count_guesses, report_copying
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.errors import DataError


def by_hand(documents: list[list[int]], width: int, guesses: dict[int, int]) -> Copying:
    counts = [0, 0, 0, 0]
    for tokens in documents:
        counts[0] += max(0, len(tokens) - 1)
        for place in range(width, len(tokens)):
            context = tokens[place - width : place]
            earlier = [p for p in range(width, place) if tokens[p - width : p] == context]
            if not earlier or not 64 <= place - earlier[-1] <= 448:
                continue
            counts[1] += 1
            if tokens[earlier[-1]] == tokens[place]:
                counts[2] += 1
                counts[3] += guesses.get(tokens[place - 1]) != tokens[place]
    return Copying(*counts)


def guesses_by_hand(documents: list[list[int]]) -> dict[int, int]:
    found: dict[int, Counter[int]] = {}
    for tokens in documents:
        for first, second in pairwise(tokens):
            found.setdefault(first, Counter())[second] += 1
    return {
        first: min(after, key=lambda token: (-after[token], token))
        for first, after in found.items()
    }


def shards_of(documents: list[list[int]], vocab_size: int) -> Any:
    arrays = [np.array(tokens, dtype=np.uint16) for tokens in documents]
    return type("Few", (list,), {"document": list.__getitem__, "vocab_size": vocab_size})(arrays)


@pytest.fixture
def documents() -> list[list[int]]:
    """Random tokens of few kinds, with stretches that return, some of them farther than 448; after
    a 3 comes a 4."""
    generator, found = np.random.default_rng(0), []
    for number in range(9):
        tokens = generator.integers(0, 40, size=int(generator.integers(0, 900))).tolist()
        befores = [0, *tokens[:-1]]
        tokens = [4 if b == 3 else token for b, token in zip(befores, tokens, strict=False)]
        tokens[300:300] = tokens[80 : 80 + 20 * number]
        found.append(tokens)
    return [*found, [7], []]


def test_counts_are_those_of_a_plain_loop(documents: list[list[int]]) -> None:
    report = report_copying(shards_of(documents, 40))
    step = 7  # near 0.618 · 11 documents
    order = [documents[index * step % 11] for index in range(11)]
    guesses = guesses_by_hand(order[1::2])
    assert report.after_one == by_hand(order[0::2], 1, guesses)
    assert report.after_two == by_hand(order[0::2], 2, guesses)
    assert report.num_documents == 6
    for of in (report.after_one, report.after_two):
        assert of.num_places > of.num_earlier > of.num_same > of.num_beyond > 0
    assert report == report_copying(shards_of(documents, 40))


def test_reading_stops_at_the_number_of_places(documents: list[list[int]]) -> None:
    report = report_copying(shards_of(documents, 40), most_places=700, most_bigrams=500)
    assert report.after_one.num_places == report.after_two.num_places == 700
    assert report.num_documents < 6


def test_the_bounds_of_the_distance_are_inside() -> None:
    guess_V = np.full(10, -1)
    for distance, counts in ((63, 0), (64, 1), (448, 1), (449, 0)):
        tokens = np.zeros(distance + 2, dtype=np.int64)
        tokens[[0, 1, distance, distance + 1]] = 1, 2, 1, 2
        of_one = count_copies(tokens, 1, guess_V)
        assert (of_one.num_earlier, of_one.num_same, of_one.num_beyond) == (counts,) * 3
    guess_V[1] = 2
    assert count_copies(np.append(tokens[1:], [1, 2]), 1, guess_V).num_beyond == 0


def test_the_most_frequent_successor_is_guessed() -> None:
    guess_V = count_guesses([np.array([1, 2, 1, 3, 1, 3]), np.array([2, 4, 2, 3])], 6)
    assert guess_V.tolist() == [-1, 3, 1, 1, 2, -1]


def test_one_document_cannot_be_read_by_what_it_counts() -> None:
    shards = shards_of([[1, 2, 3]], 4)
    shards.paths = [SimpleNamespace(parent="data/book")]
    with pytest.raises(DataError, match=r"data/book holds one training document.*cut the text"):
        report_copying(shards)


def test_prepare_prints_it(
    run_dict: dict, shards: TokenShards, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(run_dict))
    assert main(["prepare", str(path), "--report"]) == 0
    shown = capsys.readouterr().out
    assert shown.strip() == str(report_copying(shards))
    assert f"vocabulary {shards.vocab_size}" in shown
    assert f"{copying.NEAREST} to {copying.FARTHEST} tokens back" in shown
