"""Read and write the files of a run folder: config, environment and metrics.

Place in the flow: written by training/loop.py, next to its checkpoints.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olmo_sparsity.config.run import flatten, load_saved_config, save_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.text import SCALING_FIELDS
from olmo_sparsity.conform import conform, parse_json, with_crc
from olmo_sparsity.errors import ConfigError, DataError, UserError
from olmo_sparsity.folders import WorkFolder, differences, refuse_changes
from olmo_sparsity.io import naming, read_bounded, read_json, write_atomically, writing
from olmo_sparsity.model.checkpoint_files import list_checkpoints
from olmo_sparsity.runtime import device_name, provenance, say, typed_command
from olmo_sparsity.training.checkpoint import refuse_other_metrics, step_of
from olmo_sparsity.training.sinks import Sink

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# A resumed run may differ in these: they change what is written, or what computes it, and not the
# weights, except for rounding and (engine, micro_batch_size) the masks of dropout.
FREE_KEYS = (
    "run_folder",
    "logging",
    "checkpoint",
    "evaluation",
    "engine",
    "data.folder",
    "training.deterministic",
    "training.device",
    "training.micro_batch_size",
)

# What the tokenizer sets when a run starts.
RESOLVED_KEYS: tuple[str, ...] = (
    "model.vocab_size",
    "model.embedding_size",
    "model.eos_token_id",
    "model.pad_token_id",
)


@contextmanager
def open_run_folder(config: RunConfig) -> Iterator[Path]:
    """Create the folder, or check that it holds the same run, and lock it."""
    folder = WorkFolder(Path(config.run_folder), "run_folder", "config.yaml")
    with folder.opened("checkpoints"):
        work = (folder.path / "metrics.jsonl", *(folder.path / "checkpoints").iterdir())
        # A start that was rejected before its first step has nothing to lose.
        if folder.identity.exists() and any(path.exists() for path in work):
            refuse_other_config(folder.identity, config)
            _refuse_other_evaluation(folder.identity, config)
        save_config(config, folder.identity)
        yield folder.path


def refuse_other_config(path: Path, config: RunConfig) -> None:
    settings = _settings(path, config, lambda key: not key.startswith(FREE_KEYS))
    refuse_changes(str(path.parent), differences(*settings))


def is_work_of(config: RunConfig) -> bool:
    """Whether what is in its folder, if anything, may be of this config, which is not resolved."""
    path, free = Path(config.run_folder) / "config.yaml", (*FREE_KEYS, *RESOLVED_KEYS)
    free = (*free, "training.precision") if config.training.precision == "auto" else free
    settings = path.exists() and _settings(path, config, lambda key: not key.startswith(free))
    return not settings or not differences(*settings)


def _refuse_other_evaluation(path: Path, config: RunConfig) -> None:
    """Result of a finished run, which evaluates nothing more."""
    last = max(map(step_of, list_checkpoints(path.parent)), default=0)
    changed = differences(*_settings(path, config, lambda key: key.startswith("evaluation.")))
    if changed and last == config.training.num_steps:
        raise ConfigError(
            f"{path.parent} is finished, and was evaluated with {', '.join(changed)}; set it as it "
            "was, or train in another run_folder"
        )


def refuse_other_branch(path: Path, config: RunConfig) -> None:
    """A branch may change everything except the model and the order of the text."""
    fixed = {"seed", "training.length", "training.batch_size"}
    fixed |= {f"positions.{name}" for name in SCALING_FIELDS}
    free = "model.max_sequence_length"
    settings = _settings(
        path,
        config,
        lambda key: key.split("[")[0] in fixed or (key.startswith("model.") and key != free),
    )
    if changed := differences(*settings):
        raise ConfigError(
            f"branch_from={path.parent} was trained with {', '.join(changed)}; a branch goes on "
            "with the same model in the same text: set them as they were, or take the weights with "
            "init_from"
        )


def _settings(path: Path, config: RunConfig, counts: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Return the settings that count, from the file and from now."""
    return [
        {key: value for key, value in flatten(settings).items() if counts(key)}
        for settings in (load_saved_config(path), config)
    ]


# --- environment.json -----


def describe_environment(
    run_folder: Path, engine: dict[str, Any], device: torch.device, resumed_at: int
) -> None:
    import torch

    path = run_folder / "environment.json"
    entries = read_json(path, list[dict], "delete it to go on without") if path.exists() else []
    entries.append(
        {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "resumed_at_step": resumed_at,
            "command": typed_command(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "slurm_job": os.environ.get("SLURM_JOB_ID"),
            "engine": engine,
            "num_threads": torch.get_num_threads(),
            **provenance(device_name(device)),
        }
    )
    write_atomically(path, json.dumps(entries, indent=1))


# --- metrics.jsonl -----


def refuse_divergence(step: float, values: dict[str, float]) -> None:
    if all(math.isfinite(value) for value in values.values()):
        return
    shown = ", ".join(f"{name} {value}" for name, value in values.items())
    raise UserError(
        f"step {step:.0f}: {shown}; earlier checkpoints are intact. Lower "
        "optimizer.learning_rate or training.max_grad_norm, or lengthen optimizer.warmup_steps, "
        "in another run_folder"
    )


class Metrics:
    """`metrics.jsonl`: one line per step. Losses stay on the device until `flush`, so that a GPU
    need not wait at each step."""

    def __init__(
        self, run_folder: Path, start: int, sinks: list[Sink], writes: bool = True
    ) -> None:
        """`writes`: whether this process writes; the others only check their numbers."""
        self.path = run_folder / "metrics.jsonl"
        self.sinks, self.writes = sinks, writes
        self.pending: list[tuple[int, dict[str, Tensor | float]]] = []
        self.num_lines = 0
        self.last_crc32: str | None = None
        """CRC of the line of the last step."""
        saved = start if list_checkpoints(run_folder) else 0  # a branch begins without rows
        if writes and (saved or self.path.exists()):
            # A killed run may have written past its last checkpoint; those steps are repeated.
            lines = _read_lines(self.path)
            _refuse_other_run(self.path, lines)
            kept = [line for line in lines if line.row is None or line.row["step"] <= start]
            with writing(self.path) as partial:
                partial.write_bytes(b"".join(line.text + b"\n" for line in kept))
            self.num_lines = max((line.number for line in kept), default=0)
            # A gap in the numbers, by which later readers see it too: a step has a line, at least.
            self.num_lines += _name_damage(self.path, kept, saved)

    def add(self, step: int, **values: Tensor | float) -> None:
        self.pending.append((step, values))

    def flush(self, **of_last: float) -> dict[str, float]:
        """Write the pending rows; returns their means."""
        rows = [
            {"step": step, **{name: float(value) for name, value in values.items()}}
            for step, values in self.pending
        ]
        self.pending = []
        if not rows:
            return {}
        rows[-1].update(of_last)
        for row in rows:
            refuse_divergence(
                row["step"], {"loss": row["loss"], "gradient norm": row["gradient_norm"]}
            )
        self.write(*rows)
        return {"loss": sum(row["loss"] for row in rows) / len(rows)}

    def write_heldout(
        self, step: int, losses: list[dict], drops: dict[str, float], sparsity: dict | None
    ) -> None:
        """`drops`: the induction drop of each corpus."""
        # No training loss shows the effect of the last update.
        refuse_divergence(step, {"held-out loss": sum(row["loss"] for row in losses)})
        drop = sum(drops.values()) / len(drops)
        row = {"step": step, "heldout": losses, "induction_drop": drop}
        row |= {"induction_drops": drops} if len(drops) > 1 else {}
        self.write(row if sparsity is None else row | {"sparsity": sparsity})

    def write(self, *rows: dict) -> None:
        if not self.writes:
            return
        with naming(self.path), self.path.open("a") as file:
            for row in rows:
                self.num_lines += 1
                line = with_crc({**row, "line": self.num_lines})
                self.last_crc32 = self.last_crc32 if "heldout" in row else line["crc32"]
                file.write(json.dumps(line) + "\n")
        for sink in self.sinks:
            for row in rows:
                sink(row)

    def last_heldout(self) -> list[dict] | None:
        """None: its line is lost."""
        rows = [row["heldout"] for row in read_metrics(self.path) if "heldout" in row]
        return rows[-1] if rows else None


def read_metrics(path: Path) -> Iterator[dict]:
    """The rows of a metrics file; damaged lines are skipped."""
    yield from (line.row for line in _read_lines(path) if line.row is not None)


@dataclass(frozen=True)
class _Line:
    number: int
    """As written; lines before it may be lost."""

    text: bytes
    row: dict | None
    """None: the line is damaged."""


@dataclass(frozen=True)
class _Row:
    """The keys of a line."""

    step: int
    loss: float = 0.0
    gradient_norm: float = 0.0
    learning_rate: float = 0.0
    tokens_per_s: float = 0.0
    peak_memory_gib: float = 0.0
    mfu: float = 0.0
    mfu_whole_attention: float = 0.0
    heldout: list[dict[str, float | str]] = field(default_factory=list)
    induction_drop: float = 0.0
    induction_drops: dict[str, float] = field(default_factory=dict)
    sparsity: dict = field(default_factory=dict)
    line: int = 0


_LARGEST = 2**30
"""Bytes of metrics: millions of steps."""


def _read_lines(path: Path) -> list[_Line]:
    try:
        content = read_bounded(path, _LARGEST) if path.exists() else b""
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; restore it") from None
    lines: list[_Line] = []
    last = 0
    for text in content.splitlines():
        try:
            row = _check_row(parse_json(text, dict))
        except ValueError:
            row = None
        # Older versions wrote no numbers. A number that does not rise is a duplicate.
        number = last + 1 if row is None else row.pop("line", last + 1)
        lines.append(_Line(number, text, row if number > last else None))
        last = max(last, number)
    if lines and lines[-1].row is None and not content.endswith(b"\n"):
        lines.pop()  # cut short by a kill
    return lines


def _check_row(row: dict) -> dict:
    conform(row, _Row)
    for part in row.get("heldout", []):
        if missing := {"from", "to", "loss", "num_tokens"} - part.keys():
            raise ValueError(f"heldout lacks {missing}")
    return row


def _refuse_other_run(path: Path, lines: list[_Line]) -> None:
    crc32_of = {
        line.row["step"]: json.loads(line.text).get("crc32")
        for line in lines
        if line.row is not None and "heldout" not in line.row
    }
    refuse_other_metrics(path, crc32_of)


def _name_damage(path: Path, lines: list[_Line], saved: int) -> int:
    """Returns how many steps up to `saved`, the last of a checkpoint, have lost their rows."""
    damaged = [number for number, line in enumerate(lines, start=1) if line.row is None]
    num_lost = max((line.number for line in lines), default=0) - len(lines)
    if damaged:
        more = f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""
        which = ", ".join(map(str, damaged[:5])) + more
        say(f"{path}: {len(damaged)} damaged lines are passed over: {which}")
    if num_lost > 0:
        say(f"{path}: {num_lost} lines are lost")
    last = max((line.row["step"] for line in lines if line.row is not None), default=0)
    if last < saved:
        say(f"{path} ends at step {last}; its rows up to step {saved} are lost")
    return max(saved - last, 0)


# --- the curves of a run -----


def loss_table(run_folder: str | Path) -> str:
    """The held-out losses of a run as text: the last in detail, then all of them."""
    rows = _evaluations(run_folder)
    lines = [f"{run_folder}, step {rows[-1]['step']}: held-out loss by position"]
    names = [_name(part) for part in rows[-1]["heldout"]]
    width = max(14, *map(len, names))
    lines.append(
        f"{'positions':>{width}} {'tokens':>10} {'loss (nats)':>12} {'perplexity':>11} "
        f"{'bits/byte':>10}"
    )
    for part in rows[-1]["heldout"]:
        perplexity = math.exp(min(part["loss"], 700))
        lines.append(
            f"{_name(part):>{width}} {part['num_tokens']:>10,} {part['loss']:>12.4f} "
            f"{perplexity:>11.2f} {part.get('bits_per_byte', math.nan):>10.4f}"
        )
    lines.append("loss by step, and how far it falls when a passage is read twice (induction)")
    corpora = list(rows[-1].get("induction_drops", ()))
    units = sorted({name for row in rows for name in row.get("sparsity", ())})
    columns = ["step", *names, "induction", *(f"… {name}" for name in corpora)]
    columns += [f"net {name}" for name in units]
    lines.append("".join(f" {name:>{max(13, len(name))}}" for name in columns))
    for row in rows:
        losses = {_name(part): part["loss"] for part in row["heldout"]}
        shown = [losses.get(name, math.nan) for name in names]
        drops = row.get("induction_drops", {})
        shown += [row.get("induction_drop", math.nan), *(drops.get(c, math.nan) for c in corpora)]
        sparsity = row.get("sparsity", {})
        shown += [sparsity[name]["net"] if name in sparsity else math.nan for name in units]
        cells = [f"{row['step']:,}", *(f"{value:.4f}" for value in shown)]
        lines.append(
            "".join(f" {c:>{max(13, len(n))}}" for n, c in zip(columns, cells, strict=True))
        )
    return "\n".join(lines)


def draw_losses(run_folder: str | Path, out: Path) -> None:
    """A figure of held-out and training loss, induction and net excess over steps."""
    from matplotlib.figure import Figure

    from olmo_sparsity.drawing import band, save

    rows = _evaluations(run_folder)
    steps = [row["step"] for row in rows]
    training = [row for row in read_metrics(Path(run_folder) / "metrics.jsonl") if "loss" in row]
    probed = [row for row in rows if row.get("sparsity")]

    def draw() -> Figure:
        num_panels = 3 if probed else 2
        figure = Figure(figsize=(2.75 * num_panels, 2.3), layout="constrained")
        losses, induction, *beside = figure.subplots(1, num_panels)
        losses.plot(
            [row["step"] for row in training],
            [row["loss"] for row in training],
            color="0.8",
            linewidth=0.6,
            label="training",
        )
        for name in [_name(part) for part in rows[-1]["heldout"]]:
            values = [
                next((p["loss"] for p in row["heldout"] if _name(p) == name), math.nan)
                for row in rows
            ]
            losses.plot(steps, values, marker=".", label=f"held out, {name}")
        losses.set(xlabel="step", ylabel="loss (nats)")
        losses.legend(frameon=False, loc="upper right")  # "best" takes seconds
        drops = [row.get("induction_drop", math.nan) for row in rows]
        induction.plot(steps, drops, marker=".", label="induction")
        for corpus in rows[-1].get("induction_drops", ()):
            of_corpus = [row.get("induction_drops", {}).get(corpus, math.nan) for row in rows]
            induction.plot(steps, of_corpus, marker=".", linewidth=0.6, label=corpus)
        if rows[-1].get("induction_drops"):
            induction.legend(frameon=False, loc="upper left")
        induction.axhline(0, color="0.8", linewidth=0.6)
        induction.set(xlabel="step", ylabel="induction drop (nats)")
        for axes in beside:
            for units in probed[-1]["sparsity"]:
                at = [row["step"] for row in probed if units in row["sparsity"]]
                net, low, high = (
                    [row["sparsity"][units][name] for row in probed if units in row["sparsity"]]
                    for name in ("net", "net_low", "net_high")
                )
                (line,) = axes.plot(at, net, marker=".", label=f"best of {units}")
                band(axes, at, low, high, line.get_color())
            axes.axhline(0, color="0.8", linewidth=0.6)
            axes.set(xlabel="step", ylabel="net excess (share of the gap)")
            axes.legend(frameon=False, loc="upper left")
        return figure

    save(draw, out)


def _name(part: dict) -> str:
    return f"{part.get('corpus', '')} {part['from']} … {part['to'] - 1}".lstrip()


def _evaluations(run_folder: str | Path) -> list[dict]:
    path = Path(run_folder) / "metrics.jsonl"
    if not path.is_file():
        raise DataError(f"{path} does not exist; is '{run_folder}' of a trained run?")
    lines = _read_lines(path)
    _refuse_other_run(path, lines)
    _name_damage(path, lines, max(map(step_of, list_checkpoints(run_folder)), default=0))
    rows = [line.row for line in lines if line.row is not None and "heldout" in line.row]
    if not rows:
        raise DataError(f"{path} holds no held-out loss yet; let the run reach an evaluation")
    return rows
