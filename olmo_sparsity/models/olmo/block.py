"""One layer of OLMo with rotary tables as an argument, where upstream counts positions from 0.

    x → norm → _project: rotated queries and keys, values → mix (or attend_within) → attn_out, + x
      → norm → ff_proj → act → ff_out, + the sum so far

`forward` is the pass of training. inference.py calls the parts of a block for its own, faster pass.

Dimension key: B batch, L length, D width, H heads, R pairs of rotated coordinates of a head, K
width of a head.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from olmo.model import BufferCache, LayerNormBase, OLMoSequentialBlock
from torch import Tensor, nn

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.attention import attend
from olmo_sparsity.models.document_attention import (
    DocumentStarts,
    attend_within,
    count_keys_of_documents,
)
from olmo_sparsity.models.olmo.layers import count_keys, first_query_scale, rotate
from olmo_sparsity.models.rope import RotaryTables


class LastAttention(NamedTuple):
    """The inputs of attention in one layer, for the last token of each row: its weights follow from
    them."""

    query_BHK: Tensor
    keys_BHLK: Tensor
    """The keys of all tokens, rotated. With grouped heads, they have fewer heads than queries."""

    bias: Tensor | None


class PositionedBlock(OLMoSequentialBlock):
    """Upstream's block with rotary tables as an argument and our choice of attention kernels."""

    config: ModelConfig  # type: ignore[assignment] # OLMo: its own class, with the same fields
    attention_record: list[LastAttention] | None = None
    """If set, `mix` appends to it: fused kernels return no weights of attention."""

    def __init__(self, layer_id: int, config: ModelConfig) -> None:
        # Upstream's rotation would fill a cache for all positions, which is unused here.
        without_rope: Any = replace(config, rope=False)
        super().__init__(layer_id, without_rope, BufferCache())
        self.config = config
        # Layers are counted from 1, so that the first one has positions.
        has_nope = config.nope_every is not None and (layer_id + 1) % config.nope_every == 0
        self.rotates = config.rope and not has_nope
        self._replace_upstream_parts(config)
        self.query_scale: nn.Parameter | None = None
        if config.query_scale_learned:
            self.query_scale = nn.Parameter(torch.empty(config.n_heads))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.query_scale is not None:
            scale = first_query_scale(self.config.max_sequence_length)
            nn.init.constant_(self.query_scale, scale)

    def _replace_upstream_parts(self, config: ModelConfig) -> None:
        """Replace layers that upstream builds, where the config asks for what upstream cannot:
        heads whose widths do not add up to d_model, biases of queries, keys and values alone, norms
        of single heads."""
        head_width = config.effective_head_width
        num_key_heads = config.effective_n_kv_heads
        query_width = config.n_heads * head_width
        key_width = num_key_heads * head_width
        has_other_width = query_width != config.d_model
        if has_other_width or config.qkv_bias:
            has_bias = config.include_bias
            device = config.init_device
            self.fused_dims = (query_width, key_width, key_width)
            self.att_proj = nn.Linear(
                config.d_model,
                sum(self.fused_dims),
                bias=has_bias or config.qkv_bias,
                device=device,
            )
            self.attn_out = nn.Linear(query_width, config.d_model, bias=has_bias, device=device)
        if config.attention_layer_norm and (has_other_width or config.attention_norm_per_head):
            affine = config.attention_layer_norm_with_affine
            for name, num_heads in (("q_norm", config.n_heads), ("k_norm", num_key_heads)):
                size = head_width if config.attention_norm_per_head else head_width * num_heads
                norm = LayerNormBase.build(self.config, size=size, elementwise_affine=affine)  # type: ignore[arg-type] # the same fields
                setattr(self, name, norm)

    # OLMo: a module counts tokens from 0, and keys are cached before rotation. Here the tables come
    # with the input: a module that kept them could not be compiled together with checkpointing.
    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        tables: RotaryTables | None,
        bias: Tensor | None,
        documents: DocumentStarts | None = None,
    ) -> Tensor:
        """Return the output of the block.

        Args:
            x: Its input, x_BLD.
            tables: Cosines and sines of the tokens' angles; None without RoPE.
            bias: Added to attention scores; None for causal attention.
            documents: Where documents begin, if attention is restricted to them.
        """
        norm_after = self.config.norm_after  # as in OLMo 2: a norm of outputs, not of inputs

        # Attention
        q, k, v = self._project(x if norm_after else self.attn_norm(x), tables)
        if bias is not None:
            bias = self._cast_attn_bias(bias, q.dtype)
        dropout_p = self.config.attention_dropout if self.training else 0.0
        if documents is not None:
            if self.config.scales_queries:
                q = self.scale_queries(q, count_keys_of_documents(documents, *x.shape[:2]))
            mixed = attend_within(q, k, v, documents, bias, dropout_p)
        else:
            mixed = self.mix(q, k, v, bias, dropout_p)
        mixed = self.attn_out(mixed.transpose(1, 2).flatten(2))
        x = x + self.dropout(self.attn_norm(mixed) if norm_after else mixed)

        # Feed-forward network
        h = self.ff_out(self.act(self.ff_proj(x if norm_after else self.ff_norm(x))))
        return x + self.dropout(self.ff_norm(h) if norm_after else h)

    def _project(self, h: Tensor, tables: RotaryTables | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_BHLK, k_BHLK and v_BHLK; queries and keys are normed and rotated."""
        config = self.config
        projected = self.att_proj(h)
        limit = config.clip_qkv
        if limit is not None:
            projected = projected.clamp(-limit, limit)
        q, k, v = (
            part.unflatten(-1, (-1, config.effective_head_width))
            for part in projected.split(self.fused_dims, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q = self._apply_norm(self.q_norm, q).to(v.dtype)
            k = self._apply_norm(self.k_norm, k).to(v.dtype)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if tables is None or not self.rotates:
            return q, k, v
        # The same angles for all heads, hence one more dimension.
        dtype = torch.float if config.rope_full_precision else q.dtype
        cos_BLR, sin_BLR = (table[:, None].to(dtype) for table in tables)
        return rotate(q, cos_BLR, sin_BLR), rotate(k, cos_BLR, sin_BLR), v

    def _apply_norm(self, norm: nn.Module, x_BLHK: Tensor) -> Tensor:
        """Return the norm of queries or keys: over each head, or over all heads together."""
        if self.config.attention_norm_per_head:
            return norm(x_BLHK)
        return norm(x_BLHK.flatten(-2)).view_as(x_BLHK)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float = 0.0
    ) -> Tensor:
        """Return attention from queries to keys, of which there may be more: the queries are the
        last tokens. Without a bias it is causal. With one, the bias alone decides what is hidden.
        Several queries with more keys must come with a bias."""
        if self.config.scales_queries:
            q = self.scale_queries(q, count_keys(q.shape[2], k.shape[2], q.device))
        if self.attention_record is not None:
            self.attention_record.append(LastAttention(q[:, :, -1], k, bias))
        # The kernel shares grouped-query heads; upstream copies them first.
        return attend(q, k, v, bias, dropout_p)

    def scale_queries(self, q_BHLK: Tensor, counts_BL: Tensor) -> Tensor:
        """Return the queries, multiplied by their factors (`query_factors`). `counts_BL`: how many
        keys each query sees. B is 1 if all rows have the same counts."""
        factors_BHL = self.query_factors(counts_BL)
        return q_BHLK * factors_BHL[..., None].to(q_BHLK.dtype)

    def query_factors(self, counts_BL: Tensor) -> Tensor:
        """Return factors_BHL, in fp32, by which queries are multiplied. They grow with the
        logarithm of the number n of keys that a query sees, so that attention to more keys stays as
        sharp: s · ln(n) with a learned s for each head, or ln(n + 1) / ln(length) for all heads (H
        is 1)."""
        if self.query_scale is not None:
            return self.query_scale.float()[:, None] * counts_BL.log()[:, None]
        scale_length = self.config.query_scale_length
        assert scale_length is not None
        return ((counts_BL + 1).log() / math.log(scale_length))[:, None]
