"""Sparse parity: marked places and their bits."""

from __future__ import annotations

import numpy as np

from olmo_sparsity.tasks.sparse_parity import SparseParity, count_relevant_ones
from tests.support.samples import draw


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
    np.testing.assert_array_equal(count_relevant_ones(samples) % 2, answer_B)
    np.testing.assert_allclose(answer_B.mean(), 0.5, atol=0.02)
    relevant_Bl, bits_Bl = samples.prompt_BP[:, ::2] == 3, samples.prompt_BP[:, 1::2]
    first_B = bits_Bl[np.arange(20_000), relevant_Bl.argmax(1)]
    for hint_B in (first_B, bits_Bl.sum(1) % 2, bits_Bl[:, -1], relevant_Bl[:, 0]):
        assert abs(np.corrcoef(hint_B, answer_B)[0, 1]) < 0.03
