"""The text of each token, so that the pieces of a document joined are the document.

Place in the flow: beside the tables, for people. Never imports torch.

A character may be spread over several tokens. It belongs to the token that completes it; those
before hold the empty string.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Sequence

from tokenizers import Tokenizer, pre_tokenizers


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """As many strings as ids; joined they are `tokenizer.decode(ids)`, special tokens included."""
    ids = [int(token_id) for token_id in ids]
    tokens = [tokenizer.id_to_token(token_id) for token_id in ids]
    if _is_byte_level(tokenizer):
        return _byte_level_pieces(tokens)
    pieces = _grown_pieces(tokenizer, ids, tokens)
    if "".join(pieces) == _decode(tokenizer, ids):
        return pieces
    return _prefix_pieces(tokenizer, ids)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str())["decoder"]
    return decoder is not None and decoder["type"] == "ByteLevel"


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
    for i, token in enumerate(tokens):
        before, after = _decode(tokenizer, ids[start:done]), _decode(tokenizer, ids[start : i + 1])
        is_byte = token is not None and re.fullmatch(r"<0x[0-9A-F]{2}>", token)
        if is_byte and after.endswith("�") and i + 1 < len(ids):
            pieces.append("")
            continue
        pieces.append(after[len(before) :])
        start, done = done, i + 1
    return pieces


def _prefix_pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Right for every decoder, in quadratic time: what all tokens so far agree on with the whole."""
    text = _decode(tokenizer, ids)
    ends = [0]
    for i in range(1, len(ids)):
        agreed = os.path.commonprefix([_decode(tokenizer, ids[:i]), text])
        ends.append(max(ends[-1], len(agreed)))
    ends.append(len(text))
    return [text[a:b] for a, b in zip(ends, ends[1:], strict=False)] if ids else []


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)
