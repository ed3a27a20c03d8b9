"""Read the settings of a task experiment, and check all of them before training.

A mistake in the last test length of an experiment of days is an error in its first second: each
length and k is drawn once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.extend import read_object
from olmo_sparsity.config.build import Rules, build, enforce
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.rules import check_model
from olmo_sparsity.config.schema import option
from olmo_sparsity.config.sections import OptimizerConfig
from olmo_sparsity.config.yaml_files import load
from study.tasks.addition import Addition
from study.tasks.needle import Needle
from study.tasks.parity import ScratchpadParity, SparseParity
from study.tasks.planted import Planted
from study.tasks.samples import EndToken, Ks, Samples, Task
from study.tasks.schemes import (
    CHUNKED,
    COUPLED,
    HAVE_COUPLED_IDS,
    SCHEMES,
    PositionSettings,
    Sizes,
)
from study.tasks.variable_assignment import VariableAssignment

TASKS: dict[str, type] = {
    "sparse_parity": SparseParity,
    "scratchpad_parity": ScratchpadParity,
    "variable_assignment": VariableAssignment,
    "addition": Addition,
    "needle": Needle,
    "planted": Planted,
}


@dataclass
class StepSettings:
    """How a model is trained."""

    num_steps: int = option(2000, least=1)
    batch_size: int = option(128, least=1)
    lengths_per_batch: int = option(8, least=1)
    """Number of lengths drawn for each batch; shorter samples are padded. 1 costs a quarter
    less CPU, and learns less per step."""

    max_grad_norm: float = option(1.0, least=1e-12, most=1e12)
    mastery: float = option(0.0, least=0, most=1)
    """End once each k up to train_k has this exact match at the longest training length; a constant
    rate then falls to 0 in `cooldown_steps` more. 0: after num_steps."""

    past_mastery: float = option(1.0, least=1, most=1000)
    """How long to train in all, in multiples of the steps to mastery; the cooldown comes then, even
    beyond num_steps. 1: end there."""

    text_weight: float = option(0.0, least=0)
    """Weight of the mean loss of the prompt's tokens, next to that of the response."""

    check_steps: int = option(500, least=1)
    """Steps between two such checks; after each, the state that a stopped trial resumes from is
    written."""


@dataclass
class ExperimentSettings:
    """The file of an experiment: a model for each scheme, k and seed, tested at several lengths."""

    output: str = option(None, required=True)
    """Folder of the results; a second start resumes."""

    task: Any = option(None, required=True)
    """`name` and the settings of the task."""

    test_tasks: dict[str, Any] = option({})
    """Settings of the task that differ at test, by a name that rows have as `task`; several are
    tested one after the other. {}: the task as it is trained."""

    end_token: bool = False
    """Whether responses end with a token of its own; without it their length is given at test."""

    schemes: list[str] = option(None, required=True, nonempty=True, distinct=True)
    seeds: list[int] = option([1, 2, 3], least=0, nonempty=True, distinct=True)
    train_lengths: list[int] = option(None, required=True)
    """Shortest and longest; lengths between are drawn uniformly."""

    test_lengths: list[int] = option(None, required=True, nonempty=True, distinct=True)
    train_ks: list[int] = option([], distinct=True)
    """For tasks with k: a model for each, trained on k uniform in 1 … train_k (or as many as fit
    into a sample)."""

    test_ks: list[int] = option([], distinct=True)
    num_test_samples: int = option(500, least=1)
    """Test samples per length and k."""

    positions: PositionSettings = field(default_factory=PositionSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: StepSettings = field(default_factory=StepSettings)
    device: str = "auto"


MAY_CHANGE = ("output", "schemes", "seeds", "train_ks", "device")
"""Settings that may differ between two starts of one experiment: they select its trials, or where
they run."""


def load_settings(path: str | Path, overrides: list[str]) -> ExperimentSettings:
    """Read and check the file of an experiment. `overrides`: options, such as `--seeds=[1]`."""
    settings = load(ExperimentSettings, path, overrides)
    check(settings, str(path))
    return settings


def each(ks: list[int]) -> Sequence[int | None]:
    """Return the ks, or one None if the task has no k."""
    return ks or [None]


def build_task(settings: ExperimentSettings, **changes: Any) -> Task:
    """Return the task of an experiment, with some of its settings changed."""
    if not isinstance(settings.task, dict):
        raise ConfigError(f"task={settings.task} must be a section: {{name: sparse_parity}}, say")
    fields = settings.task | changes
    name = str(fields.pop("name", None))
    kind = cast(type, read_object(name, "task.name")) if ":" in name else TASKS.get(name)
    if kind is None or not is_dataclass(kind):
        raise ConfigError(
            f"task.name={name} is not one of {', '.join(TASKS)}, nor a dataclass your_file.py:Task"
        )
    task = cast(Task, build(kind, fields, "task"))
    return EndToken(task) if settings.end_token else task


def build_test_tasks(settings: ExperimentSettings) -> dict[str, Task]:
    """Return the tasks of the tests by the names that rows have."""
    changes_by_name = settings.test_tasks or {settings.task["name"]: {}}
    return {name: build_task(settings, **changes) for name, changes in changes_by_name.items()}


def check(settings: ExperimentSettings, origin: str) -> None:
    """Check everything before training; each length and k is drawn once."""
    enforce(origin, _rules(settings))
    check_model(settings.model, origin)
    task = build_task(settings)  # first, as tests add to it
    test_tasks = build_test_tasks(settings)
    for name, test_task in test_tasks.items():
        if task.vocabulary != test_task.vocabulary:
            raise ConfigError(f"{origin}: test_tasks.{name} changes the vocabulary")
    for scheme in settings.schemes:
        sizes(settings, task, test_tasks, scheme)
    _draw_once(settings, task, test_tasks)


def _rules(settings: ExperimentSettings) -> Rules:
    schemes = set(settings.schemes)
    lengths = settings.train_lengths
    unknown = [scheme for scheme in settings.schemes if scheme not in SCHEMES]
    if unknown:
        yield f"schemes={unknown} are not known; choose among {', '.join(SCHEMES)}"
    if not settings.optimizer.learning_rate:
        yield "optimizer.learning_rate=0 trains nothing; raise it"
    if len(lengths) != 2 or not 1 <= lengths[0] <= lengths[1]:
        yield f"train_lengths={lengths} must be [shortest, longest]"
    for is_used, section, names in (
        (schemes & {*CHUNKED}, "positions", ("num_chunks", "aligned_cuts", "published")),
        (settings.train_ks, "training", ("mastery",)),
        (settings.training.mastery, "training", ("past_mastery",)),
        (False, "model", ("vocab_size", "embedding_size", "max_sequence_length", "rope", "alibi")),
    ):
        values = getattr(settings, section)
        defaults = getattr(ExperimentSettings(), section)
        for name in names:
            if not is_used and getattr(values, name) != getattr(defaults, name):
                yield f"{section}.{name} is set, but decides nothing; remove it"
    if settings.train_ks and not settings.test_ks:
        yield "train_ks is set, but test_ks is empty; set both"


def sizes(
    settings: ExperimentSettings, task: Task, test_tasks: dict[str, Task], scheme: str
) -> Sizes:
    """Return how many IDs and tokens a model of this scheme needs. Raise ConfigError if the task
    has no coupled IDs for the scheme."""
    num_ids = 0
    num_coupled = 0
    longest_training = training_lengths(settings, task)[-1]
    cases: list[tuple[str, int, Task]] = [("train_lengths", longest_training, task)]
    for test_task in test_tasks.values():
        cases += [("test_lengths", length, test_task) for length in settings.test_lengths]
    for field_name, length, case_task in cases:
        longest = _draw(case_task, field_name, length, case_task.largest_k(length))
        num_needed = longest.prompt_BP.shape[1] + longest.response_BR.shape[1]
        if scheme in HAVE_COUPLED_IDS:
            largest_id = case_task.largest_id(length)
            if largest_id is None:
                raise ConfigError(f"scheme {scheme}: this task has no coupled IDs; remove it")
            num_coupled = max(num_coupled, largest_id + 1)
            if scheme in COUPLED:
                num_needed = largest_id + 1
        if scheme == "auxiliary":
            _ = longest.partners_BL  # raises if there are none
        num_ids = max(num_ids, num_needed)
    num_labels = num_coupled if scheme == "pointers" else 0
    return Sizes(num_ids, len(task.vocabulary), num_labels)


def training_lengths(settings: ExperimentSettings, task: Task) -> list[int]:
    """Return the lengths that training draws from."""
    shortest, longest = settings.train_lengths
    lengths = [n for n in range(shortest, longest + 1) if n % task.length_step == 0]
    if not lengths:
        raise ConfigError(
            f"train_lengths={settings.train_lengths} holds no multiple of {task.length_step}"
        )
    return lengths


class Test(NamedTuple):
    """What one accuracy is measured on."""

    task_name: str
    length: int
    k: int | None


def tests(settings: ExperimentSettings, test_tasks: dict[str, Task]) -> list[Test]:
    """Return all tests that exist: at a short length a large k may not fit."""
    return [
        Test(name, length, k)
        for name, test_task in test_tasks.items()
        for length in settings.test_lengths
        for k in each(settings.test_ks)
        if k is None or k <= (test_task.largest_k(length) or k)
    ]


def _draw_once(settings: ExperimentSettings, task: Task, test_tasks: dict[str, Task]) -> None:
    """Draw each length and k once, as a task rejects what it cannot draw."""
    lengths = training_lengths(settings, task)
    _check_ks("train_ks", settings.train_ks, task, lengths[-1])
    for test_task in test_tasks.values():
        _check_ks("test_ks", settings.test_ks, test_task, max(settings.test_lengths))
    for length in (lengths[0], lengths[-1]):
        # With train_ks, training draws a k for each sample.
        k_B = np.ones(_NUM_DRAWN, dtype=int) if settings.train_ks else None
        samples = _draw(task, "train_lengths", length, k_B)
    if settings.positions.aligned_cuts and samples.unit == 1:
        raise ConfigError("positions.aligned_cuts=True: this task's units are single tokens")
    for name, length, test_k in tests(settings, test_tasks):
        _draw(test_tasks[name], "test_lengths", length, test_k)


def _check_ks(field_name: str, ks: list[int], task: Task, length: int) -> None:
    """Raise ConfigError if a task has no k, or a k that is too large at this length."""
    largest = task.largest_k(length)
    if ks and largest is None:
        raise ConfigError(f"{field_name}={ks} is set, but this task has no k; remove it")
    if ks and largest is not None and not 1 <= min(ks) <= max(ks) <= largest:
        raise ConfigError(f"{field_name}={ks} must lie between 1 and {largest}, at length {length}")


_NUM_DRAWN = 4
"""Number of samples that are drawn to check a length."""


def _draw(task: Task, field_name: str, length: int, k: Ks) -> Samples:
    """Draw a few samples and check them. `field_name`: the setting, for messages."""
    if length < 1 or length % task.length_step:
        raise ConfigError(f"{field_name}: {length} is not a multiple of {task.length_step}")
    try:
        samples = task.sample(np.random.default_rng(0), _NUM_DRAWN, length, k)
    except ConfigError as error:
        raise ConfigError(f"{field_name}: {error}") from None
    enforce(f"the task's samples of length {length}", _rules_of_samples(task, samples, length))
    return samples


def _rules_of_samples(task: Task, samples: Samples, length: int) -> Rules:
    """Check samples of a user's own task before training on them."""
    tokens = np.concatenate((samples.prompt_BP, samples.response_BR), axis=1)
    low = tokens.min()
    high = tokens.max()
    num_words = len(task.vocabulary)
    if not 0 <= low <= high < num_words:
        yield f"tokens {low} to {high}, but the vocabulary has {num_words} words"
    if not np.array_equal(task.solve(samples), samples.response_BR):
        yield "solve() does not give the response that sample() gives"
    if samples.prompt_ids_BP is not None:
        low = samples.coupled_ids_BL.min()
        high = samples.coupled_ids_BL.max()
        largest_id = task.largest_id(length)
        if largest_id is None or not 1 <= low <= high <= largest_id:
            yield f"position IDs {low} to {high}, but the first is 1 and largest_id() {largest_id}"
