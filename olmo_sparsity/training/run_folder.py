"""Read and write the files of a run folder: config, environment and metrics."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olmo_sparsity.base.conform import conform, parse_json, with_crc
from olmo_sparsity.base.devices import device_name
from olmo_sparsity.base.differences import differences
from olmo_sparsity.base.errors import ConfigError, DataError, UserError
from olmo_sparsity.base.files import (
    naming_written_file,
    read_bounded,
    read_json,
    write_atomically,
    write_json,
    writing,
)
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.provenance import provenance, typed_command
from olmo_sparsity.base.work_folder import WorkFolder
from olmo_sparsity.config.run import flatten, load_saved_config
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.checkpoint import TrainerState, step_of
from olmo_sparsity.training.metric_writers import MetricWriter

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Flat = Mapping[str, Any]
"""Settings of a run, flattened: `training.length` → its value."""

# Beginnings of the keys that a resumed run may change, as they leave the weights alone. They may
# change rounding; `engine` and `micro_batch_size` change the masks of dropout; `on_nan` decides
# what happens after a number that is not finite.
FREE_KEYS = (
    "run_folder",
    "start_over",
    "logging",
    "checkpoint",
    "evaluation",
    "engine",
    "data.folder",
    "training.activation_checkpointing",
    "training.activation_memory_budget",
    "training.checkpoint_every",
    "training.deterministic",
    "training.device",
    "training.micro_batch_size",
    "training.max_epochs",
    "training.on_nan",
    "training.max_skips",
)

# What the tokenizer and the transform's file set when a run starts.
RESOLVED_KEYS: tuple[str, ...] = (
    "data.order",
    "data.transform_sha256",
    "training.earlier_weights",
    "model.vocab_size",
    "model.embedding_size",
    "model.eos_token_id",
    "model.pad_token_id",
)

# Beginnings of the keys that a branch must keep: the model, and the order of the text.
FIXED_KEYS = (
    "seed",
    "data.order",
    "data.corpus[",  # of several corpora
    "training.length",
    "training.batch_size",
    "optimizer.name",  # the state of one is not that of the other
    "model.",
)

# Of these, what a branch may change. No weight depends on the longest sequence. RoPE's angles and
# the weights of corpora may change within a run, too.
FREE_IN_BRANCH = re.compile(
    r"model\.(max_sequence_length|rope_theta)"
    r"|data\.corpus\[\d+\]\.weight"
    r"|training\.length\[\d+\]\.(weights|positions|rope_theta)\b.*"
)


def is_fixed_in_branch(key: str) -> bool:
    """Return whether a branch must keep the value of this key."""
    return key.startswith(FIXED_KEYS) and not FREE_IN_BRANCH.fullmatch(key)


def helps_to_branch(key: str) -> bool:
    """Return whether a branch is of use to change this key: with other options of the text it would
    continue on another one."""
    if key.startswith("data."):
        return FREE_IN_BRANCH.fullmatch(key) is not None
    return not is_fixed_in_branch(key)


@contextmanager
def open_run_folder(path: Path, settings: Flat, text: str) -> Iterator[None]:
    """Create the folder, or check that it holds the same run, and lock it. `text`: the settings as
    YAML."""
    folder = WorkFolder(path, "run_folder", "config.yaml")
    with folder.opened("checkpoints"):
        has_work = (path / "metrics.jsonl").exists() or any((path / "checkpoints").iterdir())
        # A start that was rejected before its first step has nothing to lose.
        if folder.identity.exists() and has_work:
            refuse_other_config(path, settings)
            _refuse_other_evaluation(path, settings)
        write_atomically(folder.identity, text)
        yield


def refuse_other_config(folder: Path, settings: Flat) -> None:
    """Raise ConfigError if the folder was begun with settings that give other weights."""
    changed = _changed(folder, settings, lambda key: not key.startswith(FREE_KEYS))
    if changed:
        keys = [text.partition("=")[0] for text in changed]
        remedy = "name a new run_folder"
        saved = list_checkpoints(folder)
        if saved and all(helps_to_branch(key) for key in keys):
            remedy += f"; with --branch_from={saved[0]} it continues from there"
        raise ConfigError(f"{folder} holds work with {', '.join(changed)}; {remedy}")


def is_work_of(folder: Path, settings: Flat) -> bool:
    """Return whether a run with these settings could resume in the folder, or begin in it.

    `settings` are as the user wrote them: what a start resolves (the tokenizer's sizes, precision
    `auto`) is not compared."""
    if not (folder / "config.yaml").exists():
        return True
    free = (*FREE_KEYS, *RESOLVED_KEYS)
    if settings["training.precision"] == "auto":
        free = (*free, "training.precision")
    return not _changed(folder, settings, lambda key: not key.startswith(free))


def _refuse_other_evaluation(folder: Path, settings: Flat) -> None:
    """Raise ConfigError if a finished run, which evaluates nothing more, is asked for another
    evaluation: its numbers would be taken for those of the new settings."""
    last = max(map(step_of, list_checkpoints(folder)), default=0)
    changed = _changed(folder, settings, lambda key: key.startswith("evaluation."))
    if changed and last == settings["training.num_steps"]:
        raise ConfigError(
            f"'{folder}' is finished, and was evaluated with {', '.join(changed)}; set it as it "
            "was, or take a new run_folder"
        )


def refuse_other_branch(folder: Path, settings: Flat) -> None:
    """Raise ConfigError if a branch changes the model or the order of the text."""
    changed = _changed(folder, settings, is_fixed_in_branch)
    if changed:
        raise ConfigError(
            f"branch_from={folder} was trained with {', '.join(changed)}; set them as they were, "
            "or take the weights alone with init_from"
        )


def _changed(folder: Path, settings: Flat, is_compared: Callable[[str], bool]) -> list[str]:
    """Return a line for each setting that differs from the one saved in the folder, of those whose
    key `is_compared`."""
    saved = flatten(load_saved_config(folder / "config.yaml"))
    before = {key: value for key, value in saved.items() if is_compared(key)}
    now = {key: value for key, value in settings.items() if is_compared(key)}
    return differences(before, now)


# --- environment.json -----


def describe_environment(
    run_folder: Path, engine: dict[str, Any], device: torch.device, resumed_at: int
) -> None:
    """Append an entry for this start to environment.json."""
    import torch

    path = run_folder / "environment.json"
    entries = []
    if path.exists():
        entries = read_json(path, list[dict], "delete it to go on without")
    started = {
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
    write_json(path, [*entries, started])


# --- metrics.jsonl -----


def refuse_divergence(step: float, values: dict[str, float]) -> None:
    """Raise UserError, which knows the step, if a value is not finite."""
    if all(math.isfinite(value) for value in values.values()):
        return
    named_values = ", ".join(f"{name} {value}" for name, value in values.items())
    error = UserError(
        f"step {step:.0f}: {named_values}; earlier checkpoints are intact: lower "
        "optimizer.learning_rate in a new folder, or pass --training.on_nan=skip"
    )
    error.diverged_at = round(step)
    raise error


class Metrics:
    """`metrics.jsonl`: one line per step. Losses stay on the device until `flush`, so that a GPU
    need not wait at each step."""

    def __init__(
        self, run_folder: Path, start: int, writers: Sequence[MetricWriter], writes: bool = True
    ) -> None:
        """`writers` get each row, too. `writes`: whether this process writes; the others only check
        their numbers."""
        self.path = run_folder / "metrics.jsonl"
        self.writers = writers
        self.writes = writes
        self.pending: list[tuple[int, dict[str, Tensor | float]]] = []
        self.last_crc32: str | None = None
        """CRC of the line of the last step."""
        if writes and self.path.exists():
            # A killed run may have written past its last checkpoint; those steps are repeated.
            kept = [text for text, row in read_own_lines(self.path) if row["step"] <= start]
            with writing(self.path) as partial:
                partial.write_bytes(b"".join(text + b"\n" for text in kept))

    def add(self, step: int, **values: Tensor | float) -> None:
        self.pending.append((step, values))

    def flush(self, **speed: float) -> dict[str, float]:
        """Write the pending rows. Return {"loss": their mean}, or {} without rows. Raise UserError
        at the first row with a number that is not finite, after writing those before it. `speed`:
        numbers of all these steps, written with the last one."""
        rows: list[dict[str, Any]] = []
        for step, tensors in self.pending:
            # Reading a number of a GPU waits for its step.
            numbers = {name: float(value) for name, value in tensors.items()}
            rows.append({"step": step, **numbers})
        self.pending = []
        if not rows:
            return {}
        rows[-1].update(speed)
        for number, row in enumerate(rows):
            values = {"loss": row["loss"], "gradient norm": row["gradient_norm"]}
            if not all(map(math.isfinite, values.values())):
                self.write(*rows[:number])
                refuse_divergence(row["step"], values)
        self.write(*rows)
        return {"loss": sum(row["loss"] for row in rows) / len(rows)}

    def write_heldout(self, step: int, losses: list[dict], drop: float, measured: dict) -> None:
        total = sum(row["loss"] for row in losses)  # finite if all of them are
        if not math.isfinite(total):
            self.flush()  # raises for an earlier step, if one was not finite
        # No training loss shows the effect of the last update.
        refuse_divergence(step, {"held-out loss": total})
        self.write({"step": step, "heldout": losses, "induction_drop": drop} | measured)

    def write(self, *rows: dict) -> None:
        if not self.writes:
            return
        with naming_written_file(self.path), self.path.open("a") as file:
            for row in rows:
                line = with_crc(row)
                if "heldout" not in row:  # a checkpoint knows the line of its training step
                    self.last_crc32 = line["crc32"]
                file.write(json.dumps(line) + "\n")
        for write_elsewhere in self.writers:
            for row in rows:
                write_elsewhere(row)

    def last_heldout(self) -> list[dict] | None:
        """Return the losses of the last evaluation; None if its line is lost."""
        rows = [row["heldout"] for row in read_metrics(self.path) if "heldout" in row]
        return rows[-1] if rows else None


# --- skipped batches -----


def read_skipped_batches(run_folder: Path) -> list[int]:
    """Return the numbers of the batches that the run leaves out."""
    path = run_folder / "skipped_batches.json"
    if not path.exists():
        return []
    return read_json(path, dict[str, list[int]], "restore it")["batches"]


def skip_batch_of(step: int, run_folder: Path, max_skips: int) -> str:
    """Leave out the batch of a step from now on; return a line that says so."""
    from olmo_sparsity.data.batches import batch_of_step  # imports PyTorch

    skipped = read_skipped_batches(run_folder)
    if len(skipped) >= max_skips:
        raise UserError(
            f"step {step} is not finite, after training.max_skips={max_skips} skipped batches; "
            "lower optimizer.learning_rate in a new folder, or raise training.max_skips"
        )
    batch = batch_of_step(step - 1, skipped)
    content = with_crc({"batches": sorted([*skipped, batch])})
    write_json(run_folder / "skipped_batches.json", content)
    count = f"{len(skipped) + 1} of at most {max_skips}"
    return f"batch {batch} is skipped ({count}); going on from the last checkpoint"


def read_metrics(path: Path) -> Iterator[dict]:
    """Yield the rows of a metrics file; damaged lines are skipped."""
    for _, row in _read_lines(path):
        yield row


_LARGEST = 2**30
"""Bytes of metrics: millions of steps."""


def _read_lines(path: Path) -> list[tuple[bytes, dict]]:
    """Return each line and its row, without damaged lines. They are reported, except for a last
    line that a kill has cut short."""
    try:
        content = read_bounded(path, _LARGEST) if path.exists() else b""
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; restore it") from None
    texts = content.splitlines()
    lines = []
    for text in texts:
        with contextlib.suppress(ValueError):
            row = parse_json(text, dict)
            conform({"step": row.get("step")}, dict[str, int])
            lines.append((text, row))
    num_damaged = len(texts) - len(lines)
    if not content.endswith(b"\n"):
        num_damaged -= 1
    if num_damaged > 0:
        say(f"{path}: {num_damaged} damaged lines are skipped")
    return lines


def read_own_lines(path: Path) -> list[tuple[bytes, dict]]:
    """Return the lines of a run's metrics, after rejecting those of another run: each checkpoint
    knows the CRC of its step's line."""
    lines = _read_lines(path)
    crc32_of = {
        row["step"]: json.loads(text).get("crc32") for text, row in lines if "heldout" not in row
    }
    for folder in list_checkpoints(path.parent):
        try:
            state = TrainerState.read(folder)
        except DataError:  # it is damaged, and not resumed from
            continue
        line_crc32 = crc32_of.get(state.step)  # None if the line is lost
        saved_crc32 = state.metrics_crc32  # None if the checkpoint is older than this check
        if line_crc32 is not None and saved_crc32 is not None and line_crc32 != saved_crc32:
            raise DataError(
                f"{path} is not of the run of {folder}: its line of step {state.step} is another; "
                "restore the file of this run, or delete it to go on without"
            )
    return lines
