"""How a command ends: one line for whatever is not a defect, and nothing for nobody who reads."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from olmo_sparsity.cli import main
from olmo_sparsity.errors import UserError, is_out_of_memory, printable
from olmo_sparsity.progress import Progress
from olmo_sparsity.training import run_folder

COMMAND = [sys.executable, "-m", "olmo_sparsity.cli"]
REAL_FULL_DISK = Path("/dev/full")

# A command that prints, without the seconds that PyTorch takes to import.
PRINTING = [
    sys.executable,
    "-c",
    "import sys, types\n"
    "table = types.SimpleNamespace(loss_table=lambda run: 'a table')\n"
    "sys.modules['olmo_sparsity.training.run_folder'] = table\n"
    "from olmo_sparsity.cli import entry\n"
    "entry(['losses', 'run'])",
]


def one_line(capsys: pytest.CaptureFixture) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffered", [True, False])
def test_nobody_reads_the_results(buffered: bool) -> None:
    with subprocess.Popen(
        PRINTING,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == (0 if buffered else 141)


@pytest.mark.skipif(not REAL_FULL_DISK.exists(), reason="no /dev/full")
@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_disk_under_the_results_is_named(buffered: bool) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    with REAL_FULL_DISK.open("w") as full:
        done = subprocess.run(
            PRINTING,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    assert done.returncode == 2
    assert done.stderr == "olmo-sparsity: stdout: No space left on device\n"


# --- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["prepare", "x"], 75, "olmo-sparsity: stopped; the same command goes on"),
        (["train", "x"], 75, "olmo-sparsity: stopped; the same command goes on"),
        (["task", "x"], 75, "olmo-sparsity: stopped; the same command goes on"),
        (["sweep", "x"], 75, "olmo-sparsity: stopped; the same command goes on"),
        (["theory", "x"], 130, "olmo-sparsity: stopped"),
        (["losses", "x"], 130, "olmo-sparsity: stopped"),
    ],
)
def test_ctrl_c_is_one_line_in_any_command(
    words: list[str],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("olmo_sparsity.config_file._read_yaml", interrupt)
    monkeypatch.setattr(run_folder, "loss_table", interrupt)
    assert main(words) == code
    assert one_line(capsys) == said


def test_ctrl_c_while_text_is_prepared(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("data: {corpus: {source: embedded}, tokenizer: {train_vocab: 4000}}\n")
    words = [*COMMAND, "prepare", str(config), f"--data.folder={tmp_path / 'data'}"]
    child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "data" / "manifest.json").exists():
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert child.returncode == 75, error
    assert error.splitlines()[-1] == "olmo-sparsity: stopped; the same command goes on"
    assert "Traceback" not in error


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't"),
    ],
)
def test_want_of_memory_is_one_line_with_a_remedy(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(run_folder, "loss_table", fail)
    assert main(["losses", "x"]) == 2
    assert "olmo-sparsity: out of memory" in (line := one_line(capsys))
    assert "training.micro_batch_size" in line


@pytest.mark.parametrize("width", [10**9, 10**15])
def test_a_model_larger_than_any_memory(
    width: int, run_dict: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run_dict["model"]["mlp_hidden_size"] = 2 * width
    run_dict["model"]["d_model"] = 2**20
    (tmp_path / "run.yaml").write_text(json.dumps(run_dict))
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    assert "out of memory" in one_line(capsys)


def test_another_defect_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(run_folder, "loss_table", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["losses", "x"])
    assert not is_out_of_memory(RuntimeError("a bug"))


# --- what a terminal would take for orders --------------------------------------------------------

ORDERS = "a\x1b]0;title\x07\x1b[2J\r\n\x9b31m\u202eb\udcff"


def test_printable_leaves_text_as_it_is() -> None:
    assert printable("loss − 1.5 … 'naïve' 日本語 🙂") == "loss − 1.5 … 'naïve' 日本語 🙂"
    assert printable(ORDERS) == r"a\x1b]0;title\x07\x1b[2J\r\n\x9b31m\u202eb\udcff"


@pytest.mark.parametrize(
    "words", [["train", ORDERS], ["losses", ORDERS], ["losses", "x", f"--{ORDERS}"]]
)
def test_names_reach_the_terminal_as_text(words: list[str], capsys: pytest.CaptureFixture) -> None:
    with contextlib.suppress(SystemExit):  # of argparse
        assert main(words) == 2
    said = capsys.readouterr().err
    assert r"\x1b]0;title" in said
    assert printable(said.replace("\n", "")) == said.replace("\n", "")


def test_names_in_progress_are_text_too(capsys: pytest.CaptureFixture) -> None:
    with Progress("training", 2, "steps", log_every_s=0) as progress:
        progress.update(1, trial=ORDERS)
        progress.note(ORDERS)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(r"\x1b[2J" in line for line in lines)


def test_an_error_of_two_lines_is_said_in_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise UserError("one\ntwo")

    monkeypatch.setattr(run_folder, "loss_table", fail)
    assert main(["losses", "x"]) == 2
    assert one_line(capsys) == r"olmo-sparsity: one\ntwo"
