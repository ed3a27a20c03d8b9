"""One trial: train a model on a task under one position scheme and seed, test it by length and k.

Place in the flow: settings + task → samples → schemes → **PositionCoupling around a model** → rows.

Every scheme runs through the same code: what differs is the IDs it is given (schemes.py), whether
the model rotates by them, subtracts their distance or ignores them, and whether it names those of
the response.

Dimension key: B samples, P prompt length, R response length, L = P + R.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.model.coupling import PositionCoupling, score
from olmo_sparsity.model.load import build_model
from olmo_sparsity.tasks.results import Row, wilson
from olmo_sparsity.tasks.samples import Samples, Task
from olmo_sparsity.tasks.schemes import COUPLED, place
from olmo_sparsity.tasks.settings import ExperimentSettings, num_ids, tests, training_lengths
from olmo_sparsity.training.optim import build_optimizer, learning_rate

_TRAIN, _TEST = 0, 1  # streams of random numbers that never meet
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


Report = Callable[[int, float], None]
"""Told the steps done and the loss, after every step."""


def build(
    settings: ExperimentSettings, task: Task, test_task: Task, scheme: str
) -> PositionCoupling:
    size = len(task.vocabulary)
    ids = num_ids(settings, task, test_task, scheme)
    model = replace(
        settings.model,
        vocab_size=size,
        embedding_size=size,
        max_sequence_length=ids,
        rope=scheme not in ("nope", "alibi"),
        alibi=scheme == "alibi",
        # Nothing is rotated without RoPE, and then the share of it would be refused.
        rotary_fraction=settings.model.rotary_fraction if scheme not in ("nope", "alibi") else 1.0,
    )
    coupled, coupling = scheme in COUPLED, settings.coupling
    return PositionCoupling(
        build_model(model),
        ids,
        embed_ids=coupled and coupling.embed_ids,
        predict_ids=scheme == "ppc",
        id_loss_weight=coupling.id_loss_weight,
    )


def train(
    settings: ExperimentSettings,
    task: Task,
    test_task: Task,
    trial: Trial,
    device: torch.device,
    report: Report,
) -> tuple[PositionCoupling, list[tuple[int, float]]]:
    """The trained model, and (step, mean loss since the last entry)."""
    torch.manual_seed(trial.seed)
    model = build(settings, task, test_task, trial.scheme).to(device).train()
    optimizer = build_optimizer(model, settings.optimizer)
    generator = np.random.default_rng([trial.seed, _TRAIN])
    lengths = training_lengths(settings, task)
    num_steps = settings.training.num_steps
    history: list[tuple[int, float]] = []
    recent: list[float] = []
    for step in range(1, num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings.optimizer, step, num_steps)
        length = int(generator.choice(lengths))
        samples = _draw_training(settings, task, trial, generator, length, step)
        tokens_BL, ids_BL, response_BL = _tensors(
            settings, trial.scheme, samples, generator, model.num_ids, device, training=True
        )
        loss = model.loss(tokens_BL, ids_BL, response_BL).total
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.training.max_grad_norm)
        optimizer.step()
        recent.append(loss.item())
        report(step, recent[-1])
        if step % _LOG_EVERY == 0 or step == num_steps:
            history.append((step, float(np.mean(recent))))
            recent = []
    return model.eval(), history


def _draw_training(
    settings: ExperimentSettings,
    task: Task,
    trial: Trial,
    generator: np.random.Generator,
    length: int,
    step: int,
) -> Samples:
    k_B = None
    if trial.train_k is not None:
        largest, growing = trial.train_k, settings.training.grow_k_steps
        if step < growing:
            largest = 1 + (largest - 1) * step // growing
        largest = min(largest, task.largest_k(length) or largest)
        k_B = generator.integers(1, largest + 1, size=settings.training.batch_size)
    return task.sample(generator, settings.training.batch_size, length, k_B)


def _tensors(
    settings: ExperimentSettings,
    scheme: str,
    samples: Samples,
    generator: np.random.Generator,
    ids: int,
    device: torch.device,
    *,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """tokens_BL, ids_BL and response_BL, true over the response."""
    positions_BL = place(scheme, samples, generator, settings.positions, ids, training=training)
    tokens_BL = np.concatenate((samples.prompt_BP, samples.response_BR), axis=1)
    response_BL = np.zeros(tokens_BL.shape, dtype=bool)
    response_BL[:, samples.prompt_BP.shape[1] :] = True
    tokens, positions, response = (
        torch.from_numpy(np.ascontiguousarray(array)).to(device)
        for array in (tokens_BL, positions_BL, response_BL)
    )
    return tokens, positions, response


def measure(
    settings: ExperimentSettings,
    task_name: str,
    test_task: Task,
    trial: Trial,
    model: PositionCoupling,
    device: torch.device,
) -> list[Row]:
    """Every scheme and seed of training meets the same test samples."""
    rows = []
    for length, k in tests(settings, test_task):
        generator = np.random.default_rng([_TEST, length, k or 0])
        rows.append(
            _measure_once(
                settings, task_name, test_task, trial, model, device, generator, length, k
            )
        )
    return rows


def _measure_once(
    settings: ExperimentSettings,
    task_name: str,
    test_task: Task,
    trial: Trial,
    model: PositionCoupling,
    device: torch.device,
    generator: np.random.Generator,
    length: int,
    k: int | None,
) -> Row:
    num_exact = num_tokens = num_right = num_right_ids = num_forced = 0
    # A batch at a time, also where one would do: a task may draw its k once for a whole batch.
    for start in range(0, settings.num_test_samples, _TEST_BATCH):
        size = min(_TEST_BATCH, settings.num_test_samples - start)
        samples = test_task.sample(generator, size, length, k)
        tokens_BL, ids_BL, _ = _tensors(
            settings, trial.scheme, samples, generator, model.num_ids, device, training=False
        )
        num_prompt, num_response = samples.prompt_BP.shape[1], samples.response_BR.shape[1]
        response_BR, response_ids_BR = tokens_BL[:, num_prompt:], ids_BL[:, num_prompt:]
        found = model.generate(
            tokens_BL[:, :num_prompt],
            ids_BL[:, :num_prompt],
            num_response,
            None if model.id_head is not None else response_ids_BR,
        )
        right = score(found, response_BR, response_ids_BR)
        # The first response token follows true tokens only: free-running and forced are one.
        forced = found if num_response == 1 else model.predict(tokens_BL, ids_BL, num_response)
        num_tokens += size * num_response
        num_exact += int(right.exact_B.sum())
        num_right += int(right.token_BR.sum())
        num_right_ids += int(right.id_BR.sum())
        num_forced += int((forced.tokens_BR == response_BR).sum())
    exact_match = num_exact / settings.num_test_samples
    low, high = wilson(exact_match, settings.num_test_samples)
    return Row(
        task=task_name,
        scheme=trial.scheme,
        seed=trial.seed,
        train_k=trial.train_k,
        test_k=k,
        length=length,
        token_accuracy=num_right / num_tokens,
        id_accuracy=None if model.id_head is None else num_right_ids / num_tokens,
        exact_match=exact_match,
        low=low,
        high=high,
        teacher_forced=num_forced / num_tokens,
        num_samples=settings.num_test_samples,
    )
