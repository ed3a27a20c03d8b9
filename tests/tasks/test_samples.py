"""Every task is what its definition says, is solved by reading its prompt, gives nothing away."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.errors import ConfigError
from olmo_sparsity.tasks.addition import Addition
from olmo_sparsity.tasks.end_token import EndToken
from olmo_sparsity.tasks.needle import Needle
from olmo_sparsity.tasks.samples import Samples, Task
from olmo_sparsity.tasks.scratchpad_parity import ScratchpadParity
from olmo_sparsity.tasks.sparse_parity import SparseParity
from olmo_sparsity.tasks.variable_assignment import VariableAssignment
from tests.support.samples import draw

TASKS: list[Any] = [
    SparseParity(),
    ScratchpadParity(),
    Addition(),
    Addition(digits_reversed=False),
    Needle(),
    Needle(num_needles=3),
    VariableAssignment(),
    VariableAssignment(distractors="constants"),
    VariableAssignment(num_letters=6, num_names=30, name_length=2, value_length=3),
    VariableAssignment(num_letters=4, num_names=4, order="program"),
    VariableAssignment(num_letters=4, num_names=9, name_length=2, order="program"),
    EndToken(ScratchpadParity()),
    EndToken(VariableAssignment()),
    EndToken(Needle()),
]
every_task = pytest.mark.parametrize("task", TASKS, ids=repr)


@every_task
@pytest.mark.parametrize("length", [8, 20])
def test_a_reader_of_the_prompt_finds_the_response(task: Task, length: int) -> None:
    samples = draw(task, length=length)
    np.testing.assert_array_equal(task.solve(samples), samples.response_BR)


@every_task
def test_a_seed_fixes_every_bit(task: Task) -> None:
    first, again, other = draw(task), draw(task), draw(task, seed=1)
    for name in ("prompt_BP", "response_BR", "prompt_ids_BP", "response_ids_BR"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    assert (
        first.prompt_BP.shape != other.prompt_BP.shape or (first.prompt_BP != other.prompt_BP).any()
    )


@every_task
def test_tokens_are_words_and_ids_lie_where_they_should(task: Task) -> None:
    samples = draw(task)
    for tokens in (samples.prompt_BP, samples.response_BR):
        assert tokens.dtype == np.int64
        assert tokens.min() >= 0
        assert tokens.max() < len(task.vocabulary)
    assert len(set(task.vocabulary)) == len(task.vocabulary)
    largest = task.largest_id(12)
    if largest is None:
        assert samples.prompt_ids_BP is None
        return
    assert samples.prompt_ids_BP.min() >= 1
    assert samples.response_ids_BR.min() >= 1
    assert max(samples.prompt_ids_BP.max(), samples.response_ids_BR.max()) == largest


@every_task
def test_drawing_many_is_the_work_of_numpy(task: Task) -> None:
    """Python calls nothing for each sample, or training would wait for it."""

    def num_calls(num: int) -> int:
        draw(task, num)  # whatever is imported or cached at first
        called: list[str] = []
        sys.setprofile(lambda frame, event, argument: called.append(event))
        try:
            draw(task, num)
        finally:
            sys.setprofile(None)
        return len(called)

    assert num_calls(1024) < num_calls(128) + 100


# --- what is refused ------------------------------------------------------------------------------


TOKENS = np.zeros((4, 3), dtype=np.int64)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: draw(ScratchpadParity(), k=2), "scratchpad_parity has no k"),
        (lambda: draw(Addition(), k=2), "addition has no k"),
        (lambda: draw(Needle(), k=2), "needle has no k"),
        (lambda: draw(SparseParity(), k=7), "k=7 relevant places do not fit into the 6 pairs"),
        (lambda: Needle(num_needles=20), "task.num_needles=20 must lie between 1"),
        (lambda: Needle(num_values=1), "task.num_values=1"),
        (lambda: draw(Needle(), length=3), "length 3 has no room"),
        (lambda: VariableAssignment(num_letters=3, num_names=4), "task.num_names=4 is more than"),
        (lambda: VariableAssignment(value_length=0), "task.value_length=0 must be at least 1"),
        (lambda: draw(VariableAssignment(num_names=5)), "12 statements need as many names"),
        (lambda: draw(VariableAssignment(), k=13), "a chain of k=13 does not fit"),
        (lambda: draw(VariableAssignment(), k=np.array([1, 2])), "one k for all samples"),
        (
            lambda: Samples(TOKENS, TOKENS, TOKENS[:, :2], TOKENS),
            r"prompt_ids_BP has shape \(4, 2\); .* \(4, 3\)",
        ),
        (
            lambda: Samples(TOKENS, TOKENS, TOKENS, TOKENS[:, :2]),
            r"response_ids_BR has shape \(4, 2\)",
        ),
        (lambda: Samples(TOKENS, TOKENS, TOKENS), "or neither"),
        (lambda: Samples(TOKENS, TOKENS[:3]), "4 prompts have 3 responses"),
    ],
)
def test_what_cannot_be_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()
