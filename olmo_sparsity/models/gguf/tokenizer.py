"""Read the tokenizer of a GGUF file, and check its vocabulary.

    entries of a file, without "tokenizer.ggml."        the tokenizer here
    tokens          "a", "b", "ab", …              ─┐
    merges          "a b", …                        ├─ transformers' converter ─> `_backend`
    token_type      1, 1, 1, … (1 is ordinary)     ─┘
    pre             "smollm"                       ─── digits are split off before merging
    bos_token_id    0                              ─── `_post_processor`: what precedes a text

How text is split into words is set here by the name in `pre`, as llama.cpp does it: transformers
knows only some of these names. `tokenizer_of` is the entry: format.py calls it for a conversion,
and sources/open.py, by `read_gguf_tokenizer`, for a model that llama.cpp runs.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, pre_tokenizers, processors

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.gguf.header import REMEDY, Header, damaged, read_header

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPLIT_AS_GPT2 = ("gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "trillion", "roberta-bpe")
_SPLIT_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "tekken"
)  # fmt: skip
"""Names in `tokenizer.ggml.pre`, by how llama.cpp splits text before it merges bytes: by the
expression of GPT-2; by the same after splitting off each digit; and, whatever the expression, with
words of the vocabulary taken whole."""

_NORMAL = 1
_CONTROL = 3
_ADDED = 4
"""Three of the six types of tokens in a file."""

_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens of transformers, and their names in entries of the file."""


def read_gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a GGUF file, without its weights."""
    return tokenizer_of(read_header(path))


def tokenizer_of(header: Header) -> PreTrainedTokenizerFast:
    """Return the tokenizer in the entries of a header."""
    from transformers import PreTrainedTokenizerFast

    entries = _tokenizer_entries(header)
    try:
        _check_vocabulary(header, entries)
        backend = _backend(header, entries)
        special = _special_tokens(entries)
        backend.post_processor = _post_processor(entries, special)
    except (KeyError, IndexError, TypeError) as error:
        raise DataError(
            f"'{header.path}': its tokenizer is incomplete ({type(error).__name__}: {error}); "
            "download it again"
        ) from None
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=entries.get("chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _tokenizer_entries(header: Header) -> dict[str, Any]:
    """Return the tokenizer's entries by the last part of their keys: `tokens` for
    `tokenizer.ggml.tokens`."""
    return {
        key.removeprefix("tokenizer.").removeprefix("ggml."): value
        for key, value in header.metadata.items()
        if key.startswith("tokenizer.")
    }


def _special_tokens(entries: dict[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens, such as `bos_token`."""
    special = {}
    for name, name_in_file in _SPECIAL.items():
        token_id = entries.get(f"{name_in_file}_token_id")
        if token_id is not None:
            special[f"{name}_token"] = entries["tokens"][token_id]
    return special


def _post_processor(entries: dict[str, Any], special: dict[str, str]) -> Any:
    """Return the step that puts special tokens before and after a text. Where the file does not say
    whether a text begins with one, it is as in llama.cpp."""
    usually_puts_bos = entries["model"] == "llama"
    if entries["model"] == "gpt2":
        usually_puts_bos = entries.get("pre") in _WHOLE_WORDS

    template = ["$A"]  # the text, in the words of `tokenizers`
    ids_of_tokens = []
    if entries.get("add_bos_token", usually_puts_bos) and "bos_token" in special:
        template.insert(0, special["bos_token"])
        ids_of_tokens.append((special["bos_token"], entries["bos_token_id"]))
    if entries.get("add_eos_token", False) and "eos_token" in special:
        template.append(special["eos_token"])
        ids_of_tokens.append((special["eos_token"], entries["eos_token_id"]))
    return processors.TemplateProcessing(single=template, special_tokens=ids_of_tokens)


def _check_vocabulary(header: Header, entries: dict[str, Any]) -> None:
    """Reject a vocabulary that contradicts itself, and warn of what looks odd in it. The file has
    no checksum, so nothing else notices a flipped bit in a token."""
    tokens = entries["tokens"]
    kinds = entries.get("token_type") or [_NORMAL] * len(tokens)
    if len(set(tokens)) != len(tokens):
        raise damaged(header, f"its vocabulary holds {Counter(tokens).most_common(1)} twice")
    if len(kinds) != len(tokens) or not {*kinds} <= {*range(1, 7)}:
        raise damaged(header, f"its tokens are of {len(kinds)} types, {sorted({*kinds})}")
    for score in entries.get("scores", ()):
        if not math.isfinite(score):
            raise damaged(header, f"a token has the score {score}")
    odd = _odd_special_tokens(header, entries, kinds)
    odd += _unknown_keys(header)
    if entries["model"] == "gpt2":
        odd += _odd_tokens_of_bpe(header, entries, kinds)
    if odd:
        say(
            f"{header.path.name}: {len(odd)} entries or tokens ({odd[0]!r}) do not agree with the "
            "others; the file may be damaged"
        )


def _odd_special_tokens(header: Header, entries: dict[str, Any], kinds: list[int]) -> list[str]:
    """Return special tokens whose type is that of ordinary ones. Reject IDs of no token."""
    tokens = entries["tokens"]
    odd: list[str] = []
    for key, token_id in entries.items():
        if not key.endswith("_token_id"):
            continue
        if not 0 <= token_id < len(tokens):
            raise damaged(header, f"tokenizer.ggml.{key}={token_id}, of {len(tokens)} tokens")
        if kinds[token_id] == _NORMAL:
            odd.append(tokens[token_id])
    return odd


def _unknown_keys(header: Header) -> list[str]:
    """Return keys of the tokenizer that GGUF does not define; chat templates have any name."""
    from gguf import Keys

    defined = vars(Keys.Tokenizer).values()
    keys = [key for key in header.metadata if key.startswith("tokenizer.")]
    keys = [key for key in keys if not key.startswith("tokenizer.chat_template.")]
    return [key for key in keys if key not in defined]


def _odd_tokens_of_bpe(header: Header, entries: dict[str, Any], kinds: list[int]) -> list[str]:
    """Return ordinary tokens that no merge makes, and special ones that a merge makes. Reject
    merges whose parts or result are not in the vocabulary, and tokens that are not made of
    bytes."""
    known = set(entries["tokens"])
    merges = [tuple(merge.split(" ")) for merge in entries["merges"]]
    for merge, count in Counter(merges).items():
        if count > 1 or len(merge) != 2 or not known.issuperset({*merge, "".join(merge)}):
            raise damaged(header, f"its merge {' '.join(merge)!r} is not of its vocabulary")
    letters = {*pre_tokenizers.ByteLevel.alphabet()}
    merged = letters | {"".join(merge) for merge in merges}
    odd: list[str] = []
    for token, kind in zip(entries["tokens"], kinds, strict=True):
        if kind == _NORMAL and not letters.issuperset(token):
            raise damaged(header, f"its token {token!r} is not of bytes")
        has_usual_kind = kind in (_NORMAL, _CONTROL, _ADDED) or token.startswith("[PAD")
        if not has_usual_kind or (token in merged) != (kind == _NORMAL):
            odd.append(token)
    return odd


def _backend(header: Header, entries: dict[str, Any]) -> Tokenizer:
    """Return transformers' own tokenizer, changed to split text into words as llama.cpp does."""
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    pre = entries.get("pre", "default")
    renamed = {
        names[f"ggml.{key}"]: value for key, value in entries.items() if f"ggml.{key}" in names
    }
    try:
        backend: Tokenizer = convert_gguf_tokenizer(header.architecture, renamed)[0]
    except ValueError as error:
        raise DataError(f"'{header.path}': {error}; {REMEDY}") from None
    if entries["model"] != "gpt2":  # SentencePiece and other kinds
        return backend
    if pre in _SPLIT_DIGITS:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif pre not in {*_SPLIT_AS_GPT2, *GGUF_PRE_TOKENIZER_SPLITS}:
        known = ", ".join(sorted({*_SPLIT_AS_GPT2, *_SPLIT_DIGITS, *GGUF_PRE_TOKENIZER_SPLITS}))
        raise DataError(f"'{header.path}': tokenizer.ggml.pre={pre} is not supported, only {known}")
    backend.model.ignore_merges = pre in _WHOLE_WORDS
    return backend
