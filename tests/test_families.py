"""Each main family of transformers, as a tiny random model: all that is computed here is what
transformers computes, or it is refused by name. `python -m tests.test_families` writes
docs/models.md from the same list."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from olmo_sparsity.errors import ConfigError
from olmo_sparsity.model.compatibility import position_limit
from olmo_sparsity.model.huggingface import HuggingFaceLM
from olmo_sparsity.model.layers import causal_bias
from olmo_sparsity.model.losses import mean_loss
from olmo_sparsity.model.sharing import attending_to
from tests.test_load import SIZES, TOKEN_IDS

PAGE = Path(__file__).parents[1] / "docs/models.md"

CPU = torch.device("cpu")
LENGTH, NUM_FAR = 12, 7
# Their attention takes more than queries, keys and values of one width, or is their own.
COPIES_FAR = {
    *("Gemma2", "Gemma3n", "Gemma4", "DeepseekV2", "DeepseekV3", "GptOss", "Falcon", "GPTJ"),
    *("GPTNeo", "CodeGen"),
}
COUNTED = torch.arange(LENGTH)[None]
GAPPED = torch.tensor([[0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15]])
TOKENS = torch.randint(0, 61, (1, LENGTH), generator=torch.Generator().manual_seed(1))

OLDER = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **TOKEN_IDS}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
SHARED = {  # the last layers look at keys and values of earlier ones
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 16,
    "vocab_size_per_layer_input": 61,
    "hidden_size_per_layer_input": 8,
    "bos_token_id": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Family:
    name: str
    class_name: str
    settings: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)


SUPPORTED = [
    Family("Llama 1, 2, 3", "LlamaForCausalLM"),
    Family("Llama 4 (text)", "Llama4ForCausalLM", {
        **HEADS, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 16,
    }),
    Family("Mistral", "MistralForCausalLM", {"sliding_window": 16}),
    Family("Ministral", "MinistralForCausalLM", {**HEADS, **SLIDING}),
    Family("Mixtral", "MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": None}),
    Family("Qwen 2, 2.5", "Qwen2ForCausalLM"),
    Family("Qwen 2 MoE", "Qwen2MoeForCausalLM", {
        **EXPERTS, "shared_expert_intermediate_size": 16,
    }),
    Family("Qwen 3", "Qwen3ForCausalLM", HEADS),
    Family("Qwen 3 MoE", "Qwen3MoeForCausalLM", {**HEADS, **EXPERTS}),
    Family("Gemma", "GemmaForCausalLM", HEADS),
    Family("Gemma 2", "Gemma2ForCausalLM", {**HEADS, **SLIDING}),
    Family("Gemma 3 (text)", "Gemma3ForCausalLM", {**HEADS, **SLIDING}),
    Family("Gemma 3n (text)", "Gemma3nForCausalLM", {
        **HEADS, **SHARED, "laurel_rank": 4, "activation_sparsity_pattern": None,
    }),
    Family("Gemma 4 (text)", "Gemma4ForCausalLM", {
        **HEADS, **SHARED, "global_head_dim": 16,
    }),
    Family("Gemma 3 (with images)", "Gemma3ForConditionalGeneration", sizes={
        "text_config": {**SIZES, **HEADS, **SLIDING},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
    }),
    Family("Phi 1, 2", "PhiForCausalLM"),
    Family("Phi 3, 4", "Phi3ForCausalLM", {"sliding_window": None}),
    Family("Phi 3, 4 (LongRoPE)", "Phi3ForCausalLM", {
        "rope_parameters": LONGROPE, "original_max_position_embeddings": 16,
    }),
    Family("OLMo", "OlmoForCausalLM"),
    Family("OLMo 2", "Olmo2ForCausalLM"),
    Family("OLMo 3", "Olmo3ForCausalLM", SLIDING),
    Family("OLMoE", "OlmoeForCausalLM", EXPERTS),
    Family("DeepSeek V2", "DeepseekV2ForCausalLM", LATENT),
    Family("DeepSeek V3, R1", "DeepseekV3ForCausalLM", LATENT),
    Family("gpt-oss", "GptOssForCausalLM", {
        **HEADS, **SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2,
    }),
    Family("Cohere Command R", "CohereForCausalLM"),
    Family("Cohere Command R7B, A", "Cohere2ForCausalLM", {**HEADS, **SLIDING}),
    Family("Granite", "GraniteForCausalLM", {"logits_scaling": 3.0, "attention_multiplier": 0.3}),
    Family("SmolLM 3", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    Family("StableLM", "StableLmForCausalLM"),
    Family("StarCoder", "GPTBigCodeForCausalLM", sizes=OLDER),
    Family("StarCoder 2", "Starcoder2ForCausalLM", {"sliding_window": 16}),
    Family("GLM 4", "Glm4ForCausalLM", {**HEADS, "partial_rotary_factor": 0.5}),
    Family("EXAONE 4", "Exaone4ForCausalLM", {**HEADS, **SLIDING}),
    Family("nanochat", "NanoChatForCausalLM"),
    Family("Falcon (RoPE)", "FalconForCausalLM", {"num_kv_heads": 4}),
    Family("GPT-NeoX, Pythia", "GPTNeoXForCausalLM", {"rotary_pct": 0.5}),
    Family("GPT-2", "GPT2LMHeadModel", sizes=OLDER),
    Family("GPT-J", "GPTJForCausalLM", {"rotary_dim": 4}, sizes=OLDER),
    Family("GPT-Neo", "GPTNeoForCausalLM", {
        "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
        "window_size": 16,
    }, sizes={k: v for k, v in SIZES.items() if "num_" not in k}),
    Family("CodeGen", "CodeGenForCausalLM", {"rotary_dim": 4}, sizes=OLDER),
    Family("OPT", "OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
]  # fmt: skip

MAMBA = {k: v for k, v in SIZES.items() if k not in ("num_attention_heads", "num_key_value_heads")}
ENCODER_DECODER = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
REFUSED = [
    Family("BLOOM", "BloomForCausalLM", {"n_layer": 2, "n_head": 4}, sizes={
        "vocab_size": 61, "hidden_size": 32, **TOKEN_IDS,
    }),
    Family("MPT", "MptForCausalLM", sizes={
        "vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64,
        **TOKEN_IDS,
    }),
    Family("Falcon (ALiBi)", "FalconForCausalLM", {"alibi": True, "num_kv_heads": 4}),
    Family("Mamba", "MambaForCausalLM", sizes=MAMBA),
    Family("RWKV", "RwkvForCausalLM", {"attention_hidden_size": 32}, sizes={
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, **TOKEN_IDS,
    }),
    Family("RecurrentGemma", "RecurrentGemmaForCausalLM", {
        **HEADS, "lru_width": 32, "attention_window_size": 16,
    }),
    Family("Qwen 3 Next", "Qwen3NextForCausalLM", {
        **HEADS, **EXPERTS, "layer_types": ["linear_attention", "full_attention"],
    }),
    Family("LFM 2", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    Family("BERT (not a decoder)", "BertLMHeadModel"),
    Family("T5", "T5ForConditionalGeneration", sizes={
        "vocab_size": 61, **ENCODER_DECODER, "decoder_start_token_id": 0,
    }),
]  # fmt: skip


def build(family: Family, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model_class = getattr(transformers, family.class_name)
    # Copied: configs write into the dicts that they are given.
    config = model_class.config_class(**deepcopy(family.sizes | family.settings | changes))
    model = model_class(config).eval()
    # GPT-2 and its kin: whatever the config says, their own 0.02 leaves nothing to attend to.
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and weight.std() < 0.1:
                weight.normal_(std=0.2)
    return model


@functools.cache
def wrap(index: int) -> HuggingFaceLM:
    return HuggingFaceLM(build(SUPPORTED[index]))


@functools.cache
def reason(index: int) -> str:
    family = REFUSED[index]
    with pytest.raises(ConfigError) as caught:
        HuggingFaceLM(build(family))
    name, _, said = str(caught.value).partition(" is not supported: ")
    assert name.startswith(family.class_name)
    return said


each = pytest.mark.parametrize("index", range(len(SUPPORTED)), ids=[f.name for f in SUPPORTED])


def check_close(found: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max())
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-5 * scale


def own_logits(model: HuggingFaceLM, positions_BL: Tensor, bias: Tensor) -> Tensor:
    return model.model(
        input_ids=TOKENS, position_ids=positions_BL, attention_mask=bias, use_cache=False
    ).logits


# --- what is supported is right -------------------------------------------------------------------


@torch.no_grad()
@each
def test_logits_are_its_own_and_gaps_are_gaps(index: int) -> None:
    model = wrap(index)
    assert model.vocab_size == 61
    check_close(model(TOKENS, COUNTED), model.model(input_ids=TOKENS).logits)
    gapped = model(TOKENS, GAPPED)
    check_close(gapped, own_logits(model, GAPPED, causal_bias(LENGTH, CPU)))
    assert float((gapped - model(TOKENS, COUNTED))[:, 4:].abs().max()) > 1e-3


@torch.no_grad()
@each
def test_far_states_stand_for_far_places(index: int) -> None:
    model = wrap(index)
    far = model.far_states(TOKENS[:, :NUM_FAR], COUNTED[:, :NUM_FAR])
    near = (TOKENS[:, NUM_FAR:], COUNTED[:, NUM_FAR:])
    plain = model.model(input_ids=TOKENS).logits
    check_close(model.unembed(model.hidden(*near, far=far)), plain[:, NUM_FAR:])
    check_close(model.unembed(model.hidden(*near, far=far, last=2)), plain[:, -2:])
    chosen = [1, 4, 5]
    hidden_from = [place for place in range(NUM_FAR) if place not in chosen]
    bias = causal_bias(LENGTH, CPU).clone()
    bias[..., NUM_FAR:, hidden_from] = bias[0, 0, 0, 1]
    expected = own_logits(model, COUNTED, bias)[:, NUM_FAR:]
    some = far.choose(torch.tensor([chosen]))
    check_close(model.unembed(model.hidden(*near, far=some)), expected)
    others_hidden = far.expand(1, bias[0, :, NUM_FAR, :NUM_FAR])
    check_close(model.unembed(model.hidden(*near, far=others_hidden)), expected)
    copies = SUPPORTED[index].class_name.split("For")[0] in COPIES_FAR
    assert model.shares_far(NUM_FAR, LENGTH - NUM_FAR) == (not copies)
    rows = (near[0].expand(2, -1), near[1].expand(2, -1))
    none_and_others = torch.cat((torch.zeros(1, NUM_FAR), bias[0, :, NUM_FAR, :NUM_FAR]))
    two = model.unembed(model.hidden(*rows, far=far.expand(2, none_and_others)))
    check_close(two, torch.cat((plain[:, NUM_FAR:], expected)))
    assert float((expected - plain[:, NUM_FAR:]).abs().max()) > 1e-3


@torch.no_grad()
def test_queries_that_grow_with_the_text_count_shared_places() -> None:
    model = HuggingFaceLM(build(SUPPORTED[find("Llama 4 (text)")], floor_scale=4))
    far = model.far_states(TOKENS[:, :NUM_FAR], COUNTED[:, :NUM_FAR])
    assert model.shares_far(NUM_FAR, LENGTH - NUM_FAR)
    found = model.unembed(model.hidden(TOKENS[:, NUM_FAR:], COUNTED[:, NUM_FAR:], far=far))
    check_close(found, model.model(input_ids=TOKENS).logits[:, NUM_FAR:])


@torch.no_grad()
def test_other_threads_and_types_are_not_affected_by_sharing() -> None:
    model, near = wrap(find("Llama 1, 2, 3")), (TOKENS[:, NUM_FAR:], COUNTED[:, NUM_FAR:])
    far = model.far_states(TOKENS[:, :NUM_FAR], COUNTED[:, :NUM_FAR])
    alone = model.hidden(*near)
    with attending_to(far, torch.zeros(1)), ThreadPoolExecutor() as pool:
        assert torch.equal(pool.submit(torch.no_grad()(model.hidden), *near).result(), alone)
        with pytest.raises(NotImplementedError, match="another mask"):
            model.hidden(*near)
    shared = model.hidden(*near, far=far)
    with torch.autocast("cpu", torch.bfloat16):  # its kernels are not those that share
        torch.testing.assert_close(model.hidden(*near, far=far).float(), shared, atol=0.1, rtol=0.1)


def test_a_window_beyond_the_trained_length_is_still_a_limit() -> None:
    family = SUPPORTED[find("Mistral")]
    model = HuggingFaceLM(build(family, sliding_window=48, max_position_embeddings=32))
    tokens = torch.zeros(1, 49, dtype=torch.long)
    model.hidden(tokens[:, :48], torch.arange(48)[None])
    with pytest.raises(ConfigError, match=r"49 positions .*48 \(sliding window"):
        model.hidden(tokens, torch.arange(49)[None])


def test_a_model_in_memory_keeps_its_settings() -> None:
    model = build(SUPPORTED[find("Gemma 3 (with images)")])
    model.config._attn_implementation = {"text_config": "sdpa", "vision_config": "eager"}
    parts = (model.config, model.config.text_config, model.config.vision_config)
    before = [part._attn_implementation for part in parts]
    HuggingFaceLM(model)
    assert [part._attn_implementation for part in parts] == before


@torch.no_grad()
@each
def test_last_attention_is_that_of_its_own_layers(index: int) -> None:
    model = wrap(index)
    before = model.model.config._attn_implementation
    far = model.far_states(TOKENS[:, :NUM_FAR], COUNTED[:, :NUM_FAR])
    weights_BHK = model.last_attention(TOKENS[:, NUM_FAR:], COUNTED[:, NUM_FAR:], far)
    assert model.model.config._attn_implementation == before
    model.model.set_attn_implementation("eager")
    try:
        theirs = model.body(
            input_ids=TOKENS,
            position_ids=COUNTED,
            attention_mask=causal_bias(LENGTH, CPU),
            output_attentions=True,
            use_cache=False,
        ).attentions
    finally:  # all tests of this family take this model
        model.model.set_attn_implementation(before)
    check_close(weights_BHK, torch.cat([weights[:, :, -1] for weights in theirs], 1))
    # gpt-oss has a place to attend to that is no token.
    sums_H = weights_BHK[0].sum(-1)
    assert float(sums_H.mean()) > 0.5
    assert float(sums_H.max()) <= 1 + 1e-5


# --- what is not is refused by name ---------------------------------------------------------------


# --- how long a text may be -----------------------------------------------------------------------

FULL, HALF = ["full_attention"] * 2, ["sliding_attention", "full_attention"]
LIMITS: list[tuple[str, dict[str, Any], int, str]] = [
    ("MistralForCausalLM", {"sliding_window": None}, 64, "max_position_embeddings"),
    ("Qwen2ForCausalLM", {"sliding_window": 16}, 64, "max_position_embeddings"),
    (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        16,
        "sliding window",
    ),
    ("Olmo3ForCausalLM", {"sliding_window": 16, "layer_types": FULL}, 64, "max_position_embed"),
    ("Olmo3ForCausalLM", {"sliding_window": 16, "layer_types": HALF}, 16, "sliding window"),
    ("Olmo3ForCausalLM", {"sliding_window": 99, "layer_types": HALF}, 64, "max_position_embed"),
    (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        64,
        "max_position_embeddings",
    ),
]


@pytest.mark.parametrize(("class_name", "settings", "num_positions", "cause"), LIMITS)
def test_the_tightest_limit_counts(
    class_name: str, settings: dict[str, Any], num_positions: int, cause: str
) -> None:
    config = getattr(transformers, class_name).config_class(**deepcopy(SIZES | settings))
    limit = position_limit(config)
    assert limit.num_positions == num_positions
    assert cause in limit.cause


def find(name: str) -> int:
    return next(index for index, family in enumerate(SUPPORTED) if family.name == name)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "num_positions", "cause"),
    [
        ("Mistral", 16, "sliding window"),
        ("Gemma 3 (with images)", 16, "sliding window"),
        ("Llama 4 (text)", 16, "attention chunk size"),
        ("GPT-Neo", 16, "window size"),
        ("Phi 3, 4 (LongRoPE)", 16, "LongRoPE"),
        ("GPT-2", 64, "max_position_embeddings"),
    ],
)
def test_what_would_be_wrong_is_refused_where_it_begins(
    name: str, num_positions: int, cause: str
) -> None:
    model = wrap(find(name))
    for length in (num_positions, num_positions + 1):
        tokens_BL = torch.arange(length)[None] % 61
        positions_BL = torch.arange(length)[None]
        explicit = {"position_ids": positions_BL, "attention_mask": causal_bias(length, CPU)}
        asked = (model.hidden, model.far_states)
        if length == num_positions:
            expected = model.model(input_ids=tokens_BL, **explicit, use_cache=False).logits
            check_close(model(tokens_BL, positions_BL), expected)
            continue
        for ask in asked:
            with pytest.raises(ConfigError, match=f"{length} positions .* right for: .*{cause}"):
                ask(tokens_BL, positions_BL)
        far = model.far_states(tokens_BL[:, :2], positions_BL[:, :2])
        for ask in (model.hidden, model.last_attention):
            with pytest.raises(ConfigError, match=cause):
                ask(tokens_BL[:, -1:], positions_BL[:, -1:], far=far)
        if name in ("GPT-2", "GPT-Neo"):
            continue  # there is no row for it; hides it under any mask
        # And wrong it would be: transformers itself says something else there.
        theirs = model.model(input_ids=tokens_BL, use_cache=False).logits
        if cause == "LongRoPE":
            short = model.model(input_ids=tokens_BL[:, :-1], use_cache=False).logits
            assert float((theirs[:, :-1] - short).abs().max()) > 1e-3
        else:
            ours = model.model(input_ids=tokens_BL, **explicit, use_cache=False).logits
            assert float((theirs - ours)[:, -1].abs().max()) > 1e-3


def test_dynamic_rope_is_refused_where_it_would_turn_by_other_angles() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = HuggingFaceLM(build(SUPPORTED[0], rope_parameters=rope))
    with pytest.raises(ConfigError, match=r"65 positions .* right for: 64 .*dynamic RoPE"):
        model(TOKENS[:, :1], torch.tensor([[64]]))
    model(TOKENS[:, :1], torch.tensor([[63]]))


def test_training_beyond_the_trained_length_is_not_refused() -> None:
    model = wrap(find("Llama 1, 2, 3"))
    assert model(TOKENS, COUNTED + 1000).isfinite().all()


# --- logits that are scaled or capped -------------------------------------------------------------


def test_scaled_logits_train_and_capped_ones_do_not() -> None:
    labels_BL = TOKENS.roll(-1, 1)
    scaled = HuggingFaceLM(build(SUPPORTED[find("Granite")]))
    loss = mean_loss(scaled, TOKENS, COUNTED, labels_BL, LENGTH)
    logits_BLV = scaled.model(input_ids=TOKENS).logits
    expected = F.cross_entropy(logits_BLV.transpose(1, 2), labels_BL)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    ours = scaled.embedding.weight.grad.clone()
    scaled.zero_grad()
    expected.backward()
    torch.testing.assert_close(ours, scaled.embedding.weight.grad)
    with pytest.raises(ConfigError, match=r"Gemma2ForCausalLM caps its logits at 30.0"):
        mean_loss(wrap(find("Gemma 2")), TOKENS, COUNTED, labels_BL, LENGTH)


# --- a gap must hide nothing, and noise is no gap -------------------------------------------------


class EightBits(nn.Linear):
    """Weights and activations rounded to 8 bits, as quantized models do."""

    def forward(self, x: Tensor) -> Tensor:
        steps = [t.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127 for t in (x, self.weight)]
        x, weight = ((t / s).round() * s for t, s in zip((x, self.weight), steps, strict=True))
        return F.linear(x, weight, self.bias)


def quantize(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if type(module) is nn.Linear and module is not model.get_output_embeddings():
            module.__class__ = EightBits
    return model


ROUGH: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {}),
    ("GPTNeoXForCausalLM", {}),
    ("MixtralForCausalLM", {"num_local_experts": 4}),
]


@pytest.fixture
def _kernels_that_round_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the causal kernel is another one than the one that takes a mask."""
    attend = F.scaled_dot_product_attention

    def causal_in_fp64(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **more: Any) -> Any:
        if attn_mask is not None:
            return attend(q, k, v, attn_mask=attn_mask, **more)
        return attend(q.double(), k.double(), v.double(), **more).to(q.dtype)

    monkeypatch.setattr(F, "scaled_dot_product_attention", causal_in_fp64)


@pytest.mark.usefixtures("_kernels_that_round_differently")
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("class_name", "settings"), ROUGH)
def test_rounding_to_8_bits_is_told_from_a_gap_that_hides(
    class_name: str,
    settings: dict[str, Any],
    dtype: torch.dtype,
    hides: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(Family("", class_name, {"num_hidden_layers": 16, **settings}))
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
    quantize(model).to(dtype)
    if not hides:
        HuggingFaceLM(model)
        return
    forward = model.base_model.forward

    @functools.wraps(forward)  # with its signature
    def without_ones(*args: Any, attention_mask: Any = None, **more: Any) -> Any:
        """Without a mask transformers takes a gap for the start of another text."""
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = None
        return forward(*args, attention_mask=attention_mask, **more)

    monkeypatch.setattr(model.base_model, "forward", without_ones)
    with pytest.raises(ConfigError, match="a gap in its position IDs changes who may attend"):
        HuggingFaceLM(model)


def test_a_kernel_that_packs_texts_is_refused_with_the_remedy() -> None:
    model = build(SUPPORTED[0])
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match=r'flash_attention_2.*set_attn_implementation\("sdpa"\)'):
        HuggingFaceLM(model)


def test_construction_draws_nothing_and_leaves_the_mode() -> None:
    model = build(SUPPORTED[0]).train()
    state = torch.get_rng_state()
    HuggingFaceLM(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


# --- the page -------------------------------------------------------------------------------------


def page() -> str:
    rows = []
    for index, family in enumerate(SUPPORTED):
        limit = wrap(index).limit
        rows.append((family.name, family.class_name, limit.cause))
    refused = [(f.name, f.class_name, reason(index)) for index, f in enumerate(REFUSED)]

    def table(title: str, entries: list[tuple[str, str, str]]) -> str:
        lines = [f"| family | class in transformers | {title} |", "| --- | --- | --- |"]
        lines += [f"| {name} | `{cls}` | {said} |" for name, cls, said in entries]
        return "\n".join(lines)

    return f"""# Supported models

Written by `python -m tests.test_families` from the list that `tests/test_families.py` goes through
with tiny random models. Any other causal language model
is checked in the same way when it is loaded: what does not pass is refused by name.

A text may be as long as `max_position_embeddings`, where nothing else limits it. Within a sliding
window all places see all earlier ones, so positions are position IDs; beyond it, and where RoPE
turns short and long texts by different angles, numbers would be wrong, and are refused.

{table("what limits the long window", rows)}

Not supported:

{table("why", refused)}
"""


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "write it anew: python -m tests.test_families"


if __name__ == "__main__":
    PAGE.write_text(page())
