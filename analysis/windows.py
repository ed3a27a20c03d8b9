"""Which tokens a target may see: the long window, the short one, and the far tokens between.

Place in the flow: documents → **blocks of targets** → losses. Pure arithmetic; no torch.

A block is W consecutive targets that share their windows. With the block starting at b, target b +
i sees the N + i tokens before it (long) or the last S + i of them (short); W = 1 is an exact window
for each target. A token's position ID is its place in the long window, whatever else is left out.

Dimension key: N long, S short, W stride (targets of a block), F = N − S far tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from olmo_sparsity.errors import ConfigError

NOTHING = np.empty(0, dtype=np.int64)
"""No far tokens."""


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

    def check(self, max_positions: int | None) -> None:
        """Refuse windows that mean nothing, or that the model is not prepared for."""
        if self.short < 1 or self.stride < 1:
            raise ConfigError(f"--short={self.short} and --stride={self.stride} must be at least 1")
        if self.short >= self.long:
            raise ConfigError(
                f"--short={self.short} must be below --long={self.long}: the far tokens are those "
                "in the long window and not in the short one"
            )
        if max_positions is not None and self.num_positions > max_positions:
            raise ConfigError(
                f"--long={self.long} with --stride={self.stride} needs {self.num_positions} "
                f"positions, the model is prepared for {max_positions}; lower --long"
                + (" or --stride" if self.stride > 1 else "")
            )

    def blocks(self, document: np.ndarray) -> Iterator[Block]:
        """Every target with a full long window, in order; the last block may hold fewer."""
        for start in range(self.long, len(document), self.stride):
            end = min(start + self.stride, len(document))
            yield Block(self, start, document[start - self.long : end])


@dataclass(frozen=True)
class Block:
    windows: Windows
    start: int
    """Place of the first target in its document."""

    tokens: np.ndarray
    """The long window of the first target, then the targets; a token's index is its position ID."""

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
        """The same short window and targets behind other far tokens (the foreign control)."""
        assert far_F.shape == (self.windows.num_far,)
        return replace(self, tokens=np.concatenate([far_F, self.tokens[self.windows.num_far :]]))

    def long_places(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Position IDs of the inputs that predict targets first … last − 1 in the long window."""
        last = self.num_targets if last is None else last
        assert 0 <= first < last <= self.num_targets
        return np.arange(self.windows.long + last - 1)

    def set_places(self, far: np.ndarray, last: int | None = None) -> np.ndarray:
        """Position IDs of `far` (in rising order) and the short window before target last − 1."""
        last = self.num_targets if last is None else last
        return np.concatenate([far, np.arange(self.windows.num_far, self.windows.long + last - 1)])
