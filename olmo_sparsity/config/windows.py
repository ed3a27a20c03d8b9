"""Say how much of the text before a target is long context, and how much of that is local.

    FixedWindow(8)      . . . . |d d d d d l l l| target      5 distant tokens, 3 local ones
    AllEarlierText()   |d d d d  d d d d d l l l| target      all but 3 are distant

Place in the flow: below all settings. The options, the windows of a text, reports and experiments
ask here what a long window is. Imports no large package, because `--help` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Long = int | Literal["all"]
"""What a user passes as `long`: a number of tokens, or all earlier text."""

# The local window of many documents and that of one prediction differ on purpose. In documents each
# target is evaluated many times over, and all targets of a block share the window, so that it is as
# long as what is local to most tokens: the 96 tokens before a token are enough for 75 to 80% of
# them (arXiv 2512.08082), and each token more makes every row of a target dearer. One prediction is
# read by a person, who asks what it takes from the text before; a prompt is often shorter than 500
# tokens, of which 128 would hide a large part.
LOCAL_OF_DOCUMENTS = 128
LOCAL_OF_ONE_PREDICTION = 32


def default_local(usual_local: int, num_long: int | None) -> int:
    """Return the default number of tokens of the local window: `usual_local`, or a quarter of the
    long window if that is less, so that most of the long window is distant. `num_long`: the number
    of tokens of the long window; None if it has no fixed length."""
    if num_long is None:
        return usual_local
    return max(1, min(usual_local, num_long // 4))


@dataclass(frozen=True)
class FixedWindow:
    """The last `num_tokens` tokens before a target."""

    num_tokens: int
    is_all = False

    @property
    def longest(self) -> int | None:
        """Return the largest number of tokens that the window can have; None if only the text
        limits it."""
        return self.num_tokens

    @property
    def length(self) -> float:
        """Return a number by which windows are sorted, infinity for all earlier text."""
        return self.num_tokens

    @property
    def description(self) -> str:
        return str(self.num_tokens)

    def tokens_before(self, start: int) -> int:
        """Return the number of tokens in the window of a target. `start`: the index of the target
        in its document."""
        return self.num_tokens

    def begin(self, start: Any) -> Any:
        """Return the index of the first token in the window of a target at index `start`. An array
        of targets gives an array."""
        return start - self.num_tokens

    def first_target(self, local: int) -> int:
        """Return the index of the first target, before which there is a whole window. `local`: the
        number of tokens of the local window."""
        return self.num_tokens

    def least_distant(self, local: int) -> int:
        """Return the smallest number of distant tokens that a target can have."""
        return self.num_tokens - local


@dataclass(frozen=True)
class AllEarlierText:
    """All tokens before a target. The methods are those of `FixedWindow`."""

    max_tokens: int | None = None
    """The largest number of tokens of the window, the last before the target. None: no limit."""

    min_distant: int = 1
    """The number of distant tokens of the first target."""

    is_all = True

    @property
    def longest(self) -> int | None:
        return self.max_tokens

    @property
    def length(self) -> float:
        return float("inf")

    @property
    def description(self) -> str:
        return "of all tokens before a target"

    def tokens_before(self, start: int) -> int:
        return start if self.max_tokens is None else min(start, self.max_tokens)

    def begin(self, start: Any) -> Any:
        if self.max_tokens is None:
            return 0 * start  # a number or an array, as `start`
        # The larger of 0 and the difference, for a number and for an array.
        return (start - self.max_tokens) * (start > self.max_tokens)

    def first_target(self, local: int) -> int:
        return local + self.min_distant

    def least_distant(self, local: int) -> int:
        return self.min_distant


def long_window(
    long: Long, max_tokens: int | None = None, min_distant: int = 1
) -> FixedWindow | AllEarlierText:
    """Return the long window that a user asks for. `max_tokens` and `min_distant` hold for all
    earlier text alone: a fixed window says both by its length."""
    if long == "all":
        return AllEarlierText(max_tokens, min_distant)
    return FixedWindow(long)
