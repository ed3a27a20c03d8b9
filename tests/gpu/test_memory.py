"""Bytes that models of any size take on GPUs, and send: real steps, on tensors without numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.gpu.process import on_pretended_gpus

if TYPE_CHECKING:
    from olmo_sparsity.analysis.models.huggingface import HuggingFaceLM

GIB = 2**30


@pytest.mark.parametrize("recomputes", [False, True])
@on_pretended_gpus
def test_the_dry_run_knows_the_memory_of_a_step(recomputes: bool) -> None:
    """Without that of CUDA itself, and what compiling saves."""
    import torch

    from olmo_sparsity.training.estimate import CUDA_CONTEXT_BYTES, estimate
    from tests.gpu.scaling import config_of
    from tests.gpu.shapes import training_step

    again = f"--training.activation_checkpointing={str(recomputes).lower()}"
    config = config_of("150m", "single", "--model.n_layers=3", again)
    found = training_step(config, 1, 2).memory / GIB
    stated = float(estimate(config, torch.device("cuda"))["memory"].split()[0])
    stated -= CUDA_CONTEXT_BYTES / GIB
    print(f"computed again: {recomputes}: {found:.2f} GiB, stated {stated:.2f}")
    assert stated == pytest.approx(found, rel=0.05)


@on_pretended_gpus
def test_each_engine_holds_and_sends_what_it_should() -> None:
    """Of P weights in bf16 and two micro-batches, on eight processes."""
    import torch

    from olmo_sparsity.model.build import build_model
    from olmo_sparsity.training.estimate import count_parameters
    from tests.gpu.scaling import config_of
    from tests.gpu.shapes import training_step

    small = ("--model.n_layers=2", "--training.micro_batch_size=1")  # most of it are weights

    def step_of(engine: str) -> tuple[float, dict[str, float]]:
        step = training_step(config_of("150m", engine, *small), 8, 2)
        return step.memory, {kind: size / count for kind, size in step.given.items()}

    with torch.device("meta"):
        count = count_parameters(build_model(config_of("150m", "single", *small).model))
    memory, given = step_of("ddp")
    assert given == pytest.approx({"all_reduce": 4}, rel=0.01)  # gradients in fp32
    before, given = step_of("zero1")
    # DeepSpeed all-reduces gradients where a reduce-scatter would do.
    assert given == pytest.approx({"all_reduce": 2, "all_gather": 2}, rel=0.01)
    assert before < memory - 6 * count
    memory, given = step_of("zero2")  # sends for each micro-batch
    assert given == pytest.approx({"all_reduce": 4, "all_gather": 2}, rel=0.01)
    assert memory < before - count
    before, given = memory, step_of("zero3")[1]
    assert given["reduce_scatter"] == pytest.approx(4, rel=0.01)
    # Weights for each forward and backward pass; those in use stay from one to the next.
    assert 3.5 < given["all_gather"] <= 8.1


# --- a model of 8B parameters ---------------------------------------------------------------------


def large_llama(num_layers: int) -> HuggingFaceLM:
    """As Llama 3.1 8B, which has 32 layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from olmo_sparsity.analysis.models.compatibility import LogitMap
    from olmo_sparsity.analysis.models.huggingface import HuggingFaceLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch, torch.device("cuda:0"):
        # It compares numbers, of which there are none.
        fits = (LogitMap(), True, 0.0)
        patch.setattr(
            "olmo_sparsity.analysis.models.huggingface.refuse_unfit", lambda *_, **__: fits
        )
        torch.set_default_dtype(torch.bfloat16)
        try:
            return HuggingFaceLM(LlamaForCausalLM(config)).eval()
        finally:
            torch.set_default_dtype(before)


@on_pretended_gpus
def test_every_selector_fits_a_model_of_8b_parameters_on_one_gpu() -> None:
    """With 32,768 far tokens, of 80 GB, with 4 GiB for CUDA and what the allocator cannot use. What
    each layer adds is measured between one and two of them."""
    from olmo_sparsity.analysis.inputs.windows import Units, Windows
    from olmo_sparsity.analysis.scoring.scorer import Scorer
    from olmo_sparsity.analysis.selectors.influence import SELECTORS

    # The others take rows as these do.
    names = ("add_one_screened", "drop_one", "gradient", "lrp")
    from tests.gpu.shapes import shapes
    from tests.support.brute import question

    num_far = 32768
    tokens = np.random.default_rng(0).integers(3, 1000, num_far + 512 + 8)
    peaks: dict[int, dict[str, float]] = {}
    for num_layers in (1, 2):
        with shapes() as memory:
            model = large_llama(num_layers)
            (block,) = Windows(num_far + 512, 512, 8).blocks(tokens)
            scorer, units = Scorer(model), Units.of_runs(np.arange(num_far) * 4 // num_far)
            # Of one target, as 32 layers keep too much for two at once.
            asked = question(scorer, block, [7], 2, units, block)
            peaks[num_layers] = {}
            for name in names:
                memory.peak = memory.now
                SELECTORS[name](scorer, asked)
                peaks[num_layers][name] = memory.peak / GIB
    for name, least in peaks[1].items():
        of_layer = peaks[2][name] - least
        found = least + 31 * of_layer
        print(f"{name}, {num_far:,} far tokens: {found:.1f} GiB, {of_layer:.2f} a layer")
        assert of_layer > 0.5, "its weights and far states"
        assert found < 80e9 / GIB - 4
