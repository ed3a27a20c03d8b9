"""The text of each token, so that the pieces of a document joined are the document.

Place in the flow: beside the tables, for people. Never imports torch.

A character may be spread over several tokens. It belongs to the token that completes it; those
before hold the empty string.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """As many strings as ids; joined they are `tokenizer.decode(ids)`, special tokens included."""
    ids = [int(token_id) for token_id in ids]
    tokens = [tokenizer.id_to_token(token_id) for token_id in ids]
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return _byte_level_pieces(tokens)
    pieces = _grown_pieces(tokenizer, ids, tokens)
    if "".join(pieces) == _decode(tokenizer, ids):
        return pieces
    return _prefix_pieces(tokenizer, ids)


def first_characters(pieces: Sequence[str]) -> np.ndarray:
    """Where in the joined text each piece begins, the white space it starts with not counted: a
    token that begins with a space belongs to the word after it."""
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    spaces = [len(piece) - len(piece.lstrip()) for piece in pieces]
    return np.cumsum(lengths) - lengths + np.array(spaces, dtype=np.int64)


def _byte_level_pieces(tokens: list[str | None]) -> list[str]:
    byte_of = _bytes_by_character()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    pieces = []
    for token in tokens:
        if token is None:  # an id the vocabulary has no token for decodes to nothing
            pieces.append("")
            continue
        try:
            raw = bytes([byte_of[character] for character in token])
        except KeyError:  # an added token, which stands for itself
            raw = token.encode()
        pieces.append(decoder.decode(raw))
    if pieces:  # a character cut off by the end of the document
        pieces[-1] += decoder.decode(b"", final=True)
    return pieces


def _bytes_by_character() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE: printable bytes are themselves, the others follow
    from U+0100 in order."""
    stand_ins = set(pre_tokenizers.ByteLevel.alphabet())
    table = {chr(byte): byte for byte in range(256) if chr(byte) in stand_ins}
    others = [byte for byte in range(256) if chr(byte) not in stand_ins]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


def _grown_pieces(tokenizer: Tokenizer, ids: list[int], tokens: list[str | None]) -> list[str]:
    """Any other decoder sees its neighbours (a space dropped at the start, bytes that join), so a
    piece is what a token adds to the text of the few before it."""
    pieces: list[str] = []
    start = done = 0  # decode from `start`; the text of ids before `done` is out
    pending = b""
    for i, token in enumerate(tokens):
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token or "")
        pending = pending + bytes.fromhex(byte[1]) if byte else b""
        if i + 1 < len(ids) and not _is_utf8(pending):
            pieces.append("")
            continue
        pending = b""
        before, after = _decode(tokenizer, ids[start:done]), _decode(tokenizer, ids[start : i + 1])
        pieces.append(after[len(before) :])
        start, done = done, i + 1
    return pieces


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _prefix_pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Right for every decoder, in quadratic time: as far as a prefix agrees with the whole."""
    text = _decode(tokenizer, ids)
    ends = [0]
    for i in range(1, len(ids)):
        pairs = zip(_decode(tokenizer, ids[:i]), text, strict=False)
        num_agreed = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        ends.append(max(ends[-1], num_agreed))
    ends.append(len(text))
    return [text[a:b] for a, b in itertools.pairwise(ends)] if ids else []


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)
