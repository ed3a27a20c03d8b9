"""Many runs from one small file: every config × every choice of every axis of a grid.

Place in the flow: beside the command line; each run is an ordinary `olmo-sparsity train` into its
own folder. How they stand is read from those folders alone, so it does not matter who ran them,
where, or how often they were stopped.

    folder: runs/pose_pays                 # every run gets a folder in here
    configs: [../quick.yaml]               # as seen from this file
    grid:
      seed: [1, 2, 3]                      # an axis: a key and its values …
      scheme:                              # … or a name and named sets of keys
        pose: {}
        rope: {positions.scheme: contiguous, positions.target_length: null}

In a value, `{seed}` stands for what that axis adds to the run's name (seed1), so that a sweep can
begin where another ended: `init_from: ["runs/school/quick_{seed}"]`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olmo_sparsity.config_file import fill_in, load_config, read_given
from olmo_sparsity.errors import ConfigError, DataError, SaidElsewhere, UserError
from olmo_sparsity.files import write_atomically
from olmo_sparsity.json_files import read_json
from olmo_sparsity.model.checkpoint_files import list_checkpoints
from olmo_sparsity.progress import say
from olmo_sparsity.training.run_folder import read_metrics

EXIT_STOPPED = 75
SILENT_S = 900
"""A run on another machine that has not logged for so long is taken for dead."""


@dataclass
class SweepConfig:
    folder: str = ""
    configs: list[str] = field(default_factory=list)
    grid: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    name: str
    config: str
    overrides: list[str]
    folder: Path
    num_steps: int

    @property
    def note(self) -> Path:
        """Beside the run's folder: what was wrong when it last ended badly."""
        return self.folder.with_name(self.folder.name + ".failed")

    @property
    def command(self) -> str:
        return shlex.join(["olmo-sparsity", "train", self.config, *self.overrides])


@dataclass(frozen=True)
class State:
    name: str
    """done, running, failed or waiting."""

    step: int = 0
    detail: str = ""


# --- from the grid to runs ------------------------------------------------------------------------


def expand(path: str, overrides: list[str]) -> list[Run]:
    """The runs of a grid, in order; each config is checked. Overrides are for all of them."""
    sweep = fill_in(SweepConfig, read_given(path), path)
    if not sweep.folder or not sweep.configs:
        raise ConfigError(f"{path}: a sweep needs `folder` and `configs`")
    axes = [_choices(path, axis, values) for axis, values in sweep.grid.items()]
    runs = []
    for name in sweep.configs:
        config = os.path.relpath(Path(path).parent / name)
        for choices in itertools.product(*axes):
            labels = {
                axis: _as_name(label) for axis, (label, _) in zip(sweep.grid, choices, strict=True)
            }
            parts = [_as_name(Path(name).stem), *filter(None, labels.values())]
            folder = Path(sweep.folder) / "_".join(parts)
            chosen = [_name_axes(word, labels) for _, words in choices for word in words]
            words = [*chosen, *overrides, f"--run_folder={folder}"]
            num_steps = load_config(config, words).training.num_steps
            runs.append(Run(folder.name, config, words, folder, num_steps))
    for name, count in Counter(run.name for run in runs).items():
        if count > 1:
            raise ConfigError(
                f"{path}: {count} runs would be called {name}; rename a config or choice"
            )
    return runs


def _choices(path: str, axis: str, values: Any) -> list[tuple[str, list[str]]]:
    """Of one axis: what each choice adds to a run's name, and to its command."""
    if isinstance(values, list) and values:
        leaf = axis.rsplit(".", 1)[-1]
        labels = [f"{leaf}{_text(value)}" if len(values) > 1 else "" for value in values]
        return [
            (label, [f"--{axis}={_text(value)}"])
            for label, value in zip(labels, values, strict=True)
        ]
    if isinstance(values, dict) and all(isinstance(keys, dict) for keys in values.values()):
        return [
            (str(label), [f"--{key}={_text(value)}" for key, value in keys.items()])
            for label, keys in values.items()
        ]
    raise ConfigError(
        f"{path}: grid.{axis} must be a list of values, or names each with `key: value` pairs"
    )


def _as_name(label: str) -> str:
    return re.sub(r"[^\w.+-]", "-", label)


def _name_axes(word: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{([^{}]+)\}", lambda found: labels.get(found[1], found[0]), word)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# --- how they stand -------------------------------------------------------------------------------


def state_of(run: Run) -> State:
    saved = next((int(path.name[4:]) for path in list_checkpoints(run.folder)), 0)
    if saved >= run.num_steps:
        return State("done", saved)
    logged = [row["step"] for row in read_metrics(run.folder / "metrics.jsonl")]
    step = max(logged, default=0)
    if (run.folder / "attempts.json").exists():  # there while it runs, and after it died
        alive, where = _heartbeat(run.folder)
        return State("running", step, where) if alive else State("failed", step, f"died {where}")
    if run.note.exists():
        return State("failed", step, run.note.read_text())
    return State("waiting", saved)


def _heartbeat(folder: Path) -> tuple[bool, str]:
    start: dict = {}
    with contextlib.suppress(DataError, IndexError):
        start = read_json(folder / "environment.json", list[dict], "")[-1]
    host, pid, job = start.get("host"), start.get("pid"), start.get("slurm_job")
    where = f"on {host}" + (f", job {job}" if job else "")
    if host == socket.gethostname() and pid is not None:
        return Path(f"/proc/{pid}").exists(), where
    times = [path.stat().st_mtime for path in folder.glob("*.json*")]
    return time.time() - max(times, default=0) < SILENT_S, where


def format_states(runs: list[Run]) -> str:
    states = [state_of(run) for run in runs]
    width = max(len(run.name) for run in runs)
    lines = [
        f"{run.name:<{width}}  {state.name:<8}{state.step:>9,}/{run.num_steps:<9,} {state.detail}"
        for run, state in zip(runs, states, strict=True)
    ]
    counts = Counter(state.name for state in states)
    told = ", ".join(f"{counts[name]} {name}" for name in ("done", "running", "failed", "waiting"))
    return "\n".join([*(line.rstrip() for line in lines), f"{len(runs)} runs: {told}"])


# --- running them ---------------------------------------------------------------------------------


@contextlib.contextmanager
def noting_failure(run: Run) -> Iterator[None]:
    """Around the training of one run, in its process: `state_of` reads what is left here."""
    run.note.unlink(missing_ok=True)
    try:
        yield
    except SaidElsewhere:
        raise
    except Exception as error:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(run.note, str(error) or type(error).__name__)
        raise


def run_here(path: str, overrides: list[str], runs: list[Run]) -> int:
    """All that are not done, one after the other, each in a process of its own."""
    failed = []
    for number, run in enumerate(runs):
        if state_of(run).name in ("done", "running"):
            continue
        say(f"{run.name}: {run.command}")
        words = ["sweep", path, f"--only={number}", *overrides]
        code = _run([sys.executable, "-m", "olmo_sparsity.cli", *words])
        if code == EXIT_STOPPED:
            return EXIT_STOPPED
        if code != 0:
            failed.append(run.name)
    print(format_states(runs))
    if failed:
        raise UserError(f"{', '.join(failed)}: failed; the same command tries again")
    return 0


def _run(command: list[str]) -> int:
    # In a process group of its own, or Ctrl-C would reach it twice: the second is not for saving.
    with subprocess.Popen(command, process_group=0) as child:
        names = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
        before = {
            name: signal.signal(name, lambda number, _: child.send_signal(number)) for name in names
        }
        try:
            return child.wait()
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)


def submit(path: str, overrides: list[str], runs: list[Run], flags: str) -> int:
    """All that are neither done nor running, as an array of SLURM."""
    script = Path("slurm/train.sbatch")
    if not script.exists():
        raise ConfigError(f"{script} is not here; submit from the root of olmo-sparsity")
    todo = [i for i, run in enumerate(runs) if state_of(run).name not in ("done", "running")]
    if not todo:
        print(format_states(runs))
        return 0
    array = f"--array={','.join(map(str, todo))}"
    command = ["sbatch", *shlex.split(flags), array, str(script), path, *overrides]
    say(shlex.join(command))
    try:
        return subprocess.run(command).returncode
    except FileNotFoundError:
        raise ConfigError("sbatch is not here; leave --slurm out to run one by one") from None
