"""What analysis finds on a GPU: the CPU's numbers, with any kernel of attention, in the memory of
one GPU, and without waiting for it more than a few times. Then what the kernel for packed documents
is given, and computes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.gpu.models import OURS, build
from tests.gpu.process import on_pretended_gpus

THEIRS = ("LlamaForCausalLM", "Gemma3ForCausalLM", "GPTNeoXForCausalLM")


def ask(model: Any, selectors: Any = None, far: str = "contextual") -> dict[str, np.ndarray]:
    """What the selectors find in one document, on the model's own device, and the gradients of
    gates that led them there."""
    from olmo_sparsity.analysis.inputs.documents import Document
    from olmo_sparsity.analysis.inputs.windows import Windows
    from olmo_sparsity.analysis.measurement.recovery import recover
    from olmo_sparsity.analysis.scoring.scorer import Scorer
    from olmo_sparsity.analysis.selectors import influence

    document = Document(np.random.default_rng(0).integers(3, 64, 18))
    found, gates = {}, []
    gate_gradients = influence.gate_gradients

    def kept(*args: Any) -> np.ndarray:
        gates.append(gate_gradients(*args))
        return gates[-1]

    for name in selectors or influence.SELECTORS:
        scorer = Scorer(model, far_states=far)
        with mock.patch.object(influence, "gate_gradients", kept):
            tables = recover(scorer, document, Windows(16, 4, 2), selectors=name, ks=(1, 4))
        found[name] = tables["influence"].influence.to_numpy()
        found[f"{name}, recovery"] = np.stack(tables["recovery"].loss_set)
    found["gates"] = np.concatenate([part.ravel() for part in gates] or [np.zeros(0)])
    return found


@pytest.mark.parametrize(
    ("name", "far"),
    [(name, "contextual") for name in (*OURS, *THEIRS)]
    + [("olmo", "isolated"), (THEIRS[0], "isolated")],
)
@on_pretended_gpus
def test_selectors_find_what_they_find_on_cpu(name: str, far: str) -> None:
    from tests.gpu.pretend import pretend

    model = build(name)
    selectors: tuple[str, ...] | None = ("add_one", "add_one_screened", "attention")
    if far == "contextual":  # all of them with one model of ours and one of transformers
        selectors = None if name in ("olmo", THEIRS[0]) else (*selectors, "gradient")
    expected = ask(model, selectors, far)
    with pretend() as gpus:
        model.to("cuda:0")
        gpus.uploads.clear()
        found = ask(model, selectors, far)
    assert found.keys() == expected.keys()
    for what, numbers in found.items():
        np.testing.assert_allclose(numbers, expected[what], atol=2e-4, err_msg=what)
    # The host waits for copies of numbers that are not pinned. These two are made once.
    once = ("far_error", "<genexpr>")
    assert not [line for line in gpus.uploads if not line.endswith(once)], gpus.uploads


@pytest.mark.parametrize("name", ["olmo", "LlamaForCausalLM"])
@on_pretended_gpus
def test_the_host_does_not_wait_for_batches(name: str) -> None:
    from olmo_sparsity.analysis.models.use import in_use
    from olmo_sparsity.analysis.scoring.scorer import Scorer
    from tests.gpu.pretend import pretend

    counted: list[int] = []
    real = Scorer._hidden

    def count(scorer: Any, *asked: Any) -> Any:
        before = gpus.waits.total()
        hidden = real(scorer, *asked)
        counted.append(gpus.waits.total() - before)
        return hidden

    with pretend() as gpus, pytest.MonkeyPatch.context() as patch:
        model = build(name).to("cuda:0")
        with in_use(model):  # tries it, once
            pass
        patch.setattr(Scorer, "_hidden", count)
        patch.setattr(Scorer, "_tokens_at_once", lambda _: 30)
        gpus.waits.clear()
        ask(model, ["add_one"])
    allowed = 0 if name.startswith("olmo") else 1  # transformers looks whether a mask hides any
    assert len(counted) > 0
    assert max(counted) <= allowed, gpus.waits
    at_the_end = (" to_host", " nll")
    of_calls = sum(count for line, count in gpus.waits.items() if line.endswith(at_the_end))
    assert 0 < of_calls < len(counted), gpus.waits
    assert gpus.waits.total() <= of_calls + allowed * len(counted) + 2, gpus.waits


@on_pretended_gpus
def test_cudnn_attends_to_many_places_alone_and_only_if_it_is_right() -> None:
    """It plans for each shape of rows, of which there are hundreds."""
    import torch

    from olmo_sparsity.analysis.kernels import attention
    from olmo_sparsity.analysis.models.use import in_use
    from tests.gpu import pretend

    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    name, right = pretend.ATTENTION[op]

    def kernel(*given: Any, **more: Any) -> Any:
        if fault == "refuses":
            raise RuntimeError("No valid execution plans built.")
        mixed, sums, *others = right(*given, **more)
        if fault == "another base":
            sums = sums / np.log(2)
        if fault == "sees nothing":
            mixed = mixed.masked_fill(sums < -1e30, torch.nan)
        return mixed, sums, *others

    with pretend.pretend(kernel="cudnn") as gpus, pytest.MonkeyPatch.context() as patch:
        model = build("LlamaForCausalLM").to("cuda:0", dtype=torch.bfloat16)
        with in_use(model):  # tries it, once
            pass
        gpus.kernels.clear()
        expected = ask(model, ["add_one", "gradient", "attention"])
        assert gpus.kernels.total() > 0
        assert not gpus.kernels["cudnn"], gpus.kernels
        patch.setattr(attention, "KEYS_FOR_CUDNN", 10)
        patch.setitem(pretend.ATTENTION, op, (name, kernel))
        for fault in ("", "another base", "refuses", "sees nothing"):
            said: list[str] = []
            patch.setattr(attention, "say", said.append)
            attention._cudnn_works.clear()
            gpus.kernels.clear()
            found = ask(model, ["add_one"])
            for what, numbers in found.items():
                np.testing.assert_allclose(numbers, expected[what], atol=0.02, err_msg=what)
            assert len(said) == bool(fault), said
            assert (gpus.kernels["cudnn"] > 2) == (not fault), "more than the trial"


# --- packed documents -----------------------------------------------------------------------------

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
