"""Read the tokenizer of a trained model as a `tokenizers.Tokenizer`, from the files or objects of
any library, and change how it treats control tokens and spaces.

    find_tokenizer, as_tokenizer    from a folder, from an object
    without_control_tokens          "<|im_end|>" becomes characters, as it should in documents
    without_space_before            a text that continues another one gets no space before it
    tokens_before                   what a tokenizer puts before a text, such as <s>

Text is encoded in a copy, with truncation and padding off: an object that a user passes may have
both, and keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from olmo_sparsity.base.errors import ConfigError, DataError, one_line, unreadable
from olmo_sparsity.base.files import read_bounded
from olmo_sparsity.models.huggingface.folder import NO_CODE

_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Names of files, of which a folder with a tokenizer has at least one."""


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """Return a tokenizer of transformers or of tokenizers as one of tokenizers. The result is a
    copy, because calls of the original may set truncation and padding."""
    fast = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(fast, Tokenizer):
        raise ConfigError(
            f"tokenizer must be a fast one, not {type(tokenizer).__name__}; pass one of "
            "AutoTokenizer, or of tokenizers"
        )
    plain = _set_plain(Tokenizer.from_str(fast.to_str()))
    if fast is not tokenizer:
        _check_same_tokens(tokenizer, plain)
        plain.encode_special_tokens = False  # the check may have set it
    return plain


_PROBE = "  The Café  in Zürich opened\n\tat 9:30, didn't IT? ２ﬁ "
"""A text that code around a tokenizer is likely to change: it has capitals, accents, white space at
both ends and twice in a row, and characters that Unicode's compatible forms replace."""

_NUM_PROBED_IDS = 32
"""The number of tokens of the vocabulary whose text is a second probe. In a vocabulary of a few
words, all words of the first one may be unknown."""


def _check_same_tokens(tokenizer: Any, plain: Tokenizer) -> None:
    """Raise ConfigError if a tokenizer of transformers has Python code that changes tokens. Only
    its backend encodes texts here. `plain`: a copy of the backend."""
    special = special_tokens(plain)
    ids = sorted(set(plain.get_vocab().values()) - special.keys())
    step = max(1, len(ids) // _NUM_PROBED_IDS)
    for text in (_PROBE, plain.decode(ids[::step])):
        try:
            expected = plain.encode(text, add_special_tokens=False).ids
        except Exception:  # tokenizers raises bare Exception, for a word that it does not know
            continue
        for encode, way in _ways_to_encode(tokenizer, plain):
            # Without the special tokens around a text, which `tokens_before` reads.
            try:
                encoded = encode(text, add_special_tokens=False)
                ids_of_text = getattr(encoded, "input_ids", encoded)
            except Exception as error:  # of anybody's code
                changed = f"raises {one_line(f'{type(error).__name__}: {error}')}"
            else:
                if list(ids_of_text) == expected:
                    continue
                changed = f"does not return the tokens of its backend_tokenizer for {text[:40]!r}"
            raise ConfigError(
                f"tokenizer: {type(tokenizer).__name__}{way} {changed}, and only the backend is "
                "used; apply its Python code to the texts, or make it a normalizer of the backend, "
                "and pass tokenizer.backend_tokenizer"
            )


def _ways_to_encode(tokenizer: Any, plain: Tokenizer) -> list[tuple[Callable[..., Any], str]]:
    """Return the functions with which a tokenizer of transformers encodes a text, and how an error
    names them. They encode with `plain` in place of its backend, as a call sets the truncation and
    padding of the backend, which a user may have set."""
    copied = copy(tokenizer)
    copied._tokenizer = plain
    copied.model_max_length = 2**30  # otherwise it may warn that a text is long
    return [(copied, "(text)"), (copied.encode, ".encode(text)")]


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the texts of special tokens, by their IDs."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {token_id: token.content for token_id, token in added if token.special}


def spelled_in(text: str, ids: list[int], special: dict[int, str]) -> list[str]:
    """Return the special tokens that a text spells out and that became control tokens.

    Args:
        ids: The token IDs of the text.
        special: The texts of special tokens, by their IDs.
    """
    names = [special[token_id] for token_id in special.keys() & set(ids)]
    return sorted(name for name in names if name in text)


def without_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer that reads the names of special tokens as ordinary text."""
    copied = Tokenizer.from_str(tokenizer.to_str())
    copied.encode_special_tokens = True
    return copied


_NO_SPACE: dict[str, dict[str, Any]] = {
    "ByteLevel": {"add_prefix_space": False},
    "Prepend": {"prepend": ""},
    "Metaspace": {"prepend_scheme": "never"},
}
"""For each type of step in a tokenizer: the setting with which it puts no space before a text."""


def without_space_before(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer for texts that continue others. A tokenizer of sentencepiece would put a
    space before each of them."""
    settings = json.loads(tokenizer.to_str())
    is_changed = False
    steps = [settings["normalizer"], settings["pre_tokenizer"]]
    while steps:
        step = steps.pop()
        if step is None:
            continue
        for name, value in _NO_SPACE.get(step["type"], {}).items():
            is_changed |= step.get(name) != value
            step[name] = value
        # A step may be a sequence of steps.
        steps += [*step.get("normalizers", []), *step.get("pretokenizers", [])]
    return Tokenizer.from_str(json.dumps(settings)) if is_changed else tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`."""
    if not path.is_file():
        raise DataError(f"'{path}' does not exist; copy the tokenizer it was trained with there")
    try:
        return _set_plain(Tokenizer.from_buffer(read_bounded(path, 2**28)))
    except Exception as error:  # tokenizers raises bare Exception
        raise unreadable(path, error) from None


def _set_plain(tokenizer: Tokenizer) -> Tokenizer:
    """Switch off what a tokenizer.json may enable: truncation, padding, and the dropout of a BPE,
    with which a text would have other tokens each time."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer that a folder holds in the format of any library; None if it holds
    none."""
    if (folder / "tokenizer.json").is_file():
        return read_tokenizer(folder / "tokenizer.json")
    tokenizer = read_transformers_tokenizer(folder)
    return None if tokenizer is None else as_tokenizer(tokenizer)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer of any library."""
    return any((folder / name).is_file() for name in _FILES)


def read_transformers_tokenizer(folder: Path) -> Any | None:
    """Return the tokenizer of a folder as a transformers object; None if it holds none."""
    if not has_tokenizer(folder):
        return None  # transformers would create one with only special tokens
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **NO_CODE)
        tokenizer.encode("a")  # fails if its config is wrong, such as model_max_length
        return tokenizer
    except Exception as error:  # a missing library or damaged file raises almost any
        reason = f"{one_line(error)}; save it once with AutoTokenizer"
        raise DataError(f"'{folder}': transformers cannot read its tokenizer ({reason})") from None


def tokens_before(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens that a tokenizer of either library puts before this text, such as a
    beginning-of-text token."""
    try:
        plain = _ids(tokenizer, text, special=False)
        complete = _ids(tokenizer, text, special=True)
    except Exception as error:  # tokenizers raises bare Exception, for a word that it does not know
        raise DataError(f"prefix=auto: the tokenizer cannot read '{text[:40]}': {error}") from None
    if plain:
        for start in range(len(complete)):
            if complete[start : start + len(plain)] == plain:
                return complete[:start]
    raise DataError(
        f"prefix=auto: '{text[:40]}' is {complete[:8]} with special tokens, {plain[:8]} without; "
        "pass prefix=bos, none or a text"
    )


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    """Return the token IDs of a text, with or without the special tokens around it."""
    encoded = tokenizer.encode(text, add_special_tokens=special)
    return list(getattr(encoded, "ids", encoded))
