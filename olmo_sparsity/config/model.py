"""Declare the shape of a model: `ModelConfig`, the section `model` of a run.

    model:                       in a YAML file
      d_model: 512
      n_heads: 8
      max_sequence_length: 2048

    ModelConfig(d_model=512, n_heads=8, max_sequence_length=2048)

`models/build.py` builds a model from it, and config/sections.py makes it a part of `RunConfig`.

Each field says what it changes (`changes=…`), in one of the words below. From these words follow
which models a run may start from (`init_from`), and which models can be exported: a model with
another `d_model` (COMPUTATION) is refused as a start, one with another `attention_dropout`
(TRAINING) is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from olmo_sparsity.config.schema import option

# --- what a field of the model changes -----------------------------------------------------------

COMPUTATION = "computation"
"""With another value, the same weights compute something else, or do not fit. So a run that starts
from the weights of a model (`init_from`) must have that model's value (checked in
models/huggingface/computation.py), and a model can be exported only to a family of transformers
that can express the value (models/huggingface/families.py)."""

ANGLES = "angles"
"""The field determines RoPE's frequencies. A run that starts from weights may lower them, to read
longer texts."""

ROUNDING = "rounding"
"""The field changes in which precision something is computed, and nothing else."""

TRAINING = "training"
"""The field has an effect in training alone, as dropout has."""

START = "start"
"""The field determines how weights are drawn before the first step."""

USE = "use"
"""The field says which inputs the model is meant for, or which tokens have a purpose, such as to
end a text. Its computation stays."""

NOTHING = "nothing"
"""The field of OLMo's class has no effect here, and a config that sets it is refused. Its `refused`
says why, or where to set it."""


@dataclass
class ModelConfig:
    """The fields of `olmo.config.ModelConfig`, and after them the fields of this project.

    It is declared anew, as OLMo's module takes seconds to import, which `--help` and every check of
    a config would wait for. OLMo's layers accept it in place of their own class: the fields have
    the same names, and OLMo's enums equal the texts that are used here.
    """

    # Fields are in OLMo's order, and saved configs keep it: a new one follows at the end.
    #
    # OLMo's defaults are those of GPT-2 (dropout 0.1, biases, GPT-2's vocabulary). The defaults
    # here are the values that all published OLMo configs share, so that our YAML files state only
    # differences.
    d_model: int = option(768, changes=COMPUTATION, least=1, most=10**6)
    """Width of the residual stream."""

    n_heads: int = option(12, changes=COMPUTATION, least=1, most=10**5)
    """Attention heads of a layer."""

    n_kv_heads: int | None = option(None, changes=COMPUTATION, least=1, most=10**5)
    """Heads of keys and values. If they are fewer than n_heads, several query heads share one of
    them (grouped-query attention). None: n_heads."""

    clip_qkv: float | None = option(None, changes=COMPUTATION, least=1e-30, most=1e30)
    """Limit queries, keys and values to this absolute value. None: no limit."""

    n_layers: int = option(12, changes=COMPUTATION, least=1, most=10**5)
    """Layers of the model."""

    mlp_ratio: int = option(4, changes=COMPUTATION, least=1, most=10**5)
    """Width of the MLP, as a multiple of d_model. With swiglu it is the sum of both halves, gate
    and value, which other programs do not add up: their 4 is 8 here."""

    mlp_hidden_size: int | None = option(None, changes=COMPUTATION, least=1, most=10**6)
    """Width of the MLP, instead of mlp_ratio. With swiglu it is the sum of both halves: twice
    Llama's intermediate_size."""

    activation_type: Literal["gelu", "relu", "swiglu"] = option("swiglu", changes=COMPUTATION)
    """Activation of the MLP."""

    block_type: Literal["sequential", "llama"] = option("sequential", changes=COMPUTATION)
    """Kind of the layers. sequential: one linear map makes queries, keys and values. llama has
    three maps for them, and is not supported."""

    block_group_size: int = option(
        1, changes=NOTHING, refused="FSDP wrapping is not available here"
    )
    alibi: bool = option(False, changes=COMPUTATION)
    """Use linear biases by distance (ALiBi), without RoPE."""

    alibi_bias_max: float = option(8.0, changes=COMPUTATION, least=0, most=1e6)
    """ALiBi lowers attention scores by a slope for each token of distance. The slopes of the heads
    go from 2^-(this / n_heads) to 2^-this."""

    rope: bool = option(True, changes=COMPUTATION)
    """Use rotary positions."""

    rope_full_precision: bool = option(True, changes=ROUNDING)
    """Rotate queries and keys in fp32, also where the rest is computed in bf16."""

    rope_theta: float = option(10_000.0, changes=ANGLES, least=1, most=1e12)
    """Base of RoPE's frequencies. OLMo declares a whole number; models of transformers have
    others, too."""

    flash_attention: bool = option(
        False, changes=NOTHING, refused="PyTorch's own fused attention is always used"
    )
    attention_dropout: float = option(0.0, changes=TRAINING, least=0, most=0.999)
    """Share of attention weights that are dropped."""

    multi_query_attention: bool | None = option(
        None, changes=NOTHING, refused="set model.n_kv_heads=1"
    )
    attention_layer_norm: bool = option(False, changes=COMPUTATION)
    """Apply a norm to queries and keys."""

    residual_dropout: float = option(0.0, changes=TRAINING, least=0, most=0.999)
    """Share of the outputs of attention and of the MLP that are dropped before they are added to
    the residual stream."""

    embedding_dropout: float = option(0.0, changes=TRAINING, least=0, most=0.999)
    """Share of embeddings that are dropped."""

    embedding_layer_norm: bool = option(False, changes=COMPUTATION)
    """Apply a norm to the embeddings."""

    layer_norm_type: Literal["default", "low_precision", "rms"] = option(
        "default", changes=COMPUTATION
    )
    """Kind of norm. default: LayerNorm; rms: RMSNorm."""

    layer_norm_with_affine: bool = option(True, changes=COMPUTATION)
    """Give norms weights that are trained."""

    layer_norm_eps: float = option(1e-5, changes=COMPUTATION, least=0, most=1)
    """Number that norms add to the variance before its root is taken."""

    attention_layer_norm_with_affine: bool = option(True, changes=COMPUTATION)
    """Give the norms of queries and keys weights."""

    max_sequence_length: int = option(1024, changes=USE, least=1, most=10**9)
    """Number of position IDs of the model; position IDs of the training must be below it."""

    include_bias: bool = option(False, changes=COMPUTATION)
    """Give all maps biases."""

    bias_for_layer_norm: bool | None = option(None, changes=COMPUTATION)
    """Give norms biases. None: if include_bias is true."""

    scale_logits: bool = option(False, changes=COMPUTATION)
    """Divide logits by the root of d_model."""

    vocab_size: int = option(0, changes=COMPUTATION, least=0, most=10**9)
    """Number of tokens that the model knows. 0: the tokenizer's size, rounded up to a multiple of
    128 for fast matrix products."""

    embedding_size: int | None = option(None, changes=COMPUTATION, least=1, most=10**9)
    """Rows of the embedding, at least vocab_size. None: vocab_size."""

    weight_tying: bool = option(True, changes=COMPUTATION)
    """Share the weights of embedding and output."""

    eos_token_id: int = option(0, changes=USE)
    """ID of the end-of-text token. A run replaces it by the tokenizer's."""

    pad_token_id: int = option(0, changes=USE)
    """ID of the token that fills up short rows. A run replaces it by the tokenizer's end-of-text
    token."""

    init_device: str | None = option(None, changes=NOTHING, refused="set training.device")
    init_fn: Literal["mitchell", "normal", "kaiming_normal", "fan_in", "full_megatron"] = option(
        "normal", changes=START
    )
    """OLMo's method by which weights are drawn at the start. kaiming_normal and fan_in are not
    supported."""

    init_std: float = option(0.02, changes=START, least=0, most=1e6)
    """Standard deviation of the weights at the start, with init_fn=normal."""

    init_cutoff_factor: float | None = option(None, changes=START, least=1e-3, most=1e6)
    """Draw no weight beyond this many standard deviations. None: no limit."""

    precision: str | None = option(None, changes=NOTHING, refused="set training.precision")
    scale_emb_init: bool = option(False, changes=START)
    """With init_fn=full_megatron: draw embeddings with a standard deviation that is larger by the
    root of d_model."""

    emb_init_std: float | None = option(None, changes=START, least=0, most=1e6)
    """Standard deviation of the embedding at the start. None: init_std."""

    norm_after: bool = option(False, changes=COMPUTATION)
    """Apply norms to the outputs of attention and MLP, as OLMo 2 does, not to their inputs."""

    # The fields below are of this project. OLMo's class does not have them.
    architecture: Literal["olmo", "gpt_neox", "olmo3"] = option("olmo", changes=COMPUTATION)
    """Which code computes the model. olmo: that of this package; gpt_neox and olmo3: transformers'
    GPTNeoXForCausalLM and Olmo3ForCausalLM, whose configurations are made from these fields."""

    sliding_window: int | None = option(None, changes=COMPUTATION, least=1, most=10**9)
    """With architecture=olmo3: three of four layers attend only to tokens whose position ID differs
    from the query's by less than this."""

    nope_every: int | None = option(None, changes=COMPUTATION, least=2, most=10**5)
    """Leave every n-th layer without positions (NoPE), as SmolLM3 does: with 4, RoPE does not
    rotate in layers 4, 8, …, counted from 1. None: RoPE rotates in all layers."""

    rotary_fraction: float = option(1.0, changes=COMPUTATION)
    """Share of each head's width that RoPE rotates. 1.0 is OLMo's, 0.25 GPT-NeoX's."""

    query_scale_length: float | None = option(None, changes=COMPUTATION, least=2, most=1e12)
    """Multiply each query by ln(n + 1) / ln(this), where n is the number of keys that it sees, so
    that attention is as sharp over many keys as over few. The paper does not do this. None: no
    scaling."""

    query_scale_learned: bool = option(False, changes=COMPUTATION)
    """Multiply each query by s·ln(n), where n is the number of keys that it sees, and s a weight of
    each head of each layer (Scalable-Softmax, Nakanishi 2025). As in that work, s begins such that
    the factor is 1 on average over a sequence of max_sequence_length: for 1,024 tokens 0.168."""

    head_width: int | None = option(None, changes=COMPUTATION, least=2, most=10**6)
    """Width of a head. None: d_model / n_heads."""

    qkv_bias: bool = option(False, changes=COMPUTATION)
    """Give the maps of queries, keys and values biases, and no other map, as Qwen 2 does.
    (include_bias gives them to all.)"""

    attention_norm_per_head: bool = option(False, changes=COMPUTATION)
    """With attention_layer_norm: apply the norm to each head by itself, as Qwen 3 does, not to all
    heads of a token together."""

    rope_scaling: dict[str, Any] | None = option(
        None, changes=ANGLES, refused="set positions.scaling"
    )
    """How RoPE's frequencies are lowered, in the keys of transformers' `rope_parameters`. In the
    config of a run it is set by `positions.scaling`."""

    @property
    def effective_n_kv_heads(self) -> int:
        """Return the number of heads of keys and values, where n_kv_heads may be None. OLMo's
        classes read it by this name."""
        if self.n_kv_heads is None:
            return 1 if self.multi_query_attention else self.n_heads
        return self.n_kv_heads

    @property
    def scales_queries(self) -> bool:
        """Return whether a query depends on the number of keys that it sees."""
        return self.query_scale_length is not None or self.query_scale_learned

    @property
    def effective_head_width(self) -> int:
        """Return the width of a head, where head_width may be None."""
        return self.head_width or self.d_model // self.n_heads
