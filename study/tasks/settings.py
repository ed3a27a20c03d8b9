"""The settings of a task experiment, read from YAML and `--key.sub=value` overrides, and checked.

Place in the flow: first; experiment.py receives the result. Wrong settings are rejected before
anything is trained.

Dimension key: P prompt length, R response length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import numpy as np

from olmo_sparsity.config.run import check_model
from olmo_sparsity.config.sections import ModelConfig, OptimizerConfig
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.extend import read_object
from olmo_sparsity.settings import Rules, build, enforce, load, option
from study.tasks.addition import Addition
from study.tasks.end_token import EndToken
from study.tasks.needle import Needle
from study.tasks.samples import Ks, Samples, Task
from study.tasks.schemes import (
    CHUNKED,
    COUPLED,
    EMBEDDED,
    HAVE_COUPLED_IDS,
    PREDICTED,
    SCHEMES,
    SPREAD,
    PositionSettings,
    Sizes,
)
from study.tasks.scratchpad_parity import ScratchpadParity
from study.tasks.sparse_parity import SparseParity
from study.tasks.variable_assignment import VariableAssignment

TASKS: dict[str, type] = {
    "sparse_parity": SparseParity,
    "scratchpad_parity": ScratchpadParity,
    "variable_assignment": VariableAssignment,
    "addition": Addition,
    "needle": Needle,
}


@dataclass
class CouplingSettings:
    """See model/coupling.py."""

    embed_ids: bool = True
    """Whether coupled IDs also enter by a learned embedding, which PPC requires."""

    id_loss_weight: float = 1.0


@dataclass
class StepSettings:
    num_steps: int = option(2000, least=1)
    batch_size: int = option(128, least=1)
    lengths_per_batch: int = option(8, least=1)
    """Number of lengths drawn for each batch; shorter samples are padded. 1 costs a quarter
    less CPU, and learns less per step."""

    max_grad_norm: float = option(1.0, least=1e-12, most=1e12)
    grow_k_steps: int = option(0, least=0)
    """Number of steps over which the largest k grows from 2 to train_k. Not in the paper. 0: all k
    from the start."""


@dataclass
class ExperimentSettings:
    output: str = option(None, required=True)
    """Folder of the results; a second start resumes."""

    task: Any = option(None, required=True)
    """`name` and the settings of the task."""

    test_task: dict[str, Any] = option({})
    """Settings of the task that differ at test: more names than in training, say."""

    end_token: bool = False
    """Whether responses end with a token of its own; without it their length is given at test."""

    schemes: list[str] = option(None, required=True, some=True, distinct=True)
    seeds: list[int] = option([1, 2, 3], least=0, some=True, distinct=True)
    train_lengths: list[int] = option(None, required=True)
    """Shortest and longest; lengths between are drawn uniformly."""

    test_lengths: list[int] = option(None, required=True, some=True, distinct=True)
    train_ks: list[int] = option([], distinct=True)
    """For tasks with k: a model for each, trained on k uniform in 1 … train_k (or as many as fit
    into a sample)."""

    test_ks: list[int] = option([], distinct=True)
    num_test_samples: int = option(500, least=1)
    """Test samples per length and k."""

    positions: PositionSettings = field(default_factory=PositionSettings)
    coupling: CouplingSettings = field(default_factory=CouplingSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: StepSettings = field(default_factory=StepSettings)
    device: str = "auto"
    num_workers: int = option(1, least=1)
    """Processes that train in parallel, with one thread each."""


MAY_CHANGE = ("output", "schemes", "seeds", "train_ks", "num_workers", "device")
"""Settings that may differ between two starts of one experiment: they select its trials, or where
they run."""


def load_settings(path: str | Path, overrides: list[str]) -> ExperimentSettings:
    settings = load(ExperimentSettings, path, overrides)
    check(settings, str(path))
    return settings


def each(ks: list[int]) -> Sequence[int | None]:
    """The ks, or one None if the task has no k."""
    return ks or [None]


def build_task(settings: ExperimentSettings, *, test: bool = False) -> Task:
    if not isinstance(settings.task, dict):
        raise ConfigError(f"task={settings.task} must be a section: {{name: sparse_parity}}, say")
    given = dict(settings.task)
    name = str(given.pop("name", None))
    kind = _read_class(name) if ":" in name else TASKS.get(name)
    if kind is None:
        raise ConfigError(
            f"task.name={name} is not known; choose one of {', '.join(TASKS)}, or write "
            "your_file.py:YourTask"
        )
    if test:
        given |= settings.test_task
    task = cast(Task, build(kind, given, "test_task" if test else "task"))
    return EndToken(task) if settings.end_token else task


def _read_class(name: str) -> type:
    """A user's own task: `path/to/file.py:Class`."""
    kind = read_object(name, "task.name")
    path, _, class_name = name.rpartition(":")
    if not isinstance(kind, type) or not is_dataclass(kind):
        raise ConfigError(f"task.name={name}: '{path}' defines no dataclass {class_name}")
    members = [member for member in vars(Task) if not member.startswith("_")]
    given = {*dir(kind), *(item.name for item in fields(kind))}
    if missing := [member for member in members if member not in given]:
        raise ConfigError(
            f"task.name={name}: {class_name} lacks {', '.join(missing)}; docs/tasks.md has a "
            "complete one"
        )
    return kind


def check(settings: ExperimentSettings, origin: str) -> None:
    """Check everything before training; each length and k is drawn once."""
    enforce(origin, _rules(settings))
    check_model(settings.model, origin)
    task = build_task(settings)  # first, as `test_task` adds to it
    test_task = build_task(settings, test=True)
    if task.vocabulary != test_task.vocabulary:
        raise ConfigError(
            f"{origin}: test_task={settings.test_task} changes the vocabulary, which must be that "
            "of training; change something else"
        )
    for scheme in settings.schemes:
        sizes(settings, task, test_task, scheme)
    _draw_once(settings, task, test_task)


def _rules(settings: ExperimentSettings) -> Rules:
    schemes, lengths = set(settings.schemes), settings.train_lengths
    for scheme in settings.schemes:
        yield (
            scheme in SCHEMES,
            f"scheme {scheme} is not known; choose among {', '.join(SCHEMES)}",
        )
    rate = settings.optimizer.learning_rate
    yield rate > 0, f"optimizer.learning_rate={rate} trains nothing; raise it"
    yield (
        len(lengths) == 2 and 1 <= lengths[0] <= lengths[1],
        f"train_lengths={lengths} must be [shortest, longest]",
    )
    chunked, spread, positions = schemes & {*CHUNKED}, schemes & {*SPREAD}, settings.positions
    cut_anywhere = chunked and positions.num_chunks > 1 and not positions.aligned_cuts
    no_chunks = f"no scheme cuts chunks ({', '.join(CHUNKED)} do)"
    defaults = ExperimentSettings()

    def needs(is_used: object, name: str, reason: str) -> tuple[Any, str]:
        value = attrgetter(name)(settings)
        is_default = value == attrgetter(name)(defaults)
        return is_used or is_default, f"{name}={value} is set, but {reason}; remove it"

    yield needs(chunked, "positions.num_chunks", no_chunks)
    yield needs(chunked, "positions.aligned_cuts", no_chunks)
    yield needs(spread, "positions.num_ids", f"no scheme spreads IDs ({', '.join(SPREAD)} do)")
    yield needs(cut_anywhere, "positions.published", "it means several chunks, cut anywhere")
    yield needs(schemes & {*EMBEDDED}, "coupling.embed_ids", "no scheme embeds IDs")
    yield needs(schemes & {*PREDICTED}, "coupling.id_loss_weight", "no scheme has this loss")
    yield needs(settings.train_ks, "training.grow_k_steps", "train_ks is empty")
    for name in ("vocab_size", "embedding_size", "max_sequence_length"):
        yield needs(False, f"model.{name}", "the task and positions.num_ids decide it")
    for name in ("rope", "alibi"):
        yield needs(False, f"model.{name}", "the scheme decides it")
    yield (
        settings.test_ks or not settings.train_ks,
        "train_ks is set, but test_ks is empty; set both",
    )
    yield (
        settings.coupling.embed_ids or not schemes & set(PREDICTED),
        f"coupling.embed_ids=false: {' and '.join(PREDICTED)} cannot predict IDs that they see by "
        "their differences alone; remove it",
    )


def sizes(settings: ExperimentSettings, task: Task, test_task: Task, scheme: str) -> Sizes:
    """Rejected if training or tests need more position IDs than are given."""
    given = settings.positions.num_ids or 0
    num_ids = num_coupled = 0
    for name, length, of in (
        ("train_lengths", training_lengths(settings, task)[-1], task),
        *(("test_lengths", length, test_task) for length in settings.test_lengths),
    ):
        sample = _draw(of, name, length, of.largest_k(length))  # the longest there is
        needed = sample.prompt_BP.shape[1] + sample.response_BR.shape[1]
        if scheme in HAVE_COUPLED_IDS:
            largest = of.largest_id(length)
            if largest is None:
                raise ConfigError(
                    f"scheme {scheme}: this task has no coupled IDs; remove {scheme} from schemes"
                )
            num_coupled = max(num_coupled, largest + 1)
            needed = largest + 1 if scheme in COUPLED else needed
        if scheme == "auxiliary":
            _ = sample.partners_BL  # rejected if there are none
        if scheme in SPREAD and given and needed > given:
            raise ConfigError(
                f"{name}: length {length} has position IDs up to {needed - 1} under {scheme}, "
                f"beyond the largest ID of training, positions.num_ids - 1 = {given - 1}; raise "
                f"positions.num_ids to at least {needed}, or lower the length"
            )
        num_ids = max(num_ids, needed, given)
    num_labels = num_coupled if scheme == "pointers" else 0
    return Sizes(num_ids, len(task.vocabulary), num_labels)


def training_lengths(settings: ExperimentSettings, task: Task) -> list[int]:
    first, last = settings.train_lengths
    lengths = [n for n in range(first, last + 1) if n % task.length_step == 0]
    if not lengths:
        raise ConfigError(
            f"train_lengths={settings.train_lengths} holds no multiple of {task.length_step}"
        )
    return lengths


def tests(settings: ExperimentSettings, test_task: Task) -> list[tuple[int, int | None]]:
    """All pairs (length, k) that exist: at a short length a large k may not fit."""
    return [
        (length, k)
        for length in settings.test_lengths
        for k in each(settings.test_ks)
        if k is None or k <= (test_task.largest_k(length) or k)
    ]


def _draw_once(settings: ExperimentSettings, task: Task, test_task: Task) -> None:
    """Draw each length and k once, as a task rejects what it cannot draw."""
    lengths = training_lengths(settings, task)
    for name, ks, at, of in (
        ("train_ks", settings.train_ks, lengths, task),
        ("test_ks", settings.test_ks, settings.test_lengths, test_task),
    ):
        largest = of.largest_k(max(at))
        for k in ks:
            if largest is None:
                raise ConfigError(f"{name}={ks} is set, but this task has no k; remove it")
            if not 1 <= k <= largest:
                raise ConfigError(
                    f"{name}: k={k} must lie between 1 and {largest}, the places of the longest "
                    f"sample, of length {max(at)}; lower k or raise the length"
                )
    for length in (lengths[0], lengths[-1]):
        # With train_ks, training draws a k for each sample.
        k_B = np.ones(_NUM_DRAWN, dtype=int) if settings.train_ks else None
        samples = _draw(task, "train_lengths", length, k_B)
    if settings.positions.aligned_cuts and samples.unit == 1:
        raise ConfigError(
            "positions.aligned_cuts=True is set, but this task's units are single tokens; remove it"
        )
    for length, test_k in tests(settings, test_task):
        _draw(test_task, "test_lengths", length, test_k)


_NUM_DRAWN = 4


def _draw(task: Task, field_names: str, length: int, k: Ks) -> Samples:
    if length < 1 or length % task.length_step:
        raise ConfigError(
            f"{field_names}: {length} is not a length of this task; use multiples of "
            f"{task.length_step}"
        )
    try:
        samples = task.sample(np.random.default_rng(0), _NUM_DRAWN, length, k)
    except ConfigError as error:
        raise ConfigError(f"{field_names}: {error}") from None
    _check_samples(task, samples, length)
    return samples


def _check_samples(task: Task, samples: Samples, length: int) -> None:
    """Check samples of a user's own task before training on them."""

    def rules() -> Rules:
        tokens = np.concatenate((samples.prompt_BP, samples.response_BR), axis=1)
        size = len(task.vocabulary)
        yield (
            tokens.min() >= 0 and tokens.max() < size,
            f"tokens {tokens.min()} to {tokens.max()}, but the vocabulary has {size} words",
        )
        yield (
            np.array_equal(task.solve(samples), samples.response_BR),
            "solve() does not give the response that sample() gives",
        )
        if samples.prompt_ids_BP is not None and samples.response_ids_BR is not None:
            ids = np.concatenate((samples.prompt_ids_BP, samples.response_ids_BR), axis=1)
            largest = task.largest_id(length)
            yield (
                largest is not None and ids.min() >= 1 and ids.max() <= largest,
                f"position IDs {ids.min()} to {ids.max()}, but the first is 1 and largest_id() "
                f"{largest}",
            )

    enforce(f"the task's samples of length {length}", rules())
