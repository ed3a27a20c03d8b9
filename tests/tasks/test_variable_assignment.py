"""Chains of assignments, in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from olmo_sparsity.tasks.variable_assignment import VariableAssignment
from tests.support.samples import draw


@pytest.mark.parametrize("order", ["shuffled", "program"])
def test_an_assignment_leads_along_its_chain(order: str) -> None:
    task = VariableAssignment(num_letters=12, num_names=12, order=order)
    for k in (1, 4, 12):
        samples = draw(task, num=500, k=k)
        assert samples.response_BR.shape == (500, k)
        places = samples.response_ids_BR - 1
        np.testing.assert_array_equal(
            np.take_along_axis(samples.prompt_BP, places, axis=1), samples.response_BR
        )
        # A source stands in the second place of its statement; the last one is a constant.
        assert (places % 2 == 1).all()
        assert ((samples.response_BR >= 12).sum(1) == k - 1).all()
        if order == "program":
            assert (np.diff(places) < 0).all()


def test_shuffled_assignments_name_each_variable_once_and_give_no_place_away() -> None:
    samples = draw(VariableAssignment(num_letters=12, num_names=12), num=6000, k=3)
    targets = samples.prompt_BP[:, :-2:2]
    assert (np.sort(targets, axis=1) == np.arange(12, 24)).all()
    first = samples.response_ids_BR[:, 0] // 2 - 1
    np.testing.assert_allclose(np.bincount(first, minlength=12) / 6000, 1 / 12, atol=0.02)
    constants = samples.response_BR[:, -1] - 2
    np.testing.assert_allclose(np.bincount(constants) / 6000, 0.1, atol=0.02)
    # Four chains of three: the constant asked for is one of four.
    assert ((samples.prompt_BP[:, 1:-2:2] < 12).sum(1) == 4).all()


def test_names_that_training_never_used_are_spelled_with_letters_it_did() -> None:
    settings: dict[str, Any] = {"num_letters": 5, "name_length": 2}
    few = VariableAssignment(num_names=12, **settings)
    many = VariableAssignment(num_names=25, **settings)
    assert few.vocabulary == many.vocabulary
    seen, used = (
        {tuple(name) for name in draw(task, num=2000, k=3).prompt_BP[:, -2:].tolist()}
        for task in (few, many)
    )
    assert len(seen) == 12
    assert len(used) == 25
    assert seen < used
    assert {letter for name in seen for letter in name} == set(range(12, 17))


def test_in_a_program_a_name_alone_does_not_say_which_statement_is_meant() -> None:
    samples = draw(VariableAssignment(num_letters=4, num_names=4, order="program"), num=500, k=5)
    targets = samples.prompt_BP[:, :-2:2]
    asked = samples.prompt_BP[:, -1:]
    assert (targets == asked).sum(1).mean() > 2
    # Reading the first assignment of the name instead of the last one is often wrong.
    first = (targets == asked).argmax(1)
    sources = samples.prompt_BP[:, 1:-2:2][np.arange(500), first]
    assert (sources == samples.response_BR[:, 0]).mean() < 0.7
