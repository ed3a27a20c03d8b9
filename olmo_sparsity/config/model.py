"""Declare the shape of a model: `ModelConfig`, the section `model` of a run.

Each field says what it changes (`changes=…`), in one of the words below. From these words follow
which models a run may start from (`init_from`), and which models can be exported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from olmo_sparsity.config.schema import option

# --- what a field of the model changes -----------------------------------------------------------

COMPUTATION = "computation"
"""With other values, the same weights compute something else, or do not fit. A run that starts from
weights (`init_from`) must have the value of their model, and an export must express it: both follow
from this word, in models/huggingface/computation.py and models/huggingface/families.py."""

ANGLES = "angles"
"""RoPE's frequencies, which a run that starts from weights may lower."""

ROUNDING = "rounding"
"""The same computation, rounded in another way."""

TRAINING = "training"
"""The field has an effect in training alone, as dropout has."""

START = "start"
"""How weights are drawn."""

USE = "use"
"""Which inputs are allowed, and which tokens have a purpose."""

NOTHING = "nothing"
"""Refused: what the field means to OLMo is set elsewhere here."""


@dataclass
class ModelConfig:
    """The fields of `olmo.config.ModelConfig`, which takes seconds to import, and of this project.
    OLMo's classes take it in place of theirs, whose enums equal these texts."""

    # Fields are in OLMo's order, and saved configs keep it: a new one follows at the end.
    #
    # OLMo: defaults of GPT-2 (dropout 0.1, biases, GPT-2's vocabulary); here: the values of all
    # published OLMo configs, so that our YAML files state only differences.
    d_model: int = option(768, changes=COMPUTATION, least=1, most=10**6)
    """Width of the residual stream."""

    n_heads: int = option(12, changes=COMPUTATION, least=1, most=10**5)
    """Attention heads of a layer."""

    n_kv_heads: int | None = option(None, changes=COMPUTATION, least=1, most=10**5)
    """Heads of keys and values, of which several queries share one (GQA). None: n_heads."""

    clip_qkv: float | None = option(None, changes=COMPUTATION, least=1e-30, most=1e30)
    """Limit queries, keys and values to this absolute value. None: no limit."""

    n_layers: int = option(12, changes=COMPUTATION, least=1, most=10**5)
    """Layers of the model."""

    mlp_ratio: int = option(4, changes=COMPUTATION, least=1, most=10**5)
    """Width of the MLP, as a multiple of d_model. With swiglu it counts both halves: 8 is what
    others call 4."""

    mlp_hidden_size: int | None = option(None, changes=COMPUTATION, least=1, most=10**6)
    """Width of the MLP, instead of mlp_ratio. With swiglu it counts both halves: twice Llama's
    intermediate_size."""

    activation_type: Literal["gelu", "relu", "swiglu"] = option("swiglu", changes=COMPUTATION)
    """Activation of the MLP."""

    block_type: Literal["sequential", "llama"] = option("sequential", changes=COMPUTATION)
    """Order of the maps of a layer. llama: separate maps of queries, keys and values."""

    block_group_size: int = option(
        1, changes=NOTHING, refused="FSDP wrapping is not available here"
    )
    alibi: bool = option(False, changes=COMPUTATION)
    """Use linear biases by distance (ALiBi), without RoPE."""

    alibi_bias_max: float = option(8.0, changes=COMPUTATION, least=0, most=1e6)
    """ALiBi's biases go from 2^-(this / n_heads) to 2^-this a token."""

    rope: bool = option(True, changes=COMPUTATION)
    """Use rotary positions."""

    rope_full_precision: bool = option(True, changes=ROUNDING)
    """Rotate in fp32, also where the rest is bf16."""

    rope_theta: float = option(10_000.0, changes=ANGLES, least=1, most=1e12)
    """Base of RoPE's frequencies. OLMo: a whole number, hence the other type."""

    flash_attention: bool = option(
        False, changes=NOTHING, refused="PyTorch's own fused attention is always used"
    )
    attention_dropout: float = option(0.0, changes=TRAINING, least=0, most=0.999)
    """Share of attention weights that are dropped."""

    multi_query_attention: bool | None = option(
        None, changes=NOTHING, refused="set model.n_kv_heads=1"
    )
    attention_layer_norm: bool = option(False, changes=COMPUTATION)
    """Norm queries and keys."""

    residual_dropout: float = option(0.0, changes=TRAINING, least=0, most=0.999)
    """Share of what a layer adds that is dropped."""

    embedding_dropout: float = option(0.0, changes=TRAINING, least=0, most=0.999)
    """Share of embeddings that are dropped."""

    embedding_layer_norm: bool = option(False, changes=COMPUTATION)
    """Norm the embeddings."""

    layer_norm_type: Literal["default", "low_precision", "rms"] = option(
        "default", changes=COMPUTATION
    )
    """Kind of norm. default: LayerNorm; rms: RMSNorm."""

    layer_norm_with_affine: bool = option(True, changes=COMPUTATION)
    """Give norms weights."""

    layer_norm_eps: float = option(1e-5, changes=COMPUTATION, least=0, most=1)
    """Added to a variance before the root."""

    attention_layer_norm_with_affine: bool = option(True, changes=COMPUTATION)
    """Give the norms of queries and keys weights."""

    max_sequence_length: int = option(1024, changes=USE, least=1, most=10**9)
    """Positions of the model, at least the largest that is trained."""

    include_bias: bool = option(False, changes=COMPUTATION)
    """Give all maps biases."""

    bias_for_layer_norm: bool | None = option(None, changes=COMPUTATION)
    """Give norms biases. None: as include_bias."""

    scale_logits: bool = option(False, changes=COMPUTATION)
    """Divide logits by the root of d_model."""

    vocab_size: int = option(0, changes=COMPUTATION, least=0, most=10**9)
    """0: the tokenizer's size, rounded up to a multiple of 128 for fast matrix products."""

    embedding_size: int | None = option(None, changes=COMPUTATION, least=1, most=10**9)
    """Rows of the embedding, at least vocab_size. None: vocab_size."""

    weight_tying: bool = option(True, changes=COMPUTATION)
    """Share the weights of embedding and output."""

    eos_token_id: int = option(0, changes=USE)
    """ID of the end-of-text token. A run replaces it by the tokenizer's."""

    pad_token_id: int = option(0, changes=USE)
    """A run replaces it by the tokenizer's end-of-text token."""

    init_device: str | None = option(None, changes=NOTHING, refused="set training.device")
    init_fn: Literal["mitchell", "normal", "kaiming_normal", "fan_in", "full_megatron"] = option(
        "normal", changes=START
    )
    """How weights are drawn at the start."""

    init_std: float = option(0.02, changes=START, least=0, most=1e6)
    """Standard deviation of the weights at the start, with init_fn=normal."""

    init_cutoff_factor: float | None = option(None, changes=START, least=1e-3, most=1e6)
    """Draw no weight beyond this many standard deviations. None: no limit."""

    precision: str | None = option(None, changes=NOTHING, refused="set training.precision")
    scale_emb_init: bool = option(False, changes=START)
    """Draw embeddings larger by the root of d_model, with init_fn=full_megatron."""

    emb_init_std: float | None = option(None, changes=START, least=0, most=1e6)
    """Standard deviation of the embedding at the start. None: init_std."""

    norm_after: bool = option(False, changes=COMPUTATION)
    """Norm what attention and MLP return, as OLMo 2 does, not what they take."""

    # Not OLMo's.
    architecture: Literal["olmo", "gpt_neox", "olmo3"] = option("olmo", changes=COMPUTATION)
    """gpt_neox, olmo3: transformers' GPTNeoXForCausalLM and Olmo3ForCausalLM, built from the same
    fields."""

    sliding_window: int | None = option(None, changes=COMPUTATION, least=1, most=10**9)
    """Three of four layers of olmo3 attend only to position IDs that differ by less than this."""

    nope_every: int | None = option(None, changes=COMPUTATION, least=2, most=10**5)
    """Every so many layers, one has no positions (NoPE), as in SmolLM3: 4 leaves layers 4, 8, …
    without rotation. None: RoPE rotates in all layers."""

    rotary_fraction: float = option(1.0, changes=COMPUTATION)
    """Share of each head's width that RoPE rotates. 1.0 is OLMo's, 0.25 GPT-NeoX's."""

    query_scale_length: float | None = option(None, changes=COMPUTATION, least=2, most=1e12)
    """Multiply each query by ln(n + 1) / ln(this), n the number of keys it sees, so that attention
    is as sharp over many keys as over few. Not in the paper. None: no scaling."""

    query_scale_learned: bool = option(False, changes=COMPUTATION)
    """Multiply each query by s·ln(n), n the number of keys it sees, with a weight s for each head
    of each layer (Scalable-Softmax, Nakanishi 2025). As in that paper, s begins such that the
    factor is 1 on average: over sequences of max_sequence_length, 0.168 for 1,024 tokens."""

    head_width: int | None = option(None, changes=COMPUTATION, least=2, most=10**6)
    """Width of a head. None: d_model / n_heads."""

    qkv_bias: bool = option(False, changes=COMPUTATION)
    """Biases of queries, keys and values, and no others (Qwen 2). include_bias: all biases."""

    attention_norm_per_head: bool = option(False, changes=COMPUTATION)
    """With attention_layer_norm: each head is normed by itself (Qwen 3), not all of them as one."""

    rope_scaling: dict[str, Any] | None = option(
        None, changes=ANGLES, refused="set positions.scaling"
    )
    """How frequencies of RoPE are lowered, in the words of transformers. In a run: of positions."""

    @property
    def effective_n_kv_heads(self) -> int:
        """Return the number of heads of keys and values, resolved. OLMo's classes ask for it by
        this name."""
        if self.n_kv_heads is None:
            return 1 if self.multi_query_attention else self.n_heads
        return self.n_kv_heads

    @property
    def scales_queries(self) -> bool:
        """Return whether a query depends on the number of keys that it sees."""
        return self.query_scale_length is not None or self.query_scale_learned

    @property
    def effective_head_width(self) -> int:
        """Return the width of a head, resolved."""
        return self.head_width or self.d_model // self.n_heads
