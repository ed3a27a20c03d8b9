"""Hold the keys and values of distant tokens in all layers, and select some of them.

The states are computed once for a text. A window that attends to k of its tokens then costs as much
as its own tokens, however long the text is:

    states = model.distant_states(tokens_BL, positions_BL)   # of the whole text
    chosen = states.choose(indices_BF)                       # k other tokens for each row
    model.hidden(window_BL, window_positions_BL, distant=chosen, num_last=1)

The index of a token counts the tokens of the text from 0. Its position ID may be larger, as IDs may
have gaps.

Dimension key: B rows, F distant tokens, L tokens of a window, G heads of keys and values, S keys
that a row attends to, K width of a head, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.models.attention import causal_bias


@dataclass(frozen=True)
class DistantStates:
    """The keys and values of distant tokens. B is 1 if all rows attend to the same tokens."""

    positions_BF: Tensor
    """Position IDs of these tokens."""

    layers: list[tuple[Tensor, Tensor]]
    """k_BFGK, rotated, and v_BFGK of each layer."""

    bias_BF: Tensor | None = None
    """Added to the attention scores of these tokens, by row. None adds nothing."""

    hidden_BFD: Tensor | None = None
    """The hidden states of these tokens after the last norm, from which their next tokens are
    predicted. None if they were not kept."""

    @staticmethod
    def after_prefix(batches: Sequence[DistantStates], num_prefix: int) -> DistantStates:
        """Join rows, each of which is the same prefix and one more token, into one text. The result
        has the states of tokens without their context: each was computed after the prefix alone.

            p p a       joined: p p a b c
            p p b
            p p c
        """

        def join(tensors: list[Tensor]) -> Tensor:
            prefix = tensors[0][:1, :num_prefix]
            last_tokens = [tensor[None, :, -1] for tensor in tensors]  # rows become tokens
            return torch.cat([prefix, *last_tokens], 1)

        layers = [
            (join([k for k, _ in layer]), join([v for _, v in layer]))
            for layer in zip(*(batch.layers for batch in batches), strict=True)
        ]
        return DistantStates(join([batch.positions_BF for batch in batches]), layers)

    def with_hidden_after(self, before: DistantStates | None, hidden_BLD: Tensor) -> DistantStates:
        """Return these states with the hidden states of all their tokens: those that `before` has
        of the first tokens, and then `hidden_BLD`. If `before` kept none, the result has none, as
        it must have those of all tokens or of none."""
        if before is None:
            return replace(self, hidden_BFD=hidden_BLD)
        if before.hidden_BFD is None:
            return replace(self, hidden_BFD=None)
        return replace(self, hidden_BFD=torch.cat([before.hidden_BFD, hidden_BLD], 1))

    @property
    def num_tokens(self) -> int:
        """Return the number of distant tokens, of a prefix too, that each row attends to."""
        return self.positions_BF.shape[1]

    @property
    def num_heads(self) -> int:
        return self.layers[0][0].shape[2]

    def expand(self, num_rows: int, bias_BF: Tensor | None = None) -> DistantStates:
        """Return the same keys and values in every row, as views, without `hidden_BFD`. `bias_BF`:
        the bias of each row."""

        def repeat(x_1F: Tensor) -> Tensor:
            return x_1F.expand(num_rows, *x_1F.shape[1:])

        layers = [(repeat(k), repeat(v)) for k, v in self.layers]
        return DistantStates(repeat(self.positions_BF), layers, bias_BF)

    def positions_before(self, positions_BL: Tensor) -> Tensor:
        """Return the position IDs of all keys of a window: those of the distant tokens before it,
        then its own."""
        distant_BF = self.positions_BF.expand(len(positions_BL), -1)
        return torch.cat((distant_BF, positions_BL), 1)

    def window_bias(self, length: int) -> Tensor | None:
        """Return bias_B1LS for the queries of a window of `length` tokens. Its keys are the distant
        tokens, with `bias_BF`, and then the window, with a causal mask. None means that each query
        sees all distant tokens, and attention is causal."""
        if self.bias_BF is None:
            return None
        distant_B1LF = self.bias_BF[:, None, None].expand(-1, -1, length, -1)
        causal_B1LL = causal_bias(length, self.bias_BF.device).expand(len(self.bias_BF), -1, -1, -1)
        return torch.cat((distant_B1LF, causal_B1LL), dim=-1)

    def first(self, num_tokens: int) -> DistantStates:
        """Return the states of the first tokens, as views."""
        assert self.bias_BF is None, "states with a bias cannot be cut"
        layers = [(k[:, :num_tokens], v[:, :num_tokens]) for k, v in self.layers]
        hidden_BFD = None if self.hidden_BFD is None else self.hidden_BFD[:, :num_tokens]
        return DistantStates(self.positions_BF[:, :num_tokens], layers, hidden_BFD=hidden_BFD)

    def choose(self, indices_BF: Tensor) -> DistantStates:
        """Return the keys and values of some tokens for each row, without `hidden_BFD`.
        `indices_BF`: the indices of these tokens, each once, in the text, which must be one text
        for all rows."""
        assert self.bias_BF is None, "states with a bias cannot be chosen from"
        if indices_BF.shape == (1, self.num_tokens):
            return self  # all tokens: attention does not depend on their order

        def pick(x_1F: Tensor) -> Tensor:
            index = indices_BF.to(x_1F.device).flatten()
            return x_1F[0].index_select(0, index).unflatten(0, indices_BF.shape)

        layers = [(pick(k), pick(v)) for k, v in self.layers]
        return DistantStates(pick(self.positions_BF), layers)


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return arrays of integers as tensors on a device. All are sent in one copy, for which the
    host does not wait."""
    numbers = torch.from_numpy(np.concatenate([a.ravel() for a in arrays]).astype(np.int64))
    if device.type == "cuda":
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    parts = numbers.to(device).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
