"""OLMo with explicit positions, and the chunked losses: equal to what they replace, causal, and
dependent on position IDs exactly as RoPE, ALiBi and NoPE say."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from olmo.config import ActivationType, InitFnType, LayerNormType
from olmo.config import ModelConfig as UpstreamConfig
from olmo.model import OLMo
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from olmo_sparsity.config import IGNORED, ModelConfig
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.model import layers, losses
from olmo_sparsity.model.layers import attend, causal_bias
from olmo_sparsity.model.load import build_model
from olmo_sparsity.model.losses import mean_loss, row_losses, token_losses
from olmo_sparsity.model.olmo import PositionedOLMo
from tests.test_load import COUNTED, FIELDS, GAPPED, draw_tokens

TINY = {name: value for name, value in FIELDS.items() if name != "init_std"}

UPSTREAM_KNOWS: dict[str, dict[str, Any]] = {
    "rope": {},
    "rope, other theta": {"rope_theta": 500},
    "rope in low precision": {"rope_full_precision": False},
    "alibi": {"rope": False, "alibi": True},
    "grouped queries": {"n_kv_heads": 2},
    "one key head": {"n_kv_heads": 1},
    "qk-norm, norm after": {
        "attention_layer_norm": True,
        "norm_after": True,
        "layer_norm_type": LayerNormType.rms,
    },
    "grouped queries with qk-norm": {"n_kv_heads": 2, "attention_layer_norm": True},
    "scaled logits": {"scale_logits": True},
    "LayerNorm in low precision": {"layer_norm_type": LayerNormType.low_precision},
    "RMSNorm": {"layer_norm_type": LayerNormType.rms},
    "norms without weights": {"layer_norm_with_affine": False},
    "untied": {"weight_tying": False},
    "biases": {"include_bias": True},
    "untied with biases": {"include_bias": True, "weight_tying": False},
    "clipped, normed embedding": {"clip_qkv": 0.05, "embedding_layer_norm": True},
    "padded embedding": {"embedding_size": 128},
    "gelu": {"activation_type": ActivationType.gelu, "mlp_hidden_size": 48},
    "mitchell": {"init_fn": InitFnType.mitchell},
}


def build(**changes: Any) -> PositionedOLMo:
    torch.manual_seed(0)
    model = build_model(ModelConfig(**(TINY | changes)))
    with torch.no_grad():  # biases begin at zero, which would hide their loss
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


# --- equal to upstream --------------------------------------------------------------------------


def upstream_of(model: PositionedOLMo) -> OLMo:
    ours = {"architecture", "rotary_fraction", "query_scale_length"}
    fields = {name: v for name, v in vars(model.config).items() if name not in ours}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        upstream = OLMo(UpstreamConfig(**fields), init_params=False)
    upstream.load_state_dict(model.state_dict())
    return upstream


@pytest.mark.parametrize("changes", UPSTREAM_KNOWS.values(), ids=UPSTREAM_KNOWS)
def test_equals_upstream_for_contiguous_positions(changes: dict[str, Any]) -> None:
    model = build(**changes)
    upstream = upstream_of(model)
    tokens_BL = draw_tokens()
    ours = model(tokens_BL, COUNTED)
    torch.testing.assert_close(ours, upstream(tokens_BL).logits, atol=5e-6, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        ours_low, theirs_low = model(tokens_BL, COUNTED), upstream(tokens_BL).logits
    difference = (ours_low.float() - theirs_low.float()).abs().max()
    assert bool(difference < 0.03 * ours.abs().max())


@pytest.mark.parametrize("init_fn", [InitFnType.normal, InitFnType.mitchell])
def test_initialises_as_upstream(init_fn: InitFnType) -> None:
    """Same distributions: the draws differ in order, so their spread is compared per parameter."""
    model = build(init_fn=init_fn, d_model=64, weight_tying=False)
    torch.manual_seed(0)
    upstream = upstream_of(model)
    upstream.reset_parameters()
    theirs = dict(upstream.named_parameters())
    for name, parameter in model.named_parameters():
        spread, expected = parameter.detach().std(), theirs[name].detach().std()
        assert float(spread) == pytest.approx(float(expected), rel=0.1), name


# --- positions ----------------------------------------------------------------------------------


def test_rotating_part_of_a_head_is_something_else() -> None:
    whole, part = build(), build(rotary_fraction=0.5)
    part.load_state_dict(whole.state_dict())
    tokens_BL = draw_tokens()
    assert not torch.allclose(whole(tokens_BL, GAPPED), part(tokens_BL, GAPPED), atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rotary_fraction": 0.5},
        {"rope": False, "alibi": True},
        {"rotary_fraction": 0.5, "architecture": "gpt_neox"},
    ],
    ids=["rope", "half rope", "alibi", "GPT-NeoX"],
)
def test_only_differences_of_positions_matter(changes: dict[str, Any]) -> None:
    model, tokens_BL = build(**changes), draw_tokens()
    logits = model(tokens_BL, GAPPED)
    torch.testing.assert_close(model(tokens_BL, GAPPED + 29), logits, atol=2e-6, rtol=1e-4)
    assert not torch.allclose(model(tokens_BL, COUNTED)[:, 4:], logits[:, 4:], atol=1e-5)
    torch.testing.assert_close(model(tokens_BL, COUNTED)[:, :4], logits[:, :4])


def test_without_positional_encoding_positions_do_not_matter() -> None:
    model, tokens_BL = build(rope=False), draw_tokens()
    assert torch.equal(model(tokens_BL, GAPPED), model(tokens_BL, COUNTED))


def test_alibi_penalises_the_distance_between_ids() -> None:
    """Against a forward whose whole bias is built here, by hand, and given from outside."""
    alibi, plain = build(rope=False, alibi=True), build(rope=False)
    plain.load_state_dict(alibi.state_dict())
    bias = torch.full((1, 4, 12, 12), -1e9)
    for head in range(4):
        for query in range(12):
            for key in range(query + 1):
                distance = int(GAPPED[0, query] - GAPPED[0, key])
                bias[0, head, query, key] = -distance * 2.0 ** (-8.0 * (head + 1) / 4)
    tokens_BL = draw_tokens()
    torch.testing.assert_close(alibi(tokens_BL, GAPPED), plain(tokens_BL, GAPPED, bias))


def test_rows_of_a_batch_have_positions_of_their_own() -> None:
    model, tokens_BL = build(), draw_tokens()
    both = model(tokens_BL, torch.cat([COUNTED, GAPPED]))
    torch.testing.assert_close(both[:1], model(tokens_BL[:1], COUNTED))
    torch.testing.assert_close(both[1:], model(tokens_BL[1:], GAPPED))


@pytest.mark.parametrize("length", [96, 128, 201])
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_long_rows_attend_by_blocks_as_they_do_at_once(
    length: int, key_heads: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, 8, generator=generator).to(dtype)
        for heads in (4, key_heads, key_heads)
    )
    with torch.no_grad():
        found = attend(q, k, v, None, is_causal=True, grouped=key_heads < 4)
    whole = F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True
    )
    assert found.dtype == dtype
    precision = 1e-5 if dtype == torch.float else 2e-2
    torch.testing.assert_close(found.float(), whole, atol=precision, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_sharing_far_states_is_tried_on_the_hardware_that_is_there(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = layers._far_attends_apart.__wrapped__
    for head_width in (10, 16, 64):
        assert tried(torch.device("cpu"), dtype, head_width)
    assert not tried(torch.device("cpu"), torch.int8, 16)
    right = layers._attend_with_sum

    def other_base(*inputs: Any) -> tuple[Tensor, Tensor]:
        mixed, sums = right(*inputs)
        return mixed, sums / math.log(2)

    def missing(*inputs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel for this dtype")

    def out_of_memory(*inputs: Any) -> tuple[Tensor, Tensor]:
        raise torch.OutOfMemoryError

    for wrong in (other_base, missing):
        monkeypatch.setattr(layers, "_attend_with_sum", wrong)
        assert not tried(torch.device("cpu"), dtype, 16)
    monkeypatch.setattr(layers, "_attend_with_sum", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        tried(torch.device("cpu"), dtype, 16)


@pytest.mark.parametrize("num_far", [64, 70])
def test_the_kernel_for_gpus_takes_the_shapes_that_it_is_given(num_far: int) -> None:
    with FakeTensorMode():  # the operator's own checks and shapes, without a GPU
        q = torch.empty(3, 2, 5, 16, device="cuda", dtype=torch.bfloat16)
        k_1 = torch.empty(1, num_far, 2, 16, device="cuda", dtype=torch.bfloat16)
        k = k_1.transpose(1, 2).expand(3, -1, -1, -1)
        bias = torch.empty(3, 1, 1, num_far, device="cuda")
        mixed, sums = layers._attend_with_sum(q, k, k, bias, None)
    assert (mixed.shape, mixed.device.type, mixed.dtype) == (q.shape, "cuda", q.dtype)
    assert (sums.shape, sums.dtype) == ((3, 2, 5), torch.float)


def test_an_attention_bias_replaces_causality() -> None:
    model, tokens_BL = build(), draw_tokens()
    explicit = model(tokens_BL, GAPPED, causal_bias(12, torch.device("cpu")))
    torch.testing.assert_close(explicit, model(tokens_BL, GAPPED))
    both_ways = model(tokens_BL, GAPPED, torch.zeros(1, 1, 12, 12))
    assert not torch.allclose(both_ways[:, 0], explicit[:, 0], atol=1e-5)


def test_queries_are_scaled_by_the_log_of_the_keys_they_see() -> None:
    """Against a forward of one layer whose queries were scaled by hand, place by place."""
    scaled = build(n_layers=1, query_scale_length=5.0)
    plain = build(n_layers=1)
    plain.load_state_dict(scaled.state_dict())
    tokens_BL = draw_tokens()
    for place in (0, 3, 11):
        with torch.no_grad():
            by_hand = build(n_layers=1)
            by_hand.load_state_dict(plain.state_dict())
            factor = math.log(place + 2) / math.log(5.0)
            by_hand.transformer.blocks[0].att_proj.weight[: TINY["d_model"]] *= factor
            expected = by_hand(tokens_BL, GAPPED)[:, place]
            torch.testing.assert_close(scaled(tokens_BL, GAPPED)[:, place], expected)
    # A query that sees four keys is left as it is; others are not.
    torch.testing.assert_close(scaled(tokens_BL, GAPPED)[:, 3], plain(tokens_BL, GAPPED)[:, 3])
    assert not torch.allclose(scaled(tokens_BL, GAPPED)[:, 11], plain(tokens_BL, GAPPED)[:, 11])


def test_unsupported_settings_are_refused_by_name() -> None:
    for field, value in {
        "block_type": "llama",
        "init_fn": InitFnType.fan_in,
        "rotary_fraction": 0.1,
    }.items():
        with pytest.raises(ConfigError, match=f"model.{field}={value}"):
            build(**{field: value})


# --- activation checkpointing -------------------------------------------------------------------


def gradients(model: PositionedOLMo, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """All forwards before any backward: a recomputation must rotate by its own positions."""
    model.zero_grad()
    values = [
        mean_loss(model, tokens, positions, tokens.roll(-1, dims=1), tokens.numel())
        for tokens, positions in batches
    ]
    for value in values:
        value.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("architecture", ["olmo", "gpt_neox"])
def test_checkpointed_activations_give_equal_gradients(architecture: str) -> None:
    batches = [(draw_tokens(), COUNTED), (draw_tokens().flip(0), GAPPED)]
    plain, frugal = (build(architecture=architecture).train() for _ in range(2))
    frugal.checkpoint_activations()
    for a, b in zip(gradients(plain, batches), gradients(frugal, batches), strict=True):
        torch.testing.assert_close(a, b)


# --- losses -------------------------------------------------------------------------------------

LOSS_CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"weight_tying": False},
    "untied with bias": {"weight_tying": False, "include_bias": True},
    "scaled": {"scale_logits": True},
    "scaled, untied with bias": {
        "scale_logits": True,
        "weight_tying": False,
        "include_bias": True,
    },
    "GPT-NeoX": {"architecture": "gpt_neox"},
    "GPT-NeoX, untied": {"architecture": "gpt_neox", "weight_tying": False},
}


@pytest.fixture(params=[5, 1000], ids=["many chunks", "one chunk"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "rows_per_chunk", lambda vocab_size, device: request.param)


def draw_labels(tokens_BL: Tensor) -> Tensor:
    labels_BL = tokens_BL.roll(-1, dims=1)
    labels_BL[:, -1] = IGNORED
    labels_BL[0, 3:8] = IGNORED
    return labels_BL


def plain_loss(model: nn.Module, tokens: Tensor, labels: Tensor, num_labels: int) -> Tensor:
    logits = model(tokens, GAPPED).float().flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_labels


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", LOSS_CASES.values(), ids=LOSS_CASES)
def test_mean_loss_and_its_gradients_equal_cross_entropy(
    changes: dict[str, Any], precision: str
) -> None:
    model, tokens_BL = build(**changes), draw_tokens()
    labels_BL = draw_labels(tokens_BL)
    found = []
    for compute in (
        lambda: mean_loss(model, tokens_BL, GAPPED, labels_BL, 40),
        lambda: plain_loss(model, tokens_BL, labels_BL, 40),
    ):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = compute()
        (3 * loss).backward()  # the gradient that comes from above is used too
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append((loss.detach(), grads))
    (ours, our_grads), (plain, plain_grads) = found
    assert len(our_grads) == len(plain_grads) == len(list(model.parameters()))
    if precision == "fp32":
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)
        for a, b in zip(our_grads, plain_grads, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    else:
        torch.testing.assert_close(ours, plain, atol=0, rtol=1e-2)
        for a, b in zip(our_grads, plain_grads, strict=True):
            assert float((a - b).norm()) <= 0.05 * float(b.norm())


def test_mean_loss_of_no_labels_is_zero() -> None:
    model, tokens_BL = build(), draw_tokens()
    loss = mean_loss(model, tokens_BL, COUNTED, torch.full_like(tokens_BL, IGNORED), 1)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("changes", LOSS_CASES.values(), ids=LOSS_CASES)
def test_token_losses_equal_cross_entropy(changes: dict[str, Any]) -> None:
    model, tokens_BL = build(**changes), draw_tokens()
    labels_BL = draw_labels(tokens_BL)
    logits_BLV = model(tokens_BL, GAPPED)
    expected = F.cross_entropy(
        logits_BLV.transpose(1, 2), labels_BL, ignore_index=IGNORED, reduction="none"
    )
    nll_BL = token_losses(model, tokens_BL, GAPPED, labels_BL)
    torch.testing.assert_close(nll_BL, expected.detach(), atol=1e-6, rtol=1e-5)
    assert not nll_BL[labels_BL == IGNORED].any()
    assert nll_BL.dtype == torch.float32


def test_losses_of_no_rows_are_no_losses() -> None:
    model = build()
    assert row_losses(model, torch.zeros(0, 32), torch.zeros(0, dtype=torch.long)).shape == (0,)
