"""Say how much of the text before a target is long context, and how much of that is local.

    FixedWindow(8)      . . . . |d d d d d l l l| target      5 distant tokens, 3 local ones
    AllEarlierText()   |d d d d  d d d d d l l l| target      all but 3 are distant

    long_window(8)            FixedWindow(8)
    long_window("all")        AllEarlierText()
    default_local(128, 64)    16: a quarter of a long window of 64 tokens
    default_local(128, 4032)  128

The options, the windows of a text (text/windows.py), reports and experiments ask here what a long
window is. Both classes are a `LongWindow`, and only this module names them. Imports no large
package, because `--help` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

Long = int | Literal["all"]
"""What a user passes as `long`: a number of tokens, or all earlier text."""

# The default local windows, in tokens.
#
# That of many documents and that of one prediction differ on purpose. In documents each target is
# evaluated many times over, and all targets of a block share the window, so that it is as long as
# what is local to most tokens: the 96 tokens before a token are enough for 75 to 80% of them
# (arXiv 2512.08082), and each further token makes every row of a target cost more. One prediction
# is read by a person, who asks what it takes from the text before; a prompt is often shorter than
# 500 tokens, of which 128 would hide a large part.
LOCAL_OF_DOCUMENTS = 128
LOCAL_OF_ONE_PREDICTION = 32


def default_local(usual_local: int, num_long: int | None) -> int:
    """Return the default number of tokens of the local window: `usual_local`, or a quarter of the
    long window if that is less, so that most of the long window is distant. `num_long`: the number
    of tokens of the long window; None if it has no fixed length."""
    if num_long is None:
        return usual_local
    return max(1, min(usual_local, num_long // 4))


class LongWindow(Protocol):
    """The tokens before a target that are its long context."""

    @property
    def is_all(self) -> bool:
        """Return whether it takes all earlier text, or as much of it as a limit allows, so that
        targets differ in their numbers of tokens."""

    @property
    def max_length(self) -> int | None:
        """Return the largest number of tokens that it can have; None if only the text limits it."""

    @property
    def sort_key(self) -> float:
        """Return the number of tokens by which windows are sorted, the shortest first: infinity for
        all earlier text, even if its number of tokens is limited."""

    @property
    def description(self) -> str:
        """Return its number of tokens in words."""

    def tokens_before(self, place: int) -> int:
        """Return the number of tokens in the window of a target whose index in its document is
        `place`."""

    def first_token(self, place: Any) -> Any:
        """Return the index of the first token in the window of a target at index `place`: a number,
        or, for an array of targets, an array. Negative where a fixed window does not fit before
        the target."""

    def first_target(self, local: int) -> int:
        """Return the smallest index of a target before which there is enough text. `local`: the
        number of tokens of the local window, which is a part of the long one."""

    def min_num_distant(self, local: int) -> int:
        """Return the smallest number of distant tokens that a target can have."""


@dataclass(frozen=True)
class FixedWindow:
    """A `LongWindow` of the last `num_tokens` tokens before a target."""

    num_tokens: int
    is_all = False

    @property
    def max_length(self) -> int | None:
        return self.num_tokens

    @property
    def sort_key(self) -> float:
        return self.num_tokens

    @property
    def description(self) -> str:
        return str(self.num_tokens)

    def tokens_before(self, place: int) -> int:
        return self.num_tokens

    def first_token(self, place: Any) -> Any:
        return place - self.num_tokens

    def first_target(self, local: int) -> int:
        return self.num_tokens

    def min_num_distant(self, local: int) -> int:
        return self.num_tokens - local


@dataclass(frozen=True)
class AllEarlierText:
    """A `LongWindow` of all tokens before a target, or of the last `max_tokens` of them."""

    max_tokens: int | None = None
    """The largest number of tokens of the window. None: no limit."""

    min_distant: int = 1
    """The number of distant tokens of the first target."""

    is_all = True

    @property
    def max_length(self) -> int | None:
        return self.max_tokens

    @property
    def sort_key(self) -> float:
        return float("inf")

    @property
    def description(self) -> str:
        return "of all tokens before a target"

    def tokens_before(self, place: int) -> int:
        return place if self.max_tokens is None else min(place, self.max_tokens)

    def first_token(self, place: Any) -> Any:
        if self.max_tokens is None:
            return 0 * place  # 0 for a number, an array of zeros for an array
        # The larger of 0 and the difference: `max` takes no arrays, and NumPy is not imported here.
        return (place - self.max_tokens) * (place > self.max_tokens)

    def first_target(self, local: int) -> int:
        return local + self.min_distant

    def min_num_distant(self, local: int) -> int:
        return self.min_distant


def long_window(long: Long, max_tokens: int | None = None, min_distant: int = 1) -> LongWindow:
    """Return the long window that a user asks for.

    Args:
        long: What the user has passed.
        max_tokens, min_distant: Those of `AllEarlierText`. A fixed window ignores them: its length
            says both.
    """
    if long == "all":
        return AllEarlierText(max_tokens, min_distant)
    return FixedWindow(long)
