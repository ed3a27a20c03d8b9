"""OLMo with position IDs as an argument: a subclass of `olmo.model.OLMo`.

Place in the flow: batches → **model** → per-token losses.

Upstream, positions enter in two places: `RotaryEmbedding.forward` counts them from 0, and
`OLMo.forward` builds the ALiBi bias (or learned embeddings) from 0. Both are replaced here; layers,
initialisation and parameter names are upstream's, so weights can be exchanged.

`hidden` and `unembed` are separate, so that a loss can unembed in chunks and only wanted places.

Dimension key: B batch, L length (K keys: longer with a cache), D width, H heads, R rotated
width of a head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from olmo.config import ActivationCheckpointingStrategy
from olmo.model import BufferCache, LayerNormBase, OLMo, OLMoSequentialBlock, RMSLayerNorm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.model.attention import Documents, attend, attend_within, keeps_much
from olmo_sparsity.model.far_states import FarStates
from olmo_sparsity.model.inference import far_states, last_hidden, shares_far
from olmo_sparsity.model.layers import RMSNorm, alibi_bias, query_scales, rotate
from olmo_sparsity.model.rope import RotaryTables, rotary_tables, rotated_width

KeysAndValues = tuple[Tensor, Tensor]
"""k_BHKD and v_BHKD of one layer, keys rotated."""


@dataclass
class KeyValueCache:
    """Keys and values of earlier places, for generation. The first call of `hidden` may add many
    places, later ones add one each."""

    layers: list[KeysAndValues | None]
    positions_BK: Tensor | None = None

    def append(self, positions_BL: Tensor) -> Tensor:
        """positions_BK of all places, including these."""
        if self.positions_BK is not None:
            assert positions_BL.shape[1] == 1, "after the prompt, one place at a time"
            positions_BL = torch.cat((self.positions_BK, positions_BL), dim=1)
        self.positions_BK = positions_BL
        return positions_BL


class PositionedBlock(OLMoSequentialBlock):
    """Upstream's block with rotary tables as an argument and our choice of attention kernels."""

    config: ModelConfig
    seen: list[tuple[Tensor, Tensor, Tensor | None]] | None = None
    """If set, collects the last query, the rotated keys and the bias."""

    def __init__(self, layer_id: int, config: ModelConfig) -> None:
        # Upstream's rotation would fill a cache for all positions, which is unused here.
        super().__init__(layer_id, config.update_with(rope=False), BufferCache())
        self.config = config
        self._take_other_shapes(config)

    def _take_other_shapes(self, config: ModelConfig) -> None:
        """Replace what upstream has for heads of another width, other biases, other norms."""
        width, keys = config.effective_head_width, config.effective_n_kv_heads
        of_queries = config.n_heads * width
        own_width = of_queries != config.d_model
        if own_width or config.qkv_bias:
            bias, device = config.include_bias, config.init_device
            self.fused_dims = (of_queries, keys * width, keys * width)
            projected = sum(self.fused_dims)
            self.att_proj = nn.Linear(
                config.d_model, projected, bias=bias or config.qkv_bias, device=device
            )
            self.attn_out = nn.Linear(of_queries, config.d_model, bias=bias, device=device)
        if config.attention_layer_norm and (own_width or config.attention_norm_per_head):
            affine = config.attention_layer_norm_with_affine
            for name, num_heads in (("q_norm", config.n_heads), ("k_norm", keys)):
                size = width * (1 if config.attention_norm_per_head else num_heads)
                norm = LayerNormBase.build(config, size=size, elementwise_affine=affine)
                setattr(self, name, norm)

    # OLMo: a module counts places from 0, and keys are cached before rotation. Here the tables come
    # with the input: a module that kept them could not be compiled together with checkpointing.
    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        tables: RotaryTables | None,
        bias: Tensor | None,
        past: KeysAndValues | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, KeysAndValues]:
        """The block's output, and keys and values of all places; those of `past` come first."""
        norm_after = self.config.norm_after
        q, k, v = self._project(x if norm_after else self.attn_norm(x), tables)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        if bias is not None:
            bias = self._cast_attn_bias(bias, q.dtype)
        dropout_p = self.config.attention_dropout if self.training else 0.0
        if documents is not None:
            mixed = attend_within(q, k, v, documents, bias, dropout_p)
        else:
            mixed = self.mix(q, k, v, bias, dropout_p)
        mixed = self.attn_out(mixed.transpose(1, 2).flatten(2))
        x = x + self.dropout(self.attn_norm(mixed) if norm_after else mixed)
        h = self.ff_out(self.act(self.ff_proj(x if norm_after else self.ff_norm(x))))
        return x + self.dropout(self.ff_norm(h) if norm_after else h), (k, v)

    def _project(self, h: Tensor, tables: RotaryTables | None) -> tuple[Tensor, Tensor, Tensor]:
        """q_BHLK, k_BHLK and v_BHLK; queries and keys normed and rotated."""
        config = self.config
        projected, limit = self.att_proj(h), config.clip_qkv
        if limit is not None:
            projected = projected.clamp(-limit, limit)
        q, k, v = (
            part.unflatten(-1, (-1, config.effective_head_width))
            for part in projected.split(self.fused_dims, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._norm(self.q_norm, q).to(v.dtype), self._norm(self.k_norm, k).to(v.dtype)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if tables is None:
            return q, k, v
        dtype = torch.float if config.rope_full_precision else q.dtype
        cos_BLR, sin_BLR = (table[:, None].to(dtype) for table in tables)
        return rotate(q, cos_BLR, sin_BLR), rotate(k, cos_BLR, sin_BLR), v

    def _norm(self, norm: nn.Module, x_BLHK: Tensor) -> Tensor:
        if self.config.attention_norm_per_head:
            return norm(x_BLHK)
        return norm(x_BLHK.flatten(-2)).view_as(x_BLHK)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float = 0.0
    ) -> Tensor:
        """Attention: causal, or as `bias` says."""
        scale_length = self.config.query_scale_length
        if scale_length is not None:
            q = q * query_scales(q.shape[2], k.shape[2], scale_length, q.device).to(q.dtype)
        if self.seen is not None:
            self.seen.append((q[:, :, -1], k, bias))
        # One new place may attend to all cached ones.
        is_causal = bias is None and q.shape[2] == k.shape[2]
        # The kernel shares grouped-query heads; upstream copies them first.
        grouped = q.shape[1] != k.shape[1]
        return attend(q, k, v, bias, is_causal, dropout_p, grouped)


class PositionedOLMo(OLMo):
    """A LanguageModel: `model(tokens_BL, positions_BL)` → logits_BLV, `unembed` of `hidden`."""

    config: ModelConfig
    transformer: Any  # a ModuleDict; its entries depend on the config

    def __init__(self, config: ModelConfig, init_params: bool = True) -> None:
        refuse_unsupported(config)
        # Upstream builds everything but the blocks. Its one block is replaced, and these arguments
        # avoid its position caches and learned position embeddings.
        super().__init__(config.update_with(n_layers=1, rope=True, alibi=False), init_params=False)
        # OLMo: switches this kernel off for the process; here: it is on, as the only fused one that
        # takes a bias (ALiBi).
        torch.backends.cuda.enable_mem_efficient_sdp(True)
        self.config = config
        blocks = [PositionedBlock(i, config) for i in range(config.n_layers)]
        self.transformer.update({"blocks": nn.ModuleList(blocks)})
        for module in self.modules():
            if type(module) is RMSLayerNorm:
                module.__class__ = RMSNorm  # the same parameters, another forward
        if init_params:
            self.reset_parameters()

    @property
    def blocks(self) -> list[PositionedBlock]:
        return list(self.transformer.blocks)

    @property
    def vocab_size(self) -> int:
        return self.config.embedding_size or self.config.vocab_size

    @property
    def embedding(self) -> nn.Embedding:
        return self.transformer.wte

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        last = self.transformer.wte if self.config.weight_tying else self.transformer.ff_out
        return last.weight, getattr(last, "bias", None)

    @property
    def logit_scale(self) -> float:
        return self.config.d_model**-0.5 if self.config.scale_logits else 1.0

    # OLMo: takes more arguments, and computes positions itself.
    def forward(  # type: ignore[override]
        self, tokens_BL: Tensor, positions_BL: Tensor, attention_bias: Tensor | None = None
    ) -> Tensor:
        return self.unembed(self.hidden(tokens_BL, positions_BL, attention_bias))

    def hidden(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        attention_bias: Tensor | None = None,
        *,
        documents: Documents | None = None,
        added_BLD: Tensor | None = None,
        cache: KeyValueCache | None = None,
        far: FarStates | None = None,
        last: int | None = None,
    ) -> Tensor:
        assert documents is None or (attention_bias is None and cache is None and far is None)
        if far is not None:
            assert not self.training
            assert added_BLD is None
            assert cache is None
            last = last or tokens_BL.shape[1]
            return last_hidden(self, tokens_BL, positions_BL, attention_bias, last, far)
        plain = not torch.is_grad_enabled() and not self.training and added_BLD is None
        if last is not None and plain and cache is None and documents is None:
            return last_hidden(self, tokens_BL, positions_BL, attention_bias, last)
        x = self.transformer.wte(tokens_BL)
        if added_BLD is not None:
            x = x + added_BLD
        if self.config.embedding_layer_norm:
            x = self.transformer.emb_norm(x)
        x = self.transformer.emb_drop(x)
        tables = rotary_tables(positions_BL, self.config) if self.config.rope else None
        if cache is not None:
            positions_BL = cache.append(positions_BL.expand_as(tokens_BL))
        if self.config.alibi:
            alibi = alibi_bias(positions_BL, self.config, num_queries=tokens_BL.shape[1])
            attention_bias = alibi if attention_bias is None else alibi + attention_bias
        for index, block in enumerate(self.blocks):
            if cache is not None:
                x, cache.layers[index] = block(x, tables, attention_bias, cache.layers[index])
            elif torch.is_grad_enabled() and self.recomputes(tokens_BL.numel()):
                given = (x, tables, attention_bias, None, documents)
                x = checkpoint(block, *given, use_reentrant=False)[0]
            else:
                x = block(x, tables, attention_bias, None, documents)[0]
        return self.transformer.ln_f(x if last is None else x[:, -last:])

    def recomputes(self, num_tokens: int, num_keys: int = 0) -> bool:
        config, itemsize = self.config, self.embedding.weight.element_size()
        shape = (config.d_model, config.n_heads, config.n_layers)
        checkpointing = self.activation_checkpointing_strategy is not None
        return checkpointing or (
            not self.training and keeps_much(num_tokens, num_keys, *shape, itemsize)
        )

    def shares_far(self, num_far: int, length: int) -> bool:
        return shares_far(self, num_far, length)

    def far_states(self, tokens_BL: Tensor, positions_BL: Tensor) -> FarStates:
        return far_states(self, tokens_BL, positions_BL)

    def new_cache(self) -> KeyValueCache:
        return KeyValueCache([None] * self.config.n_layers)

    @torch.no_grad()
    def last_attention(self, tokens_BL: Tensor, positions_BL: Tensor, far: FarStates) -> Tensor:
        seen: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for block in self.blocks:
            block.seen = seen
        try:
            self.hidden(tokens_BL, positions_BL, far=far, last=1)
        finally:
            for block in self.blocks:
                block.seen = None
        weights = []
        for q_BHK, k_BHLK, bias in seen:
            k_BHLK = k_BHLK.repeat_interleave(q_BHK.shape[1] // k_BHLK.shape[1], dim=1)
            scores_BHL = torch.einsum("bhk,bhlk->bhl", q_BHK.float(), k_BHLK.float())
            scores_BHL = scores_BHL * q_BHK.shape[-1] ** -0.5
            if bias is not None:
                scores_BHL = scores_BHL + bias[:, :, -1]
            weights.append(scores_BHL.softmax(-1))
        return torch.cat(weights, dim=1)

    def unembed(self, hidden: Tensor) -> Tensor:
        weight_VD, bias_V = self.unembedding
        logits = F.linear(hidden, weight_VD, bias_V)
        return logits * self.logit_scale if self.config.scale_logits else logits

    def checkpoint_activations(self) -> None:
        self.activation_checkpointing_strategy = ActivationCheckpointingStrategy.whole_layer


def refuse_unsupported(config: ModelConfig) -> None:
    if config.block_type != "sequential":
        raise ConfigError(f"model.block_type={config.block_type} is not supported; use sequential")
    if config.init_fn not in ("normal", "mitchell", "full_megatron"):
        raise ConfigError(
            f"model.init_fn={config.init_fn} is not implemented by ai2-olmo; use normal, mitchell "
            "or full_megatron"
        )
    if config.rope and rotated_width(config) < 2:
        raise ConfigError(
            f"model.rotary_fraction={config.rotary_fraction} rotates none of a head's "
            f"{config.effective_head_width} coordinates; raise it"
        )
    if config.rope and rotated_width(config) < 4 and (config.rope_scaling or {}).get("rope_type"):
        raise ConfigError("positions.scaling needs at least two frequencies; widen the heads")
