"""Every command runs to its end on a GPU, and training's steps never wait for it. Then the bytes
that models of any size take on GPUs and send: real steps, on tensors without numbers."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from study.tasks.__main__ import main
from tests.conftest import VOCAB, small_task
from tests.gpu import process
from tests.gpu.process import on_pretended_gpus

if TYPE_CHECKING:
    from olmo_sparsity.analysis.models.huggingface import HuggingFaceLM

GIB = 2**30

SMALL = [
    "--data.corpus.max_documents=300",
    f"--data.tokenizer.train_vocab={VOCAB}",
    "--data.heldout_share=0.2",
    "--model.d_model=32",
    "--model.n_heads=2",
    "--model.n_layers=2",
    "--model.max_sequence_length=64",
    "--positions.target_length=32",
    "--training.length=16",
    "--training.batch_size=4",
    "--training.num_steps=4",
    "--evaluation.num_sequences=4",
    "--evaluation.interval_steps=4",
    "--checkpoint.interval_steps=4",
    "--logging.interval_steps=4",
]


def run(*words: object) -> None:
    from olmo_sparsity.command.cli import main

    assert main([str(word) for word in words]) in (0, None), words


@contextlib.contextmanager
def one_gpu() -> Iterator[Any]:
    from tests.gpu.pretend import pretend

    with pretend() as gpus, pytest.MonkeyPatch.context() as patch:
        patch.setattr("olmo_sparsity.training.start.measure_matmul_peak", lambda *_: 1e12)
        yield gpus


def train(folder: Path, data: Path, *more: str) -> None:
    run(
        "train",
        "configs/quick.yaml",
        *SMALL,
        f"--data.folder={data}",
        f"--run_folder={folder}",
        *more,
    )


@pytest.mark.parametrize(
    "settings",
    [
        ["--training.precision=fp32"],
        ["--training.precision=bf16", "--training.activation_checkpointing=true"],
        ["--training.precision=bf16", "--data.mask_documents=true"],
    ],
    ids=["fp32", "bf16, checkpointing", "document masks"],
)
@on_pretended_gpus
def test_train(settings: list[str], tmp_path: Path, data_folder: Path) -> None:
    with one_gpu() as gpus:
        train(tmp_path / "run", data_folder, *settings)
    assert (tmp_path / "run/checkpoints").is_dir()
    assert (gpus.kernels["packed"] > 0) == ("--data.mask_documents=true" in settings)
    allowed = ("moments.py", "engine.py", "run_folder.py", "evaluate.py")
    for wait in gpus.waits:  # of saving, the log and evaluation
        path = wait.rpartition(" at ")[2].partition(":")[0]
        assert Path(path).name in allowed, gpus.waits
    of_log = [count for wait, count in gpus.waits.items() if "run_folder.py" in wait]
    assert sum(of_log) <= 2 * 4, "at most the loss and the norm of each step"
    assert not [wait for wait in gpus.waits if "engine.py" in wait and "dictcomp" not in wait]
    of_saving = [wait for wait in gpus.waits if "moments.py" in wait]
    assert [wait[:11] for wait in of_saving] == ["synchronize"], "what is copied to is pinned"


@on_pretended_gpus
def test_a_run_is_read_in_bf16_unless_fp32_is_asked_for(trained: Path) -> None:
    """fp32 takes 8 to 15 times as long on a GPU."""
    import torch

    from olmo_sparsity.analysis.models.load import load_model

    def read(*, device: str = "auto", dtype: str = "auto") -> tuple[torch.dtype, str]:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            model = load_model(str(trained), device=device, dtype=dtype).model
        return model.embedding.weight.dtype, said.getvalue()

    with one_gpu():
        dtype, said = read()
        assert dtype == torch.bfloat16
        assert "weights in bf16; dtype=fp32 is slower and exact" in said
        assert read(dtype="fp32")[0] == torch.float32
        assert read(device="cpu") == (torch.float32, "")


@on_pretended_gpus
def test_explain_a_text(trained: Path, tmp_path: Path) -> None:
    windows = ("--long", 16, "--short", 8, "--device", "cuda")
    with one_gpu() as gpus:
        text = "Three birds sat on the old wall. Three birds sat on the old wall."
        (tmp_path / "text").write_text(text)
        run("explain", trained, "--text", tmp_path / "text", "--check", "-k", 1, *windows)
    assert gpus.kernels.total() > 0


@on_pretended_gpus
def test_any_command_may_be_run_by_hand(trained: Path) -> None:
    """A prompt, of which the answer is generated; and what it did is said."""
    from tests.gpu.__main__ import main

    said = io.StringIO()
    words = ["explain", str(trained), "--prompt", "Three birds sat", "--long", "8", "--short", "4"]
    with contextlib.redirect_stderr(said):
        assert not main(words)
    assert "fused attention: {'" in said.getvalue()
    assert re.search(r"\n +\d+ × .+ at \S+\.py:\d+", said.getvalue()), said.getvalue()


@on_pretended_gpus
def test_measure(trained: Path, tmp_path: Path) -> None:
    out, windows = tmp_path / "results", ("--long", 16, "--short", 8, "--stride", 8)
    few = ("--max-documents", 3, "--min-gap", 0, "--max-targets", 1, "--ks", 1, "--draws", 1)
    words = ("measure", trained, "--quick", "--out", out, *windows, *few)
    with one_gpu() as gpus:
        run(*words, "--dry-run")
        assert not out.exists()
        run(*words)
    assert (out / "summary.parquet").is_file()
    assert json.loads((out / "meta.json").read_text())["dtype"] == "bfloat16"
    assert gpus.kernels.total() > 0


@on_pretended_gpus
def test_task(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(json.dumps(small_task(tmp_path / "run")))  # which is YAML, too
    with one_gpu() as gpus:
        assert main([str(path)]) == 0
    assert (tmp_path / "run/trials").is_dir()
    assert gpus.bytes_peak.total() > 0, "it ran on the CPU"


def test_what_others_set_reaches_no_pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """DS_ACCELERATOR=cpu is set by tests that start processes, once their files are collected."""
    names = ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_ID")
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PATH_OF_MINE", "kept")
    given = process._environment()
    assert not {*names} & given.keys()
    assert given["PATH_OF_MINE"] == "kept"


# --- memory ---------------------------------------------------------------------------------------


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
    stated = float(
        estimate(config.model, config.training, torch.device("cuda"))["memory"].split()[0]
    )
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
    names = ("add_one_screened", "gradient")
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
            asked = question(scorer, block, [7], 2, units)
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
