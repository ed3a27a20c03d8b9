"""Running parity."""

from __future__ import annotations

import numpy as np

from olmo_sparsity.tasks.scratchpad_parity import ScratchpadParity
from tests.support.samples import draw


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
