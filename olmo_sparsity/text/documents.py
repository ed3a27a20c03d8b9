"""Documents as token IDs of the measured model, their texts, and the unrelated ones of controls.

Place in the flow: sources → **documents** → windows. Never imports torch.

Dimension key: L tokens of a document, F far places.
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

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.extend import find_added
from olmo_sparsity.base.streams import stream
from olmo_sparsity.config.text import Control
from olmo_sparsity.text.sentences import sentence_starts
from olmo_sparsity.text.windows import Block, Spans, Units, Windows, span_width

MOST_GROUPS = 20

_BEGINNINGS = {"words": r"(?<!\S)\S", "paragraphs": r"(?:^|\n\s*\n)\s*\S"}
"""A word or paragraph begins with the last character of a match."""


@dataclass(eq=False)
class Document:
    tokens: np.ndarray
    number: int = 0
    """Its index in its source, which also seeds its random draws."""

    group: str = ""
    """Documents of one group share text (passages of one article), and never serve as unrelated
    text for each other. Empty: it shares text with its copies alone."""

    tokenizer: Tokenizer | None = field(default=None, repr=False)
    may_replace: bool = True
    """Whether its text may replace the distant tokens of another document."""

    name: str = ""
    """Its file and record number, or its title."""

    target: int | None = None
    """In a record of prompt and target, the first place of the target."""

    _found: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def origin(self) -> str | bytes:
        """Equal for documents that share text."""
        return self.group or hashlib.sha256(self.tokens.tobytes()).digest()

    @cached_property
    def texts(self) -> list[str]:
        """The text of each token; joined they are the document."""
        if self.tokenizer is None:
            return [""] * len(self.tokens)
        return token_texts(self.tokenizer, self.tokens.tolist())

    def units(self, kind: str, first: int, end: int) -> Units:
        """Units of the places first … end − 1, counted from `first`."""
        width = span_width(kind)
        if width is not None:
            return Units.of_spans(end - first, width)
        return Units.of_runs(self._runs(kind)[first:end])

    def _runs(self, kind: str) -> np.ndarray:
        """For each token the number of its word, sentence or paragraph."""
        if self.tokenizer is None:
            raise DataError(f"units={kind}: the model has no tokenizer; use tokens or span:W")
        if kind not in self._found:
            text = "".join(self.texts)
            if kind == "sentences":
                starts = sentence_starts(text)
            elif kind in _BEGINNINGS:
                starts = [match.end() - 1 for match in re.finditer(_BEGINNINGS[kind], text)]
            else:
                added: Any = find_added(kind, "olmo_sparsity.units", "units")
                starts = sorted(added(text))
            inside_L = first_characters(self.texts)
            self._found[kind] = np.searchsorted(starts, inside_L, side="right")
        return self._found[kind]


def spread_evenly(numbers: Sequence[int], limit: int) -> list[int]:
    """Choose no more than `limit` of the numbers, evenly over all: neighbours in a prepared folder
    are often of one package or day."""
    num = min(len(numbers), limit)
    return [numbers[place * len(numbers) // num] for place in range(num)]


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

    @staticmethod
    def of(texts: Sequence[np.ndarray], name: str = "documents") -> Documents:
        return Documents(name, [Document(text, number) for number, text in enumerate(texts)])

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Document:  # type: ignore[override] # slices are not used
        return self.items[number]

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.grouped_by.encode())
        for document in self.items:
            tokens = document.tokens.astype("<u4")
            digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
            if not document.may_replace:
                digest.update(b"is not a control")
        return digest.hexdigest()

    @property
    def groups(self) -> dict[str, list[int]]:
        """The documents of each value of `grouped_by`, if these are few, to split results by."""
        found: dict[str, list[int]] = {}
        for document in self.items if self.grouped_by else ():
            found.setdefault(document.group, []).append(document.number)
        return found if 1 < len(found) <= MOST_GROUPS else {}

    @property
    def have_targets(self) -> bool:
        return self.items[0].target is not None


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """One string per token; joined they are `tokenizer.decode(ids)`, special tokens included. A
    character of several tokens belongs to the one that completes it."""
    ids = [int(token_id) for token_id in ids]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    texts: list[str] = []
    # The text of a token depends on its neighbours (a space dropped at the start, bytes that join),
    # so each is decoded after the few before it, from `first` to `done`, which are decoded.
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


# --- controls -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FarText:
    """Distant tokens, as places in the document that they come from."""

    document: Document
    places_F: np.ndarray

    @staticmethod
    def at(document: Document, first: int, num_far: int) -> FarText:
        return FarText(document, np.arange(first, first + num_far))

    @property
    def is_run(self) -> bool:
        """Return whether its tokens are consecutive in their document."""
        return bool((np.diff(self.places_F) == 1).all())

    @property
    def tokens_F(self) -> np.ndarray:
        return self.document.tokens[self.places_F]

    def units(self, kind: str) -> Units:
        first = int(self.places_F.min())
        return self.document.units(kind, first, first + len(self.places_F))

    def text(self, first: int, end: int) -> str:
        """Text of the far places first … end − 1; without a tokenizer, the token IDs."""
        places = self.places_F[first:end]
        if self.document.tokenizer is None:
            return " ".join(str(token) for token in self.document.tokens[places])
        return "".join(self.document.texts[place] for place in places)


@dataclass(frozen=True)
class Controls:
    """Draw the texts that replace a document's distant tokens, by (seed, document, block, draw).

    With `long="all"`, one draw serves all blocks of a document, and each takes as much of its
    beginning as it needs. If no other document is as long, several are joined.
    """

    documents: Sequence[Document]
    windows: Windows
    kind: Control = "unrelated"
    num_draws: int = 3
    seed: int = 0

    @cached_property
    def _candidates(self) -> list[Document]:
        return [
            document
            for document in self.documents
            if self.windows.long == "all" or len(document.tokens) > self.windows.long
            if document.may_replace
        ]

    @cached_property
    def _known(self) -> dict[tuple, Document]:
        return {}

    @property
    def num_candidates(self) -> int:
        return len({document.origin for document in self._candidates})

    def _foreign_to(self, document: Document) -> list[Document]:
        return [
            other
            for other in self._candidates
            if other.number != document.number and other.origin != document.origin
        ]

    def unrelated(self, document: Document, block: Block, draw: int) -> FarText:
        """As many consecutive tokens of another document."""
        return self._draw(self._foreign_to(document), document, block, "unrelated", draw)

    def placebo(self, document: Document, block: Block) -> FarText:
        """An unrelated text in the role of the document's own; if there are enough documents, none
        of the foreign ones."""
        return self._draw(self._unused(document, block), document, block, "placebo")

    def replacement(self, document: Document, block: Block, draw: int) -> FarText:
        """A text that replaces the document's own: no foreign one and no placebo, if it can be."""
        unused, placebo = self._unused(document, block), self.placebo(document, block).document
        others = [other for other in unused if other is not placebo] or unused
        return self._draw(others, document, block, "replacement", draw)

    def _unused(self, document: Document, block: Block) -> list[Document]:
        """Documents that are no foreign text of this one; all, if there are too few."""
        others = self._foreign_to(document)
        used = {
            self._draw(others, document, block, "unrelated", draw).document.number
            for draw in range(self.num_draws)
        }
        return [other for other in others if other.number not in used] or others

    def foreign(
        self, document: Document, block: Block, own: dict[str, tuple[FarText, Spans]], draw: int
    ) -> Iterator[tuple[FarText, dict[str, Spans]]]:
        """Unrelated texts of one draw for a block's distant tokens, each with its targets;
        and the targets of each distant text."""
        if self.kind == "unrelated":  # one text for the whole block
            targets = {part: spans for part, (_, spans) in own.items()}
            yield self.unrelated(document, block, draw), targets
            return
        for part, (far, spans) in own.items():
            if self.kind == "shuffled":
                draws = stream(self.seed, "shuffled", document.number, block.start, draw)
                places_F = draws.permutation(far.places_F)
                yield replace(far, places_F=places_F), {part: spans}
                continue
            others = [o for o in self._foreign_to(document) if o is not far.document]
            tokens = block.targets_W[[first for first, _ in spans]]
            for token in np.unique(tokens).tolist():
                text = self._with_token(others, document, block, token, draw)
                served = [span for span, t in zip(spans, tokens, strict=True) if t == token]
                yield text, {part: served}

    def _draw(
        self, others: list[Document], document: Document, block: Block, purpose: str, *keys: int
    ) -> FarText:
        start, length, is_all = block.start, block.num_far, self.windows.long == "all"
        if is_all:
            start, length = 0, self.windows.of_all(len(document.tokens)) - self.windows.short
        long_enough = [other for other in others if len(other.tokens) >= length]
        generator = stream(self.seed, purpose, document.number, start, *keys)
        if long_enough:
            other = long_enough[generator.integers(len(long_enough))]
        elif is_all and sum(len(other.tokens) for other in others) >= length:
            other = self._joined(others, (document.number, purpose, *keys), length, generator)
        else:
            raise DataError(f"controls need another document of at least {length:,} tokens")
        first = int(generator.integers(len(other.tokens) - length + 1))
        return FarText.at(other, first, block.num_far)

    def _joined(
        self,
        others: list[Document],
        key: tuple[int | str, ...],
        length: int,
        generator: np.random.Generator,
    ) -> Document:
        """Others in random order, one behind the other, of `length` tokens. Kept for the blocks of
        a document, as the text of each token takes time."""
        if key not in self._known:
            parts, size = list[np.ndarray](), 0
            for index in generator.permutation(len(others)).tolist():
                parts.append(others[index].tokens)
                size += len(parts[-1])
                if size >= length:
                    break
            tokens = np.concatenate(parts)[:length]
            self._known.clear()
            self._known[key] = Document(tokens, -1, "joined", others[0].tokenizer)
        return self._known[key]

    def _with_token(
        self, others: list[Document], document: Document, block: Block, token: int, draw: int
    ) -> FarText:
        """A text that contains the token anywhere. If no document has the token, it is inserted at
        a random place."""
        num_far, keys = block.num_far, (draw, token)
        generator = stream(self.seed, "with token", document.number, block.start, *keys)
        holders = [o for o in others if len(o.tokens) >= num_far and (o.tokens == token).any()]
        if not holders:
            text = self._draw(others, document, block, "token inserted", *keys)
            changed = replace(text.document, tokens=text.document.tokens.copy())
            changed.tokens[generator.choice(text.places_F)] = token
            return FarText(changed, text.places_F)
        other = holders[generator.integers(len(holders))]
        place = int(generator.choice(np.flatnonzero(other.tokens == token)))
        lowest, highest = max(0, place - num_far + 1), min(place, len(other.tokens) - num_far)
        return FarText.at(other, int(generator.integers(lowest, highest + 1)), num_far)
