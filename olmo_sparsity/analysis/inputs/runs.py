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
from typing import TYPE_CHECKING, Protocol

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.analysis.inputs.records import CorpusConfig

if TYPE_CHECKING:
    from olmo_sparsity.analysis.models.load import LoadedModel


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
    corpora: tuple[tuple[CorpusConfig, float], ...]
    """Each corpus, and the share of its documents that was held out."""


class RunLoader(Protocol):
    def find(self, path: Path) -> Path | None:
        """Return the folder of the weights, or None if `path` is not a run of this package."""

    def load(self, folder: Path, name: str, dtype: str, device: str) -> LoadedModel:
        """Load a folder that `find` returned. `name` is what the user typed."""

    def open_prepared(self, folder: Path) -> PreparedText | None:
        """Open the held-out documents of a prepared folder, or return None for another folder."""


@cache
def run_loaders() -> tuple[RunLoader, ...]:
    return tuple(found.load()() for found in entry_points(group="olmo_sparsity.runs"))
