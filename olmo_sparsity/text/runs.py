"""Define what a training package must provide so that its runs can be measured.

Measuring imports no training code. An installed package offers a `RunLoader` as an entry point of
the group `olmo_sparsity.runs`, as this package does for its own runs, and `run_loaders` finds it:

    RunLoader.load(folder) → TrainedModel ─ .text → TrainingText ─ .open_heldout() → PreparedText
                             a checkpoint           what it read                     what it did not
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def document(self, number: int) -> np.ndarray:
        """Return the tokens of a document."""

    def group(self, number: int) -> str:
        """Return what names the group of a document; documents of one group share text."""


@dataclass(frozen=True)
class TrainingText:
    """The text that a run was trained on."""

    folder: str
    """The prepared folder that the run read."""

    open_heldout: Callable[[], PreparedText]
    """Opens the documents that training held out."""

    corpora: tuple[CorpusConfig, ...]
    heldout_share: float
    """The fraction of documents that was held out. With it and the corpora, `corpus.is_heldout`
    says of any text of these corpora whether training has read it."""


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint of a training package, loaded."""

    model: Any
    """The model on its device, in its dtype, in evaluation mode."""

    tokenizer: Tokenizer
    name: str
    weights_sha256: str
    text: TrainingText
    trained: dict[str, Any]
    """How it was trained, such as its steps and length, for the identity of results."""


class Reader(Protocol):
    """The part of a `LoadedModel` that reading text needs."""

    name: str
    model: Any
    tokenizer: Tokenizer | None
    text: TrainingText | None

    def encode(
        self, texts: list[str], control_tokens: bool = True, follow: bool = False
    ) -> list[list[int]]:
        """Return the tokens of each text. `control_tokens`: whether a control token that is spelled
        out becomes that token; `follow`: whether the texts continue others."""


class RunLoader(Protocol):
    """Reads the runs of a training package."""

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
    """Return the loaders of all installed training packages."""
    entries = entry_points(group="olmo_sparsity.runs")
    return tuple(entry.load()() for entry in entries)


def spread_evenly(numbers: Sequence[int], limit: int) -> list[int]:
    """Return no more than `limit` of the numbers, evenly spread over all of them: 0, 2 and 5 of the
    numbers 0 … 7, for a limit of 3. Neighbours in a prepared folder are often of one package or
    day, so that the first ones would be alike."""
    num_chosen = min(len(numbers), limit)
    return [numbers[index * len(numbers) // num_chosen] for index in range(num_chosen)]
