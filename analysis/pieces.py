"""The text of each token, so that the pieces of a document joined are the document.

Place in the flow: beside the tables, for people. Never imports torch.

A character may be spread over several tokens. It belongs to the token that completes it; those
before hold the empty string. (U+FFFD, which a part of any character is decoded as, belongs to the
first of its own tokens.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """As many strings as ids; joined they are `tokenizer.decode(ids)`, special tokens included."""
    ids = [int(token_id) for token_id in ids]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    pieces: list[str] = []
    # A decoder sees a token's neighbours (a space dropped at the start, bytes that join), so each
    # is decoded behind the few before it, from `first` to `done`, whose text is known.
    first, done, known, at = 0, 0, 0, 0
    for end in range(1, len(ids)):
        new = tokenizer.decode(ids[first:end], skip_special_tokens=False)[known:]
        piece = new
        while not text.startswith(piece, at):  # the document has no part of a character
            piece = piece[:-1]
        pieces.append(piece)
        at += len(piece)
        known += len(piece)
        if piece and piece == new:
            first, done = done, end
            known = len(tokenizer.decode(ids[first:done], skip_special_tokens=False))
    return [*pieces, text[at:]] if ids else []


def first_characters(pieces: Sequence[str]) -> np.ndarray:
    """Where in the joined text each piece begins, the white space it starts with not counted: a
    token that begins with a space belongs to the word after it."""
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    spaces = [len(piece) - len(piece.lstrip()) for piece in pieces]
    return np.cumsum(lengths) - lengths + np.array(spaces, dtype=np.int64)
