"""Targets and units are shown so that a reader recognizes them."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity.analysis.results.targets_in_text import (
    MARGIN,
    describe_target,
    highlight,
    word_around,
)
from olmo_sparsity.analysis.results.view import format_number, sentence

TEXTS = ["In", " 1906", " she", " su", "ed", " the", " jour", "nal", "ist", ".", "\n", "é"]


@pytest.mark.parametrize(
    ("first", "end", "word"),
    [
        (4, 5, "sued"),
        (3, 4, "sued"),
        (7, 8, "journalist"),
        (6, 9, "journalist"),
        (2, 3, "she"),
        (9, 10, "journalist."),
        (10, 11, ""),
        (0, 1, "In"),
        (11, 12, "é"),
    ],
)
def test_the_word_around_a_piece_is_found(first: int, end: int, word: str) -> None:
    assert word_around(TEXTS, first, end) == word


def test_numbers_of_numpy_are_shown_like_those_of_python() -> None:
    numbers = (np.int64(3), np.float32(3), 3)
    assert {format_number(number, digits=0) for number in numbers} == {"3"}
    assert format_number(np.float32("nan")) == "–"


def test_a_hyphen_in_a_name_is_no_minus_of_a_sentence() -> None:
    said = sentence("SmolLM2-135M loses -0.3 nats [-0.5, -0.1]")
    assert said == "SmolLM2-135M loses −0.3 nats [−0.5, −0.1]."


def test_highlighted_text_has_as_many_tokens_after_the_last_as_before_the_first() -> None:
    texts = [f"{number} " for number in range(300)]
    targets = pd.DataFrame({"target": [150], "end": [151]})
    units = pd.DataFrame({"target": [150], "first": [140], "end": [141], "nats": [1.0]})
    shown = re.findall(r"\d+(?= )", re.sub("<[^>]*>", "", highlight(texts, targets, units)))
    assert (int(shown[0]), int(shown[-1])) == (140 - MARGIN, 150 + MARGIN)


def test_a_target_that_is_a_piece_of_a_word_is_shown_with_its_word() -> None:
    nothing = pd.DataFrame({"target": []})
    losses = {"loss_short": 5.0, "loss_long": 4.0, "gap": 1.0}
    piece = pd.Series({"target": 4, "end": 5, "text": "ed"} | losses)
    assert describe_target(TEXTS, piece, nothing, 8).startswith("ed in “sued” (token 4): loss 5.00")
    whole = pd.Series({"target": 2, "end": 3, "text": " she"} | losses)
    assert describe_target(TEXTS, whole, nothing, 8).startswith("she (token 2): loss 5.00")
