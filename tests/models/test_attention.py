"""Attention of rows by each kernel, of documents, and through windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from olmo_sparsity.models import attention, cpu_document_attention, document_attention
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
        found = attend(q, k, v)
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
    documents: document_attention.DocumentStarts
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
        return document_attention.attend_within(*self.inputs, self.documents, self.bias, dropout_p)


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
    for name, first in (("CPU_KERNEL", 0), ("CPU_KERNEL_BACKWARD", 1)):
        kernel = getattr(cpu_document_attention, name)
        monkeypatch.setattr(cpu_document_attention, name, of_equal_heads(kernel, first))
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
    documents = document_attention.find_documents(documents_BL, torch.device("cpu"))
    return Packed(q, k, v, documents, bias, expected)


def test_documents_begin_where_the_number_of_a_place_changes() -> None:
    case = packed_case(torch.float, key_heads=1, rows_of_bias=0)
    assert case.documents.starts_on_host.tolist() == [0, 1, 6, 206, 250, 500]


def test_documents_attend_as_behind_a_dense_mask(case: Packed) -> None:
    found = case.attended()
    assert found.dtype == case.q.dtype
    torch.testing.assert_close(found.float(), case.expected, **case.tolerance)


def test_documents_one_by_one_attend_alike(case: Packed) -> None:
    """As on GPUs in fp32."""
    starts = case.documents.starts_on_host
    one_by_one = document_attention._attend_one_by_one(*case.inputs, starts, case.bias, 0.0)
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
    monkeypatch.setattr(
        document_attention, "takes_packed_documents", lambda device, dtype, width: width == 8
    )
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", packed)
    torch.testing.assert_close(case.attended(), case.expected, **case.tolerance)


def of_equal_heads(kernel: Any, first: int) -> Any:
    """That of older versions of PyTorch takes no grouped heads."""

    def checking(*tensors: Any, **options: Any) -> Any:
        q, k, v = tensors[first : first + 3]
        assert q.shape[1] == k.shape[1] == v.shape[1]
        return kernel(*tensors, **options)

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


@pytest.mark.parametrize(
    ("grad", "length", "has_bias", "grouped", "kernel"),
    [
        (True, 192, False, False, "_attend_by_matmul"),
        (True, 192, True, False, "_attend_by_matmul"),
        (True, 193, False, False, "scaled_dot_product_attention"),
        (True, 100, False, True, "scaled_dot_product_attention"),
        (False, 96, False, True, "_attend_by_blocks"),
        (False, 96, True, False, "scaled_dot_product_attention"),
        (False, 95, False, False, "scaled_dot_product_attention"),
    ],
)
def test_the_kernel_is_the_fastest_one(
    grad: bool, length: int, has_bias: bool, grouped: bool, kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As measured on CPUs."""
    for where, name in (
        *((attention, name) for name in ("_attend_by_matmul", "_attend_by_blocks")),
        (F, "scaled_dot_product_attention"),
    ):
        monkeypatch.setattr(where, name, lambda *_, name=name, **__: name)
    q = torch.zeros(1, 2, length, 4)
    k = torch.zeros(1, 1 if grouped else 2, length, 4)
    bias = torch.zeros(1, 1, length, length) if has_bias else None
    with torch.set_grad_enabled(grad):
        assert attend(q, k, k, bias) == kernel


@pytest.mark.parametrize("num_queries", [1, 100])
@pytest.mark.parametrize("grad", [False, True])
def test_the_last_query_sees_all_keys_without_a_bias(num_queries: int, grad: bool) -> None:
    q = torch.zeros(1, 2, num_queries, 4)
    k = torch.zeros(1, 2, 100, 4)
    v = torch.randn(1, 2, 100, 4, generator=torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(grad):
        found = attend(q, k, v)
    torch.testing.assert_close(found[:, :, -1], v.mean(2))


def test_windows_and_chunks_hide_what_they_say() -> None:
    places = torch.arange(3, 20)[None]
    for size, is_chunked in ((4, False), (4, True), (7, True)):
        window = attention.AttentionWindow(size, is_chunked)
        hidden = window.hides(places, places)[0]
        for query, key in ((a, b) for a in range(17) for b in range(a + 1)):
            near = (query + 3) // size == (key + 3) // size if is_chunked else query - key < size
            assert bool(hidden[query, key]) != near
            both = query < size if is_chunked else query - key < size
            assert window.spans(key, query) == both


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
        monkeypatch.setattr(document_attention, "_HAS_PACKING", is_there)
        assert document_attention.takes_packed_documents(device, dtype, width) == expected


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
