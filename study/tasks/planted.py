"""Plant the pieces of an answer into text: k of them, far before a cue, determine its one token.

Whatever k is, there are 256 answers: each piece is one of 256^(1/k) marks of an alphabet of its
own. A prompt has eight slots, and its pieces stand in k of them, drawn anew: so the distance of a
piece has one distribution for all k. Local slots are adjacent, in the first eighth of the prompt;
scattered ones are an eighth of the prompt apart. The cue is its last token.

Dimension key: B samples, P prompt length, K pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.schema import option
from olmo_sparsity.data.shard_manifest import Manifest
from study.tasks.samples import Ks, Samples, Task, refuse_k

_SLOTS = 8
_ANSWERS = 256


@dataclass(frozen=True)
class Planted(Task):
    folder: str = option(None, required=True)
    """Folder of the prepared text."""

    pieces: int = option(1, least=1, most=8)
    """Number of pieces that determine the answer."""

    placement: Literal["local", "scattered", "both"] = "both"
    split: Literal["train", "heldout"] = "train"
    length_step: ClassVar[int] = _SLOTS

    def __post_init__(self) -> None:
        if round(_ANSWERS ** (1 / self.pieces)) ** self.pieces != _ANSWERS:
            raise ConfigError(f"task.pieces={self.pieces} must be 1, 2, 4 or 8")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        words = [f"text {n}" for n in range(_read_text(self.folder, self.split).num_words)]
        marks_and_answers = [f"{kind} {n}" for kind in ("mark", "answer") for n in range(_ANSWERS)]
        return (*words, *marks_and_answers, "cue")

    def sample(
        self, generator: np.random.Generator, num_samples: int, length: int, k: Ks = None
    ) -> Samples:
        refuse_k("planted", k)
        text, num_words = _read_text(self.folder, self.split)
        starts_B1 = generator.integers(len(text) - length, size=(num_samples, 1))
        prompt_BP = text[starts_B1 + np.arange(length)].astype(np.int64)

        # Where the eight slots are, and which of them hold a piece.
        eighth = (length - 1) // _SLOTS
        is_half_B1 = generator.random((num_samples, 1)) < 0.5
        is_local_B1 = is_half_B1 if self.placement == "both" else self.placement == "local"
        first_B1 = generator.integers(max(1, eighth - _SLOTS + 1), size=(num_samples, 1))
        places_B8 = first_B1 + np.arange(_SLOTS) * np.where(is_local_B1, 1, eighth)
        slots_BK = generator.random((num_samples, _SLOTS)).argsort(1)[:, : self.pieces]
        places_BK = np.take_along_axis(places_B8, slots_BK, 1)

        # Each piece has an alphabet of its own, so that a value says which piece it is of.
        values_BK = generator.integers(self._num_values, size=(num_samples, self.pieces))
        marks_BK = num_words + np.arange(self.pieces) * self._num_values + values_BK
        np.put_along_axis(prompt_BP, places_BK, marks_BK, 1)
        prompt_BP[:, -1] = num_words + 2 * _ANSWERS
        return Samples(prompt_BP, self._answers(values_BK) + num_words + _ANSWERS)

    def solve(self, samples: Samples) -> np.ndarray:
        num_words = _read_text(self.folder, self.split).num_words
        # The cue has the largest ID, and marks have the next ones, in the order of the pieces.
        marks_BK = np.sort(samples.prompt_BP, axis=1)[:, -1 - self.pieces : -1] - num_words
        return self._answers(marks_BK % self._num_values) + num_words + _ANSWERS

    @property
    def _num_values(self) -> int:
        """Number of values of each piece."""
        return round(_ANSWERS ** (1 / self.pieces))

    def _answers(self, values_BK: np.ndarray) -> np.ndarray:
        """Return the number of the answer, whose digits are the values."""
        return (values_BK * self._num_values ** np.arange(self.pieces)).sum(1, keepdims=True)


class _Text(NamedTuple):
    tokens: np.ndarray
    num_words: int
    """Size of the text's vocabulary."""


@cache
def _read_text(folder: str, split: str) -> _Text:
    """Return the prepared tokens of a split."""
    manifest = Manifest.load(Path(folder))
    parts = [
        np.memmap(Path(folder) / file.tokens, dtype=np.dtype(manifest.dtype).newbyteorder("<"))
        for file in manifest.files
        if file.split == split
    ]
    return _Text(np.concatenate(parts), manifest.vocab_size)
