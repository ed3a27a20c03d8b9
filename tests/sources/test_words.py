"""Which words of a statement rest on a source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from olmo_sparsity import attribute
from olmo_sparsity.models.pretrained_tokenizer import as_tokenizer
from olmo_sparsity.sources.report.words import WordNats, describe_words, nats_by_word
from olmo_sparsity.text.documents import Document
from tests.support.explanations import make_tokenizer
from tests.support.sources import asked, with_verdicts

WORDS = [WordNats("Ada", 6.04), WordNats("painted", -0.4), WordNats("it", 0.9), WordNats("red.", 1)]


def test_tokens_of_a_word_are_added() -> None:
    tokenizer = make_tokenizer()
    document = Document(np.array([12, 4, 5, 6]), tokenizer=as_tokenizer(tokenizer))
    words = nats_by_word(document, 1, np.array([2.0, 0.5, -1.0]))
    assert words == [WordNats("w1", 2.0), WordNats("w2", 0.5), WordNats("w3", -1.0)]


def test_words_that_the_source_does_not_carry_are_listed_apart() -> None:
    shown = describe_words({"": WORDS})
    assert shown == "by word, in nats: Ada +6.0, red. +1.0; less than 1: painted it"


def test_each_of_several_needed_sources_has_its_words() -> None:
    other = [WordNats(word.text, 2.0 if word.text == "it" else 0.0) for word in WORDS]
    shown = describe_words({"a": WORDS, "b": other})
    assert shown == "by word, in nats: a: Ada +6.0, red. +1.0; b: it +2.0; less than 1: painted"


def test_a_statement_of_one_word_has_no_list() -> None:
    assert describe_words({"": WORDS[:1]}) == ""


def test_a_long_statement_lists_the_words_of_most_nats_in_their_order() -> None:
    words = [WordNats(f"w{i}", float(i)) for i in (3, 9, 1, 8, 7, 6, 5, 4, 2, 10)]
    shown = describe_words({"": [*words, WordNats("x" * 200, 0.0), WordNats("y", 0.0)]})
    assert shown.startswith("by word, in nats: w3 +3.0, w9 +9.0, w8 +8.0")
    assert "w10 +10.0, 2 more" in shown
    assert len(shown) < 300


def test_a_verdict_shows_which_words_rest_on_its_source(tmp_path: Path) -> None:
    answered = asked()
    found = replace(with_verdicts(answered), token_losses=answered.token_losses)
    *shown, of_one_word = found.statements.by_word
    assert of_one_word == ""
    assert all(line.startswith("by word, in nats: ") for line in shown)
    found.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for line in shown:
        assert line in found.describe()
        assert line in page


def test_an_invented_word_is_not_among_those_of_the_source() -> None:
    notes = {"bridge": "The new bridge was opened by Katharina Weiss in June 1921."}
    notes |= {"ferry": "Until then a ferry had carried people across the river, six at a time."}
    answer = ["Katharina Weiss opened it with oranges."]
    found = attribute("demo", sources=notes, question="Who opened the bridge?", answer=answer)
    (row,) = found.statements.itertuples()
    if row.kind != "one":
        pytest.skip(f"the demo model's verdict is {row.kind} on this machine")
    carried, _, rest = row.by_word.partition("; less than 1: ")
    assert "Weiss" in carried
    assert "oranges" in rest
