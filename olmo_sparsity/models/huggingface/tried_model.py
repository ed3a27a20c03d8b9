"""Say what is tried of a model, on which eight tokens, and with which error it is rejected.

The parts that all checks of compatibility.py have in common:

    TriedModel       the wrapper, as the checks use it
    eight_tokens     the row on which it is run
    distance         by how much two of its results differ
    unfit            the error with which it is rejected

Dimension key: B rows, L tokens of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.attention import AttentionWindow
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.language_model import LanguageModel

NUM_TOKENS = 8
"""The number of tokens on which a model is tried: enough for a gap and for a window inside it."""

NUM_BEFORE_GAP = 4
"""The number of tokens before the gap in the position IDs. Windows that are tried have this size,
too, so that they hide some of the eight tokens."""


class TriedModel(LanguageModel, Protocol):
    """What the checks need of a `HuggingFaceLM`, which cannot be imported here: it imports them."""

    model: Any
    """The model of transformers."""

    windows: dict[str, AttentionWindow | None]
    """The attention window of each kind of layer, computed here; empty if the model computes them
    itself."""

    @property
    def body(self) -> nn.Module:
        """Return the model without its last linear map."""

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Return the output of the last linear map."""

    def hidden_sharing(
        self, tokens_BL: Tensor, positions_BL: Tensor, distant: DistantStates
    ) -> Tensor:
        """Return what `hidden` returns for rows that share distant states."""


class EightTokens(NamedTuple):
    """The row on which a model is tried."""

    tokens_BL: Tensor
    counted_BL: Tensor
    """Their position IDs without a gap: 0 … 7."""


def eight_tokens(tried: TriedModel) -> EightTokens:
    """Return the row on which a model is tried, on the model's device."""
    counted_BL = torch.arange(NUM_TOKENS, device=tried.device)[None]
    # Token IDs count up, too, unless the vocabulary is smaller than eight.
    return EightTokens(counted_BL % tried.embedding.weight.shape[0], counted_BL)


def distance(a: Tensor, b: Tensor | float = 0.0) -> float:
    """Return the root mean square of a − b. Unlike a maximum, it changes little if a mixture of
    experts routes one token differently."""
    return float((a.float() - b).square().mean().sqrt())


def unfit(tried: TriedModel, problem: str) -> ConfigError:
    """Return the error with which a model is rejected. `problem`: why, and what to do."""
    family = f"{type(tried.model).__name__} (model_type {tried.model.config.model_type})"
    return ConfigError(f"{family} is not supported: {problem}")
