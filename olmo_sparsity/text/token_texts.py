"""Cut the text of a document into the text of each of its tokens.

    tokens   "na", "ï"[first byte], "ï"[second byte], "ve"
    texts    "na", "",              "ï",              "ve"      joined they are "naïve"

No library does this: a tokenizer decodes whole texts, the bytes of one character may be spread over
tokens, and a decoder may drop the first space. `token_texts` has three ways, the fastest first:

1. Byte-level tokens (GPT-2, Llama 3) spell bytes. They are decoded one after the other, and the
   result is right if it equals the whole text.
2. Otherwise tokens are sorted into groups that have whole characters, each group is decoded after a
   few tokens before it, and the texts of a group's bytes are kept if they fit.
3. If they do not fit, the last token of the group gets the text of the whole group.

`Document.texts` (documents.py) calls it. Words, sentences and what a page shows are made of the
result. Never imports torch.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Names of the tokens that a `ByteFallback` decoder reads as one byte each, such as <0xC3>."""

_NO_CHARACTER = "\ufffd"
"""The replacement character, as which bytes that are not a character are decoded."""

_MAX_CONTEXT = 8
"""The number of tokens without text that a group is decoded after. No tokenizer is known to have
more in a row; without a limit the time would be quadratic in their number."""


@dataclass(frozen=True)
class _Group:
    """Tokens that share characters, so that they can only be decoded together."""

    indices: list[int]
    """Indices of the tokens in the document."""

    texts_by_bytes: list[str] | None = None
    """The text of each token if the decoder only joins bytes. None for a token that is no bytes."""


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return one string per token; joined they are `tokenizer.decode(ids)`, with special tokens.

    A character that is spread over several tokens belongs to the token that completes it, and the
    tokens before have the empty string. U+FFFD, as which bytes that are not a character are
    decoded, belongs to the first of its tokens. The time is linear in the number of tokens.
    """
    ids = [int(token_id) for token_id in ids]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    names = [tokenizer.id_to_token(token_id) for token_id in ids]
    kinds = _kinds_of_decoder(tokenizer)
    groups: Iterable[_Group]
    if "ByteLevel" in kinds:
        parts = _decode_parts([_bytes_of(name) for name in names])
        if "".join(parts.texts) == text:
            return parts.texts
        # Another step of the decoder has changed the text, such as one that drops the first space.
        groups = _group_byte_level(parts)
    else:
        groups = _group_byte_fallback(names, has_byte_tokens="ByteFallback" in kinds)

    return _decode_groups(tokenizer, ids, text, groups)


def _decode_groups(
    tokenizer: Tokenizer, ids: Sequence[int], text: str, groups: Iterable[_Group]
) -> list[str]:
    """Return the text of each token, by decoding one group after the other. `text`: all tokens
    decoded at once, which the results must add up to."""
    texts = [""] * len(ids)
    num_characters = 0  # of `text` that belong to the groups so far
    # The text of a group depends on what precedes it: a space is dropped at the start, for example.
    # So each is decoded after a context, the last group that has text and those without text after
    # it. Decoding all tokens before it would take quadratic time.
    context_ids: list[int] = []
    context_length = 0
    for group in groups:
        group_ids = [ids[index] for index in group.indices]
        decoded = tokenizer.decode([*context_ids, *group_ids], skip_special_tokens=False)
        group_text = decoded[context_length:]
        # A decoder that treats the last token in another way writes other characters here than in
        # the whole text.
        while not text.startswith(group_text, num_characters):
            group_text = group_text[:-1]

        if group.texts_by_bytes is not None and "".join(group.texts_by_bytes) == group_text:
            for index, token_text in zip(group.indices, group.texts_by_bytes, strict=True):
                texts[index] = token_text
        else:
            texts[group.indices[-1]] = group_text
        num_characters += len(group_text)

        # A group with text is context enough; those without text need the one before them.
        context_ids = group_ids if group_text else [*context_ids, *group_ids][-_MAX_CONTEXT:]
        context_length = len(tokenizer.decode(context_ids, skip_special_tokens=False))
    if ids:
        texts[-1] += text[num_characters:]
    return texts


def _kinds_of_decoder(tokenizer: Tokenizer) -> set[str]:
    """Return the types of all steps of a tokenizer's decoder, such as {"ByteFallback", "Fuse"}."""
    if tokenizer.decoder is None:
        return set()
    kinds = set()
    # A step of the type Sequence holds more steps.
    steps: list[dict[str, Any]] = [json.loads(tokenizer.decoder.__getstate__())]
    while steps:
        step = steps.pop()
        kinds.add(step["type"])
        steps += step.get("decoders", [])
    return kinds


# --- tokens that spell single bytes (ByteFallback) ------------------------------------------------


def _group_byte_fallback(names: Sequence[str | None], has_byte_tokens: bool) -> Iterator[_Group]:
    """Yield a group for each run of tokens that are one byte each, and one for each other token.

    Args:
        names: The token of each ID. A token ID outside the vocabulary, whose name is None, is in no
            group, as `decode` skips it.
        has_byte_tokens: Whether names such as <0xC3> are bytes for the tokenizer's decoder.
    """
    run: list[int] = []
    run_bytes = b""
    for index, name in enumerate(names):
        if name is None:
            continue
        byte = _BYTE_TOKEN.fullmatch(name) if has_byte_tokens else None
        if byte is not None:
            run.append(index)
            run_bytes += bytes.fromhex(byte[1])
            continue
        if run:
            yield _Group(run, _decode_run(run_bytes))
            run = []
            run_bytes = b""
        yield _Group([index])
    if run:
        yield _Group(run, _decode_run(run_bytes))


def _decode_run(run_bytes: bytes) -> list[str]:
    """Return the text of each byte of a run, as `ByteFallback` decodes it: if a byte anywhere in
    the run is part of no character, none of the run is decoded."""
    try:
        run_bytes.decode()
    except UnicodeDecodeError:
        return [_NO_CHARACTER] * len(run_bytes)
    return _decode_parts([bytes([byte]) for byte in run_bytes]).texts


# --- tokens that spell any bytes (ByteLevel) ------------------------------------------------------


def _bytes_of(name: str | None) -> bytes:
    """Return the bytes that a `ByteLevel` decoder makes of a token: "Ġa" becomes b" a"."""
    if name is None:
        return b""
    try:
        return bytes(_BYTE_OF_LETTER[letter] for letter in name)
    except KeyError:  # an added token, whose name is plain text
        return name.encode()


def _byte_of_letter() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary spells: printable letters of
    Latin-1 are bytes themselves, and the other bytes are the letters from U+0100 on (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_of_letter()


class _DecodedParts(NamedTuple):
    """Parts of a text in UTF-8, which was cut anywhere, also within a character."""

    parts: Sequence[bytes]
    texts: list[str]
    """The characters that each part completes. U+FFFD belongs to the part in which its bytes
    begin."""

    is_complete: list[bool]
    """Whether the bytes up to the end of each part are whole characters."""


def _group_byte_level(decoded: _DecodedParts) -> list[_Group]:
    """Return the groups of tokens that share characters. Tokens without bytes are in no group."""
    groups: list[_Group] = []
    indices: list[int] = []
    for index, part in enumerate(decoded.parts):
        if part:
            indices.append(index)
        ends_group = decoded.is_complete[index] or index == len(decoded.parts) - 1
        if indices and ends_group:
            groups.append(_Group(indices, [decoded.texts[index] for index in indices]))
            indices = []
    return groups


def _decode_parts(parts: Sequence[bytes]) -> _DecodedParts:
    """Decode the parts of a text one after the other. The bytes of "na", C3 and AF give the texts
    "na", "" and "ï"."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [""] * len(parts)
    is_complete = []
    pending = b""  # the beginning of a character that no part has completed
    pending_index = 0  # of the part in which it begins
    for index, part in enumerate(parts):
        characters = decoder.decode(part)
        # The pending bytes turned out to be no character.
        if pending and characters.startswith(_NO_CHARACTER):
            texts[pending_index] += _NO_CHARACTER
            characters = characters[1:]
        texts[index] += characters
        pending, _ = decoder.getstate()
        if len(pending) <= len(part):  # what is pending begins in this part
            pending_index = index
        is_complete.append(not pending)
    if pending:
        texts[pending_index] += decoder.decode(b"", final=True)
    return _DecodedParts(parts, texts, is_complete)
