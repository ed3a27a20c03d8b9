"""Train and test one model on a task, for one position scheme and seed (a trial).

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
from olmo_sparsity.training.optim import build_adamw, learning_rate
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

_TRAIN, _TEST, _TEST_IDS, _CHECK = 0, 1, 2, 3  # independent streams of random numbers
_TEST_BATCH = 100
_LOG_EVERY = 100


@dataclass(frozen=True)
class Trial:
    scheme: str
    train_k: int | None
    seed: int

    @property
    def name(self) -> str:
        k = "" if self.train_k is None else f"_k{self.train_k}"
        return f"{self.scheme}{k}_seed{self.seed}"


class Bench:
    """A trial, its tasks, and what its scheme needs of a model."""

    def __init__(self, settings: ExperimentSettings, trial: Trial, device: torch.device) -> None:
        self.settings, self.trial, self.device = settings, trial, device
        self.task, self.test_tasks = build_task(settings), build_test_tasks(settings)
        self.sizes = sizes(settings, self.task, self.test_tasks, trial.scheme)


Report = Callable[[int, float], None]
"""Called after each step with the number of steps done and the loss."""


def build(bench: Bench) -> PositionCoupling:
    settings, scheme, needed = bench.settings, bench.trial.scheme, bench.sizes
    rotates = scheme not in ("nope", "alibi")
    num_words = needed.num_words + needed.num_labels
    model = replace(
        settings.model,
        vocab_size=num_words,
        embedding_size=num_words,
        max_sequence_length=needed.num_ids,
        rope=rotates,
        alibi=scheme == "alibi",
        rotary_fraction=settings.model.rotary_fraction if rotates else 1.0,
    )
    return PositionCoupling(
        build_model(model),
        needed.num_ids,
        embed_ids=scheme in EMBEDDED,
        predict_ids=scheme in PREDICTED,
        feed_ids=scheme != "auxiliary",
        text_weight=settings.training.text_weight,
    ).to(bench.device)


@dataclass
class Course:
    """How far a training is."""

    num_steps: int
    step: int = 0
    mastered: int | None = None
    """The step of the first check that each k passed."""

    losses: list[list[float]] = field(default_factory=list)
    """[step, mean loss since the last entry]."""

    recent: list[float] = field(default_factory=list)


def train(
    bench: Bench, report: Report, kept: Path | None = None
) -> tuple[PositionCoupling, Course]:
    """The trained model. `kept`: file of the state, which a stopped training resumes from."""
    settings, seed = bench.settings, bench.trial.seed
    torch.manual_seed(seed)
    model = build(bench).train()
    optimizer = build_adamw(model.parameters(), model, settings.optimizer)
    generator = np.random.default_rng([seed, _TRAIN])
    training, course = settings.training, Course(settings.training.num_steps)
    if kept is not None and kept.is_file():
        course, weights, moments, drawn = torch.load(kept, weights_only=False)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        generator.bit_generator.state = drawn

    while course.step < course.num_steps:
        course.step += 1
        unknown = bool(training.mastery) and course.mastered is None
        num_steps = course.num_steps + unknown * settings.optimizer.cooldown_steps
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings.optimizer, course.step, num_steps)
        loss = model.loss(*_draw_batch(bench, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        course.recent.append(loss.item())
        report(course.step, course.recent[-1])
        checked = course.step % training.check_steps == 0
        if checked and unknown and _masters(bench, model):
            course.mastered = course.step
            num_constant = round(course.step * training.past_mastery)
            course.num_steps = num_constant + settings.optimizer.cooldown_steps
        if course.step % _LOG_EVERY == 0 or course.step == course.num_steps:
            course.losses.append([course.step, float(np.mean(course.recent))])
            course.recent.clear()
        if checked and kept is not None:
            states = [model.state_dict(), optimizer.state_dict(), generator.bit_generator.state]
            with writing(kept) as partial:
                torch.save([course, *states], partial)
    return model.eval(), course


def _masters(bench: Bench, model: PositionCoupling) -> bool:
    """Whether each k of training has the accuracy asked, on samples of no test."""
    assert bench.trial.train_k is not None
    length = training_lengths(bench.settings, bench.task)[-1]
    model.eval()
    # The largest k is learnt last: trying it first ends most checks after one k.
    masters = True
    for k in range(bench.trial.train_k, 0, -1):
        row = _measure_at(bench, model, bench.task, length, k, stream=_CHECK)
        if row.exact_match < bench.settings.training.mastery:
            masters = False
            break
    model.train()
    return masters


def _draw_batch(bench: Bench, generator: np.random.Generator) -> tuple[Tensor, ...]:
    """tokens_BL, ids_BL, response_BL and target_ids_BL of several lengths, padded at the right,
    where causal attention and the loss ignore it."""
    settings = bench.settings
    lengths = training_lengths(settings, bench.task)
    size = settings.training.batch_size
    parts = []
    for part in np.array_split(np.arange(size), min(settings.training.lengths_per_batch, size)):
        length = int(generator.choice(lengths))
        samples = _draw_training(bench, generator, len(part), length)
        parts.append(_tensors(bench, _place(bench, samples, generator, training=True)))
    longest = max(tokens.shape[1] for tokens, *_ in parts)
    return tuple(
        torch.cat([F.pad(array, (0, longest - array.shape[1])) for array in arrays])
        for arrays in zip(*parts, strict=True)
    )


def _draw_training(
    bench: Bench, generator: np.random.Generator, num_samples: int, length: int
) -> Samples:
    largest, k_B = bench.trial.train_k, None
    if largest is not None:
        largest = min(largest, bench.task.largest_k(length) or largest)
        k_B = generator.integers(1, largest + 1, size=num_samples)
    return bench.task.sample(generator, num_samples, length, k_B)


def _place(
    bench: Bench, samples: Samples, generator: np.random.Generator, training: bool
) -> Placed:
    scheme, positions = bench.trial.scheme, bench.settings.positions
    return place(scheme, samples, generator, positions, bench.sizes, training=training)


def _tensors(bench: Bench, placed: Placed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens_BL, ids_BL, response_BL (true over the response) and target_ids_BL."""
    response_BL = np.zeros(placed.tokens_BL.shape, dtype=bool)
    response_BL[:, placed.num_prompt :] = True
    tokens, ids, response, targets = (
        torch.from_numpy(np.ascontiguousarray(array)).to(bench.device)
        for array in (placed.tokens_BL, placed.ids_BL, response_BL, placed.target_ids_BL)
    )
    return tokens, ids, response, targets


def measure(bench: Bench, model: PositionCoupling) -> list[Row]:
    return [
        replace(_measure_at(bench, model, bench.test_tasks[name], length, k), task=name)
        for name, length, k in tests(bench.settings, bench.test_tasks)
    ]


def draw_test_samples(
    task: Task, num_samples: int, length: int, k: int | None, stream: int = _TEST
) -> Iterator[Samples]:
    """The same for every scheme and seed."""
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
    settings, trial = bench.settings, bench.trial
    placing = np.random.default_rng([_TEST_IDS, length, k or 0])
    num_samples = settings.num_test_samples
    num_exact = num_tokens = num_correct = num_correct_ids = num_forced = 0
    for samples in draw_test_samples(task, num_samples, length, k, stream):
        placed = _place(bench, samples, placing, training=False)
        tokens_BL, ids_BL, _, target_ids_BL = _tensors(bench, placed)
        before, after = slice(placed.num_prompt), slice(placed.num_prompt, None)
        num_response = tokens_BL[:, after].shape[1]
        generated = model.generate(
            tokens_BL[:, before],
            ids_BL[:, before],
            num_response,
            None if model.feeds_ids else ids_BL[:, after],
        )
        # For a single response token, free-running and teacher-forced are the same.
        forced = generated if num_response == 1 else model.predict(tokens_BL, ids_BL, num_response)
        truth = Response(tokens_BL[:, after], target_ids_BL[:, after])
        if bench.sizes.num_labels:
            generated, forced, truth = (_read_labels(r) for r in (generated, forced, truth))
        correct = score(generated, truth.tokens_BR, truth.ids_BR)
        num_tokens += truth.tokens_BR.numel()
        exact_B = correct.exact_B if model.feeds_ids else correct.token_BR.all(1)
        num_exact += int(exact_B.sum())
        num_correct += int(correct.token_BR.sum())
        num_correct_ids += int(correct.id_BR.sum())
        num_forced += int((forced.tokens_BR == truth.tokens_BR).sum())
    exact_match = num_exact / num_samples
    low, high = wilson(exact_match, num_samples)
    return Row(
        task=settings.task["name"],
        scheme=trial.scheme,
        seed=trial.seed,
        train_k=trial.train_k,
        test_k=k,
        length=length,
        token_accuracy=num_correct / num_tokens,
        id_accuracy=num_correct_ids / num_tokens
        if model.id_head is not None or bench.sizes.num_labels
        else None,
        exact_match=exact_match,
        low=low,
        high=high,
        teacher_forced=num_forced / num_tokens,
        num_samples=num_samples,
    )


def _read_labels(written: Response) -> Response:
    """Return the labels, which precede the tokens, as IDs."""
    return Response(written.tokens_BR[:, 1::2], written.tokens_BR[:, ::2])
