"""Define what a task provides: prompts, target responses, and the position IDs that couple them.

Nothing here knows a model. A task of one's own needs only what `Task` lists; study/tasks.md
writes one.

Dimension key: B samples, P prompt length, R response length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from olmo_sparsity.base.errors import ConfigError

Ks = int | np.ndarray | None
"""k of all samples, or of each. None: the task chooses, or has no k."""


@dataclass(frozen=True)
class Samples:
    """B samples with prompts of one length and responses of one length."""

    prompt_BP: np.ndarray
    response_BR: np.ndarray

    prompt_ids_BP: np.ndarray | None = None
    """Coupled position IDs, at least 1: tokens that belong together have equal or neighbouring
    ones. Only their order and equality matter, as training shifts and spreads them. None: the task
    has no coupling."""

    response_ids_BR: np.ndarray | None = None
    """Coupled position IDs of the response."""

    unit: int = 1
    """Size of a unit, in tokens or coupled IDs, from the first on: aligned cuts fall between
    units."""

    def __post_init__(self) -> None:
        if (self.prompt_ids_BP is None) != (self.response_ids_BR is None):
            raise ConfigError(
                "a sample has coupled IDs for its prompt and its response, or neither"
            )
        for name, shape in (
            ("prompt_ids_BP", self.prompt_BP.shape),
            ("response_ids_BR", self.response_BR.shape),
        ):
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise ConfigError(f"{name} has shape {array.shape}; its tokens have shape {shape}")
        if len(self.prompt_BP) != len(self.response_BR):
            raise ConfigError(
                f"{len(self.prompt_BP)} prompts have {len(self.response_BR)} responses"
            )

    @property
    def coupled_ids_BL(self) -> np.ndarray:
        """The coupled IDs of prompt and response."""
        assert self.prompt_ids_BP is not None
        assert self.response_ids_BR is not None
        return np.concatenate((self.prompt_ids_BP, self.response_ids_BR), axis=1)

    @property
    def partners_BL(self) -> np.ndarray:
        """For each token, the place of the first prompt token with the same coupled ID."""
        num_prompt = self.prompt_BP.shape[1]
        same_BLP = self.coupled_ids_BL[:, :, None] == self.coupled_ids_BL[:, None, :num_prompt]
        if not same_BLP.any(2).all():
            raise ConfigError(
                "scheme auxiliary: some response tokens of this task are coupled with no prompt "
                "token; remove auxiliary from schemes"
            )
        return same_BLP.argmax(2)


class Task(Protocol):
    """The interface of a task, and what most of the shipped ones have in common."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Return the words; a token's ID is its word's index."""

    @property
    def length_step(self) -> int:
        """Return the number of which lengths are multiples."""
        return 1

    def sample(
        self, generator: np.random.Generator, num_samples: int, length: int, k: Ks = None
    ) -> Samples:
        """Return random samples of a length. A task without k rejects one.

        length: As the task counts it: tokens, digits or statements.
        """

    def largest_k(self, length: int) -> int | None:
        """Return the largest k of a sample of this length. None: the task has no k."""
        return None

    def solve(self, samples: Samples) -> np.ndarray:
        """Return response_BR, computed from the prompts alone: a check of `sample`."""

    def largest_id(self, length: int) -> int | None:
        """Return the largest coupled ID of a sample of this length. None: no coupling."""
        return None


def refuse_k(task: str, k: Ks) -> None:
    """Raise ConfigError if a task without k is given one."""
    if k is not None:
        raise ConfigError(f"{task} has no k; leave train_ks and test_ks empty")


@dataclass(frozen=True)
class EndToken(Task):
    """A task whose responses end with a token of its own, so that a model must find their length.
    The end is coupled with the last token of the prompt."""

    task: Task

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return (*self.task.vocabulary, "<end>")

    @property
    def length_step(self) -> int:
        return self.task.length_step

    def sample(
        self, generator: np.random.Generator, num_samples: int, length: int, k: Ks = None
    ) -> Samples:
        samples = self.task.sample(generator, num_samples, length, k)
        ids_BP = samples.prompt_ids_BP
        ids_BR = samples.response_ids_BR
        if ids_BP is not None and ids_BR is not None:
            ids_BR = np.concatenate((ids_BR, ids_BP[:, -1:]), axis=1)
        response_BR = self._with_end(samples.response_BR)
        return replace(samples, response_BR=response_BR, response_ids_BR=ids_BR)

    def largest_k(self, length: int) -> int | None:
        return self.task.largest_k(length)

    def largest_id(self, length: int) -> int | None:
        return self.task.largest_id(length)

    def solve(self, samples: Samples) -> np.ndarray:
        return self._with_end(self.task.solve(samples))

    def _with_end(self, response_BR: np.ndarray) -> np.ndarray:
        return np.pad(response_BR, ((0, 0), (0, 1)), constant_values=len(self.task.vocabulary))
