"""Make training sequences of one repeated passage, which teach a model to copy (induction).

All tokens of a random passage differ, so that each has one successor. Its first occurrence cannot
be predicted and is not trained on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.text import RepeatedConfig
from olmo_sparsity.text.vocabulary import IGNORED, ordinary_tokens


@dataclass(frozen=True)
class Repeating:
    config: RepeatedConfig
    tokens: np.ndarray
    """IDs that passages are drawn from."""

    @staticmethod
    def of(config: RepeatedConfig, tokenizer: Tokenizer) -> Repeating:
        tokens = np.array(ordinary_tokens(tokenizer))
        if config.of == "random" and config.max_length > len(tokens):
            most = f"must be at most {len(tokens)}, the size of the vocabulary"
            raise ConfigError(f"data.repeated.max_length={config.max_length} {most}")
        return Repeating(config, tokens)

    def draw(
        self, text_L: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """tokens_L and labels_L. A text passage is the beginning of `text_L`."""
        period = int(generator.integers(self.config.min_length, self.config.max_length + 1))
        if self.config.of == "text":
            passage = text_L[:period]
        else:
            passage = generator.choice(self.tokens, size=period, replace=False)
        tokens = np.resize(passage, len(text_L) + 1)
        labels_L = tokens[1:].copy()
        if self.config.of == "random":
            labels_L[:period] = IGNORED
        return tokens[:-1], labels_L
