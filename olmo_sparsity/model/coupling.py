"""Position coupling, and Predictive Position Coupling (PPC), around any model with position IDs.

Place in the flow: tokens and coupled IDs → **PositionCoupling(model)** → a joint loss, or a freely
generated response.

Tokens that belong together share a position ID. In training the IDs of prompt and response are
given; in PPC the model also learns to name the ID of each next response token. At test only the
prompt's IDs are known: the model feeds its own tokens *and* its own IDs back, so one wrong ID
misleads all that follows.

IDs enter by the model's own positions (RoPE, on all or part of a head: `model.rotary_fraction`) and
by a learned embedding (`embed_ids`). Which IDs a sample gets in training, so that every ID up to
the test length is seen, is drawn in data/positions.py. One's own task: docs/tasks.md.

Dimension key: B samples, P prompt length, R response length, L = P + R, N response places of a
batch, D width, V vocabulary, I number of IDs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.errors import ConfigError


class PositionedModel(Protocol):
    """What is asked of a model; PositionedOLMo and HuggingFaceLM provide it."""

    @property
    def embedding(self) -> nn.Embedding: ...
    def hidden(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        attention_bias: Tensor | None = None,
        *,
        added_BLD: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor: ...
    def unembed(self, hidden: Tensor) -> Tensor: ...
    def new_cache(self) -> Any: ...


class JointLoss(NamedTuple):
    total: Tensor
    token: Tensor
    id: Tensor
    """0 where IDs are not predicted."""


class Response(NamedTuple):
    tokens_BR: Tensor
    ids_BR: Tensor
    """As predicted; where they are not, as given."""


class Score(NamedTuple):
    """What was right, place by place; a wrong ID is an error as a wrong token is."""

    token_BR: Tensor
    id_BR: Tensor
    exact_B: Tensor


class PositionCoupling(nn.Module):
    """`PositionCoupling(model, num_ids=256)`, then `loss` to train it and `generate` to use it."""

    def __init__(
        self,
        model: PositionedModel,
        num_ids: int,
        *,
        embed_ids: bool = True,
        predict_ids: bool = True,
        id_loss_weight: float = 1.0,
    ) -> None:
        """IDs are 0 … num_ids - 1. Without `predict_ids` this is position coupling with IDs given;
        without `embed_ids` too, it is the model as it stands."""
        super().__init__()
        if num_ids < 1:
            raise ConfigError(f"num_ids={num_ids} must be at least 1")
        if predict_ids and not embed_ids:
            raise ConfigError(
                "predict_ids=True needs embed_ids=True: RoPE sees differences of IDs only, so a "
                "prompt looks the same at any shift and its absolute IDs cannot be told from it"
            )
        if not id_loss_weight > 0:
            raise ConfigError(
                f"id_loss_weight={id_loss_weight} must be above 0; for IDs that are given, set "
                "predict_ids=False"
            )
        self.model = model
        self.num_ids = num_ids
        self.id_loss_weight = id_loss_weight
        tokens = model.embedding
        width, where = tokens.embedding_dim, tokens.weight.device
        self.id_embedding = nn.Embedding(num_ids, width, device=where) if embed_ids else None
        # A map of its own: tied to the embedding it would have to serve as its inverse.
        self.id_head = nn.Linear(width, num_ids, device=where) if predict_ids else None
        if self.id_embedding is not None:
            with torch.no_grad():  # on the scale of what it is added to
                self.id_embedding.weight.normal_(std=float(tokens.weight.std()))

    def forward(self, tokens_BL: Tensor, ids_BL: Tensor) -> tuple[Tensor, Tensor | None]:
        """logits_BLV of each next token, and id_logits_BLI of its ID."""
        hidden_BLD = self._hidden(tokens_BL, ids_BL)
        id_logits_BLI = None if self.id_head is None else self.id_head(hidden_BLD)
        return self.model.unembed(hidden_BLD), id_logits_BLI

    def loss(self, tokens_BL: Tensor, ids_BL: Tensor, response_BL: Tensor) -> JointLoss:
        """Means over the response: `response_BL` is true where token and ID are to be learnt."""
        self._check(tokens_BL, ids_BL)
        if response_BL.shape != tokens_BL.shape or response_BL[:, 0].any():
            raise ConfigError(
                f"response_BL has shape {tuple(response_BL.shape)} for tokens of shape "
                f"{tuple(tokens_BL.shape)}; it must be as large, and false at the first place, "
                "which nothing precedes"
            )
        wanted = response_BL[:, 1:]
        hidden_ND = self._hidden(tokens_BL[:, :-1], ids_BL[:, :-1])[wanted]
        logits_NV = self.model.unembed(hidden_ND).float()
        token_loss = F.cross_entropy(logits_NV, tokens_BL[:, 1:][wanted])
        if self.id_head is None:
            return JointLoss(token_loss, token_loss, torch.zeros_like(token_loss))
        id_loss = F.cross_entropy(self.id_head(hidden_ND).float(), ids_BL[:, 1:][wanted])
        return JointLoss(token_loss + self.id_loss_weight * id_loss, token_loss, id_loss)

    @torch.no_grad()
    def predict(self, tokens_BL: Tensor, ids_BL: Tensor, num_response: int) -> Response:
        """Teacher-forced: each of the last R tokens and IDs, given the true ones before it."""
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
        """Free-running: R tokens, each the most likely after those generated before it. IDs are the
        model's own where it predicts them, else `response_ids_BR`."""
        if (response_ids_BR is None) != (self.id_head is not None):
            raise ConfigError(
                "with predict_ids=True only the prompt's IDs are known: leave out response_ids_BR"
                if self.id_head is not None
                else "with predict_ids=False the response's IDs must be given: response_ids_BR"
            )
        self._check(prompt_BP, prompt_ids_BP)
        if response_ids_BR is not None:
            self._check(prompt_BP.new_zeros(len(prompt_BP), num_response), response_ids_BR)
        cache = self.model.new_cache()
        tokens, ids = prompt_BP, prompt_ids_BP
        found: list[Response] = []
        for place in range(num_response):
            given = None if response_ids_BR is None else response_ids_BR[:, place : place + 1]
            found.append(self._most_likely(self._hidden(tokens, ids, cache)[:, -1:], given))
            tokens, ids = found[-1]
        return Response(*(torch.cat(parts, dim=1) for parts in zip(*found, strict=True)))

    def _hidden(self, tokens_BL: Tensor, ids_BL: Tensor, cache: Any = None) -> Tensor:
        added_BLD = None if self.id_embedding is None else self.id_embedding(ids_BL)
        return self.model.hidden(tokens_BL, ids_BL, added_BLD=added_BLD, cache=cache)

    def _most_likely(self, hidden_BRD: Tensor, given_ids_BR: Tensor | None) -> Response:
        tokens_BR = self.model.unembed(hidden_BRD).argmax(-1)
        if self.id_head is not None:
            return Response(tokens_BR, self.id_head(hidden_BRD).argmax(-1))
        assert given_ids_BR is not None
        return Response(tokens_BR, given_ids_BR)

    def _check(self, tokens_BL: Tensor, ids_BL: Tensor) -> None:
        if ids_BL.shape != tokens_BL.shape:
            raise ConfigError(
                f"position IDs have shape {tuple(ids_BL.shape)}, their tokens "
                f"{tuple(tokens_BL.shape)}; give every token one ID"
            )
        if ids_BL.numel() and not 0 <= int(ids_BL.min()) <= int(ids_BL.max()) < self.num_ids:
            raise ConfigError(
                f"position IDs run from {int(ids_BL.min())} to {int(ids_BL.max())}, but "
                f"num_ids={self.num_ids} knows 0 to {self.num_ids - 1} only; raise num_ids, and "
                "train on IDs up to there"
            )


def score(found: Response, tokens_BR: Tensor, ids_BR: Tensor) -> Score:
    token_BR, id_BR = found.tokens_BR == tokens_BR, found.ids_BR == ids_BR
    return Score(token_BR, id_BR, (token_BR & id_BR).all(1))
