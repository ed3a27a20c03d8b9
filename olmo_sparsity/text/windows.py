"""Cut documents into blocks of targets, and say which tokens each target may see.

A block is W consecutive targets that share their windows. Here P = 1, F = 5, S = 3 and W = 2:

    tokens of the block   p | d d d d d | l l l | t t
    position ID           0   1 2 3 4 5   6 7 8   9 10
    long window           prefix, distant and local tokens        N = F + S
    short window          prefix and local tokens                 S

If the block starts at token b of the document, target b + i sees the N + i tokens before it (long)
or the last S + i of them (short), as earlier targets are inputs, too. So only W = 1 gives each
target a window of exactly N tokens. With `long="all"`, N is b: a target sees everything before it.
Both windows begin with the same P prefix tokens, such as a beginning-of-text token.

The position ID of a token is its index in the long window, prefix included, whichever other tokens
are left out. A *place* is the index of a token in its document; names such as `start` and `target`
mean places.

Distant tokens are ranked, added and dropped as units, such as words (units.py).

Place in the flow: documents → **blocks of targets** → losses. Pure arithmetic; no torch.

Dimension key: N long, S short, P prefix, W stride (targets of a block), F = N − S distant tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any, TypeVar

import numpy as np

from olmo_sparsity.base.errors import ConfigError, check_type
from olmo_sparsity.base.renamed import OldAttribute
from olmo_sparsity.config.windows import Long, LongWindow, long_window

Places = TypeVar("Places", int, np.ndarray)
"""The place of one token, or an array of places; a function returns the same kind."""


@dataclass(frozen=True)
class Windows:
    """The lengths of the long and of the local window, in tokens before a target."""

    long: Long
    short: int
    stride: int = 1
    prefix: tuple[int, ...] = ()
    """Token IDs that begin every window. They are never ranked."""

    max_tokens: int | None = None
    """With `long="all"`: the largest number of tokens of the long window, the last before the
    target. None means no limit."""

    min_distant: int = 1
    """With `long="all"`: the number of distant tokens of the first target. Later targets have
    more."""

    def __post_init__(self) -> None:
        check_type("short", self.short, Integral, "a whole number of tokens")
        check_type("stride", self.stride, Integral, "a whole number of tokens")
        if self.long != "all":
            check_type("long", self.long, Integral, 'a whole number of tokens, or "all"')

    @cached_property
    def long_window(self) -> LongWindow:
        return long_window(self.long, self.max_tokens, self.min_distant)

    @property
    def has_all(self) -> bool:
        """Return whether a target sees all earlier text."""
        return self.long_window.is_all

    @property
    def num_distant(self) -> int:
        """Return the number of distant tokens of every target."""
        assert not self.has_all, "the number of distant tokens differs between blocks"
        return self.least_distant

    @property
    def least_distant(self) -> int:
        """Return the smallest number of distant tokens of a target."""
        return self.long_window.min_num_distant(self.short)

    @property
    def first_target(self) -> int:
        """Return the place of the first token of a document with enough distant tokens and a full
        local window before it."""
        return self.long_window.first_target(self.short)

    def check(self) -> None:
        """Raise ConfigError for lengths that do not form windows."""
        if self.short < 1 or self.stride < 1:
            raise ConfigError(f"short={self.short} and stride={self.stride} must be at least 1")
        max_length = self.long_window.max_length
        if max_length is not None and self.short >= max_length:
            raise ConfigError(
                f"short={self.short} must be below long={max_length}, as distant tokens are "
                "those of the long window outside the local one; lower short, or raise long"
            )

    def as_stored(self) -> dict[str, Any]:
        """Return the lengths as results store them, by keys that later releases can read."""
        return {
            "long": self.long,
            "short": self.short,
            "stride": self.stride,
            "prefix": self.prefix,
            # Stored results have these keys, so a new name of the field does not change them.
            "most": self.max_tokens,
            "least": self.min_distant,
        }

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Windows:
        """Return the windows that `as_stored` has written, possibly in an earlier release."""
        return cls(
            long=stored["long"],
            short=stored["short"],
            stride=stored["stride"],
            # An earlier release did not store these three.
            prefix=tuple(stored.get("prefix") or ()),
            max_tokens=stored.get("most"),
            min_distant=stored.get("least", 1),
        )

    def num_positions(self, longest_document: int) -> int:
        """Return one more than the largest position ID of a forward pass. `longest_document`: the
        number of tokens of the longest document. A long window of a fixed length does not depend on
        it."""
        # The longest window is that of a full block at the document's end.
        num_long = self.tokens_before(longest_document - self.stride)
        return len(self.prefix) + num_long + self.stride - 1  # the last target is no input

    def tokens_before(self, start: int) -> int:
        """Return the number of tokens in the long window of a block that starts at `start`."""
        return self.long_window.tokens_before(start)

    def first_distant(self, start: Places) -> Places:
        """Return the place of the first distant token of a block that starts at `start`."""
        first: Places = self.long_window.first_token(start)
        return first

    def start_of(self, target: Places) -> Places:
        """Return the start of the block that a target belongs to."""
        return target - (target - self.first_target) % self.stride

    def blocks(self, tokens: np.ndarray) -> Iterator[Block]:
        """Yield blocks of `stride` targets until each token with a full long window is a target.
        The last block may be smaller."""
        for start in range(self.first_target, len(tokens), self.stride):
            yield self.block(tokens, start, min(start + self.stride, len(tokens)))

    def block(self, tokens: np.ndarray, start: int, end: int) -> Block:
        """Return the targets start … end − 1 as one block."""
        num_long = self.tokens_before(start)
        prefix = np.array(self.prefix, dtype=tokens.dtype)
        # The block's windows have fixed lengths, also with `long="all"`.
        windows = replace(self, long=num_long, stride=end - start)
        return Block(windows, start, np.concatenate([prefix, tokens[start - num_long : end]]))


@dataclass(frozen=True)
class Block:
    """Consecutive targets of a document, and the tokens that they may see."""

    windows: Windows
    """The windows of this block: `long` is a number, and `stride` the number of its targets."""

    start: int
    """The place of the first target in its document."""

    tokens: np.ndarray
    """The prefix, the long window of the first target, and the targets. A token's index in this
    array is its position ID."""

    @property
    def first_distant(self) -> int:
        """Return the place in the document of the first distant token."""
        return self.start - self.num_distant - self.windows.short

    @property
    def num_prefix(self) -> int:
        return len(self.windows.prefix)

    @property
    def num_distant(self) -> int:
        return self.windows.num_distant

    @property
    def num_before(self) -> int:
        """Return the number of tokens before the first target, with the prefix."""
        return self.num_prefix + self.num_distant + self.windows.short

    @property
    def num_targets(self) -> int:
        return len(self.tokens) - self.num_before

    @property
    def targets_W(self) -> np.ndarray:
        return self.tokens[self.num_before :]

    @cached_property
    def distant_F(self) -> np.ndarray:
        """Return the IDs of the distant tokens."""
        return self.tokens[self.num_prefix : self.num_prefix + self.num_distant]

    # Selectors of users may have been written for the last release.
    num_far = OldAttribute("num_distant")
    far_F = OldAttribute("distant_F")
    near = OldAttribute("positions_of_local")
    first = OldAttribute("first_distant")
    earlier = OldAttribute("positions_of_distant")
    local = OldAttribute("positions_of_local")

    def with_distant(self, distant_F: np.ndarray) -> Block:
        """Return the same local window and targets after other distant tokens."""
        assert distant_F.shape == (self.num_distant,)
        prefix = self.tokens[: self.num_prefix]
        local_and_targets = self.tokens[self.num_prefix + self.num_distant :]
        return replace(self, tokens=np.concatenate([prefix, distant_F, local_and_targets]))

    def positions_of_distant(self, distant_indices: np.ndarray) -> np.ndarray:
        """Return the position IDs of the prefix and of these distant tokens, in rising order."""
        return np.concatenate([np.arange(self.num_prefix), self.num_prefix + distant_indices])

    def positions_of_local(self, num_targets: int | None = None) -> np.ndarray:
        """Return the position IDs of the local window, and of the targets that are inputs when the
        first `num_targets` targets are predicted (all by default)."""
        if num_targets is None:
            num_targets = self.num_targets
        first_local = self.num_prefix + self.num_distant
        # A target is an input for the next one, so the last target is not one.
        return np.arange(first_local, self.num_before + num_targets - 1)
