"""Attention by blocks and beside shared distant states."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from olmo_sparsity.models import attention
from olmo_sparsity.models.attention import attend


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


@pytest.mark.parametrize("alibi", [0, 1, 2], ids=["no_bias", "one_bias", "bias_of_each_row"])
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_documents_attend_as_behind_a_dense_mask(
    dtype: torch.dtype, key_heads: int, alibi: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so do gradients."""
    for name, first in (("_KERNEL", 0), ("_KERNEL_BACKWARD", 1)):
        monkeypatch.setattr(attention, name, of_equal_heads(getattr(attention, name), first))
    generator = torch.Generator().manual_seed(0)
    lengths = [[1, 5, 200, 44], [250]]
    documents_BL = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    )
    alike_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    mask = torch.where(alike_BLL.tril()[:, None], 0.0, float("-inf"))
    bias = None
    if alibi:
        slopes = -torch.rand(alibi, 4, 250, 250, generator=generator)
        bias = (slopes + attention.causal_bias(250, torch.device("cpu"))).clamp(min=-1e30).to(dtype)
        mask = mask + slopes
    q, k, v = (
        torch.randn(2, heads, 250, 8, generator=generator).to(dtype).requires_grad_()
        for heads in (4, key_heads, key_heads)
    )
    expected = F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), mask, enable_gqa=True
    )
    documents = attention.find_documents(documents_BL, torch.device("cpu"))
    assert documents[0].tolist() == [0, 1, 6, 206, 250, 500]
    found = attention.attend_within(q, k, v, documents, bias)
    one_by_one = attention._attend_one_by_one(
        q, k, v, documents[0], bias, 0.0
    )  # as on GPUs in fp32
    assert (one_by_one - found).abs().max() <= (1e-5 if dtype == torch.float else 0.05)
    assert found.dtype == dtype
    near = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float else {"atol": 0.05, "rtol": 0.05}
    torch.testing.assert_close(found.float(), expected, **near)
    assert not attention.attend_within(q, k, v, documents, bias, dropout_p=1.0).any()
    if dtype == torch.float and not alibi:
        monkeypatch.setattr(attention, "packs", lambda device, dtype, width: width == 8)
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", packed)
        packed_too = attention.attend_within(q, k, v, documents)
        torch.testing.assert_close(packed_too, found, **near)
        monkeypatch.undo()
    drawn = torch.randn(found.shape, generator=generator)
    for upstream in (drawn, drawn[..., :1].expand(found.shape)):
        for ours, theirs in zip(
            torch.autograd.grad(found, (q, k, v), upstream.to(dtype), retain_graph=True),
            torch.autograd.grad(expected, (q, k, v), upstream, retain_graph=True),
            strict=True,
        ):
            assert (ours.float() - theirs).norm() < near["rtol"] * theirs.norm()


def of_equal_heads(kernel: Any, first: int) -> Any:
    """That of older versions of PyTorch takes no grouped heads."""

    def checking(*given: Any) -> Any:
        q, k, v = given[first : first + 3]
        assert q.shape[1] == k.shape[1] == v.shape[1]
        return kernel(*given)

    return checking


def packed(q: Tensor, k: Tensor, v: Tensor, *starts_and_lengths: Any, **how: Any) -> Tensor:
    """What flash attention computes of packed documents, one after the other."""
    starts, starts_of_keys, *longest = starts_and_lengths
    assert starts is starts_of_keys
    assert longest == [250, 250]
    assert how == {"window_size": (-1, 0), "enable_gqa": q.shape[1] != k.shape[1]}
    parts = [x.transpose(0, 1).split(starts.diff().tolist(), dim=1) for x in (q, k, v)]
    each = [
        F.scaled_dot_product_attention(*(x[None] for x in own), is_causal=True, enable_gqa=True)[0]
        for own in zip(*parts, strict=True)
    ]
    return torch.cat(each, 1).transpose(0, 1)


@torch.no_grad()
@pytest.mark.parametrize("num_distant", [0, 1, 7, 16])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("hidden", ["nothing", "of rows", "of queries"])
def test_distant_and_own_places_are_attended_to_as_one(
    num_distant: int, key_heads: int, hidden: str
) -> None:
    generator, lowest = torch.Generator().manual_seed(num_distant), torch.finfo(torch.float).min
    q, k, v, distant_k, distant_v = (
        torch.randn(3, heads, length, 8, generator=generator)
        for heads, length in ((4, 3), *[(key_heads, 5)] * 2, *[(key_heads, num_distant)] * 2)
    )
    scale = own_bias = distant_bias = None
    own = attention.causal_bias(5, torch.device("cpu"), 3).expand(3, 1, -1, -1)
    distant = torch.zeros(3, 3, num_distant)
    if hidden == "of rows":
        distant[1:, :, ::2], distant[2] = lowest, lowest
        distant_bias = distant[:, 0]
    if hidden == "of queries":
        scale, own_bias = 0.3, own + torch.randn(3, 1, 3, 5, generator=generator)
        distant[1, 1:, ::2], own, distant_bias = lowest, own_bias, distant
    keys, values = torch.cat((distant_k, k), 2), torch.cat((distant_v, v), 2)
    scores = q @ keys.repeat_interleave(4 // key_heads, 1).mT * (scale or 8**-0.5)
    scores += torch.cat((distant[:, None], own), -1)
    expected = scores.softmax(-1) @ values.repeat_interleave(4 // key_heads, 1)
    found = attention.attend_to_distant(
        q, k, v, distant_k, distant_v, distant_bias, scale, own_bias
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_keys", [1, 16, 20])
def test_rows_of_a_bias_begin_at_multiples_of_16(
    num_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(attention, "_KERNEL", lambda *_, **named: given.update(named))
    q, k, bias = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, num_keys, 8), torch.ones(2, 1, 1, 20)
    bias[..., 0] = torch.finfo(torch.float).min
    attention._attend_with_sum(q, k, k, bias[..., :num_keys], None)
    mask = given["attn_mask"]
    assert mask.shape == (2, 3, 4, num_keys)
    assert mask.stride()[0] == -(-num_keys // 16) * 16
    assert (mask[..., 1:] == 1).all()
    assert (mask[..., 0].double() * 1.5 > torch.finfo(torch.float).min).all(), "not -inf"


@pytest.mark.parametrize(
    ("grad", "length", "is_causal", "grouped", "kernel"),
    [
        (True, 192, True, False, "_attend_by_matmul"),
        (True, 192, False, False, "_attend_by_matmul"),
        (True, 193, True, False, "scaled_dot_product_attention"),
        (True, 100, True, True, "scaled_dot_product_attention"),
        (False, 96, True, True, "_attend_by_blocks"),
        (False, 96, False, False, "scaled_dot_product_attention"),
        (False, 95, True, False, "scaled_dot_product_attention"),
    ],
)
def test_the_kernel_is_the_fastest_one(
    grad: bool, length: int, is_causal: bool, grouped: bool, kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As measured on CPUs."""
    for where, name in (
        *((attention, name) for name in ("_attend_by_matmul", "_attend_by_blocks")),
        (F, "scaled_dot_product_attention"),
    ):
        monkeypatch.setattr(where, name, lambda *_, name=name, **__: name)
    q = torch.zeros(1, 2, length, 4)
    with torch.set_grad_enabled(grad):
        assert attend(q, q, q, None, is_causal, grouped=grouped) == kernel


def test_windows_and_chunks_hide_what_they_say() -> None:
    places = torch.arange(3, 20)[None]
    for size, is_chunked in ((4, False), (4, True), (7, True)):
        window = attention.AttentionWindow(size, is_chunked)
        hidden = window.hides(places, places)[0]
        for query, key in ((a, b) for a in range(17) for b in range(a + 1)):
            near = (query + 3) // size == (key + 3) // size if is_chunked else query - key < size
            assert bool(hidden[query, key]) != near
            both = query < size if is_chunked else query - key < size
            assert window.holds(key, query) == both


def test_which_hardware_packs_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, half = torch.device("cuda"), torch.bfloat16
    for capability, is_there, device, dtype, width, expected in (
        ((8, 0), True, cuda, half, 256, True),
        ((9, 0), True, cuda, torch.float16, 8, True),
        ((7, 5), True, cuda, half, 64, False),
        ((8, 0), False, cuda, half, 64, False),
        ((8, 0), True, torch.device("cpu"), half, 64, False),
        ((8, 0), True, cuda, torch.float, 64, False),
        ((8, 0), True, cuda, half, 60, False),
        ((8, 0), True, cuda, half, 264, False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, of=capability: of)
        monkeypatch.setattr(attention, "_PACKING_IS_THERE", is_there)
        assert attention.packs(device, dtype, width) == expected


@pytest.mark.parametrize("differentiate_bias", [False, True])
def test_kernels_are_chosen_on_a_gpu_and_put_back(differentiate_bias: bool) -> None:
    cuda = torch.backends.cuda

    def enabled() -> list[bool]:
        kinds = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
        return [kind() for kind in (*kinds, cuda.cudnn_sdp_enabled)]

    before, reduces = enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed()
    assert all(before)
    with attention.fast_kernels(torch.device("cpu")):
        assert enabled() == before
    with attention.fast_kernels(torch.device("cuda"), differentiate_bias):
        assert enabled() == [not differentiate_bias, not differentiate_bias, True, False]
        assert cuda.fp16_bf16_reduction_math_sdp_allowed() == differentiate_bias
    assert (enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed()) == (before, reduces)


def test_activations_beyond_two_gib_are_much() -> None:
    """20 numbers of a width of 8, and 3 of each of 32 keys: 256 a token and layer."""
    assert not attention.keeps_much(2**13, 32, 8, 1, 2**8, 4)
    assert attention.keeps_much(2**13 + 1, 32, 8, 1, 2**8, 4)
    assert not attention.keeps_much(2**13, 16, 8, 2, 2**8, 4)


def test_states_are_shared_where_that_costs_less_and_is_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, fp32 = torch.device("cpu"), torch.float
    with torch.no_grad():
        assert attention.can_share_distant(cpu, fp32, 16, 8, 7)
        assert not attention.can_share_distant(cpu, fp32, 16, 7, 7)
        with torch.autocast("cpu", torch.bfloat16):
            assert not attention.can_share_distant(cpu, fp32, 16, 8, 7)
    assert not attention.can_share_distant(cpu, fp32, 16, 8, 7)
    tried = attention._distant_attends_apart.__wrapped__
    right = attention.attend_to_distant
    monkeypatch.setattr(attention, "attend_to_distant", lambda *given: right(*given) + 1)
    for dtype, rounding in ((fp32, 32 * 2.0**-23), (torch.bfloat16, 4 * 2.0**-7)):
        found = attention.distant_error(cpu, dtype, 16)
        assert found == pytest.approx(1 / rounding, rel=2 * rounding)
    for dtype in (torch.int64, torch.float8_e4m3fn):
        assert not tried(cpu, dtype, 16)
    for error, expected in ((1.0, True), (1.01, False)):
        monkeypatch.setattr(attention, "distant_error", lambda *_, error=error: error)
        assert tried(cpu, fp32, 16) == expected

    def full(*_: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention, "distant_error", full)
    with pytest.raises(torch.OutOfMemoryError):
        tried(cpu, fp32, 16)


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_sharing_distant_states_is_tried_on_the_hardware_that_is_there(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = attention._distant_attends_apart.__wrapped__
    for head_width in (10, 16, 64):
        assert tried(torch.device("cpu"), dtype, head_width)
    assert not tried(torch.device("cpu"), torch.int8, 16)
    right = attention._attend_with_sum

    def other_base(*inputs: Any) -> tuple[Tensor, Tensor]:
        mixed, sums = right(*inputs)
        return mixed, sums / math.log(2)

    def missing(*inputs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel for this dtype")

    for wrong in (other_base, missing):
        monkeypatch.setattr(attention, "_attend_with_sum", wrong)
        assert not tried(torch.device("cpu"), dtype, 16)
