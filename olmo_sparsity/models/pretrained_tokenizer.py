"""Read the tokenizer of a trained model, of any library, as a `tokenizers.Tokenizer`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from olmo_sparsity.base.errors import ConfigError, DataError, one_line, unreadable
from olmo_sparsity.base.files import read_bounded
from olmo_sparsity.models.transformers_folder import NO_CODE

_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def as_tokenizer(given: Any) -> Tokenizer:
    """Return a copy, because calls of the original may set truncation and padding."""
    fast = getattr(given, "backend_tokenizer", given)
    if not isinstance(fast, Tokenizer):
        raise ConfigError(f"tokenizer must be a fast one, not {type(given).__name__}")
    return _set_plain(Tokenizer.from_str(fast.to_str()))


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    added = tokenizer.get_added_tokens_decoder().items()
    return {number: token.content for number, token in added if token.special}


def spelled_in(text: str, ids: list[int], special: dict[int, str]) -> list[str]:
    """Return the special tokens among the IDs of a text that the text itself spells."""
    names = [special[number] for number in special.keys() & set(ids)]
    return sorted(name for name in names if name in text)


def without_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer to which the names of special tokens are ordinary text."""
    copied = Tokenizer.from_str(tokenizer.to_str())
    copied.encode_special_tokens = True
    return copied


def without_space_before(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer for texts that continue others: sentencepiece puts a space before each."""
    written = json.loads(tokenizer.to_str())
    steps = [written["normalizer"], written["pre_tokenizer"]]
    before = repr(steps)
    none: dict[str, dict] = {"ByteLevel": {"add_prefix_space": False}}
    none |= {"Prepend": {"prepend": ""}, "Metaspace": {"prepend_scheme": "never"}}
    for step in filter(None, steps):  # grows
        step.update(none.get(step["type"], {}))
        steps += [*step.get("normalizers", []), *step.get("pretokenizers", [])]
    is_same = repr(steps[:2]) == before
    return tokenizer if is_same else Tokenizer.from_str(json.dumps(written))


def read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise DataError(f"'{path}' does not exist; copy the tokenizer it was trained with there")
    try:
        return _set_plain(Tokenizer.from_buffer(read_bounded(path, 2**28)))
    except Exception as error:  # tokenizers raises bare Exception
        raise unreadable(path, error) from None


def _set_plain(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()  # a tokenizer.json may enable truncation or padding
    tokenizer.no_padding()
    return tokenizer


def find_tokenizer(folder: Path) -> Tokenizer | None:
    if (folder / "tokenizer.json").is_file():
        return read_tokenizer(folder / "tokenizer.json")
    tokenizer = read_transformers_tokenizer(folder)
    return None if tokenizer is None else as_tokenizer(tokenizer)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def read_transformers_tokenizer(folder: Path) -> Any | None:
    if not has_tokenizer(folder):
        return None  # transformers would create one with only special tokens
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **NO_CODE)
        tokenizer.encode("a")  # which reads what its config says, such as model_max_length
        return tokenizer
    except Exception as error:  # a missing library or damaged file raises almost any
        reason = f"{one_line(error)}; save it once with AutoTokenizer"
        raise DataError(f"'{folder}': transformers cannot read its tokenizer ({reason})") from None


def tokens_before(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens that a tokenizer, of either library, puts before this text."""
    try:
        plain, complete = _ids(tokenizer, text, False), _ids(tokenizer, text, True)
    except Exception as error:  # tokenizers raises bare Exception, for a word that it does not know
        raise DataError(f"prefix=auto: the tokenizer cannot read '{text[:40]}': {error}") from None
    starts = (i for i in range(len(complete)) if complete[i : i + len(plain)] == plain)
    if not plain or (start := next(starts, None)) is None:
        both = f"{complete[:8]} with special tokens, {plain[:8]} without"
        raise DataError(f"prefix=auto: '{text[:40]}' is {both}; pass prefix=bos, none or a text")
    return complete[:start]


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    encoded = tokenizer.encode(text, add_special_tokens=special)
    return list(getattr(encoded, "ids", encoded))
