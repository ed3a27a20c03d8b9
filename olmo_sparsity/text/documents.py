"""Hold documents as token IDs of the measured model, with the text and the units of each token.

    document = Document(np.array([464, 3797, 3332, 13]), tokenizer=tokenizer)
    document.texts                  # ["The", " cat", " sat", "."]
    document.units("words", 0, 4)   # the words, as runs of tokens

Place in the flow: inputs → **documents** → windows. `controls.py` draws unrelated texts from them.
Never imports torch.

Dimension key: L tokens of a document.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.base.errors import ConfigError, DataError, check_type, printable
from olmo_sparsity.base.extend import find_added
from olmo_sparsity.text.sentences import sentence_starts
from olmo_sparsity.text.token_texts import token_texts
from olmo_sparsity.text.units import Units, span_width

MAX_GROUPS = 20
"""A field with more values, such as an author, has too few documents of each to split results by
it."""

_BEGINNINGS = {"words": r"(?<!\S)\S", "paragraphs": r"(?:^|\n\s*\n)\s*\S"}
"""Kind of unit → an expression whose last character is the first of a unit: a letter after white
space, or the first letter after a blank line."""


@dataclass(eq=False)
class Document:
    """A document as token IDs."""

    tokens: np.ndarray
    number: int = 0
    """The index of the document in its input, by which its random draws are seeded, too."""

    group: str = ""
    """Documents of one group share text (passages of one article), and never serve as unrelated
    text for each other. Empty: the document shares text with its copies alone."""

    tokenizer: Tokenizer | None = field(default=None, repr=False)
    may_replace: bool = True
    """Whether its text may replace the distant tokens of another document."""

    name: str = ""
    """The document's file and record number, or its title."""

    target: int | None = None
    """The index of the first target token, in a record with a prompt and a target."""

    _unit_numbers: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    """Cache of `_number_units`, by the kind of unit: finding sentences takes time."""

    def __post_init__(self) -> None:
        self.tokens = np.asarray(self.tokens)
        if self.tokens.ndim != 1:
            raise ConfigError(
                f"tokens={printable(repr(self.tokens.tolist()))[:60]} of a document must be a list "
                "of token IDs; encode text with the model's tokenizer"
            )
        if len(self.tokens) and not np.issubdtype(self.tokens.dtype, np.integer):
            # A model would read the whole part of each number.
            shown = ", ".join(str(token) for token in self.tokens[:3].tolist())
            if len(self.tokens) > 3:
                shown += ", …"
            raise ConfigError(
                f"tokens=[{shown}] of a document must be token IDs, which are whole numbers; "
                "encode text with the model's tokenizer"
            )

    @cached_property
    def origin(self) -> str | bytes:
        """Return a value that is the same for documents that share text: documents of one group,
        and copies of one document."""
        return self.group or hashlib.sha256(self.tokens.tobytes()).digest()

    @cached_property
    def texts(self) -> list[str]:
        """Return the text of each token; joined they are the document. Without a tokenizer all are
        empty."""
        if self.tokenizer is None:
            return [""] * len(self.tokens)
        return token_texts(self.tokenizer, self.tokens.tolist())

    def units(self, kind: str, first: int, end: int) -> Units:
        """Return the units of the tokens first … end − 1. In the result, tokens are counted from
        `first`. `kind`: tokens, words, sentences, paragraphs, span:W, or a function of the user."""
        width = span_width(kind)
        if width is not None:
            return Units.of_spans(end - first, width)
        return Units.of_runs(self._number_units(kind)[first:end])

    def _number_units(self, kind: str) -> np.ndarray:
        """Return the index of each token's word, sentence or paragraph in the document."""
        if self.tokenizer is None:
            raise DataError(
                f"units={kind} needs the text of each token, and the model has no tokenizer; "
                "set units to tokens or span:W, such as span:4"
            )
        if kind not in self._unit_numbers:
            # A token belongs to the last unit that begins at or before its first letter.
            starts = _unit_starts(kind, "".join(self.texts))
            first_letters_L = first_characters(self.texts)
            self._unit_numbers[kind] = np.searchsorted(starts, first_letters_L, side="right")
        return self._unit_numbers[kind]


def _unit_starts(kind: str, text: str) -> list[int]:
    """Return the indices of the characters at which a text's units begin, in rising order."""
    if kind == "sentences":
        return sentence_starts(text)
    if kind in _BEGINNINGS:
        return [match.end() - 1 for match in re.finditer(_BEGINNINGS[kind], text)]
    find_starts: Any = find_added(kind, "olmo_sparsity.units", "units")
    return sorted(find_starts(text))


@dataclass(frozen=True)
class Documents(Sequence[Document]):
    """The documents of one input, as they are measured."""

    name: str
    items: list[Document] = field(repr=False)
    num_training: int = 0
    """Documents left out because the model was trained on them."""

    num_too_short: int = 0
    """Documents left out because they are too short to have a target."""

    grouped_by: str = ""
    """The name of the field that groups them. Empty: the input itself determines groups, such as
    the articles of Wikipedia. Unrelated texts come from other groups."""

    parts: dict[str, list[int]] = field(default_factory=dict, repr=False)
    """If long documents were split: the indices in `items` of the parts of each document, by its
    name."""

    def __post_init__(self) -> None:
        check_type("items", self.items, Document, "a list of Document", several=True)

    @staticmethod
    def of(texts: Sequence[np.ndarray], name: str = "documents") -> Documents:
        return Documents(name, [Document(text, number) for number, text in enumerate(texts)])

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Document:  # type: ignore[override] # slices are not used
        return self.items[number]

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of everything in the documents that draws and losses depend on. It is
        stored with results, so that they are not mixed with those of another text."""
        digest = hashlib.sha256(self.grouped_by.encode())
        for document in self.items:
            # In one format, whatever the dtype and the machine. With their number, as two documents
            # would otherwise hash like one.
            tokens = document.tokens.astype("<u4")
            digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
            if not document.may_replace:
                digest.update(b"is not a control")
        return digest.hexdigest()

    @property
    def groups(self) -> dict[str, list[int]]:
        """Return the numbers of the documents of each group, by which results are split. It is
        empty if no field groups them, or if there are too many groups."""
        if not self.grouped_by:
            return {}
        numbers: dict[str, list[int]] = {}
        for document in self.items:
            numbers.setdefault(document.group, []).append(document.number)
        return numbers if 1 < len(numbers) <= MAX_GROUPS else {}

    @property
    def have_targets(self) -> bool:
        """Return whether these are records of prompt and target."""
        return bool(self.items) and self.items[0].target is not None


def first_characters(texts: Sequence[str]) -> np.ndarray:
    """Return the index in the joined text of each token's first character that is not white space:
    the token " cat" belongs to the word after the space."""
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    spaces = np.array([len(text) - len(text.lstrip()) for text in texts], dtype=np.int64)
    return np.cumsum(lengths) - lengths + spaces
