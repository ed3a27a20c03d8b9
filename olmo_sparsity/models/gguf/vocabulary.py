"""Check the vocabulary of a GGUF file, which has no checksum: nothing else notices a flipped bit.

    tokens       "a", "b", "ab", "<|end|>"
    token_type    1,   1,   1,    3           an ordinary token is 1, a control token 3
    merges       "a b"                        makes "ab"

Damage shows as entries that contradict each other. Two tokens "ab", a merge "a x", or an ID of no
token: the file is rejected. A token "ax" that no merge makes is only odd, as some files have such
tokens on purpose: the user is warned. tokenizer.py calls `check_vocabulary`.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from tokenizers import pre_tokenizers

from olmo_sparsity.base.progress import say
from olmo_sparsity.models.gguf.header import Header, damaged

_NORMAL = 1
_CONTROL = 3
_ADDED = 4
"""Three of the six types of tokens in a file. The other three are unknown, unused and byte, which
tokenizers that merge bytes do not have."""


def check_vocabulary(header: Header, entries: dict[str, Any]) -> None:
    """Raise DataError for a vocabulary that contradicts itself, and warn of what looks odd in it.

    Args:
        header: The header of the file, for its path and for keys that GGUF does not define.
        entries: The entries of the tokenizer, by the last part of their keys.
    """
    tokens = entries["tokens"]
    token_types = entries.get("token_type") or [_NORMAL] * len(tokens)
    if len(set(tokens)) != len(tokens):
        raise damaged(header, f"its vocabulary holds {Counter(tokens).most_common(1)} twice")
    if len(token_types) != len(tokens) or not {*token_types} <= {*range(1, 7)}:
        raise damaged(
            header, f"its tokens are of {len(token_types)} types, {sorted({*token_types})}"
        )
    for score in entries.get("scores", ()):
        if not math.isfinite(score):
            raise damaged(header, f"a token has the score {score}")

    odd = _find_odd_special_tokens(header, entries, token_types)
    odd += _find_unknown_keys(header)
    if entries["model"] == "gpt2":
        odd += _find_odd_tokens_of_bpe(header, entries, token_types)
    if odd:
        say(
            f"{header.path.name}: {len(odd)} entries or tokens ({odd[0]!r}) do not agree with the "
            "others; the file may be damaged"
        )


def _find_odd_special_tokens(
    header: Header, entries: dict[str, Any], token_types: list[int]
) -> list[str]:
    """Return special tokens whose type is that of ordinary ones. Raise DataError for an ID of no
    token."""
    tokens = entries["tokens"]
    odd: list[str] = []
    for key, token_id in entries.items():
        if not key.endswith("_token_id"):
            continue
        if not 0 <= token_id < len(tokens):
            raise damaged(header, f"tokenizer.ggml.{key}={token_id}, of {len(tokens)} tokens")
        if token_types[token_id] == _NORMAL:
            odd.append(tokens[token_id])
    return odd


def _find_unknown_keys(header: Header) -> list[str]:
    """Return keys of the tokenizer that GGUF does not define, as a flipped bit in a key makes. Chat
    templates may have any name."""
    from gguf import Keys

    defined = vars(Keys.Tokenizer).values()
    keys = [key for key in header.metadata if key.startswith("tokenizer.")]
    keys = [key for key in keys if not key.startswith("tokenizer.chat_template.")]
    return [key for key in keys if key not in defined]


def _find_odd_tokens_of_bpe(
    header: Header, entries: dict[str, Any], token_types: list[int]
) -> list[str]:
    """Return ordinary tokens that no merge makes, and special ones that a merge makes. Raise
    DataError for merges whose parts or result are not in the vocabulary, and for tokens that are
    not made of bytes."""
    known_tokens = set(entries["tokens"])
    merges = [tuple(merge.split(" ")) for merge in entries["merges"]]
    for merge, count in Counter(merges).items():
        is_known = len(merge) == 2 and known_tokens.issuperset({*merge, "".join(merge)})
        if count > 1 or not is_known:
            raise damaged(header, f"its merge {' '.join(merge)!r} is not of its vocabulary")

    # Each byte is written as a printable letter.
    letters = {*pre_tokenizers.ByteLevel.alphabet()}
    merged_tokens = letters | {"".join(merge) for merge in merges}
    odd: list[str] = []
    for token, token_type in zip(entries["tokens"], token_types, strict=True):
        is_normal = token_type == _NORMAL
        if is_normal and not letters.issuperset(token):
            raise damaged(header, f"its token {token!r} is not of bytes")
        # llama.cpp's converter fills a vocabulary up to the size of the embedding with tokens
        # [PAD7], [PAD8], …, which are unused.
        has_usual_type = token_type in (_NORMAL, _CONTROL, _ADDED) or token.startswith("[PAD")
        if not has_usual_type or (token in merged_tokens) != is_normal:
            odd.append(token)
    return odd
