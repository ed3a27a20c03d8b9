"""Define k-sparse planted distributions (Definition 3.2), and sample strings of any length.

A string of length L is drawn in three steps: S* from Q^pos_L, then the tokens at S* together with
the label from Q^voc, then every other token i.i.d. from the background.

Dimension key: B batch, L length, V vocabulary, J the k places of a set, N sets in the support of
Q^pos_L, Z token tuples in the support of Q^voc, X strings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, product

import numpy as np

from olmo_sparsity.base.errors import ConfigError

MEMORY_LIMIT_BYTES = 2 * 2**30
"""Largest single allocation; larger ones are rejected, with their size."""


def check_distribution(mass: np.ndarray, name: str) -> None:
    if (mass < 0).any() or not abs(mass.sum() - 1) <= 1e-8:
        raise ConfigError(f"{name}: {mass.min():g} least, sum {mass.sum():.10g}; it must be 0, 1")


def check_memory(num_bytes: float, what: str, instead: str) -> None:
    if num_bytes > MEMORY_LIMIT_BYTES:
        raise ConfigError(
            f"{what} would take {num_bytes / 2**30:.3g} GiB, more than the "
            f"{MEMORY_LIMIT_BYTES / 2**30:.3g} GiB allowed; {instead}"
        )


# --- the planted places: Q^pos --------------------------------------------------------------------


@dataclass(frozen=True)
class PositionLaw:
    """Q^pos_L for every length L, as a table of place sets and their probabilities."""

    num_places: int
    """k."""

    build_table: Callable[[int], tuple[np.ndarray, np.ndarray]]
    """length → places_NJ (each row rising, from 0) and mass_N."""

    cache: dict = field(default_factory=dict, repr=False, compare=False)

    def table(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        if length not in self.cache:
            if self.num_places > length:
                raise ConfigError(f"k={self.num_places} places do not fit into length {length}")
            places_NJ, mass_N = self.build_table(length)
            check_distribution(mass_N, f"Q^pos at length {length}")
            rises = (np.diff(places_NJ, axis=1) > 0).all()
            if not rises or places_NJ.min() < 0 or places_NJ.max() >= length:
                raise ConfigError(f"Q^pos: places must rise within 0 … {length - 1}")
            self.cache[length] = places_NJ, mass_N
        return self.cache[length]


def translated_shapes(
    shapes: Sequence[Sequence[int]], weights: Sequence[float] | None = None
) -> PositionLaw:
    """The family of Remark C.1 as we read it: one distribution over shapes for all lengths (equal
    weights unless given), and each shape placed uniformly. A shape starts at 0: (0, 2) is a pair
    two places apart."""
    equal = [1 / len(shapes)] * len(shapes) if weights is None else weights
    weights_P = np.asarray(equal, dtype=float)
    check_distribution(weights_P, "weights of the shapes")
    shapes_PJ = np.asarray(shapes, dtype=int)
    if (shapes_PJ[:, 0] != 0).any() or len(np.unique(shapes_PJ, axis=0)) < len(shapes_PJ):
        raise ConfigError("shapes must start at place 0, and differ")
    spans_P = shapes_PJ[:, -1] + 1

    def build(length: int) -> tuple[np.ndarray, np.ndarray]:
        if spans_P.max() > length:
            raise ConfigError(f"a shape spans {spans_P.max()} places, the string has {length}")
        places, mass = [], []
        for shape_J, weight, span in zip(shapes_PJ, weights_P, spans_P, strict=True):
            starts = np.arange(length - span + 1)
            places.append(starts[:, None] + shape_J)
            mass.append(np.full(len(starts), weight / len(starts)))
        return np.concatenate(places), np.concatenate(mass)

    return PositionLaw(shapes_PJ.shape[1], build)


def drifting_shapes(
    shapes: Sequence[Sequence[int]], switch_length: int, rare: float
) -> PositionLaw:
    """Regular but not Remark C.1: the last shape is rare below switch_length and common from it on,
    so the best shape differs between lengths."""
    before = [(1 - rare) / (len(shapes) - 1)] * (len(shapes) - 1) + [rare]
    after = [rare / (len(shapes) - 1)] * (len(shapes) - 1) + [1 - rare]
    laws = translated_shapes(shapes, before), translated_shapes(shapes, after)
    return PositionLaw(
        laws[0].num_places, lambda length: laws[int(length >= switch_length)].table(length)
    )


def shapes_within(num_places: int, span: int) -> list[tuple[int, ...]]:
    """All shapes of k places within a span."""
    if num_places > span:
        raise ConfigError(f"k={num_places} places do not fit into a span of {span}; raise the span")
    return [(0, *rest) for rest in combinations(range(1, span), num_places - 1)]


def uniform_subsets(num_places: int) -> PositionLaw:
    """Uniform over all k-subsets of the string, the least local law."""

    def build(length: int) -> tuple[np.ndarray, np.ndarray]:
        count = math.comb(length, num_places)
        check_memory(
            count * 8.0 * (num_places + 1),
            f"the table of all {count:,} sets of {num_places} places at length {length}",
            "use a shorter length, a smaller k, or translated_shapes",
        )
        flat = chain.from_iterable(combinations(range(length), num_places))
        places_NJ = np.fromiter(flat, dtype=int, count=count * num_places)
        return places_NJ.reshape(count, num_places), np.full(count, 1 / count)

    return PositionLaw(num_places, build)


def locality(law: PositionLaw, lengths: Sequence[int]) -> int:
    """The smallest L_local for which the law is L_local-local at these lengths: the widest span of
    a planted set, ends included."""
    spans = []
    for length in lengths:
        places_NJ, mass_N = law.table(length)
        spans.append(int((places_NJ[:, -1] - places_NJ[:, 0])[mass_N > 0].max()) + 1)
    return max(spans)


def regularity(law: PositionLaw, length: int, local_span: int) -> float:
    """η_L of Assumption 4.2, exactly, in our reading (study/tasks.md).

    The largest ratio, in either direction, between Q^pos at `length` and at any length from
    2·local_span up to it, over all shapes that fit both and all their placements. It is infinite if
    one length never uses a placement that another does.
    """
    if length < 2 * local_span:
        raise ConfigError(f"η at length {length} needs length >= 2·L_local = {2 * local_span}")
    at_length = _mass_by_shape(law, length)
    worst = 1.0
    for shorter in range(2 * local_span, length + 1):
        at_shorter = _mass_by_shape(law, shorter)
        for shape in at_length.keys() | at_shorter.keys():
            if shape[-1] >= shorter:
                continue
            low, high = at_length.get(shape, (0.0, 0.0))
            shorter_low, shorter_high = at_shorter.get(shape, (0.0, 0.0))
            for above, below in ((high, shorter_low), (shorter_high, low)):
                if above > 0:
                    worst = max(worst, above / below if below > 0 else math.inf)
    return worst


def _mass_by_shape(law: PositionLaw, length: int) -> dict[tuple[int, ...], tuple[float, float]]:
    """shape → smallest and largest probability of its placements, absent ones counting as 0."""
    places_NJ, mass_N = law.table(length)
    shapes_PJ, shape_N = np.unique(places_NJ - places_NJ[:, :1], axis=0, return_inverse=True)
    low_P, high_P = np.full(len(shapes_PJ), np.inf), np.zeros(len(shapes_PJ))
    np.minimum.at(low_P, shape_N.ravel(), mass_N)
    np.maximum.at(high_P, shape_N.ravel(), mass_N)
    listed_P = np.bincount(shape_N.ravel())
    low_P[listed_P < length - shapes_PJ[:, -1]] = 0.0
    return {
        tuple(shape): (low, high)
        for shape, low, high in zip(shapes_PJ.tolist(), low_P, high_P, strict=True)
    }


# --- strings --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    tokens_BL: np.ndarray
    labels_B: np.ndarray
    places_BJ: np.ndarray
    """S*, for tests and figures; hypotheses do not see it."""

    ids_BL: np.ndarray
    """The position ID of each token: its place, or its coupled ID (Proposition 4.4)."""

    def in_id_order(self) -> np.ndarray:
        """Tokens sorted by position ID, equal IDs in reading order, as the attention class reads
        them."""
        order_BL = np.argsort(self.ids_BL, axis=1, kind="stable")
        return np.take_along_axis(self.tokens_BL, order_BL, axis=1)


@dataclass(frozen=True)
class Planted:
    """A k-sparse planted distribution (Definition 3.2), for every length at once."""

    law: PositionLaw
    tokens_ZJ: np.ndarray
    """Q^voc: the token tuples that can be planted."""

    labels_Z: np.ndarray
    """The label of each tuple."""

    mass_Z: np.ndarray
    """The probability of each tuple."""

    background_V: np.ndarray
    coupled: bool = False
    """Give related tokens one position ID (Proposition 4.4)."""

    def __post_init__(self) -> None:
        check_distribution(self.mass_Z, "Q^voc")
        check_distribution(self.background_V, "background")
        if self.tokens_ZJ.shape != (len(self.mass_Z), self.law.num_places):
            raise ConfigError(f"Q^voc plants {self.tokens_ZJ.shape}, k={self.law.num_places}")
        if self.tokens_ZJ.max() >= len(self.background_V):
            raise ConfigError(f"Q^voc plants token {self.tokens_ZJ.max()}, the background has none")

    @property
    def num_labels(self) -> int:
        return int(self.labels_Z.max()) + 1

    def ids(self, length: int) -> np.ndarray:
        """The position IDs in rising order, equal for all strings of a length."""
        return np.arange(length) // (self.law.num_places if self.coupled else 1)

    def sample(self, length: int, num_strings: int, rng: np.random.Generator) -> Sample:
        places_NJ, mass_N = self.law.table(length)
        places_BJ = places_NJ[_draw(mass_N, num_strings, rng)]
        planted_B = _draw(self.mass_Z, num_strings, rng)
        tokens_BL = _draw(self.background_V, num_strings * length, rng).reshape(-1, length)
        np.put_along_axis(tokens_BL, places_BJ, self.tokens_ZJ[planted_B], axis=1)
        ids_BL = self._draw_ids(places_BJ, length, rng)
        return Sample(tokens_BL, self.labels_Z[planted_B], places_BJ, ids_BL)

    def _draw_ids(self, places_BJ: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
        num_strings, k = places_BJ.shape
        if not self.coupled:
            return np.broadcast_to(np.arange(length), (num_strings, length))
        # All IDs are shared by k tokens, so that sharing does not reveal S*: S* takes one uniformly
        # drawn ID, the other tokens fill the remaining IDs in reading order.
        chosen_B = rng.integers(length // k, size=num_strings)
        others_BL = np.ones((num_strings, length), dtype=int)
        np.put_along_axis(others_BL, places_BJ, 0, axis=1)
        ids_BL = (np.cumsum(others_BL, axis=1) - 1) // k
        ids_BL += ids_BL >= chosen_B[:, None]
        np.put_along_axis(ids_BL, places_BJ, chosen_B[:, None].repeat(k, axis=1), axis=1)
        return ids_BL


def _draw(mass: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Inverse of the cumulative sum: much faster than rng.choice for large tables."""
    cumulative = np.cumsum(mass)
    drawn = np.searchsorted(cumulative, rng.random(size) * cumulative[-1], side="right")
    return np.minimum(drawn, len(mass) - 1)


# --- tokens and backgrounds -----------------------------------------------------------------------


def parity_tokens(k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """k planted bits, written with tokens 1 and 2 (0 is the blank); the label is their XOR."""
    bits_ZJ = np.array(list(product((0, 1), repeat=k)))
    return bits_ZJ + 1, bits_ZJ.sum(axis=1) % 2, np.full(len(bits_ZJ), 2.0**-k)


def order_tokens() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens 1 and 2 in this order (label 0) or the other (label 1); only their order matters."""
    return np.array([[1, 2], [2, 1]]), np.array([0, 1]), np.array([0.5, 0.5])


def marker_background(marker_rate: float) -> np.ndarray:
    """Blanks, with one of the two markers at this rate."""
    if not 0 <= marker_rate < 1:
        raise ConfigError(f"marker_rate={marker_rate} must lie in [0, 1)")
    return np.array([1 - marker_rate, marker_rate / 2, marker_rate / 2])
