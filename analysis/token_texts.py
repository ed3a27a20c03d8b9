"""The text of each token, such that the texts of all tokens joined give the document.

Place in the flow: token IDs of a document → **text per token**. Never imports torch.

A character may be spread over several tokens. It belongs to the token that completes it; the
tokens before hold the empty string. (U+FFFD, which an incomplete character is decoded as, belongs
to the first of its own tokens.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """One string per token; joined they are `tokenizer.decode(ids)`, special tokens included."""
    ids = [int(token_id) for token_id in ids]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    texts: list[str] = []
    # The text of a token depends on its neighbours (a space dropped at the start, bytes that join),
    # so each is decoded after the few before it, from `first` to `done`, whose text is known.
    first, done, known, at = 0, 0, 0, 0
    for end in range(1, len(ids)):
        new = tokenizer.decode(ids[first:end], skip_special_tokens=False)[known:]
        complete = new
        while not text.startswith(complete, at):  # ends with an incomplete character
            complete = complete[:-1]
        texts.append(complete)
        at += len(complete)
        known += len(complete)
        if complete and complete == new:
            first, done = done, end
            known = len(tokenizer.decode(ids[first:done], skip_special_tokens=False))
    return [*texts, text[at:]] if ids else []


def first_characters(texts: Sequence[str]) -> np.ndarray:
    """Where in the joined text each token begins, leading white space skipped: a token that begins
    with a space belongs to the word after it."""
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    spaces = [len(text) - len(text.lstrip()) for text in texts]
    return np.cumsum(lengths) - lengths + np.array(spaces, dtype=np.int64)
