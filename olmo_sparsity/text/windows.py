"""Which tokens a target may see: the long window, the short one, and the far units between.

A block is W consecutive targets that share their windows. With the block starting at b, target b +
i sees the N + i tokens before it (long) or the last S + i of them (short). With `long="all"`, N is
b. Both windows begin with the same P prefix tokens. The position ID of a token is its place in the
long window, prefix included, whichever other tokens are left out.

Dimension key: N long, S short, P prefix, W stride (targets of a block), F = N − S far places, U far
units, T targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.extend import find_added

NOTHING = np.empty(0, dtype=np.int64)
"""No far places."""

Spans = list[tuple[int, int]]
"""Targets, each from its first token to one past its last: the losses of its tokens are added."""


@dataclass(frozen=True)
class Windows:
    long: int | Literal["all"]
    short: int
    stride: int = 1
    prefix: tuple[int, ...] = ()
    """Token IDs in front of every window. Never candidates."""

    most: int | None = None
    """With `long="all"`: no more tokens than this, the last before the target."""

    least: int = 1
    """With `long="all"`: the far tokens of the first target."""

    @property
    def num_far(self) -> int:
        assert self.long != "all", "the number of far tokens differs between blocks"
        return self.long - self.short

    @property
    def least_far(self) -> int:
        """The smallest number of far tokens of a target."""
        return self.least if self.long == "all" else self.num_far

    @property
    def first_target(self) -> int:
        """The first place of a document that has enough far tokens and a full window before it."""
        return self.short + self.least if self.long == "all" else self.long

    def check(self) -> None:
        """Reject lengths that do not form windows."""
        if self.short < 1 or self.stride < 1:
            raise ConfigError(f"short={self.short} and stride={self.stride} must be at least 1")
        longest = self.most if self.long == "all" else self.long
        if longest is not None and self.short >= longest:
            raise ConfigError(f"short={self.short} must be below long={longest}")

    def num_positions(self, longest: int = 0) -> int:
        """One more than the largest position ID of a forward. `longest`: tokens of the longest
        document, needed with `long="all"`."""
        if self.long == "all":
            return len(self.prefix) + self.of_all(longest - self.stride) + self.stride - 1
        return len(self.prefix) + self.long + self.stride - 1

    def of_all(self, start: int) -> int:
        """Tokens of the long window of a target at `start`, with `long="all"`."""
        return start if self.most is None else min(start, self.most)

    def first_far(self, start: Any) -> Any:
        """The place of the first far token of a block (or each of an array of blocks)."""
        if self.long != "all":
            return start - self.long
        return start - start if self.most is None else np.maximum(0, start - self.most)

    def start_of(self, target: Any) -> Any:
        """The first target of the block that a target (or each of an array) belongs to."""
        return target - (target - self.first_target) % self.stride

    def blocks(self, tokens: np.ndarray) -> Iterator[Block]:
        """Every target with a full long window, in order; the last block may hold fewer."""
        for start in range(self.first_target, len(tokens), self.stride):
            yield self.block(tokens, start, min(start + self.stride, len(tokens)))

    def block(self, tokens: np.ndarray, start: int, end: int) -> Block:
        """The targets from `start` to `end`, all in one block."""
        long = self.of_all(start) if self.long == "all" else self.long
        prefix = np.array(self.prefix, dtype=tokens.dtype)
        windows = replace(self, long=long, stride=end - start)
        return Block(windows, start, np.concatenate([prefix, tokens[start - long : end]]))


@dataclass(frozen=True)
class Block:
    windows: Windows
    """Windows of this block: `long` is a number, and `stride` the number of its targets."""

    start: int
    """Place of the first target in its document."""

    tokens: np.ndarray
    """Prefix, long window of the first target, targets; a token's index is its position ID."""

    @property
    def first(self) -> int:
        """Place in the document of the first far token."""
        return self.start - self.num_far - self.windows.short

    @property
    def num_prefix(self) -> int:
        return len(self.windows.prefix)

    @property
    def num_far(self) -> int:
        return self.windows.num_far

    @property
    def num_before(self) -> int:
        """Tokens before the first target."""
        return self.num_prefix + self.num_far + self.windows.short

    @property
    def num_targets(self) -> int:
        return len(self.tokens) - self.num_before

    @property
    def targets_W(self) -> np.ndarray:
        return self.tokens[self.num_before :]

    @cached_property
    def far_F(self) -> np.ndarray:
        return self.tokens[self.num_prefix : self.num_prefix + self.num_far]

    def with_far(self, far_F: np.ndarray) -> Block:
        """Return the same local window and targets after other distant tokens."""
        assert far_F.shape == (self.num_far,)
        prefix, near = np.split(self.tokens, [self.num_prefix, self.num_prefix + self.num_far])[::2]
        return replace(self, tokens=np.concatenate([prefix, far_F, near]))

    def earlier(self, far: np.ndarray) -> np.ndarray:
        """Position IDs of the prefix and of the places `far` (indices into the distant tokens,
        rising)."""
        return np.concatenate([np.arange(self.num_prefix), self.num_prefix + far])

    def near(self, last: int | None = None) -> np.ndarray:
        """Position IDs of the short window, as inputs that predict the targets before `last`."""
        last = self.num_targets if last is None else last
        return np.arange(self.num_prefix + self.num_far, self.num_before + last - 1)


# --- units ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Units:
    """Runs of far places. Each is ranked, added, dropped and counted as one."""

    first: np.ndarray
    end: np.ndarray
    """One past the last place of each."""

    @staticmethod
    def of_tokens(num_far: int) -> Units:
        return Units.of_spans(num_far, 1)

    @staticmethod
    def of_spans(num_far: int, width: int) -> Units:
        """Every run of `width` places; they overlap."""
        first = np.arange(num_far - width + 1)
        return Units(first, first + width)

    @staticmethod
    def of_runs(run_F: np.ndarray) -> Units:
        """Neighbours with equal numbers in `run_F`, such as the number of their word, are one
        unit."""
        bounds = np.concatenate([[0], np.flatnonzero(np.diff(run_F)) + 1, [len(run_F)]])
        return Units(bounds[:-1], bounds[1:])

    def __len__(self) -> int:
        return len(self.first)

    def places(self, *chosen: int) -> np.ndarray:
        """All places of the chosen units, in order, each once."""
        if len(chosen) == 1:
            return np.arange(self.first[chosen[0]], self.end[chosen[0]])
        runs = [np.arange(self.first[unit], self.end[unit]) for unit in chosen]
        return np.unique(np.concatenate([NOTHING, *runs]))

    def run(self, first: int, end: int) -> np.ndarray:
        """All places of neighbouring units."""
        return np.arange(self.first[first], self.end[end - 1])

    def halves(self, num_halves: int, generator: np.random.Generator) -> np.ndarray:
        """kept_AU: random halves, all with the same number of units. Of spans, which overlap, only
        those that are adjacent are drawn."""
        apart, end = [], 0
        for unit in range(len(self)):
            if self.first[unit] >= end:
                apart.append(unit)
                end = self.end[unit]
        kept_AU = np.zeros((num_halves, len(self)), dtype=bool)
        for kept_U in kept_AU:
            kept_U[generator.choice(apart, len(apart) // 2, replace=False)] = True
        return kept_AU

    def total(self, scores_TF: np.ndarray) -> np.ndarray:
        """scores_TU: the sum over the places of each unit."""
        padded = np.pad(scores_TF, ((0, 0), (0, 1)))  # so that `end` may be F
        bounds = np.stack([self.first, self.end], axis=1).ravel()
        return np.add.reduceat(padded, bounds, axis=1)[:, ::2]


def span_width(units: str) -> int | None:
    """Return 4 for `span:4`, 1 for `tokens`, None where the width depends on the text."""
    if units == "tokens":
        return 1
    if units in ("words", "sentences", "paragraphs"):
        return None
    kind, _, width = units.partition(":")
    if kind != "span" or not width.isdecimal() or int(width) < 2:
        if find_added(units, "olmo_sparsity.units", "units") is not None:
            return None
        known = "tokens, words, sentences, paragraphs, span:W (W of 2 or more), file.py:function"
        raise ConfigError(f"units={units} is none of {known}")
    return int(width)
