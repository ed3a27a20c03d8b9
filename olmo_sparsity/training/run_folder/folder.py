"""Open the folder of a run, and check which run it is of.

    config.yaml             the settings of the run
    environment.json        an entry for each start: command, host, versions (environment.py)
    metrics.jsonl           numbers of each step (metrics/metrics.py)
    skipped_batches.json    batches that training.on_nan=skip leaves out (skipped_batches.py)
    gpu_hours.json          GPU-hours of all starts (gpu_hours.py)
    attempts.json           starts that died since the last progress (attempts.py)
    checkpoints/            step000300/ and others (models/checkpoint_files.py)

A start compares its settings with those in config.yaml, as flat keys. For example:

    training.micro_batch_size: 8 → 4    the run resumes: the key is one of `FREE_KEYS`
    training.num_steps: 300 → 400       it is another run; a branch of it may have 400 steps
    model.n_layers: 12 → 24             neither may have it: a branch keeps `FIXED_KEYS`
    model.vocab_size: 0 → 50280         no change: a start fills in `RESOLVED_KEYS` itself

start.py opens the folder, restore.py compares the settings with those of a checkpoint, and an
experiment asks which `changes_of_work` one of its models has in a folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from olmo_sparsity.base.differences import differences_by_key
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.work_folder import WorkFolder
from olmo_sparsity.config.run import flatten, load_saved_config
from olmo_sparsity.models.checkpoint_files import list_checkpoints, step_of

Flat = Mapping[str, Any]
"""Settings of a run by flat keys, such as `training.length`."""

FREE_KEYS = (
    # What is written, and where.
    "run_folder",
    "start_over",
    "logging",
    "checkpoint",
    "evaluation",
    # How a step is computed.
    "engine",
    "training.activation_checkpointing",
    "training.activation_memory_budget",
    "training.checkpoint_every",
    "training.deterministic",
    "training.device",
    "training.micro_batch_size",
    # When the run ends, or leaves out a batch.
    "training.max_epochs",
    "training.max_gpu_hours",
    "training.on_nan",
    "training.max_skips",
    # The text itself is compared by its hash, which each checkpoint has.
    "data.folder",
)
"""Beginnings of the keys that a resumed run may change, as they leave the weights alone. They may
change rounding, and some do a little more: `engine` and `micro_batch_size` change the masks of
dropout, and `on_nan` decides what happens after a number that is not finite."""

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
"""The keys among `FIXED_KEYS` that a branch may change all the same. No weight depends on the
longest sequence. RoPE's base and the weights of corpora may change within a run, too."""


@contextmanager
def open_run_folder(path: Path, settings: Flat, text: str) -> Iterator[None]:
    """Create the folder, or check that it holds the same run. Inside, it is locked for this
    process.

    Args:
        settings: The settings of this start.
        text: The same as YAML, for config.yaml.
    """
    folder = WorkFolder(path, "run_folder", "config.yaml")
    with folder.opened("checkpoints"):
        if folder.identity.exists() and _has_work(path):
            check_same_run(path, settings)
            _check_same_evaluation(path, settings)
        # Also of a run that resumes, as free keys may have changed.
        write_atomically(folder.identity, text)
        yield


def _has_work(folder: Path) -> bool:
    """Return whether a run has logged or saved anything. A start that was rejected before its first
    step has nothing to lose."""
    checkpoints = folder / "checkpoints"
    # Not `glob`, which finds nothing while a network disk is away.
    has_saved = checkpoints.exists() and any(checkpoints.iterdir())
    return has_saved or (folder / "metrics.jsonl").exists()


def check_same_run(folder: Path, settings: Flat) -> None:
    """Raise ConfigError if the folder was begun with settings that give other weights."""
    changed = _describe_changes(folder, settings, lambda key: not key.startswith(FREE_KEYS))
    if changed:
        remedy = "name a new run_folder"
        saved = list_checkpoints(folder)
        if saved and all(map(helps_to_branch, changed)):
            remedy += f"; with --branch_from={saved[0]} it continues from there"
        raise ConfigError(f"{folder} holds work with {', '.join(changed.values())}; {remedy}")


def helps_to_branch(key: str) -> bool:
    """Return whether a branch can have another value of this key, so that a message may propose
    one. With other options of the text, a branch would continue on another text."""
    if key.startswith("data."):
        return FREE_IN_BRANCH.fullmatch(key) is not None
    return not is_fixed_in_branch(key)


def is_fixed_in_branch(key: str) -> bool:
    """Return whether a branch must keep the value of this key."""
    return key.startswith(FIXED_KEYS) and not FREE_IN_BRANCH.fullmatch(key)


def changes_of_work(folder: Path, settings: Flat) -> list[str]:
    """Return a text for each setting, such as `seed=3 (now 4)`, because of which a run could not
    resume in the folder; none if it could, or could begin there, as where no step was taken yet.

    Args:
        settings: As the user wrote them. What a start resolves (the tokenizer's sizes, precision
            `auto`) is not compared.
    """
    if not (folder / "config.yaml").exists() or not _has_work(folder):
        return []
    free_keys = (*FREE_KEYS, *RESOLVED_KEYS)
    if settings["training.precision"] == "auto":
        free_keys = (*free_keys, "training.precision")
    changed = _describe_changes(folder, settings, lambda key: not key.startswith(free_keys))
    return list(changed.values())


def _check_same_evaluation(folder: Path, settings: Flat) -> None:
    """Raise ConfigError if a finished run is asked for another evaluation. It evaluates nothing
    more, so its numbers would be taken for those of the new settings."""
    # A run that goes on evaluates its last step with the new settings.
    last_step = max(map(step_of, list_checkpoints(folder)), default=0)
    changed = _describe_changes(folder, settings, lambda key: key.startswith("evaluation."))
    if changed and last_step == settings["training.num_steps"]:
        raise ConfigError(
            f"'{folder}' is finished, and was evaluated with {', '.join(changed.values())}; set it "
            "as it was, or take a new run_folder"
        )


def check_same_branch(folder: Path, settings: Flat) -> None:
    """Raise ConfigError if a branch changes the model or the order of the text."""
    changed = _describe_changes(folder, settings, is_fixed_in_branch)
    if changed:
        raise ConfigError(
            f"branch_from={folder} was trained with {', '.join(changed.values())}; set them as "
            "they were, or take the weights alone with init_from"
        )


def _describe_changes(
    folder: Path, settings: Flat, is_compared: Callable[[str], bool]
) -> dict[str, str]:
    """Return what differs between the settings and those in the folder's config.yaml, in words, by
    key. Only keys for which `is_compared` returns True are compared."""
    saved = flatten(load_saved_config(folder / "config.yaml"))
    compared_saved = {key: value for key, value in saved.items() if is_compared(key)}
    compared_now = {key: value for key, value in settings.items() if is_compared(key)}
    return differences_by_key(compared_saved, compared_now)
