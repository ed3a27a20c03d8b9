"""Add position coupling, or Predictive Position Coupling (PPC), to a model with position IDs.

Tokens that belong together share a position ID. In training all IDs are given, and in PPC the model
also learns to predict those of the response; at test it feeds back its own tokens *and* its own
IDs. IDs enter by the model's positions (`model.rotary_fraction`) and by a learned embedding.

Dimension key: B samples, P prompt length, R response length, L = P + R, N response places of a
batch, D width, V vocabulary, I number of IDs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.losses import LanguageModel


class Response(NamedTuple):
    tokens_BR: Tensor
    ids_BR: Tensor
    """As predicted, or as given if they are not predicted."""


class Score(NamedTuple):
    """Which places are correct; a wrong ID counts as an error, like a wrong token."""

    token_BR: Tensor
    id_BR: Tensor
    exact_B: Tensor


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
        """IDs are 0 … num_ids - 1. Without `predict_ids` this is position coupling with given IDs;
        also without `embed_ids`, it is the unchanged model. Without `feed_ids`, predicted IDs are
        learnt but not fed back: the response has given ones."""
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
        tokens = model.embedding
        width, where = tokens.embedding_dim, tokens.weight.device
        self.id_embedding = nn.Embedding(num_ids, width, device=where) if embed_ids else None
        # Not tied to the embedding: it would have to be its inverse.
        self.id_head = nn.Linear(width, num_ids, device=where) if predict_ids else None
        if self.id_embedding is not None:
            with torch.no_grad():  # on the scale of the token embedding
                self.id_embedding.weight.normal_(std=float(tokens.weight.std()))

    def forward(self, tokens_BL: Tensor, ids_BL: Tensor) -> tuple[Tensor, Tensor | None]:
        """logits_BLV of each next token, and id_logits_BLI of its ID."""
        hidden_BLD = self._hidden(tokens_BL, ids_BL)
        id_logits_BLI = None if self.id_head is None else self.id_head(hidden_BLD)
        return self.model.unembed(hidden_BLD), id_logits_BLI

    def loss(
        self,
        tokens_BL: Tensor,
        ids_BL: Tensor,
        response_BL: Tensor,
        target_ids_BL: Tensor | None = None,
    ) -> Tensor:
        """Mean loss of tokens over the response, the places where `response_BL` is true, plus that
        of their IDs if they are predicted: those that are fed, or `target_ids_BL`; plus that of
        tokens before the response, if it has a weight."""
        self._check(tokens_BL, ids_BL)
        wanted = response_BL[:, 1:]
        hidden_BLD = self._hidden(tokens_BL[:, :-1], ids_BL[:, :-1])

        def loss_at(places_BL: Tensor) -> Tensor:
            logits_NV = self.model.unembed(hidden_BLD[places_BL]).float()
            return F.cross_entropy(logits_NV, tokens_BL[:, 1:][places_BL])

        hidden_ND, token_loss = hidden_BLD[wanted], loss_at(wanted)
        if self.text_weight:
            before_BL = wanted.cumsum(1) == 0
            token_loss = token_loss + self.text_weight * loss_at(before_BL)
        if self.id_head is None:
            return token_loss
        targets_BL = ids_BL if target_ids_BL is None else target_ids_BL
        id_loss = F.cross_entropy(self.id_head(hidden_ND).float(), targets_BL[:, 1:][wanted])
        return token_loss + id_loss

    @torch.no_grad()
    def predict(self, tokens_BL: Tensor, ids_BL: Tensor, num_response: int) -> Response:
        """Teacher forcing: predict each of the last R tokens and IDs given the true ones before."""
        self._check(tokens_BL, ids_BL)
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
        """Free-running: generate R tokens greedily. The IDs fed are the model's own if it feeds
        them, else `response_ids_BR`."""
        if (response_ids_BR is None) != self.feeds_ids:
            raise ConfigError("response_ids_BR: pass it only if the model feeds no IDs of its own")
        self._check(prompt_BP, prompt_ids_BP)
        tokens, ids = prompt_BP, prompt_ids_BP
        steps: list[Response] = []
        for place in range(num_response):
            given = None if response_ids_BR is None else response_ids_BR[:, place : place + 1]
            steps.append(self._most_likely(self._hidden(tokens, ids)[:, -1:], given))
            tokens = torch.cat((tokens, steps[-1].tokens_BR), 1)
            ids = torch.cat((ids, steps[-1].ids_BR if given is None else given), 1)
        return Response(*(torch.cat(parts, dim=1) for parts in zip(*steps, strict=True)))

    def _hidden(self, tokens_BL: Tensor, ids_BL: Tensor) -> Tensor:
        added_BLD = None if self.id_embedding is None else self.id_embedding(ids_BL)
        return self.model.hidden(tokens_BL, ids_BL, added_BLD=added_BLD)

    def _most_likely(self, hidden_BRD: Tensor, given_ids_BR: Tensor | None) -> Response:
        tokens_BR = self.model.unembed(hidden_BRD).argmax(-1)
        if self.id_head is not None:
            return Response(tokens_BR, self.id_head(hidden_BRD).argmax(-1))
        assert given_ids_BR is not None
        return Response(tokens_BR, given_ids_BR)

    def _check(self, tokens_BL: Tensor, ids_BL: Tensor) -> None:
        if ids_BL.shape != tokens_BL.shape:
            raise ConfigError(f"ids_BL: shape {tuple(ids_BL.shape)}; give every token one ID")
        low, high = int(ids_BL.min()), int(ids_BL.max())
        if not 0 <= low <= high < self.num_ids:
            raise ConfigError(f"ids_BL: {low} to {high}, but num_ids={self.num_ids}; raise it")


def score(response: Response, tokens_BR: Tensor, ids_BR: Tensor) -> Score:
    token_BR, id_BR = response.tokens_BR == tokens_BR, response.ids_BR == ids_BR
    return Score(token_BR, id_BR, (token_BR & id_BR).all(1))
