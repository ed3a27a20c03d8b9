"""Train and test one model on a task, for one position scheme, k and seed (a trial).

    samples (samples.py) ─ `place` of schemes.py ─→ tokens and position IDs
    `train`: batches of several lengths ─→ a `PositionCoupling` model
    `measure`: samples of each test length and k ─→ a `Row` with its accuracies

Dimension key: B samples, P prompt length, R response length, L = P + R.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from olmo_sparsity.base.files import writing
from olmo_sparsity.models.build import build_model
from olmo_sparsity.training.optimizer.learning_rate import learning_rate
from olmo_sparsity.training.optimizer.optim import build_adamw
from study.coupling import PositionCoupling, Response, score
from study.tasks.results import Row, wilson
from study.tasks.samples import Samples, Task
from study.tasks.schemes import EMBEDDED, PREDICTED, Placed, place
from study.tasks.settings import (
    ExperimentSettings,
    build_task,
    build_test_tasks,
    sizes,
    tests,
    training_lengths,
)

# Independent streams of random numbers.
_TRAIN = 0
_TEST = 1
_TEST_IDS = 2
_CHECK = 3

_TEST_BATCH = 100
"""Number of test samples that are generated together."""

_LOG_EVERY = 100
"""Number of steps whose mean loss is stored."""


@dataclass(frozen=True)
class Trial:
    """What distinguishes one model of an experiment from the others."""

    scheme: str
    train_k: int | None
    """The largest k of training. None: the task has no k."""

    seed: int

    @property
    def name(self) -> str:
        """The name of its file."""
        k = "" if self.train_k is None else f"_k{self.train_k}"
        return f"{self.scheme}{k}_seed{self.seed}"


class Bench:
    """A trial, its tasks, and what its scheme needs of a model."""

    def __init__(self, settings: ExperimentSettings, trial: Trial, device: torch.device) -> None:
        self.settings = settings
        self.trial = trial
        self.device = device
        self.task = build_task(settings)
        self.test_tasks = build_test_tasks(settings)
        self.sizes = sizes(settings, self.task, self.test_tasks, trial.scheme)


Report = Callable[[int, float], None]
"""Called after each step with the number of steps done and the loss."""


def build(bench: Bench) -> PositionCoupling:
    """Return an untrained model with the positions, heads and vocabulary of a trial's scheme."""
    settings = bench.settings
    scheme = bench.trial.scheme
    rotates = scheme not in ("nope", "alibi")
    num_words = bench.sizes.num_words + bench.sizes.num_labels
    model = replace(
        settings.model,
        vocab_size=num_words,
        embedding_size=num_words,
        max_sequence_length=bench.sizes.num_ids,
        rope=rotates,
        alibi=scheme == "alibi",
        rotary_fraction=settings.model.rotary_fraction if rotates else 1.0,
    )
    return PositionCoupling(
        build_model(model),
        bench.sizes.num_ids,
        embed_ids=scheme in EMBEDDED,
        predict_ids=scheme in PREDICTED,
        feed_ids=scheme != "auxiliary",
        text_weight=settings.training.text_weight,
    ).to(bench.device)


@dataclass
class Course:
    """How far a training is. Stored with the states, so its fields keep their names."""

    num_steps: int
    step: int = 0
    """Number of steps that are done."""

    mastered: int | None = None
    """The step of the first check that each k passed."""

    losses: list[list[float]] = field(default_factory=list)
    """[step, mean loss since the last entry]."""

    recent: list[float] = field(default_factory=list)
    """Losses since the last entry."""


def train(
    bench: Bench, report: Report, kept: Path | None = None
) -> tuple[PositionCoupling, Course]:
    """Return the trained model, and how its training went.

    report: Called after each step.
    kept: File of the state, which a stopped training resumes from.
    """
    settings = bench.settings
    training = settings.training
    seed = bench.trial.seed
    torch.manual_seed(seed)
    model = build(bench).train()
    optimizer = build_adamw(model.parameters(), model, settings.optimizer)
    generator = np.random.default_rng([seed, _TRAIN])
    course = Course(training.num_steps)
    if kept is not None and kept.is_file():
        course, weights, moments, generator_state = torch.load(kept, weights_only=False)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        generator.bit_generator.state = generator_state

    while course.step < course.num_steps:
        course.step += 1
        # Until mastery the end is not known: the cooldown is put beyond it, at a constant rate.
        awaits_mastery = bool(training.mastery) and course.mastered is None
        num_steps = course.num_steps
        if awaits_mastery:
            num_steps += settings.optimizer.cooldown_steps
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings.optimizer, course.step, num_steps)
        loss = model.loss(*_draw_batch(bench, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        course.recent.append(loss.item())
        report(course.step, course.recent[-1])

        is_checked = course.step % training.check_steps == 0
        if is_checked and awaits_mastery and _masters(bench, model):
            course.mastered = course.step
            num_constant = round(course.step * training.past_mastery)
            course.num_steps = num_constant + settings.optimizer.cooldown_steps
        if course.step % _LOG_EVERY == 0 or course.step == course.num_steps:
            course.losses.append([course.step, float(np.mean(course.recent))])
            course.recent.clear()
        if is_checked and kept is not None:
            states = [model.state_dict(), optimizer.state_dict(), generator.bit_generator.state]
            with writing(kept) as partial:
                torch.save([course, *states], partial)
    return model.eval(), course


def _masters(bench: Bench, model: PositionCoupling) -> bool:
    """Return whether each k of training has the accuracy asked, on samples of no test."""
    assert bench.trial.train_k is not None
    length = training_lengths(bench.settings, bench.task)[-1]
    model.eval()
    # The largest k is learnt last: trying it first ends most checks after one k.
    rows = (
        _measure_at(bench, model, bench.task, length, k, stream=_CHECK)
        for k in range(bench.trial.train_k, 0, -1)
    )
    masters = all(row.exact_match >= bench.settings.training.mastery for row in rows)
    model.train()
    return masters


def _draw_batch(bench: Bench, generator: np.random.Generator) -> tuple[Tensor, ...]:
    """Return the arguments of `PositionCoupling.loss` for a batch of several lengths, padded at the
    right, where causal attention and the loss ignore it."""
    settings = bench.settings
    lengths = training_lengths(settings, bench.task)
    batch_size = settings.training.batch_size
    num_parts = min(settings.training.lengths_per_batch, batch_size)
    parts = []
    for numbers in np.array_split(np.arange(batch_size), num_parts):
        length = int(generator.choice(lengths))
        samples = _draw_training(bench, generator, len(numbers), length)
        parts.append(_tensors(bench, _place(bench, samples, generator, training=True)))
    longest = max(tokens.shape[1] for tokens, *_ in parts)
    return tuple(
        torch.cat([F.pad(array, (0, longest - array.shape[1])) for array in arrays])
        for arrays in zip(*parts, strict=True)
    )


def _draw_training(
    bench: Bench, generator: np.random.Generator, num_samples: int, length: int
) -> Samples:
    """Draw training samples, with k uniform in 1 … train_k, or as many as fit."""
    k_B = None
    train_k = bench.trial.train_k
    if train_k is not None:
        largest_k = min(train_k, bench.task.largest_k(length) or train_k)
        k_B = generator.integers(1, largest_k + 1, size=num_samples)
    return bench.task.sample(generator, num_samples, length, k_B)


def _place(
    bench: Bench, samples: Samples, generator: np.random.Generator, training: bool
) -> Placed:
    positions = bench.settings.positions
    return place(bench.trial.scheme, samples, generator, positions, bench.sizes, training=training)


def _tensors(bench: Bench, placed: Placed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of `PositionCoupling.loss`: tokens_BL, ids_BL, response_BL (true over
    the response) and target_ids_BL."""
    response_BL = np.zeros(placed.tokens_BL.shape, dtype=bool)
    response_BL[:, placed.num_prompt :] = True
    tokens, ids, response, targets = (
        torch.from_numpy(np.ascontiguousarray(array)).to(bench.device)
        for array in (placed.tokens_BL, placed.ids_BL, response_BL, placed.target_ids_BL)
    )
    return tokens, ids, response, targets


def measure(bench: Bench, model: PositionCoupling) -> list[Row]:
    """Return the accuracies of a trained model, a row for each test."""
    rows: list[Row] = []
    for test in tests(bench.settings, bench.test_tasks):
        task = bench.test_tasks[test.task_name]
        row = _measure_at(bench, model, task, test.length, test.k)
        rows.append(replace(row, task=test.task_name))
    return rows


def draw_test_samples(
    task: Task, num_samples: int, length: int, k: int | None, stream: int = _TEST
) -> Iterator[Samples]:
    """Yield batches of test samples, the same for every scheme and seed."""
    generator = np.random.default_rng([stream, length, k or 0])
    # In fixed batches, as a task may draw its k once per batch.
    for start in range(0, num_samples, _TEST_BATCH):
        yield task.sample(generator, min(_TEST_BATCH, num_samples - start), length, k)


def _measure_at(
    bench: Bench,
    model: PositionCoupling,
    task: Task,
    length: int,
    k: int | None,
    stream: int = _TEST,
) -> Row:
    """Return the accuracies at one length and k."""
    settings = bench.settings
    trial = bench.trial
    id_generator = np.random.default_rng([_TEST_IDS, length, k or 0])
    num_samples = settings.num_test_samples
    num_exact = num_tokens = num_correct = num_correct_ids = num_forced = 0
    for samples in draw_test_samples(task, num_samples, length, k, stream):
        placed = _place(bench, samples, id_generator, training=False)
        tokens_BL, ids_BL, _, target_ids_BL = _tensors(bench, placed)
        prompt = slice(placed.num_prompt)
        response = slice(placed.num_prompt, None)
        num_response = tokens_BL[:, response].shape[1]
        generated = model.generate(
            tokens_BL[:, prompt],
            ids_BL[:, prompt],
            num_response,
            None if model.feeds_ids else ids_BL[:, response],
        )
        # For a single response token, free-running and teacher-forced are the same.
        forced = generated if num_response == 1 else model.predict(tokens_BL, ids_BL, num_response)
        truth = Response(tokens_BL[:, response], target_ids_BL[:, response])
        if bench.sizes.num_labels:
            generated = _read_labels(generated)
            forced = _read_labels(forced)
            truth = _read_labels(truth)

        correct = score(generated, truth.tokens_BR, truth.ids_BR)
        num_tokens += truth.tokens_BR.numel()
        exact_B = correct.exact_B if model.feeds_ids else correct.token_BR.all(1)
        num_exact += int(exact_B.sum())
        num_correct += int(correct.token_BR.sum())
        num_correct_ids += int(correct.id_BR.sum())
        num_forced += int((forced.tokens_BR == truth.tokens_BR).sum())

    exact_match = num_exact / num_samples
    low, high = wilson(exact_match, num_samples)
    predicts_ids = model.id_head is not None or bench.sizes.num_labels > 0
    return Row(
        task=settings.task["name"],
        scheme=trial.scheme,
        seed=trial.seed,
        train_k=trial.train_k,
        test_k=k,
        length=length,
        token_accuracy=num_correct / num_tokens,
        id_accuracy=num_correct_ids / num_tokens if predicts_ids else None,
        exact_match=exact_match,
        low=low,
        high=high,
        teacher_forced=num_forced / num_tokens,
        num_samples=num_samples,
    )


def _read_labels(written: Response) -> Response:
    """Return the labels, which precede the tokens, as IDs."""
    return Response(written.tokens_BR[:, 1::2], written.tokens_BR[:, ::2])
