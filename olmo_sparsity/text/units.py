"""Group distant tokens into units, such as words, which are ranked, added and dropped as one.

    tokens   "I" "t" " open" "ed" " in" " 1921" "."     with the distant indices 0 to 6
    words    first = [0, 2, 4, 5], end = [2, 4, 5, 7]
    span:2   first = [0, 1, 2, 3, 4, 5]         runs of two tokens, which overlap

A *distant index* counts the distant tokens of a block from 0. (A *place* counts the tokens of a
document.)

Place in the flow: the text of tokens (documents.py) → **`Units`** → selectors. Pure arithmetic; no
torch.

Dimension key: F distant tokens, U distant units, T targets, A random halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.extend import find_added
from olmo_sparsity.base.renamed import OldAttribute

NO_INDICES = np.empty(0, dtype=np.int64)
"""The distant indices of no unit."""

Spans = list[tuple[int, int]]
"""Targets of a block: for each the index of its first token and the index after its last. A target
may have several tokens, whose losses are added."""


@dataclass(frozen=True)
class Units:
    """Runs of distant tokens, such as words. Each is ranked, added, dropped and counted as one."""

    first: np.ndarray
    """The distant index of the first token of each unit."""

    end: np.ndarray
    """One past the distant index of the last token of each unit."""

    # Selectors of users may have been written for the last release.
    places = OldAttribute("distant_indices")
    total = OldAttribute("sum_by_unit")

    @staticmethod
    def of_tokens(num_distant: int) -> Units:
        """Return a unit for each token."""
        return Units.of_spans(num_distant, 1)

    @staticmethod
    def of_spans(num_distant: int, width: int) -> Units:
        """Return a unit for each run of `width` tokens. Neighbouring units overlap."""
        first = np.arange(num_distant - width + 1)
        return Units(first, first + width)

    @staticmethod
    def of_runs(run_F: np.ndarray) -> Units:
        """Return a unit for each run of tokens that have the same number. `run_F`: a number for
        each token, such as the index of its word in the document."""
        changes = np.flatnonzero(np.diff(run_F)) + 1
        bounds = np.concatenate([[0], changes, [len(run_F)]])
        return Units(bounds[:-1], bounds[1:])

    def __len__(self) -> int:
        return len(self.first)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all units together. Units such as spans overlap, and each
        token counts once."""
        return len(self.distant_indices(*range(len(self))))

    def distant_indices(self, *units: int) -> np.ndarray:
        """Return the distant indices of all tokens of these units, in rising order, each once."""
        if len(units) == 1:  # most calls, for which no sort is needed
            return np.arange(self.first[units[0]], self.end[units[0]])
        runs = [np.arange(self.first[unit], self.end[unit]) for unit in units]
        return np.unique(np.concatenate([NO_INDICES, *runs]))

    def run(self, first: int, end: int) -> np.ndarray:
        """Return the distant indices of all tokens of the neighbouring units first … end − 1."""
        return np.arange(self.first[first], self.end[end - 1])

    def halves(self, num_halves: int, generator: np.random.Generator) -> np.ndarray:
        """Return kept_AU, which says which units are in each random half. All halves have the same
        number of units, and no two drawn units have a token in common: of spans, which overlap,
        only every W-th can be drawn."""
        drawable = []
        end_of_last = 0
        for unit in range(len(self)):
            if self.first[unit] >= end_of_last:
                drawable.append(unit)
                end_of_last = self.end[unit]
        kept_AU = np.zeros((num_halves, len(self)), dtype=bool)
        for kept_U in kept_AU:
            kept_U[generator.choice(drawable, len(drawable) // 2, replace=False)] = True
        return kept_AU

    def sum_by_unit(self, scores_TF: np.ndarray) -> np.ndarray:
        """Return scores_TU: the sum of the scores of each unit's tokens, for each target."""
        # `reduceat` takes only bounds below the number of columns, and `end` may be F. The added
        # column of zeros changes no sum.
        padded = np.pad(scores_TF, ((0, 0), (0, 1)))
        # With the bounds first[0], end[0], first[1], end[1], … `reduceat` returns the sum from each
        # bound to the next. The even columns are the sums of the units. The odd ones, from the end
        # of a unit to the beginning of the next, are not used.
        bounds = np.stack([self.first, self.end], axis=1).ravel()
        return np.add.reduceat(padded, bounds, axis=1)[:, ::2]


def span_width(units: str) -> int | None:
    """Return the number of tokens of each unit: 4 for `span:4`, 1 for `tokens`. Return None for
    units whose width depends on the text, and raise ConfigError for a name that is not a unit."""
    if units == "tokens":
        return 1
    if units in ("words", "sentences", "paragraphs"):
        return None
    kind, _, width = units.partition(":")
    if kind != "span" or not width.isdecimal() or int(width) < 2:
        if find_added(units, "olmo_sparsity.units", "units") is not None:
            return None
        raise ConfigError(
            f"units={units} is none of tokens, words, sentences, paragraphs, span:W (W of 2 or "
            "more) and file.py:function (from a text to the characters at which units begin)"
        )
    return int(width)
