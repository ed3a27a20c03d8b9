"""Define the interface of models that return log-probabilities of whole prompts.

`LogprobModel` is all that a verdict on sources needs; servers and llama.cpp implement it as
`PromptModel`:

    model.score([Prompt(prefix=[464, 7696, …], continuation=[287, 1921])])   # [array([−1.2, −0.3])]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from olmo_sparsity.base.renamed import getattr_with_old_names


@dataclass(frozen=True, eq=False)
class Prompt:
    """The token IDs of a text, and of the continuation whose log-probabilities are wanted. Position
    IDs count from 0, without gaps."""

    prefix: np.ndarray
    """All tokens before the continuation, at least one."""

    continuation: np.ndarray

    @cached_property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return a key for dictionaries that is equal for equal prompts. (Arrays cannot be
        keys.)"""
        return tuple(self.prefix.tolist()), tuple(self.continuation.tolist())

    @property
    def inputs(self) -> np.ndarray:
        """Return the tokens that a model reads: all but the last, after which nothing is
        predicted."""
        return np.concatenate([self.prefix, self.continuation[:-1]])


class LogprobModel(Protocol):
    """A model that returns log-probabilities of whole prompts: a `PromptModel`, or `ModelLogprobs`,
    which uses the states of a model in memory."""

    @property
    def shares(self) -> bool:
        """Return whether prompts of one call share the states of their beginnings."""

    @property
    def token_forwards(self) -> int:
        """Return how many tokens forward passes have computed since this object was made."""

    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return for each prompt the log-probabilities of its continuation's tokens, in nats. Each
        token is predicted from all tokens before it."""


class PromptModel(ABC):
    """A `LogprobModel` whose states cannot be read: a server, llama.cpp, a recurrent model of
    transformers."""

    token_forwards = 0
    shares = False

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Return the device of the inputs; the CPU where the model computes elsewhere."""

    @property
    @abstractmethod
    def dtype_name(self) -> str:
        """Return the dtype or quantization of the weights, which is part of the identity."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Return one more than the largest token ID."""

    @abstractmethod
    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return log-probabilities, as `LogprobModel.score` describes."""

    @abstractmethod
    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        """Return the tokens that follow, chosen greedily."""

    def recognize_in(self, folder: Path) -> None:  # noqa: B027 (files have a fingerprint)
        """Raise if the results in this folder were computed by another model than the one that can
        be reached now."""


if not TYPE_CHECKING:  # otherwise mypy accepts any name of this module
    __getattr__ = getattr_with_old_names(__name__, {"Engine": "PromptModel"})
