"""Compute in less time what scoring needs: hidden states of the last tokens of many short rows.

`InferringOLMo` has the two passes of inference. **`last_hidden`** returns what the plain forward
pass returns at the last W tokens of each row. `PositionedOLMo.hidden` calls it where no gradients
are needed, or where rows attend to states of distant tokens:

    tokens, position IDs → first layer         → middle layers → last layer     → hidden_BWD
                           each different pair                   only the W
                           is projected once                     wanted tokens
                           (first_layer.py)                      (layer_steps.py)

**`distant_states`** returns keys and values of all tokens of a text, which rows can then attend to
without computing them again. The text may be computed in chunks: with `tokens_at_once=4`, of six
tokens the first four, then the last two, which attend to the states of the first (state_buffer.py).
Rows that see most distant tokens share their states without copies.

On CPU sums are computed in place, and attention runs in fp32 for any dtype of weights.

Dimension key: B rows, L tokens of a row, W wanted tokens (the last of each row), F distant tokens,
P different pairs of token and position ID, D width, H heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from olmo.model import OLMo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.attention import keeps_much
from olmo_sparsity.models.distant_attention import can_share_distant
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.olmo.block import PositionedBlock
from olmo_sparsity.models.olmo.first_layer import (
    FirstLayer,
    find_different_pairs,
    first_layer_output,
)
from olmo_sparsity.models.olmo.layer_steps import (
    DistantLayer,
    attend_from_last,
    finish_layer,
    layer_output,
)
from olmo_sparsity.models.olmo.layers import alibi_bias
from olmo_sparsity.models.olmo.projections import project, rotations_of
from olmo_sparsity.models.olmo.state_buffer import StateBuffer


class _AttentionInputs(NamedTuple):
    """What the attention of all layers takes, besides queries, keys and values of the row."""

    bias: Tensor | None
    """Added to attention scores, (B or 1, H or 1, L, L + F); None for causal attention. Of the F
    distant tokens it has columns only if their states are not shared."""

    distant_layers: list[DistantLayer | None]
    """For each layer, its states of distant tokens; None if there are none."""

    num_keys: int
    """How many tokens the last token of a row sees, distant ones included."""


class InferringOLMo(OLMo):
    """OLMo with the two passes of inference, as the module describes them. `PositionedOLMo` adds
    the pass of training."""

    config: ModelConfig  # type: ignore[assignment] # OLMo: its own class, with the same fields
    transformer: Any  # a ModuleDict; its entries depend on the config
    reach: int | None = None
    """The largest distance of position IDs over which some layer sees a token. None means that all
    layers see all earlier tokens, as OLMo has no sliding windows."""

    @property
    def blocks(self) -> list[PositionedBlock]:
        return list(self.transformer.blocks)

    @property
    def embedding(self) -> nn.Embedding:
        return self.transformer.wte

    def recomputes(self, num_tokens: int, num_keys: int) -> bool:
        """Return whether layers are computed again in a backward pass, to save memory.

        Args:
            num_tokens: Tokens of the batch, in all rows.
            num_keys: Keys that each token attends to, if attention scores are kept for the
                backward pass; 0 if fused kernels keep none.
        """
        if self.activation_checkpointing_strategy is not None:
            return True
        if self.training:  # without the setting, a training keeps its activations
            return False
        config = self.config
        shape = (config.d_model, config.n_heads, config.n_layers)
        itemsize = self.embedding.weight.element_size()
        return keeps_much(num_tokens, num_keys, *shape, itemsize)

    def shares_distant(self, num_distant: int, length: int) -> bool:
        """Return whether attention to distant tokens is computed apart from attention to the row's
        own tokens, so that rows share the distant states."""
        config = self.config
        # ALiBi's bias and the factors of scaled queries depend on both kinds of tokens.
        if config.alibi or config.scales_queries:
            return False
        # A record of attention holds the keys of all tokens in one tensor.
        if self.blocks[0].attention_record is not None:
            return False
        weight = self.embedding.weight
        head_width = config.effective_head_width
        return can_share_distant(weight.device, weight.dtype, head_width, num_distant, length)

    def last_hidden(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        bias: Tensor | None,
        num_last: int,
        distant: DistantStates | None = None,
    ) -> Tensor:
        """Return hidden_BWD of the last `num_last` tokens, after the last norm. Each token attends
        to all of `distant` and to the tokens of its row before it.

        Args:
            bias: Added to attention scores, (B or 1, H or 1, L, L). None for causal attention, and
                always with `distant`.
            num_last: W, the number of tokens at the end of each row that are wanted.
            distant: States of earlier tokens, of all rows or of each.
        """
        length = tokens_BL.shape[1]
        positions_BL = positions_BL.expand_as(tokens_BL)
        attention = self._attention_inputs(positions_BL, bias, distant)
        recomputes = torch.is_grad_enabled() and self.recomputes(
            tokens_BL.numel(), attention.num_keys
        )

        layers = list(zip(self.blocks, attention.distant_layers, strict=True))
        # Not on a GPU: to count different pairs, the host would wait for it. And not if layers are
        # computed again in the backward pass, which `checkpoint` arranges for whole layers.
        projects_pairs = tokens_BL.device.type == "cpu" and not recomputes
        if projects_pairs:
            x_BLD, rotations = self._first_layer(tokens_BL, positions_BL, attention, num_last)
            layers_to_compute = layers[1:]
        else:
            x_BLD = self._embed(tokens_BL)
            rotations = self._rotations(positions_BL, x_BLD.dtype)
            layers_to_compute = layers

        for block, distant_layer in layers_to_compute:
            # No later layer reads the output of the last one, so only wanted tokens are computed.
            num_wanted = num_last if block is self.blocks[-1] else length
            inputs = (block, x_BLD, rotations, attention.bias, num_wanted, distant_layer)
            if recomputes:
                x_BLD = checkpoint(layer_output, *inputs, use_reentrant=False)
            else:
                x_BLD = layer_output(*inputs)
        return self.transformer.ln_f(x_BLD)

    def _attention_inputs(
        self, positions_BL: Tensor, bias: Tensor | None, distant: DistantStates | None
    ) -> _AttentionInputs:
        """Return what attention takes, with ALiBi's bias if the model has it. `bias`: as
        `last_hidden` takes it. It has no columns for distant tokens, so it must be None if there
        are distant states."""
        config = self.config
        length = positions_BL.shape[1]
        num_keys = length
        distant_layers: list[DistantLayer | None] = [None] * config.n_layers
        if distant is not None:
            assert bias is None
            is_shared = self.shares_distant(distant.num_tokens, length)
            if not is_shared:  # then one bias covers distant tokens and the row
                bias = distant.window_bias(length)
            num_keys += distant.num_tokens
            distant_layers = [
                DistantLayer(k, v, distant.bias_BF, is_shared) for k, v in distant.layers
            ]
        if config.alibi:
            positions_of_keys = positions_BL
            if distant is not None:
                positions_of_keys = distant.positions_before(positions_BL)
            alibi = alibi_bias(positions_of_keys, config, num_queries=length)
            bias = alibi if bias is None else alibi + bias
        return _AttentionInputs(bias, distant_layers, num_keys)

    def _first_layer(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        attention: _AttentionInputs,
        num_last: int,
    ) -> FirstLayer:
        """Return the output of the first layer at its wanted tokens, and the rotations of all
        tokens. All tokens are wanted unless it is the only layer. Each different pair of token and
        position ID is projected once."""
        pairs = find_different_pairs(tokens_BL, positions_BL)
        is_last_layer = len(self.blocks) == 1
        num_wanted = num_last if is_last_layer else tokens_BL.shape[1]
        return first_layer_output(
            self.blocks[0],
            self._embed(pairs.tokens_P),
            pairs,
            attention.bias,
            num_wanted,
            attention.distant_layers[0],
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the first layer for tokens of any shape."""
        x = self.transformer.wte(tokens)
        return self.transformer.emb_norm(x) if self.config.embedding_layer_norm else x

    def _rotations(self, positions_BL: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the rotations of tokens with these position IDs; None without RoPE."""
        return rotations_of(positions_BL, self.config, dtype) if self.config.rope else None

    @torch.no_grad()
    def distant_states(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        tokens_at_once: int | None = None,
        earlier: DistantStates | None = None,
    ) -> DistantStates:
        """Return keys, values and hidden states of all tokens, each of which sees those before it.

        Args:
            tokens_at_once: How many tokens are computed together; with None, all of them. Chunks
                need less memory: attention scores of a chunk are (B, H, chunk, tokens so far).
            earlier: States of the text before these tokens, which become part of the result.
        """
        length = tokens_BL.shape[1]
        positions_BL = positions_BL.expand_as(tokens_BL)
        num_earlier = 0
        if earlier is not None:
            num_earlier = earlier.num_tokens
            positions_BL = torch.cat([earlier.positions_BF, positions_BL], 1)

        buffer = StateBuffer(num_earlier + length, earlier)
        hidden: list[Tensor] = []
        end = num_earlier
        for chunk_BL in tokens_BL.split(tokens_at_once or length, 1):
            end += chunk_BL.shape[1]
            hidden.append(self._run_chunk(chunk_BL, positions_BL[:, :end], buffer))
        distant = DistantStates(positions_BL, buffer.layers)
        return distant.with_hidden_after(earlier, torch.cat(hidden, 1))

    def _run_chunk(self, chunk_BL: Tensor, positions_BL: Tensor, buffer: StateBuffer) -> Tensor:
        """Return hidden states of a chunk of a text after the last norm, and write its keys and
        values to the buffer.

        Args:
            positions_BL: The position IDs of all tokens up to the end of the chunk.
            buffer: Holds the states of all tokens before the chunk, which the chunk sees.
        """
        config = self.config
        num_chunk = chunk_BL.shape[1]
        start = positions_BL.shape[1] - num_chunk
        x_BLD = self._embed(chunk_BL)
        rotations = self._rotations(positions_BL[:, start:], x_BLD.dtype)
        bias = None
        if config.alibi:
            bias = alibi_bias(positions_BL, config, num_queries=num_chunk)
        is_shared = start > 0 and self.shares_distant(start, num_chunk)

        for layer_index, block in enumerate(self.blocks):
            projections = project(block, x_BLD, rotations, num_chunk)
            buffer.write(layer_index, start, projections)
            distant_layer = None
            if start > 0:
                k, v = buffer.first_tokens(layer_index, start)
                distant_layer = DistantLayer(k, v, None, is_shared)
            mixed = attend_from_last(block, projections, bias, num_chunk, distant_layer)
            x_BLD = finish_layer(block, x_BLD, mixed)
        return self.transformer.ln_f(x_BLD)
