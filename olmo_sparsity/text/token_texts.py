"""Cut the text of a document into the text of each of its tokens. Never imports torch.

Place in the flow: below documents, which it gives words, sentences and what a page shows.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Names of the tokens that a `ByteFallback` decoder reads as one byte each."""

_UNKNOWN = "\ufffd"
"""What bytes that are not a character are decoded as."""

_MOST_CONTEXT = 8
"""Tokens without text that a group is decoded after. More in a row are unknown; without a limit the
time would be quadratic in their number."""

Group = tuple[list[int], list[str] | None]
"""Places of tokens that may have parts of one character, and the text of each by its bytes; None if
the tokens have whole characters."""


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return one string per token; joined they are `tokenizer.decode(ids)`, with special tokens.

    A character may be spread over several tokens. It belongs to the token that completes it, and
    the tokens before hold the empty string. U+FFFD, which bytes that are not a character are
    decoded as, belongs to the first of its own tokens. The time is linear in the number of tokens.
    """
    ids = [int(token_id) for token_id in ids]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    names = [tokenizer.id_to_token(token_id) for token_id in ids]
    kinds = _kinds_of_decoder(tokenizer)
    groups: Iterable[Group]
    if "ByteLevel" in kinds:
        texts, groups = _by_bytes(names)
        if "".join(texts) == text:
            return texts
        # Another step of the decoder has changed the text, such as one that drops the first space.
    else:
        groups = _by_byte_tokens(names, has_byte_tokens="ByteFallback" in kinds)

    texts = [""] * len(ids)
    num_characters = 0  # of `text` that belong to the groups so far
    # The text of a group depends on what precedes it: a space is dropped at the start, for example.
    # So each is decoded after a context, the last group that has text and those without text after
    # it. Decoding all tokens before it would take quadratic time.
    context: list[int] = []
    context_length = 0
    for places, pieces in groups:
        group = [ids[place] for place in places]
        decoded = tokenizer.decode([*context, *group], skip_special_tokens=False)
        new = decoded[context_length:]
        # A decoder that treats the last token in another way writes other characters here than in
        # the whole text.
        while not text.startswith(new, num_characters):
            new = new[:-1]
        if pieces is not None and "".join(pieces) == new:
            for place, piece in zip(places, pieces, strict=True):
                texts[place] = piece
        else:
            texts[places[-1]] = new
        num_characters += len(new)
        context = group if new else [*context, *group][-_MOST_CONTEXT:]
        context_length = len(tokenizer.decode(context, skip_special_tokens=False))
    if ids:
        texts[-1] += text[num_characters:]
    return texts


def _kinds_of_decoder(tokenizer: Tokenizer) -> set[str]:
    """Return the types of all steps of a tokenizer's decoder."""
    if tokenizer.decoder is None:
        return set()
    kinds = set()
    steps: list[dict[str, Any]] = [json.loads(tokenizer.decoder.__getstate__())]
    while steps:
        step = steps.pop()
        kinds.add(step["type"])
        steps += step.get("decoders", [])
    return kinds


def _by_byte_tokens(names: Sequence[str | None], has_byte_tokens: bool) -> Iterator[Group]:
    """Yield runs of tokens that are one byte each, and each other token by itself. A token ID
    outside the vocabulary, whose name is None, is in no group, as `decode` skips it."""
    run: list[int] = []
    content = b""
    for place, name in enumerate(names):
        if name is None:
            continue
        byte = _BYTE.fullmatch(name) if has_byte_tokens else None
        if byte is not None:
            run.append(place)
            content += bytes.fromhex(byte[1])
            continue
        if run:
            yield run, _texts_of_run(content)
            run = []
            content = b""
        yield [place], None
    if run:
        yield run, _texts_of_run(content)


def _texts_of_run(content: bytes) -> list[str]:
    """Return the text of each byte of a run, as `ByteFallback` decodes it: if a byte anywhere in
    the run is part of no character, none of the run is decoded."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return [_UNKNOWN] * len(content)
    texts, _ = _characters_of([bytes([byte]) for byte in content])
    return texts


def _by_bytes(names: Sequence[str | None]) -> tuple[list[str], list[Group]]:
    """Return the text of each token of a `ByteLevel` decoder, and the groups of tokens that share
    characters. Tokens without bytes are in no group."""
    contents = [_bytes_of(name) for name in names]
    texts, is_complete = _characters_of(contents)
    groups: list[Group] = []
    places: list[int] = []
    for place, content in enumerate(contents):
        if content:
            places.append(place)
        if places and (is_complete[place] or place == len(contents) - 1):
            groups.append((places, [texts[place] for place in places]))
            places = []
    return texts, groups


def _bytes_of(name: str | None) -> bytes:
    """Return the bytes that a `ByteLevel` decoder makes of a token."""
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
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_of_letter()


def _characters_of(contents: Sequence[bytes]) -> tuple[list[str], list[bool]]:
    """Return the characters that each part of some UTF-8 completes, and whether the bytes up to its
    end are whole characters. U+FFFD belongs to the part in which its bytes begin."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [""] * len(contents)
    is_complete = []
    pending = b""  # the beginning of a character that no part has completed
    first = 0  # the part in which it begins
    for number, content in enumerate(contents):
        characters = decoder.decode(content)
        if pending and characters.startswith(_UNKNOWN):
            texts[first] += _UNKNOWN
            characters = characters[1:]
        texts[number] += characters
        pending, _ = decoder.getstate()
        if len(pending) <= len(content):
            first = number
        is_complete.append(not pending)
    if pending:
        texts[first] += decoder.decode(b"", final=True)
    return texts, is_complete
