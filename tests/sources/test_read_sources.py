"""Sources and answers as a user passes them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_sparsity import Answer, Segment
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.sources.reading.read_sources import read_turns
from tests.support.sources import asked


@given(st.text("ab .\n", min_size=1, max_size=12), st.lists(st.integers(0, 12), max_size=6))
def test_pieces_of_an_answer_are_the_answer(text: str, at: list[int]) -> None:
    ends = sorted({0, *at, len(text)} & set(range(len(text) + 1)))
    spans = [(a, b) for a, b in pairwise(ends) if text[a:b].strip()][::2]
    if spans:
        pieces = Answer(text, spans).pieces()
        assert "".join(piece for piece, _ in pieces) == text
        assert [piece.strip() for piece, is_one in pieces if is_one] == [
            text[a:b].strip() for a, b in spans
        ]


@pytest.mark.parametrize(
    "sources",
    [
        {"": "w1", "b": "w2"},
        [Segment(" ", "w1"), Segment("b", "w2")],
        {"a": "w1", "b": " \n"},
        {"a": 3},
        {"none": "w1", "b": "w2"},  # in `expect`, none means no source
        {"a": "w1", " no source": "w2"},
        [{"name": "a", "text": "w1"}],
        [{"role": "user", "content": None}],
        [{"content": "w1"}],
    ],
)
def test_a_source_that_no_verdict_could_name_is_refused(sources: Any) -> None:
    with pytest.raises(ConfigError, match="sources"):
        asked(sources=sources)


class LangChain:
    """As `langchain_core.documents.Document`."""

    def __init__(self, page_content: str, **metadata: str) -> None:
        self.page_content, self.metadata = page_content, metadata


class LlamaIndex:
    """As `llama_index.core.schema.TextNode`."""

    def __init__(self, text: str, **metadata: str) -> None:
        self.text, self.metadata = text, metadata


def test_documents_of_other_libraries_are_sources_and_chunks_of_a_file_stay_apart() -> None:
    items = [
        LangChain("w1 w2", source="a.pdf"),
        LangChain("w3 w4", source="a.pdf"),
        LlamaIndex("w5 w6", file_name="b.md"),
        LangChain("w7"),
    ]
    (turn,) = read_turns(items)
    assert [(part.name, part.text) for part in turn.parts] == [
        *(("a.pdf", "w1 w2"), ("a.pdf (2)", "w3 w4"), ("b.md", "w5 w6"), ("source 4", "w7"))
    ]
    assert [part.ids for part in turn.parts] == [("a.pdf",), ("a.pdf",), ("b.md",), ()]


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"question": "w20 \ud83d w21"}, r"^question: character 4 is \\ud83d"),
        ({"reasoning": "w5 \ud800"}, r"^reasoning: character 3"),
        ({"answer": "\udc00"}, r"^answer: character 0"),
        ({"answer": ["w1", "w2 \udc00"]}, r"^answer, number 1: character 3"),
        ({"answer": Answer("w1 \udc00", [(0, 2)])}, r"^answer: character 3"),
        ({"decoys": ["w1", "w2\ud800"]}, r"^decoys, number 1: character 2"),
        ({"sources": {"a\ud800": "w1"}}, r"^sources: the name 'a\\ud800': character 1"),
        ({"sources": {"a": "w1 \udc00"}}, r"^sources: the text of 'a': character 3"),
        ({"sources": ["\udc00", Segment("a", "w1")]}, r"^sources: a text without a name: "),
        (
            {"sources": [{"role": "user", "content": "w1", "name": "\udc00"}], "question": None},
            r"^sources: a message of user, key 'name': character 0",
        ),
    ],
)
def test_half_a_letter_is_an_error_with_its_place(changed: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError, match=place) as caught:
        asked(**changed)
    str(caught.value).encode()  # the message itself can be printed
