"""Identify a tokenizer, count its vocabulary, and name constants of tokens that reading text and
training share. Never imports torch.
"""

from __future__ import annotations

import hashlib

from tokenizers import Tokenizer

BATCH_CHARACTERS = 2**21
"""The number of characters that one call of the tokenizer gets: enough to keep many cores busy,
while its result (some 50 bytes per token) stays small."""

IGNORED = -100
"""The label of a token whose prediction no loss counts (PyTorch's convention)."""


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Return a SHA-256 of everything that determines how text becomes tokens."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def encode_alike(first: Tokenizer, second: Tokenizer, text: str) -> bool:
    """Return whether two tokenizers have the same tokens. A tokenizer that another library has
    saved again has another fingerprint, so that their tokens of `text` are compared, too."""
    if tokenizer_fingerprint(first) == tokenizer_fingerprint(second):
        return True
    if first.get_vocab() != second.get_vocab():
        return False
    ids = first.encode(text, add_special_tokens=False).ids
    return ids == second.encode(text, add_special_tokens=False).ids


def count_vocabulary(tokenizer: Tokenizer) -> int:
    """Return one more than the largest ID. Some vocabularies have gaps, so this may be more than
    the number of tokens."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def ordinary_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the IDs of all tokens that are not special. In a BPE the rarest come last."""
    special = tokenizer.get_added_tokens_decoder().keys()
    return [index for index in range(count_vocabulary(tokenizer)) if index not in special]
