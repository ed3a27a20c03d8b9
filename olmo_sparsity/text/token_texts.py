"""Cut the text of a document into the text of each of its tokens.

    tokens   "na", "ï"[first byte], "ï"[second byte], "ve"
    texts    "na", "",              "ï",              "ve"      joined they are "naïve"

A tokenizer decodes whole texts, and no library returns the text of one token within them: bytes of
one character may be spread over tokens, and a decoder may drop the first space. So tokens are
sorted into groups that have whole characters, and each group is decoded after what precedes it.

Place in the flow: below documents, which it gives words, sentences and what a page shows. Never
imports torch.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Names of the tokens that a `ByteFallback` decoder reads as one byte each."""

_UNKNOWN = "\ufffd"
"""What bytes that are not a character are decoded as."""

_MAX_CONTEXT = 8
"""Tokens without text that a group is decoded after. No tokenizer is known to have more in a row;
without a limit the time would be quadratic in their number."""


@dataclass(frozen=True)
class Group:
    """Tokens that may have parts of one character, so that they are decoded as one."""

    places: list[int]
    texts_by_bytes: list[str] | None = None
    """The text of each token by its bytes; None if the tokens have whole characters."""


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
        cut = _cut_by_bytes([_bytes_of(name) for name in names])
        if "".join(cut.texts) == text:
            return cut.texts
        groups = _groups_of(cut)
        # Another step of the decoder has changed the text, such as one that drops the first space.
    else:
        groups = _by_byte_tokens(names, has_byte_tokens="ByteFallback" in kinds)

    return _decode_groups(tokenizer, ids, text, groups)


def _decode_groups(
    tokenizer: Tokenizer, ids: Sequence[int], text: str, groups: Iterable[Group]
) -> list[str]:
    """Return the text of each token, by decoding one group after the other. `text`: all of them
    decoded at once."""
    texts = [""] * len(ids)
    num_characters = 0  # of `text` that belong to the groups so far
    # The text of a group depends on what precedes it: a space is dropped at the start, for example.
    # So each is decoded after a context, the last group that has text and those without text after
    # it. Decoding all tokens before it would take quadratic time.
    context_ids: list[int] = []
    context_length = 0
    for group in groups:
        group_ids = [ids[place] for place in group.places]
        decoded = tokenizer.decode([*context_ids, *group_ids], skip_special_tokens=False)
        group_text = decoded[context_length:]
        # A decoder that treats the last token in another way writes other characters here than in
        # the whole text.
        while not text.startswith(group_text, num_characters):
            group_text = group_text[:-1]
        if group.texts_by_bytes is not None and "".join(group.texts_by_bytes) == group_text:
            for place, token_text in zip(group.places, group.texts_by_bytes, strict=True):
                texts[place] = token_text
        else:
            texts[group.places[-1]] = group_text
        num_characters += len(group_text)
        # A group with text is context enough; those without text need the one before them.
        context_ids = group_ids if group_text else [*context_ids, *group_ids][-_MAX_CONTEXT:]
        context_length = len(tokenizer.decode(context_ids, skip_special_tokens=False))
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
            yield Group(run, _texts_of_run(content))
            run = []
            content = b""
        yield Group([place])
    if run:
        yield Group(run, _texts_of_run(content))


def _texts_of_run(content: bytes) -> list[str]:
    """Return the text of each byte of a run, as `ByteFallback` decodes it: if a byte anywhere in
    the run is part of no character, none of the run is decoded."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return [_UNKNOWN] * len(content)
    return _cut_by_bytes([bytes([byte]) for byte in content]).texts


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


class _CutText(NamedTuple):
    """A text in UTF-8 that was cut into parts anywhere, also within a character."""

    parts: Sequence[bytes]
    texts: list[str]
    """The characters that each part completes. U+FFFD belongs to the part in which its bytes
    begin."""

    is_complete: list[bool]
    """Whether the bytes up to the end of each part are whole characters."""


def _groups_of(cut: _CutText) -> list[Group]:
    """Return the groups of tokens that share characters. Tokens without bytes are in no group."""
    groups: list[Group] = []
    places: list[int] = []
    for place, content in enumerate(cut.parts):
        if content:
            places.append(place)
        is_end = cut.is_complete[place] or place == len(cut.parts) - 1
        if places and is_end:
            groups.append(Group(places, [cut.texts[place] for place in places]))
            places = []
    return groups


def _cut_by_bytes(contents: Sequence[bytes]) -> _CutText:
    """Decode parts of a text, which may begin or end within a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [""] * len(contents)
    is_complete = []
    pending = b""  # the beginning of a character that no part has completed
    pending_number = 0  # the part in which it begins
    for number, content in enumerate(contents):
        characters = decoder.decode(content)
        if pending and characters.startswith(_UNKNOWN):
            texts[pending_number] += _UNKNOWN
            characters = characters[1:]
        texts[number] += characters
        pending, _ = decoder.getstate()
        if len(pending) <= len(content):  # what is pending begins in this part
            pending_number = number
        is_complete.append(not pending)
    if pending:
        texts[pending_number] += decoder.decode(b"", final=True)
    return _CutText(contents, texts, is_complete)
