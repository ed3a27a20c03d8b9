"""Attention by blocks and beside shared far states."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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


@pytest.mark.parametrize("alibi", [0, 1, 2], ids=["no_bias", "one_bias", "bias_of_each_row"])
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_documents_attend_as_behind_a_dense_mask(
    dtype: torch.dtype, key_heads: int, alibi: int
) -> None:
    """And so do gradients."""
    generator = torch.Generator().manual_seed(0)
    lengths = [[5, 1, 200, 44], [250]]
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
    assert documents[0].tolist() == [0, 5, 6, 206, 250, 500]
    found = attention.attend_within(q, k, v, documents, bias)
    one_by_one = attention._attend_one_by_one(
        q, k, v, documents[0], bias, 0.0
    )  # as on GPUs in fp32
    assert (one_by_one - found).abs().max() <= (1e-5 if dtype == torch.float else 0.05)
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

    for wrong in (other_base, missing):
        monkeypatch.setattr(attention, "_attend_with_sum", wrong)
        assert not tried(torch.device("cpu"), dtype, 16)
