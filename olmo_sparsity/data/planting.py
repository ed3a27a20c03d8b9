"""Plant far dependencies at known places into text, as ground truth for selectors.

K marks, one of each of K alphabets of M tokens, replace tokens at random places; a cue and the
answer come later. By default each of the M^K combinations of marks has its own answer token, and
each mark gives 1/K of its ln M^K nats. With `together` the marks are pieces of one of M words, and
fewer than K of them say nothing. All are the last tokens of the vocabulary.

Dimension key: L length, K marks of a dependency, M tokens of an alphabet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.text import PlantedConfig
from olmo_sparsity.text.vocabulary import ordinary_tokens


@dataclass(frozen=True)
class Planting:
    marks_KM: np.ndarray
    """Token IDs of the alphabet of each mark."""

    answers: np.ndarray
    """M^K token IDs; M with `together`."""

    cue: int
    together: bool = False

    @staticmethod
    def of(config: PlantedConfig, tokenizer: Tokenizer) -> Planting:
        num_marks, num_values = config.num_tokens, config.num_values
        num_answers = num_values if config.together else num_values**num_marks
        count = num_marks * num_values + num_answers + 1
        usable = ordinary_tokens(tokenizer)
        if count > len(usable) // 2:
            needed = f"{count} tokens, more than half of the {len(usable)} of the vocabulary"
            raise ConfigError(f"data.planted: num_tokens={num_marks}, {num_values=} need {needed}")
        own = np.array(usable[-count:])
        marks = num_marks * num_values
        marks_KM = own[:marks].reshape(num_marks, num_values)
        return Planting(marks_KM, own[marks:-1], int(own[-1]), config.together)

    def clear(self, tokens_L: np.ndarray) -> np.ndarray:
        """A copy without marks, cues and answers, which the ordinary tokens just below them in the
        vocabulary replace."""
        lowest = int(self.marks_KM[0, 0])
        own = np.isin(tokens_L, self.marks_KM) | np.isin(tokens_L, self.answers)
        own |= tokens_L == self.cue
        return np.where(own, lowest - 1 - (tokens_L - lowest) % lowest, tokens_L)

    def plant(
        self,
        tokens_L: np.ndarray,
        generator: np.random.Generator,
        first: int,
        end: int,
        cue_place: int,
        num_missing: int = 0,
    ) -> tuple[np.ndarray, np.ndarray]:
        """A copy with one dependency: marks at K of the places `first` … `end` − 1, the cue at
        `cue_place`, the answer after it. Marks before place 0 are out of sight and left out, and so
        are `num_missing` others. Returns the tokens and the places of the marks."""
        num_marks, num_values = self.marks_KM.shape
        assert num_marks <= end - first
        assert end <= cue_place < len(tokens_L) - 1
        planted_L = self.clear(tokens_L)
        places_K = first + generator.choice(end - first, size=num_marks, replace=False)
        size = 1 if self.together else num_marks
        values_K = np.resize(generator.integers(num_values, size=size), num_marks)
        stands_K = places_K >= 0
        stands_K[generator.permutation(num_marks)[:num_missing] if num_missing else []] = False
        planted_L[places_K[stands_K]] = self.marks_KM[np.arange(num_marks), values_K][stands_K]
        planted_L[cue_place] = self.cue
        answer = values_K @ num_values ** np.arange(num_marks)
        if self.together:
            answer = values_K[0] if stands_K.all() else generator.integers(num_values)
        planted_L[cue_place + 1] = self.answers[answer]
        return planted_L, np.sort(places_K[stands_K])

    def plant_anywhere(self, tokens_L: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """For training: the cue anywhere, the marks anywhere before it. Early in training attention
        is uniform, so dependencies are learned best in short contexts: half of the cues are in the
        first √L places (log-uniform).

        In a quarter of the sequences marks may be out of sight, so that the model also learns to
        predict from only some of them. With `together`, one or more pieces lack in half of them."""
        num_marks = len(self.marks_KM)
        lowest, highest = np.log(num_marks), np.log(len(tokens_L) - 1)
        cue_place = int(np.exp(generator.uniform(lowest, highest)))
        if self.together:
            most = generator.choice([0, 0, 1, num_marks])
            num_missing = int(generator.integers(1, most + 1)) if most else 0
            return self.plant(tokens_L, generator, 0, cue_place, cue_place, num_missing)[0]
        first = -cue_place if generator.random() < 0.25 else 0
        return self.plant(tokens_L, generator, first, cue_place, cue_place)[0]
