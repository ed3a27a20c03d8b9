"""A needle among other keys and values."""

from __future__ import annotations

import numpy as np

from olmo_sparsity.tasks.needle import Needle
from tests.support.samples import draw


def test_a_needle_lies_anywhere_and_only_its_key_gives_it_away() -> None:
    task = Needle(num_keys=5, num_values=4, num_needles=2)
    samples = draw(task, num=20_000, length=10)
    body = samples.prompt_BP[:, :-2]
    assert ((body >= task.num_values).sum(1) == 2).all()  # two keys, the rest are values
    place_B = samples.response_ids_BR[:, 0] - 1
    np.testing.assert_array_equal(
        samples.prompt_BP[np.arange(20_000), place_B], samples.response_BR[:, 0]
    )
    assert set(place_B) == set(range(1, 8))
    # By symmetry a needle is as often at the left end as at the right end.
    counts = np.bincount(place_B)[1:]
    np.testing.assert_allclose(counts, counts[::-1], rtol=0.12)
    np.testing.assert_allclose(np.bincount(samples.response_BR[:, 0]) / 20_000, 0.25, atol=0.02)
    for place in range(8):  # no fixed place is more than guessing
        assert (body[:, place] == samples.response_BR[:, 0]).mean() < 0.4
