"""Plant dependencies into training text, or repeat passages of it: the study's `data.transform`.

    data:
      transform: study/transforms.py:plant_or_repeat
      transform_options:
        planted: {share: 1.0, num_tokens: 2, num_values: 4}

Planted text is ground truth for selectors. K marks, one of each of K alphabets of M tokens, replace
tokens at random places; a cue and the answer come later. By default each of the M^K combinations of
marks has its own answer token, and each mark gives 1/K of its ln M^K nats. With `together` the
marks are pieces of one of M words, and fewer than K of them say nothing. All are the last tokens of
the vocabulary.

A repeated passage teaches a model to copy (induction), if it is too small to learn it from text.
All tokens of a random passage differ, so that each has one successor. Its first occurrence cannot
be predicted and is not trained on.

Dimension key: L length, K marks of a dependency, M tokens of an alphabet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.build import build, enforce
from olmo_sparsity.config.schema import option
from olmo_sparsity.data.transform import Changed, Transform
from olmo_sparsity.text.vocabulary import IGNORED, ordinary_tokens

PLANTED, REPEATED = 1, 2
"""Seeds that separate the draws of planted and repeated sequences from draws of positions."""

OPTIONS = "data.transform_options"


@dataclass(frozen=True)
class PlantedSettings:
    share: float = option(0.0, least=0, most=1)
    """Share of the training sequences."""

    num_tokens: int = option(2, least=1, most=16)
    """Distant tokens that together determine an answer."""

    num_values: int = option(8, least=2, most=4096)
    """Alternatives for each of them."""

    together: bool = False
    """The tokens are pieces of one word: all of them determine the answer, fewer say nothing.
    Otherwise each of N determines an Nth."""


@dataclass(frozen=True)
class RepeatedSettings:
    share: float = option(0.0, least=0, most=1)
    """Share of the training sequences; each is one passage, repeated."""

    of: Literal["random", "text"] = "random"
    """Passages of random tokens, or of text. A model that copies one may not copy the other."""

    min_length: int = option(16, least=2)
    max_length: int = 32
    """Length of a passage, in tokens."""


def plant_or_repeat(
    tokenizer: Tokenizer,
    shortest: int,
    planted: dict[str, Any] | None = None,
    repeated: dict[str, Any] | None = None,
) -> Transform:
    """Return a transform that repeats passages in a share of the sequences, and plants dependencies
    into a share. `planted`, `repeated`: options of the classes above."""
    plants = build(PlantedSettings, planted or {}, f"{OPTIONS}.planted")
    repeats = build(RepeatedSettings, repeated or {}, f"{OPTIONS}.repeated")
    enforce(OPTIONS, _rules(plants, repeats, shortest))
    planting = Planting.of(plants, tokenizer) if plants.share else None
    repeating = Repeating.of(repeats, tokenizer) if repeats.share else None

    def change(tokens_L: np.ndarray, seeds: list[int]) -> Changed | None:
        if repeating is not None:
            generator = np.random.default_rng([*seeds, REPEATED])
            if generator.random() < repeats.share:
                return Changed(*repeating.draw(tokens_L, generator))
        if planting is not None:
            generator = np.random.default_rng([*seeds, PLANTED])
            if generator.random() < plants.share / (1 - repeats.share):
                return Changed(planting.plant_anywhere(tokens_L, generator))
        return None

    return change


def _rules(planted: PlantedSettings, repeated: RepeatedSettings, shortest: int) -> Iterator[str]:
    if not planted.share and not repeated.share:
        yield "planted.share and repeated.share are 0, so nothing changes; raise one of them"
    if planted.share and shortest < planted.num_tokens + 2:
        yield f"{planted.num_tokens=} does not fit into training.length={shortest}"
    if repeated.min_length > repeated.max_length:
        yield f"{repeated.min_length=} is above max_length={repeated.max_length}"
    if repeated.share and 2 * repeated.max_length > shortest:
        yield f"{repeated.max_length=} does not fit twice into training.length={shortest}"
    if planted.share + repeated.share > 1:
        yield f"{planted.share=} and {repeated.share=} add up to more than 1"


@dataclass(frozen=True)
class Planting:
    marks_KM: np.ndarray
    """Token IDs of the alphabet of each mark."""

    answers: np.ndarray
    """M^K token IDs; M with `together`."""

    cue: int
    together: bool = False

    @staticmethod
    def of(settings: PlantedSettings, tokenizer: Tokenizer) -> Planting:
        num_marks, num_values = settings.num_tokens, settings.num_values
        num_answers = num_values if settings.together else num_values**num_marks
        count = num_marks * num_values + num_answers + 1
        usable = ordinary_tokens(tokenizer)
        if count > len(usable) // 2:
            needed = f"{count} tokens, more than half of the {len(usable)} of the vocabulary"
            raise ConfigError(
                f"{OPTIONS}.planted: num_tokens={num_marks}, {num_values=} need {needed}"
            )
        own = np.array(usable[-count:])
        marks = num_marks * num_values
        marks_KM = own[:marks].reshape(num_marks, num_values)
        return Planting(marks_KM, own[marks:-1], int(own[-1]), settings.together)

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


@dataclass(frozen=True)
class Repeating:
    settings: RepeatedSettings
    tokens: np.ndarray
    """IDs that passages are drawn from."""

    @staticmethod
    def of(settings: RepeatedSettings, tokenizer: Tokenizer) -> Repeating:
        tokens = np.array(ordinary_tokens(tokenizer))
        if settings.of == "random" and settings.max_length > len(tokens):
            most = f"must be at most {len(tokens)}, the size of the vocabulary"
            raise ConfigError(f"{OPTIONS}.repeated.max_length={settings.max_length} {most}")
        return Repeating(settings, tokens)

    def draw(
        self, text_L: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """tokens_L and labels_L. A text passage is the beginning of `text_L`."""
        period = int(generator.integers(self.settings.min_length, self.settings.max_length + 1))
        if self.settings.of == "text":
            passage = text_L[:period]
        else:
            passage = generator.choice(self.tokens, size=period, replace=False)
        tokens = np.resize(passage, len(text_L) + 1)
        labels_L = tokens[1:].copy()
        if self.settings.of == "random":
            labels_L[:period] = IGNORED
        return tokens[:-1], labels_L
