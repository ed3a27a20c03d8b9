"""Read the tokens of a server, which writes them as IDs, as texts, or as bytes.

    sent                       a server may write
    464 "The"                  464, "The"
    7696 " bridge"             7696, " bridge", "▁bridge", "bridge"
    2634 (a byte of "é")       2634, "bytes:\\xc3", "<0xC3>", "é", "\ufffd"
    0 "<|endoftext|>"          0, "<|endoftext|>", ""

`ServerTokens.is_sent` says whether a token of a reply is the one that was sent. server.py compares
each token of each reply, to notice a reply that is about another prompt.
"""

from __future__ import annotations

from functools import cache
from typing import Any


class ServerTokens:
    """The tokens of one server, by the tokenizer that the user has passed for its model."""

    def __init__(self, tokenizer: Any) -> None:
        """Read tokens with a tokenizer of the package tokenizers."""
        self.tokenizer = tokenizer
        # Kept, as each token of each reply is compared with it.
        self.text_of = cache(lambda token: tokenizer.decode([token], skip_special_tokens=False))

    def encode(self, text: Any) -> list[int] | None:
        """Return the token IDs of what should be a text; None if it is not a text, or has halves of
        letters, which no tokenizer takes."""
        if not isinstance(text, str) or any("\ud800" <= letter <= "\udfff" for letter in text):
            return None
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def id_of(self, token: Any) -> int | None:
        """Return the ID of a token of a reply, an ID or a text; None if it is neither, or a text of
        several tokens."""
        if isinstance(token, str):
            ids = self.encode(token) or []
            return ids[0] if len(ids) == 1 else None
        return token if type(token) is int else None  # True is not the token 1

    def is_sent(self, token: Any, sent_id: int) -> bool:
        """Return whether a token of a reply, an ID or a text, is the token that was sent."""
        if not isinstance(token, str):
            return self.id_of(token) == sent_id

        # Texts are compared without white space, which servers write in several ways.
        sent_text = self.text_of(sent_id)
        # SentencePiece writes a space as ▁.
        written_text = token.replace("\ufffd", "").replace("▁", " ").strip()

        # A token that is a part of a letter has no text of its own: servers write its bytes, the
        # whole letter, or the mark of what cannot be decoded.
        if "\ufffd" in sent_text:
            is_bytes = token.startswith(("bytes:", "<0x"))
            return is_bytes or sent_text.replace("\ufffd", "").strip() in written_text

        # Some servers write special tokens as nothing.
        is_special = not written_text and sent_id in self.tokenizer.get_added_tokens_decoder()
        return written_text == sent_text.strip() or is_special
