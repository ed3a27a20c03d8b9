"""The check of a machine's GPUs: the cheap part of it on CPU, and that what is wrong is a row."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check, gpu_speed
from olmo_sparsity.analysis.kernels import attention
from olmo_sparsity.config.run import load_config

ROOT = Path(__file__).parents[2]


def machine_at(folder: Path, seconds: float = 60) -> Any:
    return gpu_check.Machine(folder, small=True, deadline=time.monotonic() + seconds)


def test_speed_on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["gpu_check.py", "--small", "--only", "speed", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert gpu_check.main() == 0
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    row, *of_measure = content["rows"]
    assert row["check"] == "speed, small, 1 process(es)"
    assert "tokens/s, peak not known" in row["found"]
    names = ["add_one", "gradient"]
    assert [r["check"] for r in of_measure] == [f"speed of measure, {name}" for name in names]
    assert all(re.match(r"[\d,]+ token-forwards/s", r["found"]) for r in of_measure)
    table = (tmp_path / "gpu_check.md").read_text()
    assert table.count("| yes |") == 3
    assert content["machine"]["torch"] in table


@pytest.mark.parametrize("lacks", [0, 1])
def test_what_a_fresh_clone_lacks_is_installed_with_what_training_needs(
    tmp_path: Path, lacks: int
) -> None:
    """Beside a Python that has none of it, and nothing where it has all."""
    python, words = tmp_path / ".venv/bin/python", tmp_path / "words"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit {lacks}\necho "$@" >>{words}\n')
    python.chmod(0o755)
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts/gpu_check.sh"
    script.write_bytes((ROOT / "scripts/gpu_check.sh").read_bytes())
    subprocess.run(["bash", script, "--small"], check=True)
    *installed, checked = words.read_text().splitlines()
    assert [line.endswith(" -e .[train]") for line in installed] == [True] * lacks
    assert checked == "benchmarks/gpu_check.py --small"


def test_runs_have_settings_that_exist(tmp_path: Path) -> None:
    machine = machine_at(tmp_path)
    for small in (True, False):
        machine.small, machine.facts = small, {"gpus": ["a", "b", "c"]}
        _, config, *words = map(str, machine.training("it", "--training.num_steps=7"))
        training = load_config(config, words).training
        assert training.num_steps == 7
        assert training.batch_size == (8 if small else 33)


def test_what_breaks_first_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: f"/usr/bin/{name}")
    machine = machine_at(tmp_path)
    machine.small, machine.facts = False, {"gpus": ["a", "b"]}
    assert [name for _, name, _ in gpu_check.checks(machine)] == [
        *("prepare", "train, measure, figure", "numbers", "device map", "srun, ddp"),
        *("ddp, 2 processes", "ddp, 1 process"),
        *("zero2, 2 processes", "zero2, bf16, 2 processes", "zero2, 1 process"),
        *("zero3, 2 processes", "zero3, bf16, 2 processes", "zero3, 1 process"),
        *("zero1, 2 processes", "zero1, bf16, 2 processes", "zero1, 1 process"),
        *("compiled", "kill -9 and resume"),
        *("speed, 60m", "speed, 150m", "speed, 300m", "speed, 1b", "speed of measure"),
        "speed, 1b, 2 processes",
    ]
    machine.facts = {"gpus": ["a"]}
    alone = [name for _, name, _ in gpu_check.checks(machine)]
    assert not {"device map", "srun, ddp", "speed, 1b, 1 processes"} & {*alone}
    assert {"Llama of transformers", "heads of 256"} <= gpu_check.MODELS.keys()


def test_each_check_that_follows_keeps_some_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "KEPT_S", 2)
    machine = machine_at(tmp_path, seconds=7)
    machine.num_following = 3
    started = time.monotonic()
    (row,) = gpu_check.perform(
        "it", lambda machine: machine.run("-c", "import time; time.sleep(1000)"), machine
    )
    assert row.found.startswith("took longer than 2 s")
    assert time.monotonic() - started < 7


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/gpu_check.py"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--small runs the same checks on CPU")


# --- what is wrong is a row, and the others go on -------------------------------------------------


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("raise ValueError('of the check')", "exit code 1: ValueError: of the check"),
        ("import os; print('half'); os.kill(os.getpid(), 11)", "exit code -11: half"),
    ],
)
def test_a_command_that_fails_is_a_row_with_its_last_words(
    tmp_path: Path, code: str, found: str
) -> None:
    (row,) = gpu_check.perform("it", lambda machine: machine.run("-c", code), machine_at(tmp_path))
    assert not row.holds
    assert row.found.startswith(found)


def test_a_command_finds_what_its_caller_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "of_the_caller.py").write_text("print('found')")
    assert machine_at(tmp_path).run("-c", "import of_the_caller, benchmarks") == "found\n"


def test_a_command_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "LIMIT_S", 0.5)
    hang = "import time; time.sleep(1000)"
    (row,) = gpu_check.perform("it", lambda machine: machine.run("-c", hang), machine_at(tmp_path))
    assert (row.holds, row.found[:11]) == (False, "took longer")
    assert row.seconds < 20
    (row,) = gpu_check.perform(
        "it", lambda machine: machine.run("-c", hang), machine_at(tmp_path, seconds=0)
    )
    assert row.found == "not run: no time was left"


def test_rows_that_came_before_a_crash_stay(tmp_path: Path) -> None:
    row = json.dumps({"check": "a", "holds": True, "found": "well"})
    machine = machine_at(tmp_path)
    run = machine.run
    crash = f"import os; print({row!r}, flush=True); os.kill(os.getpid(), 9)"
    machine.run = lambda *words, processes: run("-c", crash)
    first, second = gpu_check.perform("numbers", gpu_check.inside("numbers"), machine)
    assert (first.check, first.holds) == ("a", True)
    assert (second.check, second.holds) == ("numbers", False)
    assert second.found.startswith("exit code -9")


@pytest.mark.parametrize(
    ("curve", "norm", "holds"),
    [
        ([3.0, 2.0, 1.0001], 0.50001, True),
        ([3.0, 2.0, 1.01], 0.5, False),
        ([3.0, 2.0, 1.0], 0.49, False),  # as where a part of the gradient is 0
        ([3.0, 2.0, 1.0], float("nan"), False),
        ([3.0], 0.5, False),
    ],
)
def test_another_curve_fails(tmp_path: Path, curve: list[float], norm: float, holds: bool) -> None:
    machine: Any = machine_at(tmp_path)
    machine.reference = [3.0, 2.0, 1.0]
    machine.train = lambda *given, **settings: curve
    machine.logged = lambda name, what: [{"reference": 0.5, "ddp": norm}[name]]
    check: Callable = gpu_check.same_curve("ddp", 1)
    (row,) = gpu_check.perform("ddp", check, machine)
    assert row.holds == holds


@pytest.mark.parametrize(
    ("num_lines", "again", "found"),
    [
        (30, [3.0, 2.0], "killed after step 30, all 2 losses are the same to the bit"),
        (30, [3.0, 2.5], "killed after step 30, the loss of step 2 is another"),
        (0, [3.0, 2.0], "the run ended before it could be killed: exit code 0"),
    ],
)
def test_a_run_that_goes_on_otherwise_fails(
    tmp_path: Path, num_lines: int, again: list[float], found: str
) -> None:
    code = f"""
import time
open("{tmp_path}/killed/metrics.jsonl", "w").write('{{"loss": 1.0}}\\n' * {num_lines})
time.sleep({20 * num_lines})
"""
    (tmp_path / "killed").mkdir()
    machine = machine_at(tmp_path)
    machine.train = lambda name, *_: {"undisturbed": [3.0, 2.0], "killed": again}[name]
    machine.training = lambda name, *_: ("-c", code)
    (row,) = gpu_check.perform("it", gpu_check.resume, machine)
    assert (row.holds, row.found) == ("same" in found, found)


def test_numbers_that_are_wrong_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_check.asked_of

    def wrong(model: str, device: Any, dtype: str) -> Any:
        for what, found in right(model, device, dtype):
            off = dtype == "bf16" and what in (one_of_many, "add_one")
            yield what, found * (2 if off else 1)

    one_of_many = "gradient of transformer.blocks.1.q_norm.weight"
    found = [what for what, _ in islice(right("OLMo-2", torch.device("cpu"), "fp32"), 20)]
    assert found[:2] == ["loss", "loss with document masks"]
    weights = (name for name, _ in gpu_check.new_model("OLMo-2").named_parameters())
    assert found[2:] == [f"gradient of {name}" for name in weights]
    monkeypatch.setattr(gpu_check, "asked_of", wrong)
    monkeypatch.setattr(gpu_check, "MODELS", {"OLMo-2": gpu_check.MODELS["OLMo-2"]})
    *shared, row = gpu_check.compare_numbers()
    assert [other.holds for other in shared] == [True] * 4
    assert not row.holds
    assert f"{one_of_many} by 1.0" in row.found
    assert row.found.count("gradient of") == 1
    assert "add_one by 1.0" in row.found
    assert "add_one_screened" not in row.found


def test_a_kernel_that_refuses_is_a_row_and_no_memory_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> float:
        raise error

    monkeypatch.setattr(attention, "far_error", refuse)
    monkeypatch.setattr(gpu_check, "MODELS", {})
    error: Exception = RuntimeError("no kernel for this width")
    rows = list(gpu_check.compare_numbers())
    assert [row.holds for row in rows] == [False] * 4
    assert rows[0].found == "rows get copies: no kernel for this width"
    error = torch.OutOfMemoryError()
    with pytest.raises(torch.OutOfMemoryError):
        list(gpu_check.compare_numbers())


# --- gpu_speed ------------------------------------------------------------------------------------


def test_every_part_runs(tmp_path: Path) -> None:
    assert gpu_speed.main(["--small", "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {part.__name__ for part in gpu_speed.PARTS} <= {
        row["part"] for row in rows if "took_s" in row
    }
    steps = [row for row in rows if row["part"] == "step 60m"]
    assert len(steps) == len(gpu_speed.BEFORE) + 1
    for row in steps:  # what was before gives the same numbers
        found = pytest.approx(steps[0]["third_loss_and_norm"], rel=1e-5)
        assert row["third_loss_and_norm"] == found


def test_nothing_is_begun_without_time_for_it(tmp_path: Path) -> None:
    assert gpu_speed.main(["--small", "--out", str(tmp_path), "--seconds", "5"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert all("skipped" in row for row in rows)
    assert len(rows) == len(gpu_speed.PARTS)
