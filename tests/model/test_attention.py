"""Attention by blocks and beside shared far states."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from olmo_sparsity.model import attention
from olmo_sparsity.model.attention import attend


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


@pytest.mark.parametrize("num_far", [64, 70])
def test_the_kernel_for_gpus_takes_the_shapes_that_it_is_given(num_far: int) -> None:
    with FakeTensorMode():  # the operator's own checks and shapes, without a GPU
        q = torch.empty(3, 2, 5, 16, device="cuda", dtype=torch.bfloat16)
        k_1 = torch.empty(1, num_far, 2, 16, device="cuda", dtype=torch.bfloat16)
        k = k_1.transpose(1, 2).expand(3, -1, -1, -1)
        bias = torch.empty(3, 1, 1, num_far, device="cuda")
        mixed, sums = attention._attend_with_sum(q, k, k, bias, None)
    assert (mixed.shape, mixed.device.type, mixed.dtype) == (q.shape, "cuda", q.dtype)
    assert (sums.shape, sums.dtype) == ((3, 2, 5), torch.float)
