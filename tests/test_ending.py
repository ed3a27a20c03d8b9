"""How a command ends: one line for whatever is not a defect, and nothing for nobody who reads."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from olmo_sparsity.cli import main
from olmo_sparsity.errors import UserError, is_out_of_memory, printable
from olmo_sparsity.progress import Progress
from olmo_sparsity.training import run_folder
from tests.conftest import running, until

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

# A command that does not end before Ctrl-C.
WRITING_SLOWLY = [
    sys.executable,
    "-c",
    "import sys, time\n"
    "from olmo_sparsity.data.shards import ShardWriter\n"
    "ShardWriter.write = lambda *given: time.sleep(300)\n"
    "from olmo_sparsity.cli import entry\n"
    "entry(sys.argv[1:])",
]


def one_line(capsys: pytest.CaptureFixture) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


Failing = Callable[[BaseException], Callable]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Makes `losses` raise an error."""

    def raising(error: BaseException) -> Callable:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(run_folder, "loss_table", fail)
        return fail

    return raising


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("unbuffered", "code"), [("", 0), ("1", 141)])
def test_nobody_reads_the_results(unbuffered: str, code: int) -> None:
    with subprocess.Popen(
        PRINTING,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == code


@pytest.mark.skipif(not REAL_FULL_DISK.exists(), reason="no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_the_results_is_named(unbuffered: str) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with REAL_FULL_DISK.open("w") as full:
        done = subprocess.run(
            PRINTING, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert done.returncode == 2
    assert done.stderr == "olmo-sparsity: stdout: No space left on device\n"


# --- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["prepare", "train", "task", "sweep", "theory", "losses"])
def test_ctrl_c_is_one_line_in_any_command(
    command: str, failing: Failing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("olmo_sparsity.config_file._read_yaml", failing(KeyboardInterrupt()))
    resumes = command not in ("theory", "losses")
    assert main([command, "x"]) == (75 if resumes else 130)
    goes_on = "; the same command goes on" if resumes else ""
    assert one_line(capsys) == f"olmo-sparsity: stopped{goes_on}"


def test_ctrl_c_while_text_is_prepared(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("data: {corpus: {source: embedded}, tokenizer: {train_vocab: 4000}}\n")
    words = [*WRITING_SLOWLY, "prepare", str(config), f"--data.folder={tmp_path / 'data'}"]
    with running(words, stderr=subprocess.PIPE, text=True) as child:
        manifest = tmp_path / "data" / "manifest.json"
        until(manifest.exists, lambda: child.poll() is None)
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=60)
    assert child.returncode == 75, error
    assert error.splitlines()[-1] == "olmo-sparsity: stopped; the same command goes on"
    assert "Traceback" not in error


# --- errors ---------------------------------------------------------------------------------------

OUT_OF_MEMORY = r"olmo-sparsity: out of memory \(.*training\.micro_batch_size.*memory"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nGPU 0 has …"), OUT_OF_MEMORY),
        (MemoryError(), OUT_OF_MEMORY),
        (RuntimeError("[err == 0. DefaultCPUAllocator: can't"), OUT_OF_MEMORY),
        (UserError("one\ntwo"), r"olmo-sparsity: one\\ntwo"),
        (ValueError("embedded null byte"), "olmo-sparsity: a path holds a null byte; .*without"),
    ],
)
def test_an_error_that_is_no_defect_is_one_line(
    error: Exception, said: str, failing: Failing, capsys: pytest.CaptureFixture
) -> None:
    failing(error)
    assert main(["losses", "x"]) == 2
    assert re.fullmatch(said, one_line(capsys))


@pytest.mark.parametrize("width", [10**12, 10**18])
def test_a_model_larger_than_any_memory(
    width: int, run_dict: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run_dict["model"] |= {"mlp_hidden_size": 2 * width, "d_model": 1024}
    (tmp_path / "run.yaml").write_text(json.dumps(run_dict))
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    assert "out of memory" in one_line(capsys)


def test_a_defect_stays_one(failing: Failing) -> None:
    failing(RuntimeError("a bug"))
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


def test_a_stopped_line_names_no_time_that_is_left(capsys: pytest.CaptureFixture) -> None:
    with contextlib.suppress(ValueError), Progress("training", 9, "steps", log_every_s=0) as it:
        it.update(1)
        raise ValueError
    shown, last = capsys.readouterr().err.splitlines()
    assert shown.endswith(" left")
    assert re.fullmatch(r"training · 1/9 steps · \S+ steps/s · stopped in \d+ s", last)
