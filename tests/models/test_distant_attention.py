"""Attention to distant states that rows share is attention to copies of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from olmo_sparsity.models import distant_attention
from olmo_sparsity.models.attention import causal_bias

CPU = torch.device("cpu")


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
    own = causal_bias(5, torch.device("cpu"), 3).expand(3, 1, -1, -1)
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
    found = distant_attention.attend_to_distant(
        q, k, v, distant_k, distant_v, distant_bias, scale, own_bias
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_keys", [1, 16, 20])
def test_rows_of_a_bias_begin_at_multiples_of_16(
    num_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def kernel(q: Tensor, *_: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        given.update(named)
        return q, q[..., 0]

    monkeypatch.setattr(distant_attention, "CPU_KERNEL", kernel)
    q, k, bias = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, num_keys, 8), torch.ones(2, 1, 1, 20)
    bias[..., 0] = torch.finfo(torch.float).min
    distant_attention._attend_with_log_sum(q, k, k, bias[..., :num_keys], None)
    mask = given["attn_mask"]
    assert mask.shape == (2, 3, 4, num_keys)
    assert mask.stride()[0] == -(-num_keys // 16) * 16
    assert (mask[..., 1:] == 1).all()
    assert (mask[..., 0].double() * 1.5 > torch.finfo(torch.float).min).all(), "not -inf"


@torch.no_grad()
def test_states_are_shared_where_distant_places_are_more_than_local_ones() -> None:
    assert distant_attention.can_share_distant(CPU, torch.float, 16, num_distant=8, length=7)
    assert not distant_attention.can_share_distant(CPU, torch.float, 16, num_distant=7, length=7)


def test_states_are_not_shared_with_gradients() -> None:
    assert not distant_attention.can_share_distant(CPU, torch.float, 16, num_distant=8, length=7)


@torch.no_grad()
def test_states_are_not_shared_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert not distant_attention.can_share_distant(
            CPU, torch.float, 16, num_distant=8, length=7
        )


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float, 32 * 2.0**-23), (torch.bfloat16, 4 * 2.0**-7)]
)
def test_the_error_of_sharing_is_a_multiple_of_what_rounding_allows(
    dtype: torch.dtype, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = distant_attention.attend_to_distant
    monkeypatch.setattr(distant_attention, "attend_to_distant", lambda *given: right(*given) + 1)
    error = distant_attention.distant_error(CPU, dtype, 16)
    assert error == pytest.approx(1 / allowed, rel=2 * allowed)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_states_of_integers_or_8_bits_are_not_shared(dtype: torch.dtype) -> None:
    assert not distant_attention._computes_right_numbers.__wrapped__(CPU, dtype, 16)


@pytest.mark.parametrize(("error", "is_exact"), [(1.0, True), (1.01, False)])
def test_states_are_shared_up_to_the_error_that_rounding_allows(
    error: float, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distant_attention, "distant_error", lambda *_: error)
    assert distant_attention._computes_right_numbers.__wrapped__(CPU, torch.float, 16) == is_exact


def test_a_full_memory_says_nothing_about_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(distant_attention, "distant_error", full)
    with pytest.raises(torch.OutOfMemoryError):
        distant_attention._computes_right_numbers.__wrapped__(CPU, torch.float, 16)


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_sharing_distant_states_is_tried_on_the_hardware_that_is_there(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = distant_attention._computes_right_numbers.__wrapped__
    for head_width in (10, 16, 64):
        assert tried(torch.device("cpu"), dtype, head_width)
    assert not tried(torch.device("cpu"), torch.int8, 16)
    right = distant_attention._attend_with_log_sum

    def other_base(*inputs: Any) -> tuple[Tensor, Tensor]:
        mixed, sums = right(*inputs)
        return mixed, sums / math.log(2)

    def missing(*inputs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel for this dtype")

    for wrong in (other_base, missing):
        monkeypatch.setattr(distant_attention, "_attend_with_log_sum", wrong)
        assert not tried(torch.device("cpu"), dtype, 16)
