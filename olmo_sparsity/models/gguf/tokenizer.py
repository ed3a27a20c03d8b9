"""Read the tokenizer of a GGUF file.

    entries of a file, without "tokenizer.ggml."        the tokenizer here
    tokens          "a", "b", "ab", …              ─┐
    merges          "a b", …                        ├─ transformers' converter ─> `_make_backend`
    token_type      1, 1, 1, … (1 is ordinary)     ─┘
    pre             "smollm"                       ─── digits are split off before merging
    bos_token_id    0                              ─── `_post_processor`: what precedes a text

How text is split into words is set here by the name in `pre`, as llama.cpp does it: transformers
knows only some of these names. `tokenizer_of` is the entry: format.py calls it for a conversion,
and sources/open.py, by `read_gguf_tokenizer`, for a model that llama.cpp runs. vocabulary.py checks
the entries first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, pre_tokenizers, processors

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.models.gguf.header import REMEDY, Header, read_header
from olmo_sparsity.models.gguf.vocabulary import check_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Names in `tokenizer.ggml.pre`, by how llama.cpp splits text before it merges bytes.

_SPLIT_AS_GPT2 = ("gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "trillion", "roberta-bpe")
"""Names of the expression of GPT-2."""

_SPLIT_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Names of the same expression, after each digit was split off."""

_WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "tekken"
)  # fmt: skip
"""Names of tokenizers, with several expressions, that take a word of the vocabulary whole, without
merging its bytes. Of these, llama.cpp also puts a beginning-of-text token before a text."""

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
        check_vocabulary(header, entries)
        backend = _make_backend(header, entries)
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


def _make_backend(header: Header, entries: dict[str, Any]) -> Tokenizer:
    """Return transformers' own tokenizer, changed to split text into words as llama.cpp does."""
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    # The converter takes entries by names of transformers, such as unk_token_id.
    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    renamed = {
        names[f"ggml.{key}"]: value for key, value in entries.items() if f"ggml.{key}" in names
    }
    try:
        backend: Tokenizer = convert_gguf_tokenizer(header.architecture, renamed)[0]
    except ValueError as error:
        raise DataError(f"'{header.path}': {error}; {REMEDY}") from None
    if entries["model"] != "gpt2":  # SentencePiece and other kinds
        return backend

    # The converter has set the splits of GGUF_PRE_TOKENIZER_SPLITS, and GPT-2's for other names.
    pre = entries.get("pre", "default")
    if pre in _SPLIT_DIGITS:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif pre not in {*_SPLIT_AS_GPT2, *GGUF_PRE_TOKENIZER_SPLITS}:
        known = ", ".join(sorted({*_SPLIT_AS_GPT2, *_SPLIT_DIGITS, *GGUF_PRE_TOKENIZER_SPLITS}))
        raise DataError(f"'{header.path}': tokenizer.ggml.pre={pre} is not supported, only {known}")
    backend.model.ignore_merges = pre in _WHOLE_WORDS
    return backend


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
