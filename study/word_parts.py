"""Tell what part of a word a token is. What continues a word is copied more easily than a word is
chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from olmo_sparsity.text.documents import first_characters

_FUNCTION_WORDS = """
a about after all also am an and any are as at be because been before being both but by can could
did do does each either for from had has have he her here hers him his how i if in into is it its
me more most much must my neither no nor not of off on one only or other our out over own same she
should so some such than that the their them then there these they this those through to too under
until up us very was we were what when where which while who whom whose why will with would you
your
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())

_MARKS = ".,;:!?\"'()[]“”‘’"


def parts_of_words(texts: Sequence[str]) -> np.ndarray:
    """Return later_piece, first_piece, function_word, word or no_word for each token of a
    document."""
    text = "".join(texts)
    starts = first_characters(texts)
    later = [text[max(n - 1, 0) : n].isalnum() and text[n : n + 1].isalnum() for n in starts]
    return np.array(list(map(_part_of_word, texts, later, [*later[1:], False])))


def parts_of_targets(targets: pd.DataFrame, tokens: pd.DataFrame) -> list[str]:
    """`tokens`: all tokens of the documents."""
    kept = tokens[tokens.document.isin(targets.document)].sort_values("place")
    parts = {
        document: parts_of_words(rows.text.tolist()) for document, rows in kept.groupby("document")
    }
    return [parts[row.document][row.target] for row in targets.itertuples()]


def _part_of_word(piece: str, is_later: bool, goes_on: bool) -> str:
    if is_later:
        return "later_piece"
    if not any(map(str.isalnum, piece)):
        return "no_word"
    if goes_on:
        return "first_piece"
    return "function_word" if piece.strip().strip(_MARKS).lower() in FUNCTION_WORDS else "word"
