"""Attention by blocks and beside shared far states."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from olmo_sparsity.analysis.kernels import attention
from olmo_sparsity.analysis.kernels.attention import attend


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


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_documents_attend_as_behind_a_dense_mask(
    dtype: torch.dtype, key_heads: int, alibi: bool
) -> None:
    """And so do gradients."""
    generator = torch.Generator().manual_seed(0)
    lengths = [[5, 1, 200, 44], [250], [100, 150]]
    documents_BL = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    )
    alike_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    mask = torch.where(alike_BLL.tril()[:, None], 0.0, float("-inf"))
    bias = None
    if alibi:
        slopes = -torch.rand(1, 4, 250, 250, generator=generator)
        bias = (slopes + attention.causal_bias(250, torch.device("cpu"))).clamp(min=-1e30).to(dtype)
        mask = mask + slopes
    q, k, v = (
        torch.randn(3, heads, 250, 8, generator=generator).to(dtype).requires_grad_()
        for heads in (4, key_heads, key_heads)
    )
    expected = F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), mask, enable_gqa=True
    )
    documents = attention.find_documents(documents_BL, torch.device("cpu"))
    assert documents[0].tolist() == [0, 5, 6, 206, 250, 500, 600, 750]
    found = attention.attend_within(q, k, v, documents, bias)
    assert found.dtype == dtype
    near = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float else {"atol": 0.05, "rtol": 0.05}
    torch.testing.assert_close(found.float(), expected, **near)
    upstream = torch.randn(found.shape, generator=generator)
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v), upstream.to(dtype)),
        torch.autograd.grad(expected, (q, k, v), upstream),
        strict=True,
    ):
        assert (ours.float() - theirs).norm() < near["rtol"] * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_sharing_far_states_is_tried_on_the_hardware_that_is_there(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = attention._far_attends_apart.__wrapped__
    for head_width in (10, 16, 64):
        assert tried(torch.device("cpu"), dtype, head_width)
    assert not tried(torch.device("cpu"), torch.int8, 16)
    right = attention._attend_with_sum

    def other_base(*inputs: Any) -> tuple[Tensor, Tensor]:
        mixed, sums = right(*inputs)
        return mixed, sums / math.log(2)

    def missing(*inputs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel for this dtype")

    def out_of_memory(*inputs: Any) -> tuple[Tensor, Tensor]:
        raise torch.OutOfMemoryError

    for wrong in (other_base, missing):
        monkeypatch.setattr(attention, "_attend_with_sum", wrong)
        assert not tried(torch.device("cpu"), dtype, 16)
    monkeypatch.setattr(attention, "_attend_with_sum", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        tried(torch.device("cpu"), dtype, 16)


@pytest.mark.parametrize("num_far", [64, 70, 2048, 2051])
def test_kernels_for_gpus_take_the_shapes_that_they_are_given(
    num_far: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = torch.device("cuda", 0), torch.bfloat16, 16
    monkeypatch.setitem(attention._cudnn_works, kind, True)
    with FakeTensorMode():  # the operators' own checks and shapes, without a GPU
        q = torch.empty(3, 2, 5, 16, device="cuda", dtype=torch.bfloat16)
        k_1 = torch.empty(1, num_far, 2, 16, device="cuda", dtype=torch.bfloat16)
        k = k_1.transpose(1, 2).expand(3, -1, -1, -1)
        bias = torch.empty(3, 1, 1, num_far, device="cuda")
        mixed, sums = attention._attend_with_sum(q, k, k, bias, None)
    assert (mixed.shape, mixed.device.type, mixed.dtype) == (q.shape, "cuda", q.dtype)
    assert (sums.shape, sums.dtype) == ((3, 2, 5), torch.float)
    assert sums.stride(1) == (5 if num_far >= 2048 else 32), "cuDNN does not pad them"


@pytest.mark.parametrize("num_keys", [100, 2000])
def test_gates_in_reduced_precision_rank_places_as_in_fp32(num_keys: int) -> None:
    """MATH on the CPU, with the settings of a GPU."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (
        torch.randn(2, 4, length, 32, generator=generator)
        for length in (16, num_keys, num_keys, 16)
    )
    found = []
    for dtype in (torch.float, torch.bfloat16):
        gate_BK = torch.full((2, num_keys), math.log(0.1), requires_grad=True)
        bias = gate_BK[:, None, None].expand(-1, 4, 16, -1).to(dtype)
        with attention.fast_kernels(torch.device("cuda"), differentiate_bias=True):
            mixed = F.scaled_dot_product_attention(*(x.to(dtype) for x in (q, k, v)), bias)
        assert mixed.dtype == dtype
        found.append(torch.autograd.grad(mixed, gate_BK, upstream.to(dtype))[0])
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    for exact, reduced in zip(*found, strict=True):
        ranks = torch.stack([x.argsort().argsort().double() for x in (exact, reduced)])
        assert torch.corrcoef(ranks)[0, 1] >= 0.999
        assert not torch.equal(exact, reduced)
