"""Draw the texts that replace distant tokens: what a measurement is compared with.

    own text        d1 d2 d3 d4 d5 | local window | target
    unrelated       u1 u2 u3 u4 u5 | local window | target    consecutive tokens of another document
    matched         u1 u2 T  u4 u5 | local window | target    unrelated, and it contains the target
    shuffled        d4 d1 d5 d2 d3 | local window | target    the own tokens in another order
    placebo         p1 p2 p3 p4 p5 | local window | target    unrelated, in the role of the own text
    replacement     d1 r2 r3 d4 d5 | local window | target    r fills what a forward leaves out

`Controls` draws them for one block of targets. `control_texts` draws those of its `kind`
(unrelated, matched or shuffled), `placebo` the placebo, and `replacement` the text that gives the
r. The position IDs stay those of the own text. Every draw is seeded by its purpose, the document
and the block, so the numbers do not depend on which process measures a document, or in which order.

The texts are `DistantText`s (distant_text.py): a document, and the places of the tokens in it.

Place in the flow: documents → **controls** → losses and recovery. Never imports torch.

Dimension key: W targets of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.streams import stream
from olmo_sparsity.config.text import Control
from olmo_sparsity.text.distant_text import ControlText, DistantText, ReplacedText
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.windows import Block, Windows


@dataclass(frozen=True)
class Controls:
    """Draws the texts that replace a document's distant tokens.

        controls = Controls(documents, windows, "unrelated", num_draws=3, seed=0)
        text = controls.unrelated(documents[1], block, draw=0)
        text.document.number   # 4
        text.places_F          # array([17, 18, 19, 20, 21]), in document 4

    With `long="all"`, one draw serves all blocks of a document, and each takes as much of its
    beginning as it needs. If no other document is as long, several are joined.
    """

    documents: Sequence[Document]
    """The documents that texts are drawn from."""

    windows: Windows
    kind: Control = "unrelated"
    """How control texts are made: unrelated, matched or shuffled."""

    num_draws: int = 3
    """The number of control texts of each block."""

    seed: int = 0

    # --- what replaces the distant tokens of a block ---

    def control_texts(
        self,
        document: Document,
        block: Block,
        replaced_texts: Mapping[str, ReplacedText],
        draw: int,
    ) -> Iterator[ControlText]:
        """Yield the control texts of one draw.

        Args:
            replaced_texts: The distant texts of the block by name: the document's own and the
                placebo.
            draw: The index of the draw.
        """
        if self.kind == "unrelated":
            # One text serves the whole block.
            targets = {name: replaced.targets for name, replaced in replaced_texts.items()}
            yield ControlText(self.unrelated(document, block, draw), targets)
            return
        for name, replaced in replaced_texts.items():
            if self.kind == "shuffled":
                text = self._shuffle(replaced.text, document, block, draw)
                yield ControlText(text, {name: replaced.targets})
            else:
                yield from self._draw_matched_texts(name, replaced, document, block, draw)

    def unrelated(self, document: Document, block: Block, draw: int) -> DistantText:
        """Draw as many consecutive tokens of another document as the block has distant tokens."""
        return self._draw_text(self._unrelated_to(document), document, block, "unrelated", draw)

    def _shuffle(
        self, text: DistantText, document: Document, block: Block, draw: int
    ) -> DistantText:
        """Return the tokens of a text in random order."""
        generator = stream(self.seed, "shuffled", document.number, block.start, draw)
        return replace(text, places_F=generator.permutation(text.places_F))

    def _draw_matched_texts(
        self, name: str, replaced: ReplacedText, document: Document, block: Block, draw: int
    ) -> Iterator[ControlText]:
        """Yield a text for each different token that begins a target. The text contains the token,
        and replaces distant tokens at all targets that begin with it. So an own text
        that only repeats the target's token has no excess over it."""
        # A placebo is not compared with its own document.
        others = [
            other for other in self._unrelated_to(document) if other is not replaced.text.document
        ]
        first_tokens = block.targets_W[[first for first, _ in replaced.targets]]
        for token in np.unique(first_tokens).tolist():
            text = self._draw_with_token(others, document, block, token, draw)
            indices = np.flatnonzero(first_tokens == token)
            yield ControlText(text, {name: [replaced.targets[index] for index in indices]})

    def placebo(self, document: Document, block: Block) -> DistantText:
        """Draw an unrelated text that takes the role of the document's own text.

        If there are enough documents, it is not one of those that `unrelated` draws. It is compared
        with these, and would have no excess over itself."""
        return self._draw_text(
            self._not_drawn_as_unrelated(document, block), document, block, "placebo"
        )

    def replacement(self, document: Document, block: Block, draw: int) -> DistantText:
        """Draw a text that fills the places of distant tokens which a forward pass leaves out. If
        there are enough documents, it is neither the placebo nor one of those that `unrelated`
        draws."""
        not_drawn = self._not_drawn_as_unrelated(document, block)
        placebo = self.placebo(document, block).document
        without_placebo = [other for other in not_drawn if other is not placebo]
        return self._draw_text(without_placebo or not_drawn, document, block, "replacement", draw)

    # --- which documents may be drawn ---

    @cached_property
    def _candidates(self) -> list[Document]:
        """Return the documents whose text may replace that of another document."""
        # With long="all" short ones can be joined; otherwise a text must fill the long window.
        return [
            document
            for document in self.documents
            if document.may_replace
            and (self.windows.has_all or len(document.tokens) > self.windows.first_target)
        ]

    @property
    def num_candidates(self) -> int:
        """Return how many unrelated texts there are: copies, and documents of one group, count as
        one."""
        return len({document.origin for document in self._candidates})

    def _unrelated_to(self, document: Document) -> list[Document]:
        """Return the candidates that share no text with a document."""
        return [
            other
            for other in self._candidates
            if other.number != document.number and other.origin != document.origin
        ]

    def _not_drawn_as_unrelated(self, document: Document, block: Block) -> list[Document]:
        """Return the unrelated documents that `unrelated` does not draw for this block. If it draws
        all of them, return all of them."""
        others = self._unrelated_to(document)
        drawn_numbers = set()
        for draw in range(self.num_draws):
            # A draw is seeded, so this repeats what `unrelated` draws.
            drawn = self._draw_text(others, document, block, "unrelated", draw)
            drawn_numbers.add(drawn.document.number)
        return [other for other in others if other.number not in drawn_numbers] or others

    # --- draws ---

    def _draw_text(
        self, others: list[Document], document: Document, block: Block, purpose: str, *keys: int
    ) -> DistantText:
        """Draw as many consecutive tokens as the block has distant ones, from one of `others`.

        Args:
            others: The documents that may be drawn.
            purpose: What the text is for, such as "placebo". It seeds the draw, with the document,
                the block and `keys`.
            keys: The index of the draw, where one purpose has several.
        """
        if self.windows.has_all:
            # One draw, as long as the last block needs, serves all blocks: they are seeded alike,
            # so the texts of all blocks are beginnings of one, and share its states.
            start = 0
            length = self.windows.tokens_before(len(document.tokens)) - self.windows.short
        else:
            start = block.start
            length = block.num_distant
        generator = stream(self.seed, purpose, document.number, start, *keys)

        long_enough = [other for other in others if len(other.tokens) >= length]
        can_be_joined = sum(len(other.tokens) for other in others) >= length
        if long_enough:
            drawn = long_enough[generator.integers(len(long_enough))]
        elif self.windows.has_all and can_be_joined:
            drawn = self._join(others, (document.number, purpose, *keys), length, generator)
        else:
            raise DataError(
                f"controls need another document of at least {length:,} tokens, and none of "
                f"{len(others)} unrelated ones is as long; pass more or longer documents"
            )

        first_place = int(generator.integers(len(drawn.tokens) - length + 1))
        return DistantText.at(drawn, first_place, block.num_distant)

    @cached_property
    def _last_joined(self) -> dict[tuple, Document]:
        """Return the cache of `_join`: at most one document, by its key."""
        return {}

    def _join(
        self,
        others: list[Document],
        key: tuple[int | str, ...],
        length: int,
        generator: np.random.Generator,
    ) -> Document:
        """Return a document of `length` tokens, joined from others in random order.

        Args:
            others: The documents that may be joined, of at least `length` tokens together.
            key: What the draw is for. All blocks of a document have the same, so the joined
                document is kept for them: finding the text of each of its tokens takes time.
        """
        if key not in self._last_joined:
            token_arrays: list[np.ndarray] = []
            num_tokens = 0
            for index in generator.permutation(len(others)).tolist():
                token_arrays.append(others[index].tokens)
                num_tokens += len(token_arrays[-1])
                if num_tokens >= length:
                    break
            tokens = np.concatenate(token_arrays)[:length]
            # Blocks of one document come one after another, so one text in memory is enough.
            self._last_joined.clear()
            self._last_joined[key] = Document(tokens, -1, "joined", others[0].tokenizer)
        return self._last_joined[key]

    def _draw_with_token(
        self, others: list[Document], document: Document, block: Block, token: int, draw: int
    ) -> DistantText:
        """Draw a text that contains the token anywhere. If no document has the token, replace a
        random token of an unrelated text by it."""
        num_distant = block.num_distant
        generator = stream(self.seed, "with token", document.number, block.start, draw, token)
        holders = [
            other
            for other in others
            if len(other.tokens) >= num_distant and (other.tokens == token).any()
        ]
        if not holders:
            text = self._draw_text(others, document, block, "token inserted", draw, token)
            changed = replace(text.document, tokens=text.document.tokens.copy())
            changed.tokens[generator.choice(text.places_F)] = token
            return DistantText(changed, text.places_F)
        holder = holders[generator.integers(len(holders))]
        place = int(generator.choice(np.flatnonzero(holder.tokens == token)))
        # The text may begin anywhere between these two places: it contains the token then, and does
        # not reach beyond the document.
        lowest = max(0, place - num_distant + 1)
        highest = min(place, len(holder.tokens) - num_distant)
        return DistantText.at(holder, int(generator.integers(lowest, highest + 1)), num_distant)
