"""Which tokens a target may see: the long window, the short one, and the far units between.

Place in the flow: documents → **blocks of targets** → losses. Pure arithmetic; no torch.

A block is W consecutive targets that share their windows. With the block starting at b, target b +
i sees the N + i tokens before it (long) or the last S + i of them (short); W = 1 is an exact window
for each target. A token's position ID is its place in the long window, whatever else is left out.

Dimension key: N long, S short, W stride (targets of a block), F = N − S far places, U far units, T
targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from olmo_sparsity.errors import ConfigError

NOTHING = np.empty(0, dtype=np.int64)
"""No far places."""


@dataclass(frozen=True)
class Windows:
    long: int
    short: int
    stride: int = 1

    @property
    def num_far(self) -> int:
        return self.long - self.short

    @property
    def num_positions(self) -> int:
        """One more than the largest position ID a forward uses."""
        return self.long + self.stride - 1

    def check(self, max_positions: int | None = None) -> None:
        """Refuse windows that mean nothing, or that the model is not prepared for."""
        if self.short < 1 or self.stride < 1:
            raise ConfigError(f"short={self.short} and stride={self.stride} must be at least 1")
        if self.short >= self.long:
            raise ConfigError(
                f"short={self.short} must be below long={self.long}: the far tokens are those in "
                "the long window and not in the short one"
            )
        if max_positions is not None and self.num_positions > max_positions:
            raise ConfigError(
                f"long={self.long} with stride={self.stride} needs {self.num_positions} positions, "
                f"the model is prepared for {max_positions}; lower long"
                + (" or stride" if self.stride > 1 else "")
            )

    def start_of(self, target: Any) -> Any:
        """The first target of the block that a target (or each of an array) belongs to."""
        return target - (target - self.long) % self.stride

    def blocks(self, tokens: np.ndarray) -> Iterator[Block]:
        """Every target with a full long window, in order; the last block may hold fewer."""
        for start in range(self.long, len(tokens), self.stride):
            end = min(start + self.stride, len(tokens))
            yield Block(self, start, tokens[start - self.long : end])


@dataclass(frozen=True)
class Block:
    windows: Windows
    start: int
    """Place of the first target in its document."""

    tokens: np.ndarray
    """The long window of the first target, then the targets; a token's index is its position ID."""

    @property
    def first(self) -> int:
        """Place in the document of the first far token."""
        return self.start - self.windows.long

    @property
    def num_targets(self) -> int:
        return len(self.tokens) - self.windows.long

    @property
    def targets_W(self) -> np.ndarray:
        return self.tokens[self.windows.long :]

    @property
    def far_F(self) -> np.ndarray:
        return self.tokens[: self.windows.num_far]

    def with_far(self, far_F: np.ndarray) -> Block:
        """The same short window and targets behind another text."""
        assert far_F.shape == (self.windows.num_far,)
        return replace(self, tokens=np.concatenate([far_F, self.tokens[self.windows.num_far :]]))

    def long_places(self, last: int | None = None) -> np.ndarray:
        """Position IDs of the inputs that predict the targets before `last`, in the long window."""
        last = self.num_targets if last is None else last
        return np.arange(self.windows.long + last - 1)

    def set_places(self, far: np.ndarray, last: int | None = None) -> np.ndarray:
        """Position IDs of `far` (in rising order) and the short window before target last − 1."""
        last = self.num_targets if last is None else last
        return np.concatenate([far, np.arange(self.windows.num_far, self.windows.long + last - 1)])


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
        """Neighbours with one number in `run_F` (that of their word, say) are a unit."""
        changes = np.flatnonzero(np.diff(run_F)) + 1
        bounds = np.concatenate([[0], changes, [len(run_F)]])
        return Units(bounds[:-1], bounds[1:])

    def __len__(self) -> int:
        return len(self.first)

    def places(self, *chosen: int) -> np.ndarray:
        """All places of the chosen units, in order, each once."""
        if len(chosen) == 1:
            return np.arange(self.first[chosen[0]], self.end[chosen[0]])
        runs = [np.arange(self.first[unit], self.end[unit]) for unit in chosen]
        return np.unique(np.concatenate([NOTHING, *runs]))

    def total(self, scores_TF: np.ndarray) -> np.ndarray:
        """scores_TU: the sum over the places of each unit."""
        padded = np.pad(scores_TF, ((0, 0), (0, 1)))  # so that `end` may be F
        bounds = np.stack([self.first, self.end], axis=1).ravel()
        return np.add.reduceat(padded, bounds, axis=1)[:, ::2]


def span_width(units: str) -> int | None:
    """4 of `span:4`, 1 of `tokens`; None of units whose width depends on the text."""
    if units == "tokens":
        return 1
    if units in ("words", "sentences"):
        return None
    kind, _, width = units.partition(":")
    if kind != "span" or not width.isdecimal() or int(width) < 2:
        raise ConfigError(
            f"units={units} is none of tokens, words, sentences and span:W with W of 2 or more"
        )
    return int(width)
