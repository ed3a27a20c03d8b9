"""The token that ends a response."""

from __future__ import annotations

from olmo_sparsity.tasks.end_token import EndToken
from olmo_sparsity.tasks.scratchpad_parity import ScratchpadParity
from tests.support.samples import draw


def test_the_end_is_coupled_with_the_end_of_the_prompt() -> None:
    samples = draw(EndToken(ScratchpadParity()))
    assert (samples.response_BR[:, -1] == 3).all()
    assert (samples.response_ids_BR[:, -1] == 1).all()  # that of the equals sign
