"""Documents, and their words and sentences."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.text.distant_text import DistantText
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.units import Units
from tests.support.tokenizers_of_bytes import llama_like_tokenizer


def texts_of(units: Units, document: Document, origin: int = 0) -> list[str]:
    return [
        "".join(document.texts[origin + first : origin + end])
        for first, end in zip(units.first, units.end, strict=True)
    ]


def encoded(text: str, tokenizer: Tokenizer) -> Document:
    return Document(np.array(tokenizer.encode(text).ids), tokenizer=tokenizer)


SENTENCES = [
    "It is 3.5 miles, he said.",
    "“Really?”",
    'She asked: "Why (and how)?"',
    "Nobody knew…",
    "A heading",
    "Then it rained!",
    "Übung macht den Meister.",
]


@pytest.mark.parametrize("family", ["byte-level", "llama"])
def test_sentences_end_where_a_reader_ends_them(tokenizer: Tokenizer, family: str) -> None:
    """At a full stop, also behind a closing quote, and at a blank line; not at 3.5. Paragraphs end
    at a blank line alone."""
    *before, heading, after, last = SENTENCES
    text = " ".join(before) + f"\n\n{heading}\n\n{after}  {last}"
    document = encoded(text, tokenizer if family == "byte-level" else llama_like_tokenizer())
    assert "".join(document.texts) == text
    of_kinds = {
        "sentences": SENTENCES,
        "words": text.split(),
        "paragraphs": [" ".join(before), heading, f"{after}  {last}"],
    }
    for kind, expected in of_kinds.items():
        units = document.units(kind, 0, len(document.tokens))
        assert [unit.strip() for unit in texts_of(units, document)] == expected
        first, end = 5, len(document.tokens) - 9  # within a unit, counted from its first place
        part, distant = (
            document.units(kind, first, end),
            DistantText.at(document, first, end - first),
        )
        whole = [set(range(a, b)) for a, b in zip(units.first, units.end, strict=True)]
        cut = [sorted(p - first for p in unit if first <= p < end) for unit in whole]
        assert [list(part.distant_indices(i)) for i in range(len(part))] == [*filter(None, cut)]
        assert distant.units(kind).first.tolist() == part.first.tolist()
        assert distant.text(2, 9) == "".join(document.texts[first + 2 : first + 9])


def test_without_a_tokenizer_there_are_tokens_and_spans_only() -> None:
    document = Document(np.array([5, 6, 7, 8, 9]))
    assert document.texts == [""] * 5
    assert DistantText.at(document, 1, 4).text(1, 3) == "7 8"
    assert len(document.units("tokens", 0, 5)) == 5
    assert len(document.units("span:2", 1, 5)) == 3
    for kind in ("words", "sentences", "paragraphs"):
        with pytest.raises(DataError, match="the model has no tokenizer"):
            document.units(kind, 0, 5)


def test_token_ids_that_are_not_whole_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tokens=\[1.0, 2.5\] of a document must be token IDs"):
        Document(np.array([1.0, 2.5]))


def test_documents_are_known_by_their_tokens() -> None:
    texts = [np.arange(5), np.arange(3)]
    fingerprint = Documents.of(texts).fingerprint
    assert Documents.of([text.astype(np.uint16) for text in texts]).fingerprint == fingerprint
    apart = [np.arange(4), np.array([4, 0, 1, 2])]
    others = [texts[::-1], [np.arange(5)], apart, [*texts, texts[0]]]
    assert len({fingerprint, *(Documents.of(other).fingerprint for other in others)}) == 5
    kept = [replace(document, may_replace=False) for document in Documents.of(texts)]
    assert Documents("d", kept).fingerprint != fingerprint
    sizes = [len(text).to_bytes(8, "little") for text in texts]
    content = b"".join(n + t.astype("<u4").tobytes() for n, t in zip(sizes, texts, strict=True))
    assert fingerprint == hashlib.sha256(content).hexdigest(), "stored measurements have it"
    plain = Documents("d", [Document(texts[0])])
    assert (plain.num_training, plain.num_too_short, plain[0].number) == (0, 0, 0)
    records = [replace(plain[0], target=3), plain[0]]
    assert [Documents("d", some).have_targets for some in (records, records[::-1])] == [True, False]
