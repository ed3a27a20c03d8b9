"""What analysis finds on a GPU: the CPU's numbers, with any kernel of attention, in the memory of
one GPU, and without waiting for it more than a few times. Then what the kernel for packed documents
is given, and computes."""

from __future__ import annotations

from dataclasses import replace
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


@pytest.mark.parametrize(("name", "prefix"), [("olmo", ()), ("LlamaForCausalLM", (1, 2))])
@on_pretended_gpus
def test_rows_that_see_different_far_places_share_forwards(
    name: str, prefix: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one forward holds them all, and on a CPU if they are few."""
    from olmo_sparsity.analysis.inputs.windows import Windows
    from olmo_sparsity.analysis.scoring import scorer as scoring
    from olmo_sparsity.analysis.scoring.scorer import Scorer
    from tests.gpu.pretend import pretend

    model = build(name)
    (block,) = Windows(16, 4, 2, prefix).blocks(np.random.default_rng(0).integers(3, 64, 18))
    sets = [np.arange(k) for k in (1, 2, 4, 8, 11, 12)] + [np.array([3, 7])] * 3

    def losses(batch_tokens: int, sets: list[np.ndarray] = sets) -> tuple[np.ndarray, list[int]]:
        scorer = Scorer(model, batch_tokens=batch_tokens)
        context, real, sizes = scorer.context(block), scorer._hidden, list[int]()

        def counted(batch: Any, hides: bool) -> Any:
            sizes.append(len(batch))
            return real(batch, hides)

        scorer._hidden = counted  # type: ignore[method-assign] # counts rows
        return np.stack(scorer.losses([context.set_row(far, (0, 2)) for far in sets])), sizes

    found, sizes = losses(1000)
    assert sizes == [len(sets)]
    monkeypatch.setattr(scoring, "FEW_PAIRS", 0)
    expected, on_cpu = losses(1000)
    assert on_cpu == [1, 4, 1, 1, 1, 1]
    np.testing.assert_allclose(found, expected, atol=2e-4)
    with pretend():
        model.to("cuda:0")
        for batch_tokens, wanted in ((5 * len(sets), [len(sets)]), (5 * len(sets) - 1, on_cpu)):
            found, sizes = losses(batch_tokens)
            np.testing.assert_allclose(found, expected, atol=2e-4)
            assert sizes == wanted
        # Rows that see as many places each get copies of these, which take memory.
        assert max(losses(50, [np.arange(2)] * 12)[1]) == 50 // (5 + 2 + len(prefix))


@pytest.mark.parametrize("name", ["olmo", *THEIRS[:2]])
@on_pretended_gpus
def test_far_states_keep_what_is_used_alone(name: str) -> None:
    import torch

    from tests.gpu.pretend import pretend

    with pretend() as gpus:
        model = build(name).to("cuda:0")
        tokens_BL = torch.randint(3, 64, (1, 96), device="cuda:0")
        positions_BL = torch.arange(96, device="cuda:0")[None]
        model.far_states(tokens_BL, positions_BL)  # keeps what is computed once
        before = gpus.bytes_now.total()
        states = model.far_states(tokens_BL, positions_BL)
        kept = gpus.bytes_now.total() - before
    assert states.hidden_BFD is not None
    needed = sum(k.nbytes + v.nbytes for k, v in states.layers) + states.hidden_BFD.nbytes
    assert needed <= kept < 1.05 * needed


@pytest.mark.parametrize("name", ["olmo", "LlamaForCausalLM"])
@on_pretended_gpus
def test_gates_with_every_kernel(name: str) -> None:
    """cuDNN's does not differentiate its bias; the memory-efficient one needs a log-sum-exp, which
    it keeps only if queries, keys or values want a gradient. In bf16, scores included, gates rank
    places as in fp32."""
    import torch

    from tests.gpu.pretend import pretend

    exact = ask(build(name), ["add_one_screened"])["gates"]
    for kernel in ("flash", "memory-efficient", "cudnn"):
        with pretend(kernel=kernel):
            model = build(name).to("cuda:0", dtype=torch.bfloat16)
            gates = ask(model, ["add_one_screened"])["gates"]
        ranks = [x.argsort().argsort() for x in (exact, gates)]
        assert np.corrcoef(ranks)[0, 1] >= 0.998, kernel


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


@on_pretended_gpus
def test_two_gpus_share_far_states_without_copies() -> None:
    from accelerate import dispatch_model

    from olmo_sparsity.analysis.kernels import sharing
    from tests.gpu.pretend import pretend

    shared: list[str] = []
    real = sharing.attend_to_far

    def attend(query: Any, *others: Any) -> Any:
        shared.append(str(query.device))
        return real(query, *others)

    selectors = ["add_one", "gradient"]
    expected = ask(build("LlamaForCausalLM"), selectors)
    with pretend(num_gpus=2), pytest.MonkeyPatch.context() as patch:
        model = build("LlamaForCausalLM")
        parts = {"embed_tokens": 0, "rotary_emb": 0, "layers.0": 0, "layers.1": 1, "norm": 1}
        device_map = {f"model.{part}": gpu for part, gpu in parts.items()} | {"lm_head": 1}
        dispatch_model(model.model, device_map)
        patch.setattr(sharing, "attend_to_far", attend)
        found = ask(model, selectors)
    for what, numbers in found.items():
        np.testing.assert_allclose(numbers, expected[what], atol=2e-4, err_msg=what)
    assert shared.count("cuda:0") == shared.count("cuda:1") > 0


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
