"""Train every run of a sweep, here or as a SLURM array: all configs × all choices of a grid, as in
configs/sweeps. A run's state is read from its folder alone. In a value, `{seed}` is replaced by the
axis's part of the run's name (seed1), so that a sweep can start from the runs of another."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olmo_sparsity.base.errors import ConfigError, ReportedElsewhere, UserError
from olmo_sparsity.base.files import read_bounded, write_atomically
from olmo_sparsity.base.folders import holder
from olmo_sparsity.base.launch import EXIT_STOPPED, STOP_SIGNALS, handling
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.run import flatten, load_config
from olmo_sparsity.config.schema import find_config, load
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.run_folder import is_work_of, read_metrics

if TYPE_CHECKING:
    from olmo_sparsity.training.estimate import Hardware


@dataclass(frozen=True)
class State:
    name: str
    """done, running, failed or waiting."""

    step: int = 0
    detail: str = ""


@dataclass
class SweepConfig:
    folder: str = ""
    configs: list[str] = field(default_factory=list)
    grid: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A training run, which locks its folder while it runs."""

    name: str
    folder: Path
    num_steps: int
    config: str
    overrides: list[str]
    settings: RunConfig

    @property
    def text(self) -> str:
        """The command, for display."""
        return shlex.join(["olmo-sparsity", "train", self.config, *self.overrides])

    @property
    def note(self) -> Path:
        """A file next to the folder with the error message of the last failure."""
        return self.folder.with_name(self.folder.name + ".failed")

    def state(self) -> State:
        if not is_work_of(self.folder, flatten(self.settings)):
            return State("failed", 0, f"{self.folder} holds work with other settings")
        saved = next((int(path.name[4:]) for path in list_checkpoints(self.folder)), 0)
        logged = (row["step"] for row in read_metrics(self.folder / "metrics.jsonl"))
        if saved >= self.num_steps:
            return State("done", saved)
        owner, alive = holder(self.folder)
        if owner is not None:
            where = f"on {owner.host}" + (f", job {owner.slurm_job}" if owner.slurm_job else "")
            name, detail = ("running", where) if alive else ("failed", f"died {where}")
            return State(name, max(logged, default=0), detail)
        if self.note.is_file():
            note = read_bounded(self.note).decode(errors="replace")
            return State("failed", max(logged, default=0), " ".join(note.split()))
        return State("waiting", saved)


def expand(path: str, overrides: list[str]) -> list[Run]:
    """The runs of a grid, in order, with checked configs. Overrides apply to all of them."""
    sweep = load(SweepConfig, path)
    if not sweep.folder or not sweep.configs:
        raise ConfigError(f"{path}: a sweep needs `folder` and `configs`")
    runs = []
    for name in sweep.configs:
        config = os.path.relpath(find_config(name, find_config(path)))
        for labels, values in expand_grid(f"{path}: grid", sweep.grid):
            names = {axis: _part(axis, sweep.grid[axis], label) for axis, label in labels.items()}
            parts = [as_name(Path(name).stem), *filter(None, names.values())]
            folder = Path(sweep.folder) / "_".join(parts)
            chosen = [_name_axes(f"--{key}={value}", names) for key, value in values.items()]
            words = [*chosen, *overrides, f"--run_folder={folder}"]
            settings = load_config(config, words)
            num_steps = settings.training.num_steps
            runs.append(Run(folder.name, folder, num_steps, config, words, settings))
    for name, count in Counter(run.name for run in runs).items():
        if count > 1:
            raise ConfigError(f"{path}: {count} runs would be called {name}; rename a choice")
    return runs


def expand_grid(
    where: str, grid: dict[str, Any]
) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """All choices of all axes, in order: what is chosen of each axis, and the keys that it sets.
    An axis is a key and its values, or a name and named sets of keys."""
    for axis, values in grid.items():
        named = isinstance(values, dict) and all(isinstance(k, dict) for k in values.values())
        if not values or not (named or isinstance(values, list)):
            raise ConfigError(f"{where}.{axis} must be a list of values, or named sets of keys")
    axes = [
        [(str(label), keys) for label, keys in values.items()]
        if isinstance(values, dict)
        else [(_as_text(value), {axis: value}) for value in values]
        for axis, values in grid.items()
    ]
    for chosen in itertools.product(*axes):
        labels = {axis: label for axis, (label, _) in zip(grid, chosen, strict=True)}
        yield labels, {key: _as_text(value) for _, keys in chosen for key, value in keys.items()}


def _part(axis: str, values: Any, label: str) -> str:
    """The part of a run's name that says what is chosen of an axis."""
    if isinstance(values, dict):
        return as_name(label)
    return as_name(axis.rsplit(".", 1)[-1] + label) if len(values) > 1 else ""


def as_name(label: str) -> str:
    return re.sub(r"[^\w.+-]", "-", label)


def _name_axes(word: str, names: dict[str, str]) -> str:
    return re.sub(r"\{([^{}]+)\}", lambda match: names.get(match[1], match[0]), word)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def format_states(runs: Sequence[Run]) -> str:
    states = [run.state() for run in runs]
    width = max(len(run.name) for run in runs)
    lines = [
        f"{run.name:<{width}}  {state.name:<8}{state.step:>9,}/{run.num_steps:<9,} {state.detail}"
        for run, state in zip(runs, states, strict=True)
    ]
    counts = Counter(state.name for state in states)
    total = ", ".join(f"{counts[name]} {name}" for name in ("done", "running", "failed", "waiting"))
    return "\n".join([*(line.rstrip() for line in lines), f"{len(runs)} runs: {total}"])


def format_costs(runs: Sequence[Run], hardware: Hardware | None) -> str:
    """Return what each unfinished run costs, and their sum."""
    from olmo_sparsity.training.estimate import gpu_hours
    from olmo_sparsity.training.start import cost_of

    lines, hours = [], 0.0
    todo = [run for run in runs if run.state().name != "done"]
    for run in todo:
        config, on, cost = cost_of(run.settings, hardware)
        tokens, folder = cost["tokens in all"].split(" in "), cost["disk"].rpartition(", ")[2]
        size = f"{cost['parameters']} parameters, {tokens[0]} tokens in {tokens[1]}"
        price = cost.get("time", f"{cost['FLOPs in all']} FLOPs")
        lines.append(f"{run.name}: {size}; {price}; {folder}")
        hours += gpu_hours(config, on) if "time" in cost else 0.0
    price = f"{hours:,.3g} GPU-hours (predicted)" if hours else "pass --gpus N --gpu NAME for hours"
    if hardware is not None and hardware.price is not None:
        price += f", {hours * hardware.price:,.2f} at {hardware.price:g} a GPU-hour"
    return "\n".join([*lines, f"{len(todo)} of {len(runs)} runs to train: {price}"])


@contextlib.contextmanager
def recording_failure(run: Run) -> Iterator[None]:
    """Write the note of a run that fails inside."""
    run.note.unlink(missing_ok=True)
    try:
        yield
    except ReportedElsewhere:
        raise
    except Exception as error:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(run.note, str(error) or type(error).__name__)
        raise


def run_here(path: str, overrides: list[str], runs: Sequence[Run]) -> int:
    """Run the unfinished runs one after the other, each in its own process."""
    failed = []
    for number, run in enumerate(runs):
        if run.state().name in ("done", "running"):
            continue
        say(f"{run.name}: {run.text}")
        words = ["sweep", path, f"--only={number}", *overrides]
        code, stopped = run_process([sys.executable, "-P", "-m", "olmo_sparsity", *words])
        if stopped:
            return EXIT_STOPPED
        if code != 0:
            failed.append(run.name)
    print(format_states(runs))
    if failed:
        raise UserError(f"{', '.join(failed)}: failed; the same command tries again")
    return 0


def run_process(command: Sequence[str]) -> tuple[int, bool]:
    """Run a command. Return its exit code, and whether it or this process got a signal to stop: it
    may have ended well all the same."""
    child: subprocess.Popen | None = None
    signals, early = [], []

    def pass_on(number: int, _: object) -> None:
        signals.append(number)
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    with handling(STOP_SIGNALS, pass_on):
        # In its own process group, or Ctrl-C would reach it twice, and the second kills it.
        child = subprocess.Popen(command, process_group=0)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    return code, bool(signals) or code == EXIT_STOPPED


def submit(path: str, overrides: list[str], runs: Sequence[Run], flags: str) -> int:
    """Submit the runs that are neither done nor running as one SLURM array."""
    script = Path("slurm/train.sbatch")
    if not script.exists():
        raise ConfigError(f"{script} is not here; submit from the root of olmo-sparsity")
    todo = [str(i) for i, run in enumerate(runs) if run.state().name not in ("done", "running")]
    if not todo:
        print(format_states(runs))
        return 0
    words = ["sbatch", *shlex.split(flags), f"--array={','.join(todo)}", str(script), path]
    words += overrides
    say(shlex.join(words))
    try:
        done = subprocess.run(words)
    except FileNotFoundError:
        raise ConfigError("sbatch is not here; leave --slurm out to run one by one") from None
    if done.returncode != 0:
        raise UserError(f"sbatch ended with {done.returncode}; nothing is submitted")
    return 0
