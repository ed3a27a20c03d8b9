"""One step, its kernels, and the device and precision it runs in."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.models import training_loss
from olmo_sparsity.models.build import build_model
from olmo_sparsity.text.vocabulary import IGNORED
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.optimizer.jump_detector import JumpDetector
from olmo_sparsity.training.processes.device import choose_precision, own_device, own_gpu
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.setup.preflight import check_devices
from tests.conftest import MakeConfig

ALONE = Processes()


def test_every_process_takes_its_own_gpu() -> None:
    assert own_gpu(1, Processes(3, 4, 3, 4)) == 0, "the launcher shows it only its own"
    assert own_gpu(4, Processes(7, 8, 3, 4)) == 3
    with pytest.raises(ConfigError, match="runs 4 processes, but PyTorch sees 2 GPUs"):
        own_gpu(2, Processes(3, 4, 3, 4))


def test_no_gpu_where_slurm_gave_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    check_devices("cpu", torch.device("cpu"), ALONE)
    with pytest.raises(ConfigError, match="SLURM_GPUS_ON_NODE=4"):
        check_devices("auto", torch.device("cpu"), ALONE)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    check_devices("auto", torch.device("cpu"), ALONE)


GPT_NEOX = {
    **{"architecture": "gpt_neox", "d_model": 32, "n_heads": 2, "n_layers": 2},
    **{"max_sequence_length": 64, "activation_type": "gelu", "include_bias": True},
}

# Both layers see five positions; the longest document is longer.
WINDOWED = {
    **{"architecture": "olmo3", "d_model": 32, "n_heads": 2, "n_layers": 2, "sliding_window": 5},
    **{"max_sequence_length": 64, "layer_norm_type": "rms", "norm_after": True},
    **{"attention_layer_norm": True, "init_std": 0.1},
}


@pytest.fixture
def batch() -> Batch:
    tokens = torch.randint(0, 300, (6, 16), generator=torch.Generator().manual_seed(0))
    labels = torch.roll(tokens, -1, 1)
    labels[:, -1] = IGNORED
    labels[0, 3:9] = IGNORED  # micro-batches hold unequal numbers of labels
    return Batch(tokens, torch.arange(16).expand(6, 16), labels)


def engine_for(config: RunConfig) -> Engine:
    config.model.vocab_size = 300
    torch.manual_seed(0)
    return Engine(build_model(config.model), config.training, config.optimizer)


@pytest.mark.parametrize("is_tied", [False, True])
def test_layer_gradient_norms_are_those_of_autograd(
    make_config: MakeConfig, batch: Batch, is_tied: bool
) -> None:
    """Before clipping, over all micro-batches."""
    engine = engine_for(
        make_config(
            model__weight_tying=is_tied,
            model__layer_norm_with_affine=True,
            training__batch_size=6,
            training__micro_batch_size=3,
            training__max_grad_norm=0.01,
        )
    )
    model = engine.model
    num_labels = int((batch.labels_BL != IGNORED).sum())
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(engine.losses(batch, num_labels), list(named.values()))
    squares_of_part: dict[str, float] = {}
    for name, gradient in zip(named, gradients, strict=True):
        block = re.search(r"blocks\.(\d+)\.", name)
        tables = {"transformer.wte.weight": "embedding", "transformer.ff_out.weight": "unembedding"}
        part = f"block_{block[1]}" if block else tables.get(name, "other")
        square = float(gradient.double().square().sum())
        squares_of_part[part] = squares_of_part.get(part, 0.0) + square
    engine.logs_layer_norms = True
    _, norm = engine.step(batch, 1e-3)
    expected = {part: square**0.5 for part, square in squares_of_part.items()}
    found = {part: float(part_norm) for part, part_norm in engine.layer_norms.items()}
    assert ("unembedding" in found) == (not is_tied)
    assert found == pytest.approx(expected, rel=1e-5)
    assert sum(square for square in squares_of_part.values()) ** 0.5 == pytest.approx(float(norm))


def test_gradient_accumulation_equals_one_batch(make_config: MakeConfig, batch: Batch) -> None:
    engines = [
        engine_for(make_config(training__batch_size=6, training__micro_batch_size=micro))
        for micro in (6, 3, 1)
    ]
    found = [engine.step(batch, 1e-3) for engine in engines]
    torch.testing.assert_close(found[1:], found[:1] * 2)
    weights = [list(engine.model.parameters()) for engine in engines]
    torch.testing.assert_close(weights[1:], weights[:1] * 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("z_loss", [0.0, 0.05])
def test_the_step_is_that_of_plain_pytorch(
    make_config: MakeConfig, batch: Batch, z_loss: float
) -> None:
    """Against a bare loop: cross-entropy over all labels, z-loss, clip, AdamW."""
    config = make_config(
        training__max_grad_norm=0.1, training__batch_size=6, training__z_loss=z_loss
    )
    engine = engine_for(config)
    torch.manual_seed(0)
    bare = build_model(config.model)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(3):
        loss, _ = engine.step(batch, 3e-3)
        logits = bare(batch.tokens_BL, batch.positions_BL)
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BL.flatten())
        log_sum_BL = logits.logsumexp(-1)
        squared = log_sum_BL.square()[batch.labels_BL != IGNORED].mean()
        optimizer.zero_grad()
        (expected + z_loss * squared).backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 0.1)
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
    for ours, theirs in zip(engine.model.parameters(), bare.parameters(), strict=True):
        # Adam divides by the gradient's size, so rounding of the smallest gradients shows.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=3e-6)


def test_a_skipped_step_changes_nothing(make_config: MakeConfig, batch: Batch) -> None:
    config = make_config(training__batch_size=6)
    engine, plain = engine_for(config), engine_for(config)
    for is_jump in (True, False):
        jumps = JumpDetector(1.0, [], 0)
        jumps.is_jump = lambda *_, is_jump=is_jump: is_jump
        skipped = [step.clone() for step in engine.step(batch, 1e-3, jumps)]
        assert jumps.num_skipped == is_jump
    torch.testing.assert_close(plain.step(batch, 1e-3), tuple(skipped), rtol=0, atol=0)
    for ours, theirs in zip(engine.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


NORM_AFTER = {"model__norm_after": True, "model__attention_layer_norm": True}
OLMO_3 = NORM_AFTER | {"model__architecture": "olmo3", "model__sliding_window": 5}


@pytest.mark.parametrize("changes", [{}, OLMO_3])
def test_every_other_layer_is_computed_twice(
    make_config: MakeConfig, batch: Batch, changes: dict
) -> None:
    found = []
    for every, expected in ((0, [1, 1, 1]), (1, [2, 2, 2]), (2, [2, 1, 2])):
        config = make_config(training__batch_size=6, **changes | {"model__n_layers": 3})
        config.training.activation_checkpointing = every > 0
        config.training.checkpoint_every = max(1, every)
        engine, calls = engine_for(config), list[int]()
        layers = getattr(engine.model, "blocks", None) or engine.model.body.layers
        for number, layer in enumerate(layers):
            linear = next(module for module in layer.modules() if isinstance(module, nn.Linear))
            linear.register_forward_hook(lambda *_, n=number, calls=calls: calls.append(n))
        engine.step(batch, 1e-3)
        assert [calls.count(number) for number in range(3)] == expected
        found.append(list(engine.model.parameters()))
    torch.testing.assert_close(found[1:], found[:1] * 2)


@pytest.mark.parametrize("mask_documents", [False, True])
def test_a_step_mixes_no_devices_and_waits_for_none(
    make_config: MakeConfig, batch: Batch, mask_documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: tensors without numbers, which the host cannot read."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **named: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    config = make_config(training__device="meta", training__micro_batch_size=2)
    config.model.query_scale_learned = True
    if mask_documents:
        batch.documents_BL = (torch.arange(16) // 6).expand(6, 16)
    engine = engine_for(config)
    monkeypatch.setattr(engine.optimizer, "step", lambda: None)  # a kernel of real devices
    for tensor in engine.step(batch, 1e-3):
        assert tensor.device.type == "meta"
        with pytest.raises(RuntimeError):
            tensor.item()


@pytest.mark.accept
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training__activation_checkpointing": False, "model__rope": False, "model__alibi": True},
        NORM_AFTER | {"data__mask_documents": True, "model__n_kv_heads": 1},
        {"data__mask_documents": True, "model__query_scale_learned": True},
        {"model__n_layers": 3},
    ],
    ids=[
        *("rope", "alibi, nothing computed again", "OLMo 2, document masks"),
        *("document masks, scales learned", "blocks"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # the compiler warns about what it does itself
def test_a_compiled_step_is_two_graphs(
    changes: dict, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model and of a chunk of its losses. Where the compiler breaks off, what follows runs
    uncompiled, and says nothing."""
    torch.compiler.reset()
    from olmo.model import RMSLayerNorm
    from torch._dynamo.testing import CompileCounterWithBackend  # imports the compiler

    from olmo_sparsity.models.olmo.layers import RMSNorm

    graphs = CompileCounterWithBackend("aot_eager")
    compiler = partial(torch.compile, backend=graphs, fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr("olmo_sparsity.training.engines.compilation.COMPILED_BY_BLOCK", 3)
    monkeypatch.setattr(training_loss, "rows_per_chunk", lambda *_: 200)  # the last one has 112
    monkeypatch.setattr(RMSNorm, "forward", RMSLayerNorm.forward)  # as it is on a GPU
    config = make_config(
        training__batch_size=2,
        training__length=256,
        positions__target_length=256,
        model__max_sequence_length=256,
        **{"model__n_layers": 1, "training__activation_checkpointing": True} | changes,
    )
    eager = engine_for(config)
    compiled = engine_for(replace(config, training=replace(config.training, compile=True)))
    tokens_BL = torch.randint(2, 60, (2, 256))  # long enough for a fused kernel
    positions_BL = torch.arange(256).expand_as(tokens_BL)
    batch = Batch(tokens_BL, positions_BL, tokens_BL.roll(-1, 1))
    for of_document in (100, 60, 200):  # and a number of labels of its own
        batch.labels_BL[0, :of_document] = IGNORED
        if config.data.mask_documents:
            batch = replace(batch, documents_BL=positions_BL // of_document)
        found, expected = compiled.step(batch, 1e-3), eager.step(batch, 1e-3)
        torch.testing.assert_close(found, expected)
    assert graphs.frame_count == 2
    for graph in graphs.graphs:  # PyTorch 2.11 compiles wrong gradients of these
        assert "autograd_function_apply" not in str(graph.graph)


@pytest.mark.accept  # it compiles for half a minute
@pytest.mark.filterwarnings("ignore")  # the compiler warns about what it does itself
def test_compiled_equals_eager_and_goes_on_to_the_bit(
    make_config: MakeConfig, batch: Batch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(training_loss, "rows_per_chunk", lambda *_: 40)  # the last one has 16
    generated: list[str] = []
    monkeypatch.setattr("torch._inductor.graph.GraphLowering.save_output_code", generated.append)
    changes = {"training__batch_size": 6, "model__n_layers": 1}
    eager = engine_for(make_config(**changes))
    config = make_config(**changes, training__compile=True)
    compiled = engine_for(config)
    for _ in range(2):
        torch.testing.assert_close(compiled.step(batch, 1e-3), eager.step(batch, 1e-3))
    kernels = [kernel for code in generated for kernel in re.findall(r"r?'''(.*?)'''", code, re.S)]
    assert any("exp" in kernel for kernel in kernels)
    assert not any(re.search(r"\b(cos|sin)\(", kernel) for kernel in kernels)
    assert sum("pow(" in kernel for kernel in kernels) == 1, "the angles of all layers"
    assert compiled.model.state_dict().keys() == eager.model.state_dict().keys()
    compiled.copy_moments()(tmp_path)
    torch.compiler.reset()
    again = engine_for(config)
    again.model.load_state_dict(compiled.copy_weights(), strict=False)  # tied ones are there once
    again.load_moments(tmp_path, step=2)
    for _ in range(2):
        found, expected = again.step(batch, 1e-3), compiled.step(batch, 1e-3)
        assert torch.equal(torch.stack(found), torch.stack(expected))
    weights = [list(engine.model.parameters()) for engine in (again, compiled)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # the compiler warns about what it does itself
def test_a_smaller_budget_keeps_fewer_activations_and_takes_the_same_steps(
    make_config: MakeConfig, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))

    def steps(budget: float | None) -> tuple[list[Tensor], int]:
        """Return losses and norms of two steps, and the bytes that the second one kept."""
        torch.compiler.reset()
        config = make_config(
            training__batch_size=6,
            training__compile=True,
            training__activation_memory_budget=budget,
        )
        engine = engine_for(config)
        numbers = list(engine.step(batch, 1e-3))
        kept: dict[int, int] = {}
        alive: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            alive.append(tensor)
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            numbers += engine.step(batch, 1e-3)
        for weight in engine.model.parameters():
            kept.pop(weight.untyped_storage().data_ptr(), None)
        return numbers, sum(kept.values())

    whole, whole_bytes = steps(None)
    half, half_bytes = steps(0.5)
    none, none_bytes = steps(0.0)
    torch.testing.assert_close(half, whole)
    torch.testing.assert_close(none, whole)
    assert none_bytes < 0.9 * half_bytes < 0.8 * whole_bytes
    torch.compiler.reset()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"rope": False, "alibi": True},
        {"rope": False},
        {"n_kv_heads": 1},
        {"query_scale_length": 8.0},
        {"query_scale_learned": True, "n_kv_heads": 1},
        {"query_scale_learned": True, "rope": False, "alibi": True},
        GPT_NEOX,
        WINDOWED,
    ],
    ids=[
        *("rope", "alibi", "nope", "grouped", "scaled", "scales learned"),
        *("scales learned, alibi", "gpt_neox", "sliding windows"),
    ],
)
def test_the_loss_of_a_masked_document_is_its_loss_alone(
    make_config: MakeConfig, run_dict: dict, model: dict, precision: str
) -> None:
    """In training and held out; its position IDs may even begin anew, since only their differences
    count."""
    run_dict["model"] = model if "architecture" in model else run_dict["model"] | model
    engine = engine_for(make_config(training__batch_size=2, training__precision=precision))
    lengths, generator = (5, 1, 18), torch.Generator().manual_seed(1)
    tokens_BL = torch.randint(1, 300, (2, sum(lengths)), generator=generator)
    labels_BL = tokens_BL.roll(-1, 1)
    numbers_L = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    positions_BL = torch.arange(24).expand(2, 24)
    packed = Batch(tokens_BL, positions_BL, labels_BL, numbers_L.expand(2, 24))
    apart = [
        Batch(tokens_BL[:, a:b], positions_BL[:, : b - a], labels_BL[:, a:b])
        for a, b in ((0, 5), (5, 6), (6, 24))
    ]
    near = {"rtol": 2e-2, "atol": 2e-2} if precision == "bf16" else {"rtol": 1e-4, "atol": 1e-5}
    nll_BL = engine.token_losses(packed)
    torch.testing.assert_close(
        nll_BL, torch.cat([engine.token_losses(b) for b in apart], 1), **near
    )
    unmasked = engine.token_losses(Batch(tokens_BL, positions_BL, labels_BL))
    assert (nll_BL[:, 6:] - unmasked[:, 6:]).abs().max() > 0.05, "the mask hides something"

    def gradients(batches: list[Batch]) -> torch.Tensor:
        engine.model.zero_grad()
        for batch in batches:
            with engine.autocast():
                engine.losses(batch, 48).backward()
        return torch.cat([p.grad.flatten() for p in engine.model.parameters()])

    one, other = gradients([packed]), gradients(apart)
    assert (one - other).norm() < near["rtol"] * other.norm()


def test_devices_and_precisions_are_chosen_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_device("cpu", Processes()).type == "cpu"
    with pytest.raises(ConfigError, match=r"training\.device=warp"):
        own_device("warp", Processes())
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"training\.device=cuda"):
            own_device("cuda", Processes())
    assert choose_precision("fp32", torch.device("cpu")) == "fp32"
    for abilities, chosen in (
        ({"avx2": True, "avx512_f": True}, "fp32"),
        ({"amx_bf16": True}, "bf16"),
        ({"neon": True, "bf16": True}, "fp32"),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=abilities: found)
        assert choose_precision("auto", torch.device("cpu")) == chosen
