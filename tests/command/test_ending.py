"""How a command ends: one line for whatever is not a defect, and nothing for nobody who reads."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from olmo_sparsity.base.errors import UserError, is_out_of_memory
from olmo_sparsity.command import cli
from olmo_sparsity.command.cli import main
from olmo_sparsity.training.metrics import loss_table
from tests.conftest import running

REAL_FULL_DISK = Path("/dev/full")

# A command that prints, without the seconds that PyTorch takes to import.
PRINTING = [
    sys.executable,
    "-c",
    "import sys, types\n"
    "table = types.SimpleNamespace(describe_losses=lambda run: 'a table')\n"
    "sys.modules['olmo_sparsity.training.metrics.loss_table'] = table\n"
    "from olmo_sparsity.command.cli import entry\n"
    "entry(['losses', 'run'])",
]

# A command that can be given again and does not end before a signal, likewise.
WAITING = [
    sys.executable,
    "-c",
    "import sys, time\n"
    "def read(config, overrides):\n"
    "    print('up', file=sys.stderr, flush=True)\n"
    "    time.sleep(300)\n"
    "from olmo_sparsity.command import experiment\n"
    "experiment.read_experiment = read\n"
    "from olmo_sparsity.command.cli import entry\n"
    "entry(['experiment', 'config'])",
]


# A command that prints a message while it reads a file, likewise.
READING = [
    sys.executable,
    "-c",
    "import sys, types\n"
    "from olmo_sparsity.base.errors import DataError\n"
    "from olmo_sparsity.base.progress import say\n"
    "def read(run):\n"
    "    try:\n"
    "        say('reading')\n"
    "    except Exception as error:\n"
    "        raise DataError(f'the file is damaged: {error}')\n"
    "table = types.SimpleNamespace(describe_losses=read)\n"
    "sys.modules['olmo_sparsity.training.metrics.loss_table'] = table\n"
    "from olmo_sparsity.command.cli import entry\n"
    "entry(['losses', 'run'])",
]


Failing = Callable[[BaseException], None]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Makes `losses` raise an error."""

    def raising(error: BaseException) -> None:
        monkeypatch.setattr(loss_table, "describe_losses", Mock(side_effect=error))

    return raising


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_nobody_reads_the_results(unbuffered: str) -> None:
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
        assert child.wait() == 141


@pytest.mark.skipif(not REAL_FULL_DISK.exists(), reason="no /dev/full")
def test_nobody_reads_the_messages() -> None:
    """Of a command whose messages and results go to `head`: the lost message must not become an
    error of the file that is being read."""
    with subprocess.Popen(READING, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.wait() == 141


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_the_results_is_one_line(unbuffered: str) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with REAL_FULL_DISK.open("w") as full:
        done = subprocess.run(
            PRINTING, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert done.returncode == 2
    said = r"olmo-sparsity: standard output cannot be written: No space left on device; .*\n"
    assert re.fullmatch(said, done.stderr)


HELP = "from olmo_sparsity.command.cli import entry; entry(['--help'])"


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [
        (">&-", 2, "standard output cannot be written: it is closed; .*"),
        (">/dev/full", 2, "standard output cannot be written: No space left on device; .*"),
        ("| true", 141, ""),
    ],
)
@pytest.mark.parametrize("program", [PRINTING[2], HELP], ids=["results", "help"])
def test_lost_output_is_no_success(program: str, redirected: str, code: int, said: str) -> None:
    # Two seconds, within which `true` has closed its end of the pipe.
    delayed = f"import time; time.sleep(2 * {redirected == '| true'})\n{program}"
    line = f'set -o pipefail; {sys.executable} -c "$0" {redirected}'
    done = subprocess.run(["bash", "-c", line, delayed], capture_output=True, text=True)
    assert done.returncode == code
    assert re.fullmatch(f"olmo-sparsity: {said}\n" if said else "", done.stderr)


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    path = tmp_path / "written.txt"
    program = (
        "import os, sys\n"
        "from olmo_sparsity.command.streams import prepare_streams\n"
        "prepare_streams()\n"
        "file = open(sys.argv[1], 'w')\n"
        "for number in (1, 2):\n"
        "    try: os.write(number, b'printed by a library')\n"
        "    except OSError: pass\n"
    )
    line = f'{sys.executable} -c "$0" {path} <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", line, program]).returncode == 0
    assert path.read_text() == ""


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_output_is_what_its_stream_can_show_and_no_terminal_executes(encoding: str) -> None:
    table = "\x1b[1mbold\x1b[0m é – 🙂\n\x1b]0;title\x07\x9b31m\u202eb\udcff"
    words = [word.replace("'a table'", ascii(table)) for word in PRINTING]
    done = subprocess.run(
        words, capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding}
    )
    shown = done.stdout.decode(encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert shown.startswith("\x1b[1mbold\x1b[0m ")
    assert ("é" in shown, "🙂" in shown) == (encoding != "ascii", encoding == "utf-8")
    text = shown.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert text.replace("\n", "").isprintable()
    expected = table.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert json.loads('"' + text.removesuffix("\n").replace("\n", "\\n") + '"') == expected


# --- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR2"])
def test_a_signal_stops_a_command(name: str) -> None:
    with running(WAITING, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert child.stderr.readline() == "up\n"
        child.send_signal(getattr(signal, name))
        _, error = child.communicate(timeout=60)
    assert child.returncode == 75, error
    assert error == "olmo-sparsity: stopped; the same command goes on\n"


def test_a_dry_run_that_is_stopped_starts_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_measure", stopped)
    words = ["measure", "demo", "--text", "builtin:embedded", "--out", "x"]
    assert cli.main([*words, "--dry-run"]) == 130
    assert "stopped; the same command starts again, as a dry run stores nothing" in (
        capsys.readouterr().err
    )
    assert cli.main(words) == 75
    assert "stopped; the same command goes on" in capsys.readouterr().err


def test_a_signal_before_the_command_begins_is_one_line() -> None:
    stopped = (
        "from olmo_sparsity.command import cli\n"
        "def build_parser():\n"
        "    raise KeyboardInterrupt\n"
        "cli.build_parser = build_parser\n"
        "cli.entry([])"
    )
    done = subprocess.run([sys.executable, "-c", stopped], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "olmo-sparsity: stopped\n")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_after_the_command_shows_no_traceback(name: str) -> None:
    program = (
        "import atexit, os, signal\n"
        f"atexit.register(lambda: os.kill(os.getpid(), signal.{name}))\n"
        "from olmo_sparsity.command.cli import entry\n"
        "entry(['configs'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.Signals[name], "")
    assert "c4_1b_pose" in done.stdout


# --- errors ---------------------------------------------------------------------------------------


OUT_OF_MEMORY = r"olmo-sparsity: out of memory \(.*training\.micro_batch_size.*"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nGPU 0 has …"), OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling …"), OUT_OF_MEMORY),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for …", 2), OUT_OF_MEMORY),
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
    assert re.fullmatch(said + "\n", capsys.readouterr().err)


def test_a_defect_stays_one(failing: Failing) -> None:
    failing(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["losses", "x"])
    assert not is_out_of_memory(RuntimeError("a bug"))
