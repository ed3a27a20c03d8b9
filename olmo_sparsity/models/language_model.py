"""Declare what the rest of the package needs of a model: hidden states at given position IDs,
logits from them, and states of distant tokens that can be kept.

`PositionedOLMo` (olmo/model.py) and `HuggingFaceLM` (huggingface/model.py) implement it:

    tokens_BL, positions_BL ─ hidden ─> hidden_BLD ─ unembed ─> logits_BLV
    tokens_BF, positions_BF ─ distant_states ─> DistantStates, which `hidden` takes as `distant`

Dimension key: B batch, L length, S keys that a token may attend to, F distant tokens, D width, H
heads (in `last_attention` of all layers), V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.document_attention import DocumentStarts


class LanguageModel(Protocol):
    """The interface that PositionedOLMo and HuggingFaceLM have in common."""

    @property
    def vocab_size(self) -> int:
        """Return the width of the logits, including padding."""

    @property
    def device(self) -> torch.device:
        """Return the device of the inputs."""

    @property
    def reach(self) -> int | None:
        """Return the largest distance of position IDs over which some layer sees a token. None
        means that a layer sees all earlier tokens."""

    @property
    def embedding(self) -> nn.Embedding: ...
    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        """Return weight_VD and bias_V of the last linear map."""

    @property
    def logit_scale(self) -> float:
        """Return the factor of logits after the last linear map."""

    def hidden(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        attention_bias: Tensor | None = None,
        *,
        documents: DocumentStarts | None = None,
        added_BLD: Tensor | None = None,
        distant: DistantStates | None = None,
        num_last: int | None = None,
    ) -> Tensor:
        """Return hidden_BLD after the last norm.

        Args:
            attention_bias: (B or 1, 1 or H, L, S), added to attention scores in place of the causal
                mask.
            documents: Where documents begin. Tokens attend to their own document only.
            added_BLD: Added to the embeddings of the tokens.
            distant: States of earlier tokens, to which all tokens attend, too.
            num_last: Return the hidden states of this many tokens, the last ones. With None those
                of all tokens are returned.
        """

    def unembed(self, hidden: Tensor) -> Tensor:
        """Return logits (…, V) of hidden states (…, D)."""

    def distant_states(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        tokens_at_once: int | None = None,
        earlier: DistantStates | None = None,
    ) -> DistantStates:
        """Return keys, values and hidden states of all tokens, each of which sees those before it.

        Args:
            tokens_at_once: How many tokens are computed together; with None, all of them.
            earlier: States of the text before these tokens, which become part of the result.
        """

    def shares_distant(self, num_distant: int, length: int) -> bool:
        """Return whether rows of `length` tokens attend to `num_distant` distant tokens without
        copies of their states."""

    def last_attention(
        self, tokens_BL: Tensor, positions_BL: Tensor, distant: DistantStates
    ) -> Tensor:
        """Return weights_BHS: how much the last token attends to each token of `distant` and of the
        row, in all heads of all layers."""

    def recomputes(self, num_tokens: int, num_keys: int) -> bool:
        """Return whether a backward pass computes activations again, to save memory.

        Args:
            num_tokens: Tokens of the batch, in all rows.
            num_keys: Keys that each token attends to, if attention scores are kept; 0 if fused
                kernels keep none.
        """
