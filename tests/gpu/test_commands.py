"""Every command runs to its end on a GPU, and training's steps never wait for it."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import VOCAB, small_task
from tests.gpu import process
from tests.gpu.process import on_pretended_gpus

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
        run("task", path)
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
