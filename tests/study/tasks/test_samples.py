"""Every task is what its definition says, is solved by reading its prompt, gives nothing away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.base.errors import ConfigError
from study.tasks.addition import Addition
from study.tasks.needle import Needle
from study.tasks.parity import ScratchpadParity, SparseParity
from study.tasks.planted import Planted
from study.tasks.samples import EndToken, Samples, Task
from study.tasks.variable_assignment import VariableAssignment


def draw(task: Task, num: int = 200, length: int = 12, seed: int = 0, k: Any = None) -> Any:
    return task.sample(np.random.default_rng(seed), num, length, k)


TASKS: list[Any] = [
    SparseParity(),
    ScratchpadParity(),
    Addition(),
    Needle(),
    VariableAssignment(),
    VariableAssignment(num_names=25),
    VariableAssignment(num_names=4, order="program"),
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


def test_addition_couples_equal_significance() -> None:
    samples = draw(Addition(), num=4000, length=6)
    ids, response_ids = samples.prompt_ids_BP, samples.response_ids_BR
    np.testing.assert_array_equal(ids[:, :6], ids[:, 7:13])  # a and b
    np.testing.assert_array_equal(ids[0, :6][::-1], response_ids[0, :6])
    # The response starts beside the sign before it, and goes on by one.
    assert abs(response_ids[0, 0] - ids[0, -1]) == 1
    assert (np.diff(response_ids) == -1).all()
    digits = samples.prompt_BP[:, :6]
    np.testing.assert_allclose(
        np.bincount(digits.ravel(), minlength=10) / digits.size, 0.1, atol=0.01
    )
    assert set(np.unique(samples.response_BR[:, -1])) == {0, 1}


def test_running_parity_is_coupled_to_its_bits() -> None:
    samples = draw(ScratchpadParity(), num=4000)
    ids, response_ids = samples.prompt_ids_BP, samples.response_ids_BR
    np.testing.assert_array_equal(ids[:, :-1], response_ids)
    assert (ids[:, -1] == 1).all()
    assert (np.diff(response_ids) == 1).all()
    np.testing.assert_allclose(samples.response_BR.mean(0), 0.5, atol=0.04)
    # Neither the own bit nor the one before says the running parity.
    for shift in (0, 1):
        bits, parity = samples.prompt_BP[:, 5 - shift], samples.response_BR[:, 5]
        assert abs(np.corrcoef(bits, parity)[0, 1]) < 0.08


def test_sparse_parity_marks_k_places_all_alike() -> None:
    samples = draw(SparseParity(), num=20_000, length=24, k=3)
    relevant_Bl = samples.prompt_BP[:, ::2] == 3
    assert (relevant_Bl.sum(1) == 3).all()
    # 12 places, each marked in a quarter of the samples: 5 standard deviations.
    np.testing.assert_allclose(relevant_Bl.mean(0), 0.25, atol=5 * (0.25 * 0.75 / 20_000) ** 0.5)
    bits_Bl = samples.prompt_BP[:, 1::2]
    np.testing.assert_allclose(bits_Bl.mean(0), 0.5, atol=0.02)
    assert set(np.unique(samples.prompt_BP[:, ::2])) == {2, 3}
    assert set(np.unique(bits_Bl)) == {0, 1}


def test_sparse_parity_k_is_given_for_each_sample_or_uniform() -> None:
    k_B = np.arange(100) % 7
    samples = draw(SparseParity(), num=100, length=24, k=k_B)
    np.testing.assert_array_equal((samples.prompt_BP[:, ::2] == 3).sum(1), k_B)
    drawn_B = (draw(SparseParity(), num=12_000, length=24).prompt_BP[:, ::2] == 3).sum(1)
    np.testing.assert_allclose(np.bincount(drawn_B)[1:] / 12_000, 1 / 12, atol=0.013)


def test_nothing_less_than_all_marked_bits_says_the_parity() -> None:
    samples = draw(SparseParity(), num=20_000, length=12, k=2)
    answer_B = samples.response_BR[:, 0]
    np.testing.assert_allclose(answer_B.mean(), 0.5, atol=0.02)
    relevant_Bl, bits_Bl = samples.prompt_BP[:, ::2] == 3, samples.prompt_BP[:, 1::2]
    first_B = bits_Bl[np.arange(20_000), relevant_Bl.argmax(1)]
    for hint_B in (first_B, bits_Bl.sum(1) % 2, bits_Bl[:, -1], relevant_Bl[:, 0]):
        assert abs(np.corrcoef(hint_B, answer_B)[0, 1]) < 0.03


def test_a_needle_lies_anywhere_and_only_its_key_gives_it_away() -> None:
    samples = draw(Needle(), num=20_000, length=10)
    body = samples.prompt_BP[:, :-2]
    assert ((body >= 16).sum(1) == 1).all()  # the key, the rest are values
    place_B = samples.response_ids_BR[:, 0] - 1
    np.testing.assert_array_equal(
        samples.prompt_BP[np.arange(20_000), place_B], samples.response_BR[:, 0]
    )
    assert set(place_B) == set(range(1, 8))
    # By symmetry a needle is as often at the left end as at the right end.
    counts = np.bincount(place_B)[1:]
    np.testing.assert_allclose(counts, counts[::-1], rtol=0.12)
    np.testing.assert_allclose(np.bincount(samples.response_BR[:, 0]) / 20_000, 1 / 16, atol=0.01)
    for place in range(8):  # no fixed place is more than guessing
        assert (body[:, place] == samples.response_BR[:, 0]).mean() < 0.25


@pytest.mark.parametrize("order", ["shuffled", "program"])
def test_an_assignment_leads_along_its_chain(order: Any) -> None:
    task = VariableAssignment(num_names=12, order=order)
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
        if order == "program":  # a source is assigned before it is copied
            assert (np.diff(places) < 0).all()


def test_in_a_program_a_name_alone_does_not_say_which_statement_is_meant() -> None:
    samples = draw(VariableAssignment(num_names=4, order="program"), num=500, k=5)
    targets = samples.prompt_BP[:, :-2:2]
    is_queried = targets == samples.prompt_BP[:, -1:]
    assert is_queried.sum(1).mean() > 2
    # Reading the first assignment of the name instead of the last one is often wrong.
    first = is_queried.argmax(1)
    sources = samples.prompt_BP[:, 1:-2:2][np.arange(500), first]
    assert (sources == samples.response_BR[:, 0]).mean() < 0.7


def test_shuffled_assignments_name_each_variable_once_and_give_no_place_away() -> None:
    samples = draw(VariableAssignment(num_names=12), num=6000, k=3)
    assert (np.sort(samples.prompt_BP[:, :-2:2], axis=1) == np.arange(12, 24)).all()
    first = samples.response_ids_BR[:, 0] // 2 - 1
    np.testing.assert_allclose(np.bincount(first, minlength=12) / 6000, 1 / 12, atol=0.02)
    constants = samples.response_BR[:, -1] - 2
    np.testing.assert_allclose(np.bincount(constants) / 6000, 0.1, atol=0.02)
    # Four chains of three: the constant asked for is one of four.
    assert ((samples.prompt_BP[:, 1:-2:2] < 12).sum(1) == 4).all()


@pytest.mark.parametrize("placement", ["local", "scattered"])
def test_planted_pieces_stand_as_distant_whatever_their_number(
    data_folder: Path, placement: Any
) -> None:
    distances = []
    for pieces in (1, 2, 4, 8):
        task = Planted(str(data_folder), pieces, placement)
        samples = draw(task, num=2000, length=128)
        np.testing.assert_array_equal(task.solve(samples), samples.response_BR)
        words = len(task.vocabulary) - 513
        is_mark_BP = (samples.prompt_BP >= words) & (samples.prompt_BP < words + 256)
        assert (is_mark_BP.sum(1) == pieces).all()
        assert (samples.prompt_BP[:, -1] == words + 512).all()
        assert (samples.prompt_BP[:, :-1] < words + 256).all()
        places_BK = is_mark_BP.nonzero()[1].reshape(-1, pieces)
        distances.append(127 - places_BK.mean())
        if placement == "local":
            assert places_BK.max() < 128 / 8
        else:
            assert (np.diff(places_BK, axis=1) % 15 == 0).all()
        answers = np.bincount(samples.response_BR[:, 0] - words - 256, minlength=256)
        assert len(answers) == 256
        assert answers.max() < 25  # 7.8 expected
    np.testing.assert_allclose(distances, distances[0], rtol=0.03)


def test_planted_text_is_that_of_the_split_and_every_piece_counts(data_folder: Path) -> None:
    task = Planted(str(data_folder), 8, "both", "heldout")
    samples = draw(task, num=50, length=64)
    words = len(task.vocabulary) - 513
    (path,) = data_folder.glob("heldout-*.tokens.*")
    windows = np.lib.stride_tricks.sliding_window_view(np.fromfile(path, dtype="<u2"), 63)
    for prompt in samples.prompt_BP:
        same = (windows == prompt[:-1]) | (prompt[:-1] >= words)
        assert same.all(1).any()
    answers = task.solve(samples)
    for place in np.argwhere((samples.prompt_BP >= words) & (samples.prompt_BP < words + 256)):
        changed = samples.prompt_BP.copy()
        changed[tuple(place)] = words + ((changed[tuple(place)] - words) ^ 1)
        other = task.solve(replace(samples, prompt_BP=changed))
        assert ((other != answers)[:, 0] == (np.arange(50) == place[0])).all()


def test_the_end_is_coupled_with_the_end_of_the_prompt() -> None:
    samples = draw(EndToken(ScratchpadParity()))
    assert (samples.response_BR[:, -1] == 3).all()
    assert (samples.response_ids_BR[:, -1] == 1).all()  # that of the equals sign


TOKENS = np.zeros((4, 3), dtype=np.int64)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: draw(Needle(), k=2), "needle has no k"),
        (lambda: Planted("data", 3), "task.pieces=3 must be 1, 2, 4 or 8"),
        (lambda: draw(SparseParity(), k=7), "k=7 relevant places do not fit into the 6 pairs"),
        (lambda: draw(Needle(), length=3), "length 3 has no room"),
        (lambda: draw(VariableAssignment(num_names=5)), "12 statements need as many names"),
        (lambda: draw(VariableAssignment(), k=13), "a chain of k=13 does not fit"),
        (lambda: draw(VariableAssignment(), k=np.array([1, 2])), "one k for all samples"),
        (
            lambda: Samples(TOKENS, TOKENS, TOKENS[:, :2], TOKENS),
            r"prompt_ids_BP has shape \(4, 2\); .* \(4, 3\)",
        ),
    ],
)
def test_what_cannot_be_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()
