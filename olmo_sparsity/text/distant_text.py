"""Hold distant tokens by their places in the document that they come from.

    text = DistantText.at(document, 17, num_distant=5)     # places 17 … 21 of the document
    text.tokens_F                                          # their IDs
    text.text(0, 2)                                        # " the old", the text of the first two

It may be the document's own text before a target, or one that replaces it (controls.py). A *place*
is the index of a token in its document; a distant index counts from the first distant token.

Dimension key: F distant tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import Spans, Units


@dataclass(frozen=True)
class DistantText:
    """Distant tokens, by their places in the document that they come from."""

    document: Document
    places_F: np.ndarray
    """In the order of the distant window; shuffled texts have them in any order."""

    @staticmethod
    def at(document: Document, first_place: int, num_distant: int) -> DistantText:
        """Return `num_distant` consecutive tokens from the place `first_place` on."""
        return DistantText(document, np.arange(first_place, first_place + num_distant))

    @property
    def is_run(self) -> bool:
        """Return whether its tokens are consecutive in their document."""
        return bool((np.diff(self.places_F) == 1).all())

    @property
    def tokens_F(self) -> np.ndarray:
        return self.document.tokens[self.places_F]

    def units(self, kind: str) -> Units:
        """Return the units of this text. Its tokens must be consecutive ones, in any order."""
        first_place = int(self.places_F.min())
        return self.document.units(kind, first_place, first_place + len(self.places_F))

    def text(self, first: int, end: int) -> str:
        """Return the text of the distant tokens first … end − 1, counted from the first distant
        one. Without a tokenizer, return their IDs."""
        places = self.places_F[first:end]
        if self.document.tokenizer is None:
            return " ".join(str(token) for token in self.document.tokens[places])
        return "".join(self.document.texts[place] for place in places)


class ReplacedText(NamedTuple):
    """A distant text that control texts replace, with the targets at which it is evaluated."""

    text: DistantText
    targets: Spans
    """As indices into the block."""


class ControlText(NamedTuple):
    """A text that replaces distant texts, with the targets at which it does so."""

    text: DistantText
    targets: dict[str, Spans]
    """The targets by the name of the replaced text: the document's own, or the placebo."""
