"""How questions, statements and sources of two runs are matched."""

from __future__ import annotations

from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from olmo_sparsity.sources.gate.answers import StoredAnswer
from olmo_sparsity.sources.gate.matching import MIN_SIMILARITY, match_by_keys, match_questions
from olmo_sparsity.sources.gate.renamed_sources import current_names
from tests.support.stored_answers import answer_of, cell, compare_answers, statement_of

HIGH = cell(4.0, 3.0)
LOW = cell(0.0, -1.0)


# --- questions ------------------------------------------------------------------------------------


def asked_of(source_text: str, number: int, asked: str = "p") -> StoredAnswer:
    """Return the answer to a question about one source."""
    return answer_of([statement_of("text", [], {})], {"a": source_text}, number, asked=asked)


def test_items_match_by_their_first_key_then_by_the_second() -> None:
    matches = match_by_keys(
        ["aX", "bY"], ["bX", "cX", "aY"], lambda word: word, lambda word: word[0]
    )
    assert matches.pairs == [("aX", "aY"), ("bY", "bX")]
    assert matches.only_new == []
    assert matches.only_earlier == ["cX"]


def test_equal_questions_are_told_apart_by_their_sources() -> None:
    earlier = [asked_of("x", 0), asked_of("y", 1)]
    matches = match_questions([asked_of("y", 0), asked_of("x", 1)], earlier)
    pairs = [(new.question, earlier.question) for new, earlier in matches.pairs]
    assert pairs == [(0, 1), (1, 0)]


def test_a_question_without_a_partner_is_new_or_gone() -> None:
    matches = match_questions([asked_of("x", 0, "new")], [asked_of("x", 0, "gone")])
    assert [answer.asked for answer in matches.only_new] == ["new"]
    assert [answer.asked for answer in matches.only_earlier] == ["gone"]


def test_new_and_gone_questions_are_noted(tmp_path: Path) -> None:
    notes = compare_answers(tmp_path, asked_of("x", 0, "new"), asked_of("x", 0, "gone")).notes
    assert notes == [
        "not in the baseline: question 1, 'new'",
        "only in the baseline: question 1, 'gone'",
    ]


def test_a_reworded_question_is_known_by_its_id(tmp_path: Path) -> None:
    named = statement_of("text", ["a"], {"a": HIGH})
    earlier = answer_of([named], {"a": "x"}, id="opening", asked="When did it open?")
    not_named = statement_of("text", [], {"a": LOW})
    now = replace(earlier, asked="Since when is it open?", statements=[not_named])
    report = compare_answers(tmp_path, now, earlier)
    assert [failure.statement for failure in report.failures] == [1]
    assert "question 1 (opening) is reworded" in report.notes[0]


# --- statements -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("named", "fails"), [(["a"], []), ([], [1])])
@pytest.mark.parametrize(
    ("text", "reworded"),
    [
        ("It was opened in June 1921.", "It was opened in June of 1921."),
        # The only statement of an answer is the same one, in whatever words.
        (
            "Somebody had fitted the valve backwards.",
            "It broke as an intern put it in the wrong way round.",
        ),
    ],
)
def test_a_reworded_statement_must_rest_on_the_same_source(
    tmp_path: Path, text: str, reworded: str, named: list[str], fails: list[int]
) -> None:
    earlier = answer_of([statement_of(text, ["a"], {"a": HIGH})], {"a": "x"})
    now = replace(earlier, statements=[statement_of(reworded, named, {"a": HIGH})])
    report = compare_answers(tmp_path, now, earlier)
    assert [failure.statement for failure in report.failures] == fails
    assert any("is reworded" in note for note in report.notes)


def test_long_statements_are_compared_by_all_their_letters(tmp_path: Path) -> None:
    """Frequent letters of a text above 200 letters count, too."""
    text = "The bridge was opened in June and the mayor was there with all of the council. " * 4
    reworded = text.replace("June", "July").replace("all of", "most of")
    assert SequenceMatcher(None, reworded, text).ratio() < MIN_SIMILARITY
    # A second statement, as the only one would match in any words.
    other = statement_of("Yes.", [], {"a": LOW}, number=1)
    earlier = answer_of([statement_of(text, ["a"], {"a": HIGH}), other], {"a": "x"})
    now = replace(earlier, statements=[statement_of(reworded, [], {"a": LOW}), other])
    (failure,) = compare_answers(tmp_path, now, earlier).failures
    assert failure.statement == 1


# --- sources --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "earlier_texts", "names"),
    [
        pytest.param({"a": "x"}, {"a": "x"}, {"a": "a"}, id="same"),
        pytest.param({"b": "x"}, {"a": "x"}, {"a": "b"}, id="renamed"),
        pytest.param(
            {"a": "y", "b": "x"}, {"a": "x", "b": "y"}, {"a": "b", "b": "a"}, id="exchanged"
        ),
        pytest.param({"a": "z"}, {"a": "x"}, {"a": "a"}, id="edited"),
        pytest.param(
            {"a": "x"},
            {"a": "y", "b": "x"},
            {"b": "a", "a": "a (earlier)"},
            id="name taken by another text",
        ),
    ],
)
def test_a_source_is_known_by_its_text(
    texts: dict[str, str], earlier_texts: dict[str, str], names: dict[str, str]
) -> None:
    assert current_names(texts, earlier_texts) == names


def test_a_renamed_source_is_no_regression(tmp_path: Path) -> None:
    earlier = answer_of([statement_of("text", ["chunk 1"], {"chunk 1": HIGH})], {"chunk 1": "x"})
    now = answer_of([statement_of("text", ["chunk 7"], {"chunk 7": HIGH})], {"chunk 7": "x"})
    report = compare_answers(tmp_path, now, earlier)
    assert not report.failures
    assert any("chunk 1 is now chunk 7" in note for note in report.notes)


def test_another_text_under_a_new_name_is_another_source(tmp_path: Path) -> None:
    earlier = answer_of([statement_of("text", ["chunk 1"], {"chunk 1": HIGH})], {"chunk 1": "x"})
    now = answer_of([statement_of("text", ["chunk 7"], {"chunk 7": HIGH})], {"chunk 7": "y"})
    failures = compare_answers(tmp_path, now, earlier).failures
    assert [failure.statement for failure in failures] == [1]


@pytest.mark.parametrize(("named", "passes"), [("faq (2)", True), ("faq", False)])
def test_chunks_that_exchange_their_numbers_are_known_by_their_texts(
    tmp_path: Path, named: str, passes: bool
) -> None:
    on_faq = statement_of("text", ["faq"], {"faq": HIGH, "faq (2)": LOW})
    earlier = answer_of([on_faq], {"faq": "x", "faq (2)": "y"})
    cells = {"faq": LOW, "faq (2)": LOW} | {named: HIGH}
    now = answer_of([statement_of("text", [named], cells)], {"faq": "y", "faq (2)": "x"})
    assert bool(compare_answers(tmp_path, now, earlier)) == passes


def test_a_source_of_another_text_has_no_other_name(tmp_path: Path) -> None:
    """Text x is now called b, and a is another text: the statement no longer rests on x."""
    earlier = answer_of([statement_of("text", ["a"], {"a": HIGH})], {"a": "x"})
    on_new_a = statement_of("text", ["a"], {"a": HIGH, "b": LOW})
    assert not compare_answers(tmp_path, answer_of([on_new_a], {"a": "new", "b": "x"}), earlier)
