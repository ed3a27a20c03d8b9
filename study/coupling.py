"""Add position coupling, or Predictive Position Coupling (PPC), to a model with position IDs.

Tokens that belong together share a position ID. In training all IDs are given, and in PPC the model
also learns to predict those of the response; at test it feeds back its own tokens *and* its own
IDs. IDs enter by the model's positions (`model.rotary_fraction`) and by a learned embedding:

    tokens ─ embedding ──┐                      ┌─ unembed ─→ next token
                         + ─→ model, at the IDs ┤
    IDs ─ id_embedding ──┘                      └─ id_head ─→ its ID

Dimension key: B samples, P prompt length, R response length, L = P + R, N response places of a
batch, D width, V vocabulary, I number of IDs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.language_model import LanguageModel

_CACHED_TOKENS = 10_000
"""Tokens of a forward pass on a CPU: with more, the activations of a small model leave the cache,
and each token takes 1.5 times as long."""


class Response(NamedTuple):
    """What a model writes after a prompt."""

    tokens_BR: Tensor
    ids_BR: Tensor
    """As predicted, or as given if they are not predicted."""


class Logits(NamedTuple):
    """What a model predicts for the next token at each place."""

    token_BLV: Tensor
    id_BLI: Tensor | None
    """None: the model predicts no IDs."""


class Score(NamedTuple):
    """Which tokens and IDs of responses are correct."""

    token_BR: Tensor
    id_BR: Tensor
    exact_B: Tensor
    """Whether all of a response is. A wrong ID counts as an error, like a wrong token."""


class PositionCoupling(nn.Module):
    """`PositionCoupling(model, num_ids=256)`, then `loss` to train it and `generate` to use it."""

    def __init__(
        self,
        model: LanguageModel,
        num_ids: int,
        *,
        embed_ids: bool = True,
        predict_ids: bool = True,
        feed_ids: bool = True,
        text_weight: float = 0.0,
    ) -> None:
        """Put heads on a model.

        num_ids: IDs are 0 … num_ids - 1.
        embed_ids: Add an embedding of the IDs. Without this and `predict_ids` it is the unchanged
            model.
        predict_ids: Learn to predict the IDs of the response (PPC). Without it, this is position
            coupling with given IDs.
        feed_ids: Feed predicted IDs back when a response is generated. Without it they are learnt,
            and the response has given ones.
        text_weight: Weight of the loss of tokens before the response.
        """
        super().__init__()
        if predict_ids and not embed_ids:
            raise ConfigError(
                "predict_ids=True needs embed_ids=True: RoPE sees differences of IDs only, so "
                "absolute IDs cannot be inferred from a prompt"
            )
        self.model = model
        self.num_ids = num_ids
        self.feeds_ids = predict_ids and feed_ids
        self.text_weight = text_weight
        token_embedding = model.embedding
        width = token_embedding.embedding_dim
        device = token_embedding.weight.device
        self.id_embedding = nn.Embedding(num_ids, width, device=device) if embed_ids else None
        # Not tied to the embedding: it would have to be its inverse.
        self.id_head = nn.Linear(width, num_ids, device=device) if predict_ids else None
        if self.id_embedding is not None:
            with torch.no_grad():  # on the scale of the token embedding
                self.id_embedding.weight.normal_(std=float(token_embedding.weight.std()))

    def forward(self, tokens_BL: Tensor, ids_BL: Tensor) -> Logits:
        """Return the logits of each next token, and of its ID."""
        hidden_BLD = self._hidden(tokens_BL, ids_BL)
        id_logits_BLI = None if self.id_head is None else self.id_head(hidden_BLD)
        return Logits(self.model.unembed(hidden_BLD), id_logits_BLI)

    def loss(
        self,
        tokens_BL: Tensor,
        ids_BL: Tensor,
        response_BL: Tensor,
        target_ids_BL: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a batch: the mean over tokens of the response, plus that of their IDs
        if they are predicted, plus that of tokens before the response if it has a weight.

        ids_BL: The IDs that are fed.
        response_BL: True where a token is part of the response.
        target_ids_BL: The IDs that are to be predicted. None: those that are fed.
        """
        self._check_ids(tokens_BL, ids_BL)
        # Each place predicts the token after it, so the last has no target.
        is_response_BL = response_BL[:, 1:]
        next_tokens_BL = tokens_BL[:, 1:]
        hidden_BLD = self._hidden(tokens_BL[:, :-1], ids_BL[:, :-1])

        def loss_at(places_BL: Tensor) -> Tensor:
            logits_NV = self.model.unembed(hidden_BLD[places_BL]).float()
            return F.cross_entropy(logits_NV, next_tokens_BL[places_BL])

        total_loss = loss_at(is_response_BL)
        if self.text_weight:
            is_before_BL = is_response_BL.cumsum(1) == 0
            total_loss = total_loss + self.text_weight * loss_at(is_before_BL)
        if self.id_head is None:
            return total_loss
        targets_BL = ids_BL if target_ids_BL is None else target_ids_BL
        id_logits_NI = self.id_head(hidden_BLD[is_response_BL]).float()
        return total_loss + F.cross_entropy(id_logits_NI, targets_BL[:, 1:][is_response_BL])

    @torch.no_grad()
    def predict(self, tokens_BL: Tensor, ids_BL: Tensor, num_response: int) -> Response:
        """Predict each of the last R tokens and IDs, given the true ones before (teacher
        forcing)."""
        self._check_ids(tokens_BL, ids_BL)
        hidden_BLD = self._hidden(tokens_BL[:, :-1], ids_BL[:, :-1])
        return self._most_likely(hidden_BLD[:, -num_response:], ids_BL[:, -num_response:])

    @torch.no_grad()
    def generate(
        self,
        prompt_BP: Tensor,
        prompt_ids_BP: Tensor,
        num_response: int,
        response_ids_BR: Tensor | None = None,
    ) -> Response:
        """Generate R tokens greedily, each after those generated before it (free-running).

        response_ids_BR: The IDs of the response, if the model feeds none of its own.
        """
        if (response_ids_BR is None) != self.feeds_ids:
            raise ConfigError("response_ids_BR: pass it only if the model feeds no IDs of its own")
        self._check_ids(prompt_BP, prompt_ids_BP)
        tokens_BL = prompt_BP
        ids_BL = prompt_ids_BP
        steps: list[Response] = []
        for place in range(num_response):
            given_ids_B1 = None
            if response_ids_BR is not None:
                given_ids_B1 = response_ids_BR[:, place : place + 1]
            step = self._most_likely(self._hidden(tokens_BL, ids_BL)[:, -1:], given_ids_B1)
            steps.append(step)
            fed_ids_B1 = step.ids_BR if given_ids_B1 is None else given_ids_B1
            tokens_BL = torch.cat((tokens_BL, step.tokens_BR), dim=1)
            ids_BL = torch.cat((ids_BL, fed_ids_B1), dim=1)
        return Response(
            tokens_BR=torch.cat([step.tokens_BR for step in steps], dim=1),
            ids_BR=torch.cat([step.ids_BR for step in steps], dim=1),
        )

    def _hidden(self, tokens_BL: Tensor, ids_BL: Tensor) -> Tensor:
        """Return the last hidden states. Without gradients on a CPU, few samples at a time."""
        if torch.is_grad_enabled() or tokens_BL.device.type != "cpu":
            return self._hidden_at_once(tokens_BL, ids_BL)
        num_samples = max(1, _CACHED_TOKENS // tokens_BL.shape[1])
        parts = zip(tokens_BL.split(num_samples), ids_BL.split(num_samples), strict=True)
        return torch.cat([self._hidden_at_once(tokens, ids) for tokens, ids in parts])

    def _hidden_at_once(self, tokens_BL: Tensor, ids_BL: Tensor) -> Tensor:
        """Return hidden_BLD: the states after the last block."""
        added_BLD = None if self.id_embedding is None else self.id_embedding(ids_BL)
        return self.model.hidden(tokens_BL, ids_BL, added_BLD=added_BLD)

    def _most_likely(self, hidden_BRD: Tensor, given_ids_BR: Tensor | None) -> Response:
        """Return the most likely token at each place, and its ID: the most likely one, or as
        given."""
        tokens_BR = self.model.unembed(hidden_BRD).argmax(-1)
        if self.id_head is not None:
            return Response(tokens_BR, self.id_head(hidden_BRD).argmax(-1))
        assert given_ids_BR is not None
        return Response(tokens_BR, given_ids_BR)

    def _check_ids(self, tokens_BL: Tensor, ids_BL: Tensor) -> None:
        """Raise ConfigError unless each token has one ID that the model knows."""
        if ids_BL.shape != tokens_BL.shape:
            raise ConfigError(f"ids_BL: shape {tuple(ids_BL.shape)}; give every token one ID")
        low = int(ids_BL.min())
        high = int(ids_BL.max())
        if not 0 <= low <= high < self.num_ids:
            raise ConfigError(f"ids_BL: {low} to {high}, but num_ids={self.num_ids}; raise it")


def score(response: Response, tokens_BR: Tensor, ids_BR: Tensor) -> Score:
    """Compare a response with the true tokens and IDs."""
    token_BR = response.tokens_BR == tokens_BR
    id_BR = response.ids_BR == ids_BR
    return Score(token_BR, id_BR, (token_BR & id_BR).all(1))
