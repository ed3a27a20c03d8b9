"""Passages within a message of the user, by a tag or a regular expression."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.sources.reading.messages import read_messages
from olmo_sparsity.sources.reading.passages import Passage, split_at_passages, warnings_about

NUMBERED = """Use these.

[1] report.pdf
The bridge opened in 1921.

[2] faq.md
Tickets cost 4 euros.

When did it open?"""


def found(pattern: str, text: str = NUMBERED) -> dict[str, str]:
    """The text of each passage by its name."""
    parts = split_at_passages([text], pattern)
    return {part.name: part.text for part in parts if isinstance(part, Passage)}


def test_a_dot_matches_no_line_break() -> None:
    assert found(r"\[\d+\] .*\n.*") == {
        "passage 1": "[1] report.pdf\nThe bridge opened in 1921.",
        "passage 2": "[2] faq.md\nTickets cost 4 euros.",
    }


def test_a_dot_matches_line_breaks_if_the_expression_says_so() -> None:
    assert [*found(r"(?s)\[\d+\].*")] == ["passage 1"]


@pytest.mark.parametrize(
    "pattern",
    [r"\[\d+\] (?P<name>.*)\n(?P<text>.*)", r"\[\d+\] (?P<name>.*)\n(.*)"],
    ids=["both groups named", "the text is the other group"],
)
def test_the_group_name_names_a_passage(pattern: str) -> None:
    assert found(pattern) == {
        "report.pdf": "The bridge opened in 1921.",
        "faq.md": "Tickets cost 4 euros.",
    }


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("""<document title="Bob's notes">""", "Bob's notes"),
        ("""<document title='a "b" c'>""", 'a "b" c'),
        ('<document index="1" title="report.pdf">', "report.pdf"),
        ('<document title="report.pdf" index="1">', "report.pdf"),
        ('<document data-id="7" title="report.pdf">', "report.pdf"),
        ('<document data-id="7">', "passage 1"),
        ('<document title = "report.pdf">', "report.pdf"),
        ('<document title="a > b">', "a > b"),
        ('<document title="" id="4">', "4"),
        ("<document>", "passage 1"),
        ("<document title=Bob's>", "passage 1"),
    ],
)
def test_the_attributes_of_a_tag_name_a_passage(tag: str, name: str) -> None:
    text = f"{tag}It opened in 1921.</document>\n<document id='2'>Don't.</document>\nWhen?"
    assert found("document", text) == {name: "It opened in 1921.", "2": "Don't."}


def test_a_tag_of_another_name_is_no_passage() -> None:
    text = "<document-note>as of May</document-note> <document id='2'>Yes.</document> Is it open?"
    parts = split_at_passages([text], "document")
    assert [part.text for part in parts if isinstance(part, Passage)] == ["Yes."]
    assert parts[0] == "<document-note>as of May</document-note> <document id='2'>"
    assert warnings_about([text], parts, "document") == []


def test_the_group_name_alone_leaves_all_that_matches_as_the_text() -> None:
    assert found(r"\[\d+\] (?P<name>.*)\n.*")["faq.md"] == "[2] faq.md\nTickets cost 4 euros."


def test_the_first_group_is_the_text_of_a_passage() -> None:
    passages = found(r"\[\d+\] .*\n(.*)")
    assert passages == {
        "passage 1": "The bridge opened in 1921.",
        "passage 2": "Tickets cost 4 euros.",
    }


def test_passages_without_a_name_are_numbered_through_all_texts_of_a_message() -> None:
    parts = split_at_passages(["<doc>a</doc>", "<doc name='b'>b</doc>", "<doc>c</doc>"], "doc")
    names = [part.name for part in parts if isinstance(part, Passage)]
    assert names == ["passage 1", "b", "passage 3"]


def test_a_tag_may_hold_several_lines() -> None:
    assert found("doc", "<doc>\na\n\nb\n</doc>") == {"passage 1": "a\n\nb"}


def test_a_group_of_another_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"the group 'title'; name .*\(\?P<name>…\)"):
        found(r"(?P<title>.*)\n(?P<text>.*)")


def test_a_passage_without_a_name_keeps_an_id_that_all_of_them_share() -> None:
    log = [{"role": "user", "content": NUMBERED}, {"role": "assistant", "content": "1921."}]
    (message,) = read_messages(log, passages=r"\[\d+\] .*\n.*").sources
    ids = [part.ids for part in message["content"] if not isinstance(part, str)]
    assert ids == [("passage 1", "passage"), ("passage 2", "passage")]


def warnings(pattern: str, text: str = NUMBERED) -> list[str]:
    return warnings_about([text], split_at_passages([text], pattern), pattern)


def test_a_passage_that_swallows_all_others_and_the_question_is_noticed() -> None:
    of_question, of_passages = warnings(r"(?s)\[\d+\].*")
    assert "'passage 1' holds the last line" in of_question
    assert "'When did it open?'" in of_question
    assert "'passage 1', holds further matches" in of_passages


@pytest.mark.parametrize("pattern", [r"\[\d+\] .*\n.*", r"(?s)\[\d+\].*?(?=\n\n)"])
def test_passages_that_end_before_the_question_raise_no_warning(pattern: str) -> None:
    assert warnings(pattern) == []


def test_a_message_of_which_nothing_stays_in_view_is_noticed() -> None:
    (warning,) = warnings(".+", "Name the bridge.")
    assert "'Name the bridge.'" in warning


def test_a_question_may_precede_the_passages() -> None:
    assert warnings("doc", "When did it open?\n<doc>It opened.\nIn 1921.</doc>") == []


def test_an_unclosed_tag_is_noticed() -> None:
    text = "<doc>It opened.\n<doc>It closed.</doc>\nWhen?"
    (warning,) = warnings("doc", text)
    assert "holds further matches" in warning


PAGE = (Path(__file__).parents[2] / "docs/sources.md").read_text()


@pytest.mark.parametrize(
    "pattern",
    [
        re.findall(r"--passages '(.*)'\n", PAGE)[0],
        re.findall(r"```text\n(\(\?s\).*)\n```", PAGE)[0],
    ],
    ids=["lines", "several lines"],
)
def test_the_expressions_of_the_page_find_the_sources_of_its_message(pattern: str) -> None:
    (log,) = [text for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL) if "[1]" in text]
    (message,) = read_messages(json.loads(log), passages=pattern).sources
    parts = message["content"]
    sources = {part.name: part.text for part in parts if not isinstance(part, str)}
    assert sources == {
        "report.pdf": "The bridge opened in 1921.",
        "faq.md": "Tickets cost 4 euros.",
    }
    assert parts[-1] == "Question: When did it open?"


@pytest.mark.parametrize(
    "text",
    [
        "<d>The <d>bridge</d> opened in 1921.</d> When?",
        "<d>It opened in 1921. <d>Tickets cost 4 euros.</d> When?",
        "<d/>It opened in 1921. <d>Tickets cost 4 euros.</d> When?",
    ],
    ids=["nested", "not closed", "without text"],
)
def test_a_tag_within_a_passage_is_noticed(text: str) -> None:
    """It cuts the outer passage, or joins two of them to one source."""
    (warning,) = warnings("d", text)
    assert "another <d> begins within the source 'passage 1'" in warning
    assert warnings("<d>([^<]*)</d>", text) == []
