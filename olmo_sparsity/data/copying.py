"""Count how often copying would help on a text: `prepare --report`, before any training.

Place in the flow: token shards → a few numbers.

At a place, a model that copies looks up the last occurrence of the token before it, and predicts
the token that followed there. This helps where that is far enough to lie outside of a short
context, where the token is indeed the same, and where its neighbour alone (the bigram) would not
say so. Bigrams are counted on other documents: counted on the same ones, they would know what
repeats.

Dimension key: L tokens of a document, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from operator import add

import numpy as np

from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.errors import DataError

NEAREST, FARTHEST = 64, 448
"""How far back, in tokens, the earlier occurrence may be."""

MOST_PLACES = 400_000
MOST_BIGRAMS = 4_000_000
"""8 bytes each. More change no share by a thousandth."""


@dataclass(frozen=True)
class Copying:
    """Counts for one length of context: the token before, or the two before."""

    num_places: int
    num_earlier: int
    """Places at which the context occurred last `NEAREST` to `FARTHEST` tokens back."""

    num_same: int
    """Of these, places with the token that followed there."""

    num_beyond: int
    """Of these, places at which it is not the bigram's guess."""

    def __add__(self, other: Copying) -> Copying:
        return Copying(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class CopyingReport:
    vocab_size: int
    num_documents: int
    after_one: Copying
    after_two: Copying

    def __str__(self) -> str:
        one, two = self.after_one, self.after_two
        rows = [
            (f"last seen {NEAREST} to {FARTHEST} tokens back", "num_earlier", "num_places"),
            ("… and the next token is the same, of these", "num_same", "num_earlier"),
            ("… and not the bigram's guess, of all", "num_beyond", "num_places"),
        ]
        lines = [
            f"how often copying would help: {one.num_places:,} places of {self.num_documents:,} "
            f"training documents, vocabulary {self.vocab_size:,}",
            f"{'':<44}{'token before':>13}{'two before':>13}",
        ]
        for title, part, whole in rows:
            shares = (getattr(of, part) / max(1, getattr(of, whole)) for of in (one, two))
            lines.append(f"{title:<44}" + "".join(f"{share:>13.3f}" for share in shares))
        return "\n".join(lines)


def report_copying(
    shards: TokenShards, most_places: int = MOST_PLACES, most_bigrams: int = MOST_BIGRAMS
) -> CopyingReport:
    """Documents are spread over the whole text; every other one only serves to count bigrams."""
    if len(shards) < 2:
        raise DataError(
            f"{shards.paths[0].parent} holds one training document, and --report needs two: it "
            "counts bigrams on others than it reads; cut the text into documents"
        )
    counted = _documents(shards, 1, most_bigrams)
    guess_V = count_guesses(counted, shards.vocab_size)
    one = two = Copying(0, 0, 0, 0)
    num_documents = 0
    for tokens_L in _documents(shards, 0, most_places):
        one += count_copies(tokens_L, 1, guess_V)
        two += count_copies(tokens_L, 2, guess_V)
        num_documents += 1
    return CopyingReport(shards.vocab_size, num_documents, one, two)


def _documents(shards: TokenShards, first: int, most: int) -> Iterator[np.ndarray]:
    """Every other document of a fixed order that covers the text evenly, until they have `most`
    tokens with one before them."""
    num = len(shards)
    step = round(num * (math.sqrt(5) - 1) / 2)
    while math.gcd(step, num) > 1:
        step += 1
    for index in range(first, num, 2):
        tokens_L = shards.document(index * step % num)[: most + 1].astype(np.int64)
        yield tokens_L
        most -= max(0, len(tokens_L) - 1)
        if most <= 0:
            return


def count_guesses(documents: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """guess_V: the most frequent successor of each token (of equals the smallest); −1: none."""
    pairs = [tokens_L[:-1] * vocab_size + tokens_L[1:] for tokens_L in documents]
    codes, counts = np.unique(np.concatenate(pairs), return_counts=True)
    firsts, successors = np.divmod(codes, vocab_size)
    order = np.lexsort((-successors, counts))  # the last that is written stays
    guess_V = np.full(vocab_size, -1, dtype=np.int64)
    guess_V[firsts[order]] = successors[order]
    return guess_V


def count_copies(tokens_L: np.ndarray, width: int, guess_V: np.ndarray) -> Copying:
    """`width`: how many tokens before a place must have occurred."""
    places = np.arange(width, len(tokens_L))
    keys = np.zeros(len(places), dtype=np.int64)
    for back in range(width, 0, -1):
        keys = keys * len(guess_V) + tokens_L[places - back]
    last = last_earlier(keys)
    distance = np.arange(len(places)) - last
    earlier = places[(last >= 0) & (distance >= NEAREST) & (distance <= FARTHEST)]
    same = earlier[tokens_L[earlier] == tokens_L[last[earlier - width] + width]]
    beyond = same[tokens_L[same] != guess_V[tokens_L[same - 1]]]
    return Copying(max(0, len(tokens_L) - 1), len(earlier), len(same), len(beyond))


def last_earlier(keys: np.ndarray) -> np.ndarray:
    """For each place the last earlier one with an equal key; −1: none."""
    order = np.argsort(keys, kind="stable")
    equal = keys[order[1:]] == keys[order[:-1]]
    last = np.full(len(keys), -1, dtype=np.int64)
    last[order[1:][equal]] = order[:-1][equal]
    return last
