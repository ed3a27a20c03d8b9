"""Attention by blocks and beside shared distant states."""

from __future__ import annotations

import math
from dataclasses import dataclass
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


@dataclass
class Packed:
    """Two rows of documents, and what attention behind a dense mask gives for them."""

    q: Tensor
    k: Tensor
    v: Tensor
    documents: attention.Documents
    bias: Tensor | None
    expected: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def tolerance(self) -> dict[str, float]:
        if self.q.dtype == torch.float:
            return {"atol": 1e-5, "rtol": 1e-4}
        return {"atol": 0.05, "rtol": 0.05}

    def attended(self, dropout_p: float = 0.0) -> Tensor:
        return attention.attend_within(*self.inputs, self.documents, self.bias, dropout_p)


@pytest.fixture(params=["no_bias", "one_bias", "bias_of_each_row"])
def rows_of_bias(request: pytest.FixtureRequest) -> int:
    return ["no_bias", "one_bias", "bias_of_each_row"].index(request.param)


@pytest.fixture(params=[1, 4], ids=["1_key_head", "4_key_heads"])
def key_heads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[torch.float, torch.bfloat16], ids=["fp32", "bf16"])
def case(
    request: pytest.FixtureRequest,
    rows_of_bias: int,
    key_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> Packed:
    for name, first in (("_KERNEL", 0), ("_KERNEL_BACKWARD", 1)):
        monkeypatch.setattr(attention, name, of_equal_heads(getattr(attention, name), first))
    return packed_case(request.param, key_heads, rows_of_bias)


def packed_case(dtype: torch.dtype, key_heads: int, rows_of_bias: int) -> Packed:
    generator = torch.Generator().manual_seed(0)
    lengths = [[1, 5, 200, 44], [250]]
    documents_BL = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    )
    is_same_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    mask = torch.where(is_same_BLL.tril()[:, None], 0.0, float("-inf"))
    bias = None
    if rows_of_bias:
        slopes = -torch.rand(rows_of_bias, 4, 250, 250, generator=generator)
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
    return Packed(q, k, v, documents, bias, expected)


def test_documents_begin_where_the_number_of_a_place_changes() -> None:
    case = packed_case(torch.float, key_heads=1, rows_of_bias=0)
    assert case.documents[0].tolist() == [0, 1, 6, 206, 250, 500]


def test_documents_attend_as_behind_a_dense_mask(case: Packed) -> None:
    found = case.attended()
    assert found.dtype == case.q.dtype
    torch.testing.assert_close(found.float(), case.expected, **case.tolerance)


def test_documents_one_by_one_attend_alike(case: Packed) -> None:
    """As on GPUs in fp32."""
    starts = case.documents[0]
    one_by_one = attention._attend_one_by_one(*case.inputs, starts, case.bias, 0.0)
    allowed = 1e-5 if case.q.dtype == torch.float else 0.05
    assert (one_by_one - case.attended()).abs().max() <= allowed


def test_dropout_reaches_the_attention_of_documents(case: Packed) -> None:
    assert not case.attended(dropout_p=1.0).any()


@pytest.mark.parametrize("is_expanded", [False, True], ids=["gradient", "expanded_gradient"])
def test_gradients_of_documents_are_those_behind_a_dense_mask(
    case: Packed, is_expanded: bool
) -> None:
    found = case.attended()
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    if is_expanded:  # a view, of which the kernel would read the wrong numbers
        upstream = upstream[..., :1].expand(found.shape)
    ours = torch.autograd.grad(found, case.inputs, upstream.to(found.dtype))
    theirs = torch.autograd.grad(case.expected, case.inputs, upstream)
    for grad, expected in zip(ours, theirs, strict=True):
        assert (grad.float() - expected).norm() < case.tolerance["rtol"] * expected.norm()


def test_flash_attention_takes_documents_one_after_the_other(
    key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = packed_case(torch.float, key_heads, rows_of_bias=0)
    monkeypatch.setattr(attention, "packs", lambda device, dtype, width: width == 8)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", packed)
    torch.testing.assert_close(case.attended(), case.expected, **case.tolerance)


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


CPU = torch.device("cpu")


@torch.no_grad()
def test_states_are_shared_where_distant_places_are_more_than_local_ones() -> None:
    assert attention.can_share_distant(CPU, torch.float, 16, num_distant=8, length=7)
    assert not attention.can_share_distant(CPU, torch.float, 16, num_distant=7, length=7)


def test_states_are_not_shared_with_gradients() -> None:
    assert not attention.can_share_distant(CPU, torch.float, 16, num_distant=8, length=7)


@torch.no_grad()
def test_states_are_not_shared_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert not attention.can_share_distant(CPU, torch.float, 16, num_distant=8, length=7)


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float, 32 * 2.0**-23), (torch.bfloat16, 4 * 2.0**-7)]
)
def test_the_error_of_sharing_is_a_multiple_of_what_rounding_allows(
    dtype: torch.dtype, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention.attend_to_distant
    monkeypatch.setattr(attention, "attend_to_distant", lambda *given: right(*given) + 1)
    error = attention.distant_error(CPU, dtype, 16)
    assert error == pytest.approx(1 / allowed, rel=2 * allowed)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_states_of_integers_or_8_bits_are_not_shared(dtype: torch.dtype) -> None:
    assert not attention._distant_attends_apart.__wrapped__(CPU, dtype, 16)


@pytest.mark.parametrize(("error", "is_exact"), [(1.0, True), (1.01, False)])
def test_states_are_shared_up_to_the_error_that_rounding_allows(
    error: float, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "distant_error", lambda *_: error)
    assert attention._distant_attends_apart.__wrapped__(CPU, torch.float, 16) == is_exact


def test_a_full_memory_says_nothing_about_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention, "distant_error", full)
    with pytest.raises(torch.OutOfMemoryError):
        attention._distant_attends_apart.__wrapped__(CPU, torch.float, 16)


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
