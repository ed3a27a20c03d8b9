"""Define what a training package must provide so that the tool reads its runs.

The tool imports no training code: an installed package offers a `RunLoader` as an entry point of
the group `olmo_sparsity.runs`, as this package does for its own runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.config.text import CorpusConfig


class PreparedText(Protocol):
    """Tokenized documents on disk."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    def __len__(self) -> int:
        """Return the number of documents."""

    def document(self, number: int) -> np.ndarray: ...
    def group(self, number: int) -> str: ...


@dataclass(frozen=True)
class TrainingText:
    """The text that a run was trained on."""

    folder: str
    open_heldout: Callable[[], PreparedText]
    corpus: CorpusConfig
    heldout_share: float


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint as a training package reads it."""

    model: Any
    """On its device, in its dtype, in evaluation mode."""

    tokenizer: Tokenizer
    name: str
    weights_sha256: str
    text: TrainingText
    trained: dict[str, Any]


class Reader(Protocol):
    """What reading text needs of a `LoadedModel`."""

    name: str
    model: Any
    tokenizer: Tokenizer | None
    text: TrainingText | None

    def encode(
        self, texts: list[str], control_tokens: bool = True, follow: bool = False
    ) -> list[list[int]]: ...


class RunLoader(Protocol):
    def find(self, path: Path) -> Path | None:
        """Return the folder of the weights, or None if `path` is not a run of this package."""

    def load(self, folder: Path, name: str, dtype: str, device: str) -> TrainedModel:
        """Load a folder that `find` returned. `name` is what the user typed."""

    def checkpoints(self, path: Path) -> list[Path]:
        """Return the checkpoints of a run folder, the first one first; none of another folder."""

    def open_prepared(self, folder: Path) -> PreparedText | None:
        """Open the held-out documents of a prepared folder, or return None for another folder."""


@cache
def run_loaders() -> tuple[RunLoader, ...]:
    return tuple(found.load()() for found in entry_points(group="olmo_sparsity.runs"))
