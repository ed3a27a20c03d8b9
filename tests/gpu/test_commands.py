"""Commands run to their end on a GPU, and training's steps never wait for it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import VOCAB
from tests.gpu.process import on_pretended_gpus

if TYPE_CHECKING:
    pass

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
