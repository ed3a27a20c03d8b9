"""Open the folder of a run, and check which run it is of.

    config.yaml             the settings of the run
    environment.json        an entry for each start: command, host, versions
    metrics.jsonl           numbers of each step (metrics.py)
    skipped_batches.json    batches that training.on_nan=skip leaves out
    gpu_hours.json          GPU-hours of all starts (gpu_hours.py)
    attempts.json           starts that died since the last progress (attempts.py)
    checkpoints/            step000300/ and others (models/checkpoint_files.py)

A start compares its settings with those in the folder. Keys are in three groups: those that a
resumed run may change (`FREE_KEYS`), those that a start fills in itself (`RESOLVED_KEYS`), and
those that a branch of a run must keep (`FIXED_KEYS`).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olmo_sparsity.base.devices import device_name
from olmo_sparsity.base.differences import differences_by_key
from olmo_sparsity.base.errors import ConfigError, UserError
from olmo_sparsity.base.files import (
    read_json,
    write_atomically,
    write_json,
)
from olmo_sparsity.base.json_text import with_crc
from olmo_sparsity.base.provenance import provenance, typed_command
from olmo_sparsity.base.work_folder import WorkFolder
from olmo_sparsity.config.run import flatten, load_saved_config
from olmo_sparsity.models.checkpoint_files import list_checkpoints, step_of

if TYPE_CHECKING:
    import torch

Flat = Mapping[str, Any]
"""Settings of a run by flat keys, such as `training.length`."""

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
    "training.max_gpu_hours",
    "training.on_nan",
    "training.max_skips",
)
"""Beginnings of the keys that a resumed run may change, as they leave the weights alone. (They may
change rounding; `engine` and `micro_batch_size` change the masks of dropout; `on_nan` decides what
happens after a number that is not finite.)"""

RESOLVED_KEYS: tuple[str, ...] = (
    "data.order",
    "data.transform_sha256",
    "training.earlier_weights",
    "model.vocab_size",
    "model.embedding_size",
    "model.eos_token_id",
    "model.pad_token_id",
)
"""Keys that the tokenizer, the text or the transform's file determine when a run starts."""

FIXED_KEYS = (
    "seed",
    "data.order",
    "data.corpus[",  # of several corpora
    "training.length",
    "training.batch_size",
    "optimizer.name",  # the state of one is not that of the other
    "model.",
)
"""Beginnings of the keys that a branch must keep: the model, and the order of the text."""

FREE_IN_BRANCH = re.compile(
    r"model\.(max_sequence_length|rope_theta)"
    r"|data\.corpus\[\d+\]\.weight"
    r"|training\.length\[\d+\]\.(weights|positions|rope_theta)\b.*"
)
"""Those keys among `FIXED_KEYS` that a branch may change. No weight depends on the longest
sequence. RoPE's angles and the weights of corpora may change within a run, too."""


def is_fixed_in_branch(key: str) -> bool:
    """Return whether a branch must keep the value of this key."""
    return key.startswith(FIXED_KEYS) and not FREE_IN_BRANCH.fullmatch(key)


def helps_to_branch(key: str) -> bool:
    """Return whether a run can change this key by a branch. With other options of the text, a
    branch would continue on another text."""
    if key.startswith("data."):
        return FREE_IN_BRANCH.fullmatch(key) is not None
    return not is_fixed_in_branch(key)


@contextmanager
def open_run_folder(path: Path, settings: Flat, text: str) -> Iterator[None]:
    """Create the folder, or check that it holds the same run. Inside, it is locked for this
    process. `text`: the settings as YAML, for config.yaml."""
    folder = WorkFolder(path, "run_folder", "config.yaml")
    with folder.opened("checkpoints"):
        has_work = (path / "metrics.jsonl").exists() or any((path / "checkpoints").iterdir())
        # A start that was rejected before its first step has nothing to lose.
        if folder.identity.exists() and has_work:
            check_same_run(path, settings)
            _check_same_evaluation(path, settings)
        write_atomically(folder.identity, text)
        yield


def check_same_run(folder: Path, settings: Flat) -> None:
    """Raise ConfigError if the folder was begun with settings that give other weights."""
    changed = _changed(folder, settings, lambda key: not key.startswith(FREE_KEYS))
    if changed:
        remedy = "name a new run_folder"
        saved = list_checkpoints(folder)
        if saved and all(map(helps_to_branch, changed)):
            remedy += f"; with --branch_from={saved[0]} it continues from there"
        raise ConfigError(f"{folder} holds work with {', '.join(changed.values())}; {remedy}")


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


def _check_same_evaluation(folder: Path, settings: Flat) -> None:
    """Raise ConfigError if a finished run is asked for another evaluation. It evaluates nothing
    more, so its numbers would be taken for those of the new settings."""
    last_step = max(map(step_of, list_checkpoints(folder)), default=0)
    changed = _changed(folder, settings, lambda key: key.startswith("evaluation."))
    if changed and last_step == settings["training.num_steps"]:
        raise ConfigError(
            f"'{folder}' is finished, and was evaluated with {', '.join(changed.values())}; set it "
            "as it was, or take a new run_folder"
        )


def check_same_branch(folder: Path, settings: Flat) -> None:
    """Raise ConfigError if a branch changes the model or the order of the text."""
    changed = _changed(folder, settings, is_fixed_in_branch)
    if changed:
        raise ConfigError(
            f"branch_from={folder} was trained with {', '.join(changed.values())}; set them as "
            "they were, or take the weights alone with init_from"
        )


def _changed(folder: Path, settings: Flat, is_compared: Callable[[str], bool]) -> dict[str, str]:
    """Return what differs between the settings and those in the folder's config.yaml, in words, by
    key. Only keys for which `is_compared` returns True are compared."""
    saved = flatten(load_saved_config(folder / "config.yaml"))
    compared_saved = {key: value for key, value in saved.items() if is_compared(key)}
    compared_now = {key: value for key, value in settings.items() if is_compared(key)}
    return differences_by_key(compared_saved, compared_now)


# --- environment.json ---------------------------------------------------------------------------


def describe_environment(
    run_folder: Path, engine: dict[str, Any], device: torch.device, resumed_at: int
) -> str:
    """Append an entry for this start to environment.json. Return a line if its code is another one
    than that of the last start: a requeued job runs what the clone has by then."""
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
    commit = started["commit"]
    last_commit = entries[-1].get("commit") if entries else None
    if commit is None or last_commit in (None, commit):
        return ""
    return f"the code is commit {commit}; the last start of this run ran {last_commit}"


# --- skipped batches ----------------------------------------------------------------------------

COMES_BACK_WITHIN = 100
"""Steps after a step that was not finite within which another one has the same cause: the batch was
not it, so the run goes on from an older checkpoint."""


def read_skipped_batches(run_folder: Path) -> list[int]:
    """Return the numbers of the batches that the run leaves out, from 0."""
    return _read_skips(run_folder)["batches"]


def _read_skips(run_folder: Path) -> dict[str, list[int]]:
    """Return the content of skipped_batches.json: the `batches`, the `steps` at which they were
    skipped, and the steps from which the run went on (`went_back_to`)."""
    skips: dict[str, list[int]] = {"batches": [], "steps": [], "went_back_to": []}
    path = run_folder / "skipped_batches.json"
    if path.exists():
        skips |= read_json(path, dict[str, list[int]], "restore it")
    return skips


def skip_batch_of(step: int, run_folder: Path, max_skips: int) -> str:
    """Leave out the batch of a step from now on, and choose the checkpoint to go on from. Return
    words that say so. `step`: counted from 1."""
    from olmo_sparsity.data.batches import batch_of_step  # imports PyTorch

    skips = _read_skips(run_folder)
    skipped = skips["batches"]
    if len(skipped) >= max_skips:
        raise UserError(
            f"step {step} is not finite, after training.max_skips={max_skips} skipped batches; "
            "lower optimizer.learning_rate in a new folder, which may branch_from a checkpoint "
            "before the loss rose, or raise training.max_skips"
        )
    batch = batch_of_step(step, skipped)
    checkpoints = list_checkpoints(run_folder)
    given_up = _checkpoints_to_give_up(step, checkpoints, skips)
    usable = checkpoints[len(given_up) :]
    went_back_to = step_of(usable[0]) if usable else 0
    content = {
        "batches": sorted([*skipped, batch]),
        "steps": [*skips["steps"], step],
        "went_back_to": [*skips["went_back_to"], went_back_to],
    }
    write_json(run_folder / "skipped_batches.json", with_crc(content))
    for checkpoint in given_up:
        set_aside = checkpoint.with_suffix(".set_aside")
        shutil.rmtree(set_aside, ignore_errors=True)  # of the same step, given up before
        checkpoint.rename(set_aside)
    count = f"{len(skipped) + 1} of at most {max_skips}"
    line = f"batch {batch} is skipped ({count}); going on from "
    line += f"the checkpoint of step {went_back_to}" if usable else "the beginning"
    if given_up:
        names = ", ".join(checkpoint.name for checkpoint in given_up)
        line += f", as it came back after {names} (now *.set_aside; delete them by hand)"
    return line


def _checkpoints_to_give_up(
    step: int, checkpoints: list[Path], skips: dict[str, list[int]]
) -> list[Path]:
    """Return the newest checkpoints, those that a run leaves behind as a number that is not finite
    came back after one of them, although a batch was skipped. `checkpoints`: the newest first."""
    if not skips["steps"] or step - skips["steps"][-1] > COMES_BACK_WITHIN:
        return []
    tried_step = skips["went_back_to"][-1]
    tried = [checkpoint for checkpoint in checkpoints if step_of(checkpoint) >= tried_step]
    # Without an older one, another batch is left out after the same checkpoint.
    return tried if len(tried) < len(checkpoints) else []
