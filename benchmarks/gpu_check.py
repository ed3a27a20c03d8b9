"""Check on the GPUs of this machine that the numbers agree with the CPU's, that every engine trains
along the same curve, and that a killed run goes on along it. Print how fast training is.

    python benchmarks/gpu_check.py [--small] [--only numbers,compile] [--minutes 10] [--out FOLDER]

Each check runs commands in processes of their own, with a time limit. So one that fails, hangs or
crashes becomes a row of the table, and the others go on:

    | check              | holds  | found                                          | seconds |
    | ddp, 2 processes   | yes    | 20 losses within 3.1e-07 of one process, …     |      21 |
    | compiled           | **no** | took longer than 150 s                         |     150 |

The exit code is 0 if all hold, else 1. scripts/gpu_check.sh installs what is missing and runs it;
`--small` does the same on the CPU with a tiny model, where it says nothing of speed.

    main → checks, in order → Machine.run: `olmo-sparsity train`, `measure`, …
                            → Machine.run: gpu_measurements.py, which prints rows

Imports no torch, so that a PyTorch that does not start is a message, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).parents[1]

MEASUREMENTS = Path(__file__).with_name("gpu_measurements.py")
"""The program that measures inside of a process, and prints a row a line."""

GROUPS = ("pipeline", "numbers", "stages", "engines", "compile", "resume", "speed")
"""The groups of checks, for `--only`."""

GROUPS_WITHOUT_TEXT = {"numbers", "stages", "speed"}
"""Groups that read no prepared text: they draw random tokens."""

ALLOWED = {"fp32": 1e-3, "bf16": 0.05}
"""The largest relative error ‖found − expected‖ / ‖expected‖, by precision."""

COMMAND_LIMIT_S = 150
"""The time limit of a command. Compiling the largest model takes the longest."""

RESERVED_S = 15
"""The time that a check leaves to each of those that follow, so that the last ones are run, too."""

END_LIMIT_S = 40
"""How long torchrun may take to end its processes."""

NOT_RUN = "not run: no time was left"

FACTS_PROGRAM = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"gpus": gpus, "torch": torch.__version__, "cuda": torch.version.cuda}))
"""
"""A program that prints what is known of the machine."""

SMALL_MODEL = (
    "--model.d_model=32",
    "--model.n_heads=2",
    "--model.n_layers=2",
    "--training.length=32",
    "--training.batch_size=8",
    "--positions.target_length=64",
    "--evaluation.num_sequences=4",
    "--data.tokenizer.train_vocab=512",
    "--data.corpus.max_documents=300",
)
"""Settings of a run with `--small`."""

Launch = int | Literal["srun"] | None
"""How a command is started: by torchrun with this number of processes, by srun with one for each
GPU, or alone (None)."""


@dataclass
class Row:
    """A row of the table: one check, or one of several findings of a check."""

    check: str
    holds: bool
    found: str
    seconds: float = 0.0


class Failed(Exception):
    """A check does not hold. The message says why in one line."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output
        """All that the command printed."""


Check = Callable[["Machine"], Iterator[Row] | str]
"""Returns what was found, for a row that holds, or yields rows. Raises Failed for a row that does
not."""


class NamedCheck(NamedTuple):
    """A check with its name in the table."""

    group: str
    """One of `GROUPS`; empty for the preparation of text, which most groups need."""

    name: str
    check: Check


# --- all checks, one after the other --------------------------------------------------------------


def main() -> int:
    """Run the checks that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--small", action="store_true", help="on CPU, with a tiny model")
    parser.add_argument("--out", type=Path, default=ROOT / "results/gpu_check")
    parser.add_argument("--only", default=",".join(GROUPS), help="(%(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it (%(default)s)")
    options = parser.parse_args()
    groups = set(options.only.split(","))
    if not groups <= set(GROUPS):
        parser.error(f"--only: choose from {', '.join(GROUPS)}")

    folder = Path(tempfile.mkdtemp(prefix="gpu_check-"))
    machine = Machine(folder, options.small, time.monotonic() + 60 * options.minutes)
    try:
        machine.facts = json.loads(machine.run("-c", FACTS_PROGRAM).splitlines()[-1])
        if not machine.facts["gpus"] and not options.small:
            parser.error("PyTorch sees no GPU here; --small runs the same checks on CPU")
        rows = perform_all(choose_checks(machine, groups), machine, options.out)
    except Failed as error:
        parser.error(f"PyTorch does not start: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    num_failed = sum(not row.holds for row in rows)
    print(f"{len(rows) - num_failed} of {len(rows)} hold; {options.out / 'gpu_check.md'}")
    return int(num_failed > 0)


def choose_checks(machine: Machine, groups: set[str]) -> list[NamedCheck]:
    """Return the checks of these groups, in order, and before them what they need."""
    needs_text = bool(groups - GROUPS_WITHOUT_TEXT)
    return [
        named
        for named in list_checks(machine)
        if named.group in groups or (not named.group and needs_text)
    ]


def perform_all(named_checks: list[NamedCheck], machine: Machine, out: Path) -> list[Row]:
    """Run checks one after the other, and return their rows."""
    rows: list[Row] = []
    for index, named in enumerate(named_checks, start=1):
        machine.num_following = len(named_checks) - index
        rows += perform(named, machine)
        # After each check: whoever ends the program keeps what is known so far.
        write_report(rows, machine.facts, out)
    return rows


def perform(named: NamedCheck, machine: Machine) -> list[Row]:
    """Run a check, print its rows and return them."""
    started = time.monotonic()
    rows: list[Row] = []
    try:
        found = named.check(machine)
        if isinstance(found, str):
            rows.append(Row(named.name, True, found))
        else:
            rows.extend(found)  # rows before an error stay
    except Exception as error:  # a defect of a check is a row, too
        reason = str(error) if isinstance(error, Failed) else repr(error)
        rows.append(Row(named.name, False, reason))
    for row in rows:
        row.seconds = round((time.monotonic() - started) / len(rows), 1)
        print(f"{'holds ' if row.holds else 'FAILED'} {row.check}: {row.found}", flush=True)
    return rows


def write_report(rows: Iterable[Row], facts: dict[str, Any], out: Path) -> None:
    """Write the rows into the folder `out`, as JSON and as a table."""
    out.mkdir(parents=True, exist_ok=True)
    content = {"machine": facts, "rows": [asdict(row) for row in rows]}
    (out / "gpu_check.json").write_text(json.dumps(content, indent=1) + "\n")

    lines = ["| check | holds | found | seconds |", "| --- | --- | --- | ---: |"]
    for row in rows:
        cells = [row.check, "yes" if row.holds else "**no**", row.found, f"{row.seconds:.0f}"]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    described_machine = ", ".join(f"{name} {value}" for name, value in facts.items())
    (out / "gpu_check.md").write_text("\n".join([described_machine, "", *lines]) + "\n")


# --- the checks -----------------------------------------------------------------------------------


def list_checks(machine: Machine) -> Iterator[NamedCheck]:
    """Yield all checks of this machine. What breaks first comes first."""
    num_processes = machine.num_processes
    yield NamedCheck("", "prepare", prepare_text)
    yield NamedCheck("pipeline", "train, measure, figure", check_pipeline)
    yield NamedCheck("numbers", "numbers", measured_inside("numbers"))

    has_srun = "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None
    if num_processes > 1 and not machine.is_small and has_srun:
        yield NamedCheck("engines", "srun, ddp", same_curve("srun", "srun", "--engine.name=ddp"))
    for engine in ("zero1", "zero2", "zero2, compiled", "zero3"):
        name = f"stages of {engine}"
        yield NamedCheck("stages", name, measured_inside(name, num_processes=1))
    yield from _list_engines(num_processes, machine.is_small)

    compiled = same_curve("compiled", None, "--training.compile=true")
    yield NamedCheck("compile", "compiled", compiled)
    yield NamedCheck("resume", "kill -9 and resume", check_resume)

    for size in ["small"] if machine.is_small else ["60m", "150m", "300m", "1b"]:
        yield NamedCheck("speed", f"speed, {size}", measured_inside(size))
    of_measure = measured_inside("small_measure" if machine.is_small else "measure")
    yield NamedCheck("speed", "speed of measure", of_measure)
    if num_processes > 1 and not machine.is_small:
        name = f"speed, 1b, {num_processes} processes"
        yield NamedCheck("speed", name, measured_inside("1b", num_processes))


def _list_engines(num_processes: int, is_small: bool) -> Iterator[NamedCheck]:
    """Yield a check of each engine: on one process and on all, and in bf16 for engines that divide
    weights or gradients."""
    # On the CPU one process is left out, which would take as long again.
    counts = [num_processes] if is_small else sorted({1, num_processes}, reverse=True)
    for engine in ("ddp", "fsdp", "zero2", "zero3", "zero1"):
        option = f"--engine.name={engine}"
        divides_states = engine.startswith(("fsdp", "zero"))
        for count in counts:
            processes = f"{count} process{'es' * (count > 1)}"
            check = same_curve(f"{engine}-{count}", count, option)
            yield NamedCheck("engines", f"{engine}, {processes}", check)
            if divides_states and count == num_processes and not is_small:
                in_bf16 = (option, "--training.precision=bf16")
                check = same_curve(f"{engine}-{count}-bf16", count, *in_bf16)
                yield NamedCheck("engines", f"{engine}, bf16, {processes}", check)


def prepare_text(machine: Machine) -> str:
    """Write the token shards that trainings read. Return the line with their sizes."""
    words = [word for word in machine.training_words("run") if str(word).startswith("--data.")]
    output = machine.run("-m", "olmo_sparsity", "prepare", "configs/quick.yaml", *words)
    sizes = next(line for line in output.splitlines() if "heldout" in line)
    return sizes.partition(": ")[2]


def check_pipeline(machine: Machine) -> str:
    """Train in the hardware's own precision, measure, and draw."""
    num_steps = 20 if machine.is_small else 200
    settings = (f"--training.num_steps={num_steps}", "--training.precision=auto")
    losses = machine.train("pipeline", *settings)

    results = machine.folder / "results"
    windows = ("--long=48", "--short=16") if machine.is_small else ("--long=128", "--short=32")
    machine.run(
        *("-m", "olmo_sparsity", "measure", machine.folder / "pipeline", "--quick"),
        *("--out", results, *windows, "--stride=16", "--max-documents=16", "--min-gap=0"),
        *("--ks=1,4", "--share=top5%"),
    )
    figure = machine.folder / "figure2.png"
    machine.run("-m", "olmo_sparsity", "figure", results, "--out", figure)

    change = f"the loss went from {losses[0]:.2f} to {losses[-1]:.2f} in {num_steps} steps"
    if not losses[-1] < losses[0]:
        raise Failed(change)
    return f"{change}; the figure has {figure.stat().st_size:,} bytes"


def same_curve(run_name: str, launch: Launch, *settings: str) -> Check:
    """Return a check that a run with these settings has the losses of the reference: one process,
    not compiled."""
    allowed = ALLOWED["bf16" if "--training.precision=bf16" in settings else "fp32"]

    def check(machine: Machine) -> str:
        expected_losses = machine.reference_losses
        losses = machine.train(run_name, *settings, launch=launch)
        errors = [
            abs(loss - expected) / expected
            for loss, expected in zip(losses, expected_losses, strict=True)
        ]
        # A gradient that lacks a part changes losses late and by little, so its norm is compared.
        norm = machine.read_metric(run_name, "gradient_norm")[0]
        expected_norm = machine.read_metric("reference", "gradient_norm")[0]
        error_of_norm = abs(norm - expected_norm) / expected_norm

        found = (
            f"{len(losses)} losses within {max(errors):.1e} of one process, the first "
            f"gradient's norm within {error_of_norm:.1e}, relative"
        )
        # NaN fails this comparison, and would pass one by `max`.
        if not all(error <= allowed for error in (*errors, error_of_norm)):
            raise Failed(f"{found}; {allowed} is allowed")
        return found

    return check


def check_resume(machine: Machine) -> str:
    """Kill a run after some 25 of 100 steps, resume it, and compare all losses with those of a run
    that was not killed: to the bit, with deterministic kernels."""
    settings = ("--training.num_steps=100", "--training.deterministic=true")
    expected_losses = machine.train("undisturbed", *settings)

    child = machine.start(*machine.training_words("killed", *settings))
    try:
        while child.poll() is None and len(machine.read_metric("killed")) < 25:
            if time.monotonic() > machine.deadline:
                raise Failed(NOT_RUN)
            time.sleep(0.005)
    finally:
        kill(child)
    num_before_kill = len(machine.read_metric("killed"))
    if child.returncode != -signal.SIGKILL:
        raise Failed(f"the run ended before it could be killed: exit code {child.returncode}")

    losses = machine.train("killed", *settings)
    steps = enumerate(zip(losses, expected_losses, strict=True), start=1)
    changed_steps = [step for step, (loss, expected) in steps if loss != expected]
    if changed_steps:
        first = changed_steps[0]
        raise Failed(f"killed after step {num_before_kill}, the loss of step {first} is another")
    return f"killed after step {num_before_kill}, all {len(losses)} losses are the same to the bit"


def measured_inside(subject: str, num_processes: int | None = None) -> Check:
    """Return a check that gpu_measurements.py makes in a process of its own. `subject`: what it
    measures, as `measurement_of` there takes it."""

    def check(machine: Machine) -> Iterator[Row]:
        words = (MEASUREMENTS, subject, machine.folder)
        try:
            yield from read_rows(machine.run(*words, launch=num_processes))
        except Failed as error:
            yield from read_rows(error.output)  # those before the failure
            stages = re.findall(r"^stage: (.*)$", error.output, re.M)
            place = f"in stage '{stages[-1]}'{frames_in(error.output)}: " if stages else ""
            raise Failed(f"{place}{error}", error.output) from None

    return check


# --- what commands print --------------------------------------------------------------------------


def read_rows(output: str) -> Iterator[Row]:
    """Yield the rows that gpu_measurements.py has printed, among lines of libraries."""
    for line in output.splitlines():
        if line.startswith('{"check"'):
            yield Row(**json.loads(line))


def frames_in(output: str) -> str:
    """Return the calls in which the main thread was, from a stack that faulthandler wrote, such as
    `, in losses.forward < steps.take`. Return an empty text if there is no stack."""
    main_thread = output.rpartition("(most recent call first)")[2]  # faulthandler writes it last
    frames = re.findall(r'File "(\S+)", line \d+ in (\S+)', main_thread)
    calls = " < ".join(f"{Path(file).stem}.{function}" for file, function in frames[:6])
    return f", in {calls}" if calls else ""


def last_error_in(output: str) -> str:
    """Return the last line with an error, or else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or line.startswith("olmo-sparsity:")]
    candidates = errors or lines or ["it said nothing"]
    return candidates[-1][:300]


# --- the machine ----------------------------------------------------------------------------------


@dataclass
class Machine:
    """Runs commands of the project, within the time that all checks have together."""

    folder: Path
    """A folder for text, runs and results, which is removed at the end."""

    is_small: bool
    """Whether all runs on the CPU, with a tiny model."""

    deadline: float
    """The end of the time, by `time.monotonic`."""

    num_following: int = 0
    """The number of checks after the one that runs."""

    facts: dict[str, Any] = field(default_factory=dict)
    """The machine and its versions, as `FACTS_PROGRAM` prints them."""

    @property
    def num_processes(self) -> int:
        """Return the number of GPUs, or 2 on the CPU."""
        return 2 if self.is_small else len(self.facts["gpus"])

    @cached_property
    def reference_losses(self) -> list[float]:
        """Return the losses of one process, not compiled, which is trained at the first use."""
        return self.train("reference")

    def train(self, run_name: str, *settings: str, launch: Launch = None) -> list[float]:
        """Train configs/quick.yaml with these settings, and return the loss of each step."""
        # Below `COMMAND_LIMIT_S`, so that a run that hangs writes its stacks before it is killed.
        limits = ("--engine.work_timeout_s=100", "--engine.step_timeout_s=60")
        try:
            self.run(*self.training_words(run_name, *limits, *settings), launch=launch)
        except Failed as error:
            stacks = sorted((self.folder / run_name / "stacks").rglob("process*.txt"))
            place = frames_in(stacks[0].read_text()) if stacks else ""
            raise Failed(f"{error}{place}", error.output) from None
        return self.read_metric(run_name)

    def training_words(self, run_name: str, *settings: str) -> list[object]:
        """Return the words that train 20 steps in fp32, unless the settings say otherwise."""
        # 32 sequences, rounded up so that all processes get as many.
        batch_size = -(-32 // self.num_processes) * self.num_processes
        sizes = SMALL_MODEL if self.is_small else (f"--training.batch_size={batch_size}",)
        return [
            ROOT / "scripts/train.py",
            ROOT / "configs/quick.yaml",
            *sizes,
            f"--data.folder={self.folder / 'data'}",
            f"--run_folder={self.folder / run_name}",
            "--training.num_steps=20",
            "--training.precision=fp32",
            "--logging.interval_steps=1",
            "--checkpoint.interval_steps=10",
            *settings,
        ]

    def read_metric(self, run_name: str, key: str = "loss") -> list[float]:
        """Return a metric of each step that a run has logged; none if it has not begun."""
        path = self.folder / run_name / "metrics.jsonl"
        values: list[float] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            # A line may be half written, or of an evaluation, which has no such key.
            with contextlib.suppress(ValueError, KeyError):
                values.append(json.loads(line)[key])
        return values

    def run(self, *words: object, launch: Launch = None) -> str:
        """Return what a command prints. Raise Failed if it fails or takes too long."""
        left_s = self.deadline - time.monotonic()
        # What the following checks need is kept for them; but at least `RESERVED_S` are its own.
        own_s = max(left_s - RESERVED_S * self.num_following, min(left_s, RESERVED_S))
        limit_s = min(COMMAND_LIMIT_S, own_s)
        if limit_s <= 0:
            raise Failed(NOT_RUN)
        child = self.start(*words, launch=launch)
        try:
            output, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            # torchrun ends its processes, which have left our process group.
            child.terminate()
            output = ""
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = child.communicate(timeout=END_LIMIT_S)
            raise Failed(f"took longer than {limit_s:.0f} s", output) from None
        finally:
            kill(child)
        if child.returncode != 0:
            reason = f"exit code {child.returncode}: {last_error_in(output)}"
            raise Failed(reason, output)
        return output

    def start(self, *words: object, launch: Launch = None) -> subprocess.Popen[str]:
        """Start Python with these words, in one process or several."""
        program = [sys.executable, *map(str, words)]
        if launch == "srun":
            # --overlap: the job's own step already has its cores.
            step = ("--overlap", "--nodes=1", f"--ntasks={self.num_processes}")
            command = ["srun", *step, *program]
        elif launch is not None:
            launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={launch}")
            command = [sys.executable, *launcher, *map(str, words)]
        else:
            command = program

        # The caller's own path stays: packages may be installed there.
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        if self.is_small:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group, which `kill` ends as a whole
        )


def kill(child: subprocess.Popen[str]) -> None:
    """End a command with all processes that it has started, if they still run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


if __name__ == "__main__":
    sys.exit(main())
