"""Documents as token IDs of the measured model, their texts, and the unrelated ones of controls.

Place in the flow: inputs → **documents** → windows. Never imports torch.

Dimension key: L tokens of a document, F distant places.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.base.errors import ConfigError, DataError, check_type, printable
from olmo_sparsity.base.extend import find_added
from olmo_sparsity.base.streams import stream
from olmo_sparsity.config.text import Control
from olmo_sparsity.text.sentences import sentence_starts
from olmo_sparsity.text.token_texts import token_texts
from olmo_sparsity.text.windows import Block, Spans, Units, Windows, span_width

MOST_GROUPS = 20
"""A field with more values, such as an author, is no way to split results."""

_BEGINNINGS = {"words": r"(?<!\S)\S", "paragraphs": r"(?:^|\n\s*\n)\s*\S"}
"""A word or paragraph begins with the last character of a match."""


@dataclass(eq=False)
class Document:
    tokens: np.ndarray
    number: int = 0
    """Index of the document in its source, which also seeds the document's random draws."""

    group: str = ""
    """Documents of one group share text (passages of one article), and never serve as unrelated
    text for each other. Empty: it shares text with its copies alone."""

    tokenizer: Tokenizer | None = field(default=None, repr=False)
    may_replace: bool = True
    """Whether its text may replace the distant tokens of another document."""

    name: str = ""
    """The document's file and record number, or its title."""

    target: int | None = None
    """First place of the target in a record with a prompt and a target."""

    _unit_numbers: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    """For each kind of unit, what `_number_units` has returned: finding sentences takes time."""

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
            raise ConfigError(
                f"tokens=[{shown}{', …' if len(self.tokens) > 3 else ''}] of a document must be "
                "token IDs, which are whole numbers; encode text with the model's tokenizer"
            )

    @cached_property
    def origin(self) -> str | bytes:
        """Return a value that is equal for documents that share text."""
        return self.group or hashlib.sha256(self.tokens.tobytes()).digest()

    @cached_property
    def texts(self) -> list[str]:
        """Return the text of each token; joined they are the document. Without a tokenizer they
        are empty."""
        if self.tokenizer is None:
            return [""] * len(self.tokens)
        return token_texts(self.tokenizer, self.tokens.tolist())

    def units(self, kind: str, first: int, end: int) -> Units:
        """Return the units of the places first … end − 1, counted from `first`."""
        width = span_width(kind)
        if width is not None:
            return Units.of_spans(end - first, width)
        return Units.of_runs(self._number_units(kind)[first:end])

    def _number_units(self, kind: str) -> np.ndarray:
        """Return for each token the number of its word, sentence or paragraph."""
        if self.tokenizer is None:
            raise DataError(
                f"units={kind} needs the text of each token, and the model has no tokenizer; "
                "set units to tokens or span:W, such as span:4"
            )
        if kind not in self._unit_numbers:
            starts = _unit_starts(kind, "".join(self.texts))
            inside_L = first_characters(self.texts)
            self._unit_numbers[kind] = np.searchsorted(starts, inside_L, side="right")
        return self._unit_numbers[kind]


def _unit_starts(kind: str, text: str) -> list[int]:
    """Return the numbers of the characters at which a text's units begin, rising."""
    if kind == "sentences":
        return sentence_starts(text)
    if kind in _BEGINNINGS:
        return [match.end() - 1 for match in re.finditer(_BEGINNINGS[kind], text)]
    find_starts: Any = find_added(kind, "olmo_sparsity.units", "units")
    return sorted(find_starts(text))


@dataclass(frozen=True)
class Documents(Sequence[Document]):
    name: str
    items: list[Document] = field(repr=False)
    num_training: int = 0
    """Documents left out because the model was trained on them."""

    num_too_short: int = 0
    """Documents left out because they are too short to have a target."""

    grouped_by: str = ""
    """The field that groups them: unrelated texts come from other groups. Empty: their source."""

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
        """Return a hash of all that draws and losses depend on; stored results carry it."""
        digest = hashlib.sha256(self.grouped_by.encode())
        for document in self.items:
            tokens = document.tokens.astype("<u4")
            digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
            if not document.may_replace:
                digest.update(b"is not a control")
        return digest.hexdigest()

    @property
    def groups(self) -> dict[str, list[int]]:
        """Return the documents of each value of `grouped_by`, if these are few, to split results
        by."""
        if not self.grouped_by:
            return {}
        numbers: dict[str, list[int]] = {}
        for document in self.items:
            numbers.setdefault(document.group, []).append(document.number)
        return numbers if 1 < len(numbers) <= MOST_GROUPS else {}

    @property
    def have_targets(self) -> bool:
        """Return whether these are records of prompt and target."""
        return bool(self.items) and self.items[0].target is not None


def first_characters(texts: Sequence[str]) -> np.ndarray:
    """Return where in the joined text each token begins, leading white space skipped: a token that
    begins with a space belongs to the word after it."""
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    spaces = np.array([len(text) - len(text.lstrip()) for text in texts], dtype=np.int64)
    return np.cumsum(lengths) - lengths + spaces


# --- controls -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DistantText:
    """Distant tokens, as places in the document that they come from."""

    document: Document
    places_F: np.ndarray

    @staticmethod
    def at(document: Document, first: int, num_distant: int) -> DistantText:
        """Return `num_distant` consecutive tokens from the place `first` on."""
        return DistantText(document, np.arange(first, first + num_distant))

    @property
    def is_run(self) -> bool:
        """Return whether its tokens are consecutive in their document."""
        return bool((np.diff(self.places_F) == 1).all())

    @property
    def tokens_F(self) -> np.ndarray:
        return self.document.tokens[self.places_F]

    def units(self, kind: str) -> Units:
        """Return the units of a text whose tokens are consecutive."""
        first = int(self.places_F.min())
        return self.document.units(kind, first, first + len(self.places_F))

    def text(self, first: int, end: int) -> str:
        """Return the text of the distant places first … end − 1; without a tokenizer, the token
        IDs."""
        places = self.places_F[first:end]
        if self.document.tokenizer is None:
            return " ".join(str(token) for token in self.document.tokens[places])
        return "".join(self.document.texts[place] for place in places)


@dataclass(frozen=True)
class Controls:
    """Draw the texts that replace a document's distant tokens.

    Every draw is seeded by (seed, document, block, draw), so the numbers do not depend on which
    process measures a document, or in which order. With `long="all"`, one draw serves all blocks
    of a document, and each takes as much of its beginning as it needs. If no other document is as
    long, several are joined."""

    documents: Sequence[Document]
    windows: Windows
    kind: Control = "unrelated"
    num_draws: int = 3
    seed: int = 0

    @cached_property
    def _candidates(self) -> list[Document]:
        """Return the documents whose text may replace another's."""
        return [
            document
            for document in self.documents
            if self.windows.has_all or len(document.tokens) > self.windows.first_target
            if document.may_replace
        ]

    @cached_property
    def _joined_documents(self) -> dict[tuple, Document]:
        return {}

    @property
    def num_candidates(self) -> int:
        """Return how many texts may replace others, copies and documents of one group as one."""
        return len({document.origin for document in self._candidates})

    def _unrelated_to(self, document: Document) -> list[Document]:
        return [
            other
            for other in self._candidates
            if other.number != document.number and other.origin != document.origin
        ]

    def unrelated(self, document: Document, block: Block, draw: int) -> DistantText:
        """Draw as many consecutive tokens of another document as the block has distant tokens."""
        return self._draw(self._unrelated_to(document), document, block, "unrelated", draw)

    def placebo(self, document: Document, block: Block) -> DistantText:
        """Draw an unrelated text that takes the role of the document's own text. If there are
        enough documents, it is none of those that `unrelated` draws."""
        return self._draw(self._unused(document, block), document, block, "placebo")

    def replacement(self, document: Document, block: Block, draw: int) -> DistantText:
        """Draw a text to replace the document's own. If there are enough documents, it is neither
        the placebo nor one of those that `unrelated` draws."""
        unused = self._unused(document, block)
        placebo = self.placebo(document, block).document
        without_placebo = [other for other in unused if other is not placebo]
        return self._draw(without_placebo or unused, document, block, "replacement", draw)

    def _unused(self, document: Document, block: Block) -> list[Document]:
        """Return the documents that `unrelated` does not draw; all, if there are too few."""
        others = self._unrelated_to(document)
        used = set()
        for draw in range(self.num_draws):
            drawn = self._draw(others, document, block, "unrelated", draw)
            used.add(drawn.document.number)
        return [other for other in others if other.number not in used] or others

    def control_texts(
        self,
        document: Document,
        block: Block,
        distant: dict[str, tuple[DistantText, Spans]],
        draw: int,
    ) -> Iterator[tuple[DistantText, dict[str, Spans]]]:
        """Yield the unrelated texts of one draw, each with the targets that it serves.

        `distant` has the distant texts of a block (the document's own, a placebo), each with its
        targets; what is yielded names them by the same keys."""
        if self.kind == "unrelated":  # one text for the whole block
            targets = {part: spans for part, (_, spans) in distant.items()}
            yield self.unrelated(document, block, draw), targets
            return
        for part, (replaced, spans) in distant.items():
            if self.kind == "shuffled":
                generator = stream(self.seed, "shuffled", document.number, block.start, draw)
                places_F = generator.permutation(replaced.places_F)
                yield replace(replaced, places_F=places_F), {part: spans}
                continue
            # Matched: a text that contains the target's token serves all targets with this token.
            # A placebo is not compared with its own document.
            others = [
                other for other in self._unrelated_to(document) if other is not replaced.document
            ]
            tokens = block.targets_W[[first for first, _ in spans]]
            for token in np.unique(tokens).tolist():
                text = self._with_token(others, document, block, token, draw)
                served = [spans[index] for index in np.flatnonzero(tokens == token)]
                yield text, {part: served}

    def _draw(
        self, others: list[Document], document: Document, block: Block, purpose: str, *keys: int
    ) -> DistantText:
        """Draw a text of the block's number of distant tokens from one of `others`. `purpose` and
        `keys` seed the draw, together with the document and the block."""
        start = block.start
        length = block.num_distant
        is_all = self.windows.has_all
        if is_all:
            # One draw, as long as the last block needs, serves all blocks.
            start = 0
            length = self.windows.tokens_before(len(document.tokens)) - self.windows.short
        long_enough = [other for other in others if len(other.tokens) >= length]
        generator = stream(self.seed, purpose, document.number, start, *keys)
        if long_enough:
            other = long_enough[generator.integers(len(long_enough))]
        elif is_all and sum(len(other.tokens) for other in others) >= length:
            other = self._joined(others, (document.number, purpose, *keys), length, generator)
        else:
            raise DataError(
                f"controls need another document of at least {length:,} tokens, and none of "
                f"{len(others)} unrelated ones is as long; pass more or longer documents"
            )
        first = int(generator.integers(len(other.tokens) - length + 1))
        return DistantText.at(other, first, block.num_distant)

    def _joined(
        self,
        others: list[Document],
        key: tuple[int | str, ...],
        length: int,
        generator: np.random.Generator,
    ) -> Document:
        """Join others in random order to a document of `length` tokens. The last one is kept for
        the blocks of a document, as the text of each token takes time."""
        if key not in self._joined_documents:
            parts: list[np.ndarray] = []
            num_tokens = 0
            for index in generator.permutation(len(others)).tolist():
                parts.append(others[index].tokens)
                num_tokens += len(parts[-1])
                if num_tokens >= length:
                    break
            tokens = np.concatenate(parts)[:length]
            self._joined_documents.clear()
            self._joined_documents[key] = Document(tokens, -1, "joined", others[0].tokenizer)
        return self._joined_documents[key]

    def _with_token(
        self, others: list[Document], document: Document, block: Block, token: int, draw: int
    ) -> DistantText:
        """Draw a text that contains the token anywhere. If no document has the token, insert it at
        a random place."""
        num_distant = block.num_distant
        generator = stream(self.seed, "with token", document.number, block.start, draw, token)
        holders = [
            other
            for other in others
            if len(other.tokens) >= num_distant and (other.tokens == token).any()
        ]
        if not holders:
            text = self._draw(others, document, block, "token inserted", draw, token)
            changed = replace(text.document, tokens=text.document.tokens.copy())
            changed.tokens[generator.choice(text.places_F)] = token
            return DistantText(changed, text.places_F)
        holder = holders[generator.integers(len(holders))]
        place = int(generator.choice(np.flatnonzero(holder.tokens == token)))
        # The first places from which a text has the token and does not leave the document.
        lowest = max(0, place - num_distant + 1)
        highest = min(place, len(holder.tokens) - num_distant)
        return DistantText.at(holder, int(generator.integers(lowest, highest + 1)), num_distant)
