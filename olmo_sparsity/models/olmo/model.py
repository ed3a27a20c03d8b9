"""OLMo with position IDs as an argument: the model that PoSE and windows with gaps need.

    positions_BL = torch.tensor([[0, 1, 2, 40, 41, 42]])    # a gap of 37 position IDs
    logits_BLV = model(tokens_BL, positions_BL)

Upstream, the code of OLMo that this package installs, uses positions twice: the rotary embedding of
each layer counts them from 0, and so does the bias of ALiBi. Both are replaced here:
`rotary_tables` (rope.py) and `alibi_bias` (layers.py) take position IDs. Layers, initialisation and
names of parameters are upstream's, so weights can be exchanged.

Attention is causal by the order of tokens, not by their position IDs, and sees across a gap. So a
gap in the position IDs changes angles, and hides nothing.

`hidden` and `unembed` are separate, so that a loss can unembed in chunks (training_loss.py).

Dimension key: B batch, L length, S keys that a token may attend to, D width, H heads (in
`last_attention` of all layers), G heads of keys and values, K width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from olmo.config import ActivationCheckpointingStrategy
from olmo.model import RMSLayerNorm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.document_attention import DocumentStarts
from olmo_sparsity.models.olmo.block import LastAttention, PositionedBlock
from olmo_sparsity.models.olmo.inference import InferringOLMo
from olmo_sparsity.models.olmo.layers import RMSNorm, alibi_bias
from olmo_sparsity.models.rope import rotary_tables, rotated_width


@contextmanager
def _keeping_kernels() -> Iterator[None]:
    """Restore PyTorch's choice of attention kernels at the end. Upstream's constructor switches
    memory-efficient attention off for the whole process: the only fused kernel that takes a bias,
    as ALiBi needs."""
    cuda = torch.backends.cuda
    flash = cuda.flash_sdp_enabled()
    efficient = cuda.mem_efficient_sdp_enabled()
    try:
        yield
    finally:
        cuda.enable_flash_sdp(flash)
        cuda.enable_mem_efficient_sdp(efficient)


class PositionedOLMo(InferringOLMo):
    """Upstream's OLMo as a `LanguageModel` (language_model.py): `model(tokens_BL, positions_BL)`
    returns logits_BLV, which are `unembed` of `hidden`."""

    checkpoint_every = 1
    """With activation checkpointing, every n-th layer is computed again in the backward pass."""

    def __init__(self, config: ModelConfig, init_params: bool = True) -> None:
        check_supported(config)
        # Upstream builds everything but the blocks. Its one block is replaced, and these arguments
        # avoid its position caches and learned position embeddings.
        with _keeping_kernels():
            one_block_config: Any = replace(config, n_layers=1, rope=True, alibi=False)
            super().__init__(one_block_config, init_params=False)
        self.config = config

        blocks = [PositionedBlock(i, config) for i in range(config.n_layers)]
        self.transformer.update({"blocks": nn.ModuleList(blocks)})
        self._replace_norms()
        if init_params:
            self.reset_parameters()

    def _replace_norms(self) -> None:
        """Replace upstream's RMSNorm by one with the same parameters and a faster forward."""
        for parent in list(self.modules()):
            for name, norm in parent.named_children():
                if type(norm) is RMSLayerNorm:
                    (size,) = norm.normalized_shape
                    affine = norm.weight is not None
                    parent.add_module(name, RMSNorm(self.config, size, affine))  # type: ignore[arg-type] # the same fields

    @property
    def vocab_size(self) -> int:
        return self.config.embedding_size or self.config.vocab_size

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        head = self.transformer.wte if self.config.weight_tying else self.transformer.ff_out
        return head.weight, getattr(head, "bias", None)

    @property
    def logit_scale(self) -> float:
        return self.config.d_model**-0.5 if self.config.scale_logits else 1.0

    def set_angles(self, config: ModelConfig) -> None:
        """Take RoPE's base and scaling from another config from now on: that of a new stage of the
        run. Weights and all other settings stay."""
        # A copy, as the object may be the config of the whole run.
        self.config = replace(
            self.config, rope_theta=config.rope_theta, rope_scaling=config.rope_scaling
        )

    # Upstream's `forward` takes more arguments, and counts positions itself. Here they are passed.
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
        documents: DocumentStarts | None = None,
        added_BLD: Tensor | None = None,
        distant: DistantStates | None = None,
        num_last: int | None = None,
    ) -> Tensor:
        """Return hidden_BLD after the last norm, as `LanguageModel.hidden` describes it."""
        if documents is not None:
            assert attention_bias is None, "the attention of documents takes no bias"
            assert distant is None, "distant tokens belong to no document of the batch"
        if distant is not None:
            assert not self.training, "states of distant tokens are read in inference"
            assert added_BLD is None, "nothing can be added to embeddings beside distant states"

        # Without gradients and dropout, `last_hidden` gives the same in less time.
        is_inference = not torch.is_grad_enabled() and not self.training
        is_plain = added_BLD is None and documents is None
        saves_time = num_last is not None and is_inference and is_plain
        if distant is not None or saves_time:
            num_wanted = tokens_BL.shape[1] if num_last is None else num_last
            return self.last_hidden(tokens_BL, positions_BL, attention_bias, num_wanted, distant)

        hidden_BLD = self._hidden_of_all(
            tokens_BL, positions_BL, attention_bias, documents, added_BLD
        )
        # A slice of all tokens would cost a copy in the backward pass.
        if num_last is not None:
            hidden_BLD = hidden_BLD[:, -num_last:]
        return self.transformer.ln_f(hidden_BLD)

    def _hidden_of_all(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        attention_bias: Tensor | None,
        documents: DocumentStarts | None,
        added_BLD: Tensor | None,
    ) -> Tensor:
        """Return hidden_BLD of all tokens before the last norm: the pass of training."""
        x_BLD = self.transformer.wte(tokens_BL)
        if added_BLD is not None:
            x_BLD = x_BLD + added_BLD
        if self.config.embedding_layer_norm:
            x_BLD = self.transformer.emb_norm(x_BLD)
        x_BLD = self.transformer.emb_drop(x_BLD)

        # Computed once for all layers: each of them rotates by the same angles.
        tables = rotary_tables(positions_BL, self.config) if self.config.rope else None
        if self.config.alibi:
            alibi = alibi_bias(positions_BL, self.config, num_queries=tokens_BL.shape[1])
            attention_bias = alibi if attention_bias is None else alibi + attention_bias

        recomputes = torch.is_grad_enabled() and self.recomputes(tokens_BL.numel(), num_keys=0)
        for index, block in enumerate(self.blocks):
            inputs = (x_BLD, tables, attention_bias, documents)
            if recomputes and index % self.checkpoint_every == 0:
                x_BLD = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x_BLD = block(*inputs)
        return x_BLD

    @torch.no_grad()
    def last_attention(
        self, tokens_BL: Tensor, positions_BL: Tensor, distant: DistantStates
    ) -> Tensor:
        """Return weights_BHS: how much the last token attends to each token of `distant` and of the
        row, in all heads of all layers."""
        record: list[LastAttention] = []
        for block in self.blocks:
            block.attention_record = record
        try:
            self.hidden(tokens_BL, positions_BL, distant=distant, num_last=1)
        finally:
            for block in self.blocks:
                block.attention_record = None

        # Fused kernels return no weights, so they are computed from queries and keys.
        weights = []
        for q_BHK, k_BGSK, bias in record:
            group_size = q_BHK.shape[1] // k_BGSK.shape[1]  # query heads that share keys
            k_BHSK = k_BGSK.repeat_interleave(group_size, dim=1)
            scores_BHS = torch.einsum("bhk,bhsk->bhs", q_BHK.float(), k_BHSK.float())
            scores_BHS = scores_BHS * q_BHK.shape[-1] ** -0.5
            if bias is not None:
                scores_BHS = scores_BHS + bias[:, :, -1]
            weights.append(scores_BHS.softmax(-1))
        return torch.cat(weights, dim=1)

    def unembed(self, hidden: Tensor) -> Tensor:
        weight_VD, bias_V = self.unembedding
        logits = F.linear(hidden, weight_VD, bias_V)
        return logits * self.logit_scale if self.config.scale_logits else logits

    def checkpoint_activations(self, every: int = 1) -> None:
        """Let every n-th layer keep only its inputs in training, and compute the rest again."""
        self.checkpoint_every = every
        self.activation_checkpointing_strategy = ActivationCheckpointingStrategy.whole_layer


def check_supported(config: ModelConfig) -> None:
    """Raise ConfigError for a setting of OLMo that this model does not compute."""
    if config.block_type != "sequential":
        raise ConfigError(f"model.block_type={config.block_type} is not supported; use sequential")
    if config.init_fn not in ("normal", "mitchell", "full_megatron"):
        raise ConfigError(
            f"model.init_fn={config.init_fn} is not supported; use normal, mitchell or "
            "full_megatron"
        )
    if config.rope and rotated_width(config) < 2:
        raise ConfigError(
            f"model.rotary_fraction={config.rotary_fraction} rotates nothing; raise it, or pass "
            "--model.rope=false"
        )
    if config.rope and rotated_width(config) < 4 and (config.rope_scaling or {}).get("rope_type"):
        raise ConfigError("positions.scaling needs at least two frequencies; widen the heads")
