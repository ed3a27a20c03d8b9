"""Show which words of a statement rest on its sources.

Place in the flow: losses of the answer's tokens (trials.py) → **`nats_by_word`** →
**`describe_words`** → statement_rows.py. The line is printed below the verdict:

    by word, in nats: Katharina +7.6, Weiss +9.0, opened +2.8; less than 1: it in 1921.

A verdict is about a whole statement. If a source has the name of a thing and the rest is invented,
the name alone may give enough nats for the verdict. The words show it: a source *carries* a word if
it makes it clearly more likely, and words that no source carries are listed apart.

Dimension key: W tokens of the statement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from textwrap import shorten
from typing import NamedTuple

import numpy as np

from olmo_sparsity.text.documents import Document

MIN_NATS = 1.0
"""A word of fewer nats is listed as one that the source does not carry: decoys change words by
some tenths of a nat, too."""

MAX_CARRIED = 8
"""Number of words that are listed with their nats; words with equally many nats may be added. Words
of fewer nats are counted only."""

MAX_REST = 80
"""Largest number of characters of the words that are listed without nats."""


class WordNats(NamedTuple):
    """A word, and the nats of its tokens."""

    text: str
    nats: float

    @property
    def is_carried(self) -> bool:
        """Whether the source makes the word clearly more likely."""
        return self.nats >= MIN_NATS


def nats_by_word(document: Document, first: int, nats_W: np.ndarray) -> list[WordNats]:
    """Return the words of a statement with their nats.

    Args:
        document: The prompt with its answer.
        first: The place of the statement's first token in the document.
        nats_W: The nats of each token of the statement.
    """
    # A word may have several tokens, whose nats are added.
    units = document.units("words", first, first + len(nats_W))
    words: list[WordNats] = []
    for begin, end in zip(units.first.tolist(), units.end.tolist(), strict=True):
        text = "".join(document.texts[first + begin : first + end]).strip()
        words.append(WordNats(text, float(nats_W[begin:end].sum())))
    return words


def describe_words(words_by_source: Mapping[str, Sequence[WordNats]]) -> str:
    """Return the words that each source carries, with their nats, and the words that none carries.
    Empty where there is nothing to tell apart: for one word, or in a script without spaces.
    `words_by_source`: the words of the statement with the nats from each source, by its name. The
    name of a single source may be empty, where the verdict above has it."""
    # Every source has the same words, with other nats.
    per_source = list(words_by_source.values())
    num_words = len(per_source[0])
    if num_words < 2:
        return ""
    lists = [_list_carried(name, words) for name, words in words_by_source.items()]
    is_carried = [
        any(words[number].is_carried for words in per_source) for number in range(num_words)
    ]
    rest = _list_rest([word.text for word in per_source[0]], is_carried)
    if rest:
        lists.append(f"less than {MIN_NATS:.0f}: {rest}")
    return f"by word, in nats: {'; '.join(filter(None, lists))}"


def _list_carried(name: str, words: Sequence[WordNats]) -> str:
    """Return the words that a source carries, with their nats; empty if it carries none. If there
    are many, the words of most nats are listed."""
    carried = [word for word in words if word.is_carried]
    if not carried:
        return ""
    # In the order of the statement, not by nats, so that the words can be read as a sentence.
    smallest_shown = sorted((word.nats for word in carried), reverse=True)[:MAX_CARRIED][-1]
    shown = [word for word in carried if word.nats >= smallest_shown]
    listed = [f"{word.text} {word.nats:+.1f}" for word in shown]
    num_left = len(carried) - len(shown)
    if num_left:
        listed.append(f"{num_left} more")
    return f"{name}: {', '.join(listed)}" if name else ", ".join(listed)


def _list_rest(texts: Sequence[str], is_carried: Sequence[bool]) -> str:
    """Return the words that no source carries. Neighbours stay together, and … is between others.

    Args:
        texts: The words.
        is_carried: Whether a source carries the word.
    """
    runs: list[str] = []
    pairs = zip(texts, is_carried, strict=True)
    for are_carried, neighbours in groupby(pairs, key=lambda pair: pair[1]):
        if not are_carried:
            runs.append(" ".join(text for text, _ in neighbours))
    return shorten(" … ".join(runs), MAX_REST, placeholder=" …")
