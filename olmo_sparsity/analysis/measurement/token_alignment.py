"""Find the tokens of one tokenization in another one of the same text, by their characters.

    there   The | night |  train |  to |  Novaport
    here    The |  nig | ht |  train |  to |  Nova | port

Boundaries between tokens are compared, as a token or a run of tokens exists here if it begins and
ends at boundaries of this tokenization (`map_boundaries`). Units such as words are compared without
the white space around them (`character_spans`), as one tokenizer has it before a word and another
after it.

Dimension key: E boundaries between tokens, N items of a list (spans of tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NO_BOUNDARY = -1
"""`map_boundaries` returns this where the other tokenization has no boundary."""


def map_boundaries(from_texts: Sequence[str], to_texts: Sequence[str]) -> np.ndarray:
    """Map boundaries between the tokens of one tokenization to those of another.

    Boundary i lies before token i, and the last one after the last token. Return for each boundary
    of `from_texts` the boundary of `to_texts` at the same character, or NO_BOUNDARY:

        from_texts   |The|night|train         boundaries 0 1 2 3, before characters 0 3 8 13
        to_texts     |The|ni|ght|train        boundaries 0 1 2 3 4, before 0 3 5 8 13
        returned     0 1 3 4
    """
    from_characters_E = np.cumsum([0, *map(len, from_texts)])
    to_characters_E = np.cumsum([0, *map(len, to_texts)])
    nearest_E = np.searchsorted(to_characters_E, from_characters_E)

    # Beyond the end of the other text the nearest boundary is its last one, which is not equal.
    last_boundary = len(to_characters_E) - 1
    is_same_E = to_characters_E[np.minimum(nearest_E, last_boundary)] == from_characters_E

    # Of tokens that share a character, such as the bytes of an emoji, all but the last have an
    # empty text. So of several boundaries at one character only the first does not lie inside it.
    is_first_E = np.diff(from_characters_E, prepend=-1) > 0
    return np.where(is_same_E & is_first_E, nearest_E, NO_BOUNDARY)


class CharacterSpans(NamedTuple):
    """The characters of spans of tokens, without white space around them. For a span of white space
    alone, the end is not behind the first character."""

    first_character: np.ndarray
    """Index of the first character of each span."""

    end_character: np.ndarray
    """Index of the character after the last one of each span."""


def character_spans(texts: Sequence[str], first_N: np.ndarray, end_N: np.ndarray) -> CharacterSpans:
    """Return the characters of spans of tokens, without white space around them.

    The texts "The", " night" and " train" are 0 … 2, 3 … 8 and 9 … 14. Token 1 alone has the
    characters 4 to 8, without its space: first_character 4, end_character 9.

    Args:
        texts: The text of each token.
        first_N: The first token of each span.
        end_N: The token after the last one of each span.
    """
    character_of_boundary = np.cumsum([0, *map(len, texts)])
    text = "".join(texts)
    visible = np.array([index for index, letter in enumerate(text) if not letter.isspace()])

    # The first visible character from the span's beginning on. If none follows, it is the end.
    visible_or_end = np.append(visible, len(text)).astype(int)
    first_character_N = visible_or_end[np.searchsorted(visible, character_of_boundary[first_N])]

    # The last visible character before the span's end. If none precedes it, the span is empty.
    last_visible_N = np.searchsorted(visible, character_of_boundary[end_N]) - 1
    end_character_N = np.where(last_visible_N >= 0, visible_or_end[last_visible_N] + 1, 0)
    return CharacterSpans(first_character_N, end_character_N)


def is_same_text(first_texts: Sequence[str], second_texts: Sequence[str]) -> bool:
    """Return whether two texts are the same, as far as both go: a model that takes fewer tokens
    ends a document earlier."""
    # A text may end inside a character, which decodes to the replacement character.
    first = "".join(first_texts).rstrip("\ufffd")
    second = "".join(second_texts).rstrip("\ufffd")
    # An empty text is the beginning of every text, and says nothing.
    if not first or not second:
        return False
    return first.startswith(second) or second.startswith(first)
