"""Long documents become parts: nothing is lost, borders are of text, and parts share a group."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.split import split_long_documents
from olmo_sparsity.text.windows import Windows

PARAGRAPH = "A boat came in at noon. " * 4 + "\n\n"  # 98 characters, of a byte each


def byte_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def document_of(text: str, number: int, name: str = "") -> Document:
    tokenizer = byte_tokenizer()
    tokens = np.array(tokenizer.encode(text).ids)
    return Document(tokens, number, tokenizer=tokenizer, name=name or f"{number}.txt")


@pytest.fixture
def novels() -> Documents:
    """A document of ten paragraphs and one of one, split at 400 tokens."""
    items = [document_of(PARAGRAPH * 10, 0), document_of(PARAGRAPH, 1)]
    return split_long_documents(Documents("novels", items), 400, "a model")


def test_parts_together_are_the_document(novels: Documents) -> None:
    *parts, short = novels.items
    novel = document_of(PARAGRAPH * 10, 0)
    assert np.concatenate([part.tokens for part in parts]).tolist() == novel.tokens.tolist()
    assert short.tokens.tolist() == document_of(PARAGRAPH, 1).tokens.tolist()


def test_parts_are_whole_paragraphs_of_about_equal_length(novels: Documents) -> None:
    *parts, _ = novels.items
    assert len(parts) == 3
    for part in parts:
        assert 200 < len(part.tokens) <= 400
        # A line break before a paragraph is a token of that paragraph.
        paragraphs = "".join(part.texts).strip().split(" \n\n")
        assert set(paragraphs) == {PARAGRAPH.strip()}


def test_parts_are_numbered_and_named(novels: Documents) -> None:
    assert [part.number for part in novels.items] == [0, 1, 2, 3]
    assert [part.name for part in novels.items[:3]] == [f"0.txt, part {i} of 3" for i in (1, 2, 3)]
    assert novels.parts == {"0.txt": [0, 1, 2], "1.txt": [3]}


def test_without_paragraphs_parts_begin_at_sentences_and_else_at_words() -> None:
    sentences = document_of("The sea was calm today. " * 40, 0)
    words = document_of("sea " * 240, 1)
    letters = document_of("s" * 960, 2)
    split = split_long_documents(Documents("t", [sentences, words, letters]), 400, "a model")
    beginnings = ["".join(part.texts).lstrip()[:3] for part in split.items]
    assert beginnings == ["The"] * 3 + ["sea"] * 3 + ["sss"] * 3
    assert all(len(part.tokens) <= 400 for part in split.items)


def test_parts_of_one_document_are_never_unrelated_text_for_each_other() -> None:
    novels = [document_of(PARAGRAPH.replace("boat", name) * 10, i) for i, name in enumerate("ab")]
    split = split_long_documents(Documents("novels", novels), 400, "a model")
    controls = Controls(split, Windows("all", 8, 4, min_distant=8))
    assert controls.num_candidates == 2
    for part in split:
        others = controls._unrelated_to(part)
        assert {other.name[:5] for other in others} == {"1.txt" if part.number < 3 else "0.txt"}
    assert list(split.groups) == ["0.txt", "1.txt"]


def test_groups_of_a_field_stay_and_equal_names_are_kept_apart() -> None:
    novels = [document_of(PARAGRAPH * 10, i, "same") for i in range(2)]
    for novel in novels:
        novel.group = "author"
    split = split_long_documents(Documents("t", novels, grouped_by="by"), 400, "a model")
    assert {part.group for part in split} == {"author"}
    assert split.grouped_by == "by"
    assert list(split.parts) == ["same", "same (1)"]


def test_short_documents_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    documents = Documents("t", [document_of(PARAGRAPH, 0), document_of(PARAGRAPH * 2, 1)])
    assert split_long_documents(documents, 400, "a model") is documents
    assert "no document is longer than the 400 tokens" in capsys.readouterr().err
