"""Addition couples digits of equal significance."""

from __future__ import annotations

import numpy as np
import pytest

from olmo_sparsity.tasks.addition import Addition
from tests.support.samples import draw


@pytest.mark.parametrize("digits_reversed", [True, False])
def test_addition_couples_equal_significance(digits_reversed: bool) -> None:
    samples = draw(Addition(digits_reversed), num=4000, length=6)
    ids, response_ids = samples.prompt_ids_BP, samples.response_ids_BR
    np.testing.assert_array_equal(ids[:, :6], ids[:, 7:13])  # a and b
    from_least = response_ids[0] if digits_reversed else response_ids[0, ::-1]
    np.testing.assert_array_equal(ids[0, :6][::-1], from_least[:6])
    # The response starts beside the sign before it, and goes on by one.
    assert abs(response_ids[0, 0] - ids[0, -1]) == 1
    assert (np.diff(response_ids) == (-1 if digits_reversed else 1)).all()
    digits = samples.prompt_BP[:, :6]
    np.testing.assert_allclose(
        np.bincount(digits.ravel(), minlength=10) / digits.size, 0.1, atol=0.01
    )
    highest = samples.response_BR[:, -1 if digits_reversed else 0]
    assert set(np.unique(highest)) == {0, 1}
