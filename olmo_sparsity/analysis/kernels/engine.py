"""The interface of what returns log-probabilities of whole prompts: all that a verdict needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token IDs. Positions count from 0, without gaps."""

    prefix: np.ndarray
    """All tokens before the continuation, at least one."""

    continuation: np.ndarray

    @cached_property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Equal for equal prompts."""
        return tuple(self.prefix.tolist()), tuple(self.continuation.tolist())

    @property
    def inputs(self) -> np.ndarray:
        """All tokens that predict one of the continuation, or precede one that does."""
        return np.concatenate([self.prefix, self.continuation[:-1]])


class LogprobModel(Protocol):
    @property
    def token_forwards(self) -> int:
        """Tokens that forward passes have computed since this object was made."""

    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return log p, in nats, of each token of each prompt's continuation, given all tokens
        before it. Prompts that are given together may share what they have in common."""


class Engine(ABC):
    """A `LogprobModel` without states that could be read: a server, llama.cpp, a recurrent model of
    transformers."""

    token_forwards = 0

    @property
    @abstractmethod
    def device(self) -> torch.device: ...
    @property
    @abstractmethod
    def dtype_name(self) -> str: ...
    @property
    @abstractmethod
    def vocab_size(self) -> int: ...
    @abstractmethod
    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]: ...
    @abstractmethod
    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        """Return the tokens that follow, chosen greedily."""

    def recognize_in(self, folder: Path) -> None:  # noqa: B027 (files have a fingerprint)
        """Raise if the results in this folder are of a model that is no longer there."""
