"""Documents kept apart on a GPU: what the kernel for packed documents is given, and what comes of
it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.gpu.models import build
from tests.gpu.process import on_pretended_gpus

LENGTHS = ([5, 1, 40, 14], [60], [33, 27])


def numbered() -> Any:
    """documents_BL."""
    import torch

    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
    return torch.stack(rows)


@pytest.mark.parametrize("key_heads", [1, 4])
@on_pretended_gpus
def test_packed_documents_attend_as_behind_a_dense_mask(key_heads: int) -> None:
    """And so do gradients. Nothing that the kernel is given is read back from the GPU."""
    import torch
    import torch.nn.functional as F

    from olmo_sparsity.analysis.kernels.attention import attend_within, find_documents
    from tests.gpu import pretend

    op = torch.ops.torch_attn._varlen_attn.default
    name, kernel = pretend.ATTENTION[op]
    given: list[tuple] = []

    def look(*args: Any) -> Any:
        given.append(args)
        return kernel(*args)

    generator = torch.Generator().manual_seed(0)
    dense = [
        torch.randn(3, heads, 60, 8, generator=generator).bfloat16().float().requires_grad_()
        for heads in (4, key_heads, key_heads)
    ]
    upstream = torch.randn(3, 4, 60, 8, generator=generator).bfloat16()
    documents_BL = numbered()
    alike_BLL = documents_BL[:, :, None] == documents_BL[:, None, :]
    expected = F.scaled_dot_product_attention(*dense, alike_BLL.tril()[:, None], enable_gqa=True)
    expected.backward(upstream.float())
    with pretend.pretend() as gpus, pytest.MonkeyPatch.context() as patch:
        patch.setitem(pretend.ATTENTION, op, (name, look))
        q, k, v = packed = [x.detach().to("cuda:0", torch.bfloat16).requires_grad_() for x in dense]
        upstream = upstream.to("cuda:0")
        documents = find_documents(documents_BL, q.device)
        found = attend_within(q, k, v, documents)
        found.backward(upstream)
        assert gpus.kernels == {"packed": 1}
        assert not gpus.waits, gpus.waits
        found, gradients = found.float().cpu(), [x.grad.float().cpu() for x in packed]
    ((_, _, _, starts, same_starts, longest, same_longest, *_),) = given
    for edges in (starts, same_starts):
        assert edges.tolist() == [0, 5, 6, 46, 60, 120, 153, 180]
        assert edges.dtype == torch.int32
    assert longest == same_longest == 60
    torch.testing.assert_close(found, expected.detach(), atol=0.02, rtol=0.02)
    for ours, theirs in zip(gradients, dense, strict=True):
        torch.testing.assert_close(ours, theirs.grad, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["olmo", "LlamaForCausalLM"])
@on_pretended_gpus
def test_a_model_of_documents_loses_what_it_loses_on_cpu(name: str, dtype: str) -> None:
    """fp32 has no kernel for packed documents: one after another."""
    import torch

    from olmo_sparsity.data.batches import Batch
    from olmo_sparsity.training.engine import Losses
    from tests.gpu.pretend import pretend

    tokens_BL = torch.randint(3, 64, (3, 60), generator=torch.Generator().manual_seed(0))
    positions_BL = torch.arange(60).expand(3, 60)
    batch = Batch(tokens_BL, positions_BL, tokens_BL.roll(-1, 1))
    batch.documents_BL = numbered()

    def found(model: Any, batch: Batch, precision: str) -> tuple[Any, Any]:
        device = batch.tokens_BL.device.type
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = Losses(model)(batch, tokens_BL.numel())
        loss.backward()
        return loss.detach().cpu(), model.embedding.weight.grad.cpu()

    model = build(name).train()
    loss, gradient = found(model, batch, "fp32")
    apart = replace(batch, documents_BL=None)
    assert abs(found(build(name).train(), apart, "fp32")[0] - loss) > 0.02, "documents matter"
    with pretend() as gpus:
        model = build(name).train().to("cuda:0")
        on_gpu = batch.to(torch.device("cuda:0"))
        found_loss, found_gradient = found(model, on_gpu, dtype)
    assert (gpus.kernels["packed"] > 0) == (dtype == "bf16")
    near = 1e-5 if dtype == "fp32" else 0.02
    torch.testing.assert_close(found_loss, loss, atol=near, rtol=near)
    assert float((found_gradient - gradient).norm()) <= 5 * near * float(gradient.norm())
