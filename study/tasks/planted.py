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
from typing import ClassVar, Literal

import numpy as np

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.schema import option
from olmo_sparsity.data.shards import Manifest
from study.tasks.samples import Ks, Samples, Task, refuse_k

_SLOTS, _ANSWERS = 8, 256


@dataclass(frozen=True)
class Planted(Task):
    folder: str = option(None, required=True)
    """Of the prepared text."""

    pieces: int = option(1, least=1, most=8)
    placement: Literal["local", "scattered", "both"] = "both"
    split: Literal["train", "heldout"] = "train"
    length_step: ClassVar[int] = _SLOTS

    def __post_init__(self) -> None:
        if round(_ANSWERS ** (1 / self.pieces)) ** self.pieces != _ANSWERS:
            raise ConfigError(f"task.pieces={self.pieces} must be 1, 2, 4 or 8")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        words = [f"text {n}" for n in range(_text(self.folder, self.split)[1])]
        own = [f"{kind} {n}" for kind in ("mark", "answer") for n in range(_ANSWERS)]
        return (*words, *own, "cue")

    def sample(
        self, generator: np.random.Generator, num_samples: int, length: int, k: Ks = None
    ) -> Samples:
        refuse_k("planted", k)
        text, num_words = _text(self.folder, self.split)
        starts_B1 = generator.integers(len(text) - length, size=(num_samples, 1))
        prompt_BP = text[starts_B1 + np.arange(length)].astype(np.int64)
        eighth, half_B1 = (length - 1) // _SLOTS, generator.random((num_samples, 1)) < 0.5
        local_B1 = half_B1 if self.placement == "both" else self.placement == "local"
        first_B1 = generator.integers(max(1, eighth - _SLOTS + 1), size=(num_samples, 1))
        places_B8 = first_B1 + np.arange(_SLOTS) * np.where(local_B1, 1, eighth)
        chosen_BK = generator.random((num_samples, _SLOTS)).argsort(1)[:, : self.pieces]
        values_BK = generator.integers(self._values, size=(num_samples, self.pieces))
        marks_BK = num_words + np.arange(self.pieces) * self._values + values_BK
        np.put_along_axis(prompt_BP, np.take_along_axis(places_B8, chosen_BK, 1), marks_BK, 1)
        prompt_BP[:, -1] = num_words + 2 * _ANSWERS
        return Samples(prompt_BP, self._answers(values_BK) + num_words + _ANSWERS)

    def solve(self, samples: Samples) -> np.ndarray:
        num_words = _text(self.folder, self.split)[1]
        marks_BP = np.sort(samples.prompt_BP, axis=1)[:, -1 - self.pieces : -1] - num_words
        return self._answers(marks_BP % self._values) + num_words + _ANSWERS

    @property
    def _values(self) -> int:
        return round(_ANSWERS ** (1 / self.pieces))

    def _answers(self, values_BK: np.ndarray) -> np.ndarray:
        """The number of the answer, whose digits are the values."""
        return (values_BK * self._values ** np.arange(self.pieces)).sum(1, keepdims=True)


@cache
def _text(folder: str, split: str) -> tuple[np.ndarray, int]:
    """The tokens of a split, and the size of the vocabulary."""
    manifest = Manifest.load(Path(folder))
    parts = [
        np.memmap(Path(folder) / file.tokens, dtype=np.dtype(manifest.dtype).newbyteorder("<"))
        for file in manifest.files
        if file.split == split
    ]
    return np.concatenate(parts), manifest.vocab_size
