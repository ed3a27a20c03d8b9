"""The text of each token: joined it is the document, and no character is lost or moved."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from olmo_sparsity.analysis.measurement.at import find_spans
from olmo_sparsity.data.tokenizer import load_tokenizer, train_tokenizer
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.token_texts import token_texts
from tests.support.fake_results import fake_words
from tests.support.tokenizers_of_bytes import llama_like_tokenizer

CORNERS = ["Hello  wörld 🧑‍🚀 \x00 � <|endoftext|>  é e\u0301", "a    b\n\n\t\tx", ""]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {
        "trained": train_tokenizer(iter(["".join(fake_words(0)), *CORNERS]), 400),
        "gpt-neox": load_tokenizer("allenai_gpt-neox-olmo-dolma-v1_5"),
        "llama": llama_like_tokenizer(),
    }


@pytest.mark.parametrize("name", ["trained", "gpt-neox", "llama"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text() | st.sampled_from(CORNERS) | st.text(alphabet="ab.,' é🚀�"), data=st.data())
def test_pieces_joined_are_the_document(
    tokenizers: dict[str, Tokenizer], name: str, text: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text).ids
    start = data.draw(st.integers(0, len(ids)))  # a document may begin and end within a character
    ids = ids[start : data.draw(st.integers(start, len(ids)))]
    for place in data.draw(st.sets(st.integers(0, len(ids)), max_size=2)):
        ids.insert(place, 10**6)  # no token of the vocabulary
    pieces = token_texts(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)


@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="�"), min_size=1)
    | st.text("a é🚀", min_size=1),
    data=st.data(),
)
def test_tokens_that_end_anywhere_keep_the_characters_that_they_complete(
    text: str, data: st.DataObject
) -> None:
    """Bytes are cut into tokens at random. Up to each of them, all tokens before it are decoded."""
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((letters, _),) = as_bytes.pre_tokenize_str(text)  # one letter for each byte
    cuts = sorted(data.draw(st.sets(st.integers(1, len(letters)))) | {len(letters)})
    tokens = [letters[first:end] for first, end in zip([0, *cuts], cuts, strict=False)]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, tokens[0]))
    tokenizer.decoder = decoders.ByteLevel()
    ids = [vocabulary[token] for token in tokens]
    pieces = token_texts(tokenizer, ids)
    for end in range(1, len(ids) + 1):
        assert "".join(pieces[:end]) == tokenizer.decode(ids[:end]).rstrip("�")


class CountingTokenizer:
    """A tokenizer that counts how often it decodes tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_decodes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.num_decodes += 1
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def test_byte_level_tokens_are_decoded_together_and_not_one_by_one() -> None:
    """Once, to compare the result: a document has hundreds of thousands of tokens."""
    tokenizer = CountingTokenizer(load_tokenizer("allenai_gpt-neox-olmo-dolma-v1_5"))
    ids = tokenizer.encode("naïve 🚀 words, and more words").ids
    assert "".join(token_texts(tokenizer, ids)) == "naïve 🚀 words, and more words"
    assert tokenizer.num_decodes == 1


def test_byte_level_tokens_whose_decoder_drops_the_first_space_have_its_text() -> None:
    """Spelled byte by byte they have one character more than the whole text."""
    tokenizer = Tokenizer(models.WordLevel({"Ġa": 0, "Ã": 1, "¯": 2, "Ġb": 3}, "Ġa"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert tokenizer.decode([0, 1, 2, 3]) == "aï b"
    assert token_texts(tokenizer, [0, 1, 2, 3]) == ["a", "", "ï", " b"]


TWICE = "a \ufffd\ufffd b c"


def test_tokens_after_two_unknown_characters_keep_their_own_text() -> None:
    """Each U+FFFD is three tokens here, of one byte each."""
    tokenizer = llama_like_tokenizer()
    ids = tokenizer.encode(TWICE).ids
    expected = ["", "a", " ", "\ufffd", "", "", "\ufffd", "", "", " ", "b", " ", "c"]
    assert token_texts(tokenizer, ids) == expected


def test_words_after_two_unknown_characters_are_words_of_their_own() -> None:
    tokenizer = llama_like_tokenizer()
    ids = tokenizer.encode(TWICE).ids
    document = Document(np.array(ids), tokenizer=tokenizer)
    units = document.units("words", 0, len(ids))
    assert (units.end - units.first).tolist() == [2, 7, 2, 2]  # each with the space before it


def test_a_target_before_and_after_two_unknown_characters_is_found_twice() -> None:
    tokenizer = llama_like_tokenizer()
    document = Document(np.array(tokenizer.encode("ab \ufffd\ufffd ab c").ids), tokenizer=tokenizer)
    spans = find_spans(document, "ab")
    found = ["".join(document.texts[first:end]) for first, end in spans]
    assert found == ["ab", "ab"]
    assert [end - first for first, end in spans] == [2, 2]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["<0xC3>", "<0xA9>", "b"], ["", "é", "b"]),
        (["<0xC3>", "b"], ["\ufffd", "b"]),
        (["<0xC3>", "<0xA9>", "<0xC3>", "b"], ["\ufffd", "\ufffd", "\ufffd", "b"]),
        (["▁", "▁", "b"], ["", " ", "b"]),
    ],
)
def test_bytes_that_are_no_character_are_one_sign_each(
    names: list[str], expected: list[str]
) -> None:
    """The decoder of such a vocabulary decodes a run of bytes whole, or no byte of it."""
    tokenizer = llama_like_tokenizer()
    ids = [tokenizer.token_to_id(name) for name in names]
    assert token_texts(tokenizer, ids) == expected
    assert "".join(expected) == tokenizer.decode(ids)


@pytest.mark.parametrize("letters", ["\ufffd", "\ufffd\ufffd ab ", "é", "ab "])
def test_the_time_is_linear_in_the_length(letters: str) -> None:
    """Of 8,000 characters and of 32,000; quadratic time would be 16 times as long."""
    tokenizer = llama_like_tokenizer()
    seconds = []
    for num_characters in (8_000, 32_000):
        ids = tokenizer.encode(letters * (num_characters // len(letters))).ids
        began = time.process_time()
        token_texts(tokenizer, ids)
        seconds.append(time.process_time() - began)
    assert seconds[1] < 10 * seconds[0]
