"""The check of whether a model needs a token in front of every window."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.analysis.results.notes import describe_sink
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.scoring.sink import sink_check
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.windows import Block
from tests.support.measurements import untrained


class WithoutSink(Scorer):
    """Losses of a model that loses `harm` nats by a distant token, unless `needed` is in front."""

    def __init__(self, harm: float, needed: int) -> None:
        super().__init__(untrained())
        self.harm = harm
        self.needed = needed

    def context(self, block: Block, states: Any = None) -> Any:
        has_sink = self.needed in block.tokens[: block.num_prefix]
        return SimpleNamespace(
            set_row=lambda places: 0.0 if has_sink or not len(places) else self.harm
        )

    def losses(self, rows: Any) -> list[np.ndarray]:
        return [np.array([2.0, 3.0]) + row for row in rows]


@pytest.mark.parametrize(
    ("harm", "needed", "is_needed"), [(0.4, 7, True), (0.1, 7, False), (0.4, 8, False)]
)
def test_a_prefix_is_recommended_if_it_removes_the_harm_of_any_distant_token(
    harm: float, needed: int, is_needed: bool
) -> None:
    documents = [Document(np.arange(length), number=length) for length in (8, 20, 200)]
    found = sink_check(WithoutSink(harm, needed), documents, (), (7,))
    with_prefix = 0.0 if needed == 7 else harm
    assert found == {
        "harm": pytest.approx(harm),
        "harm_with_prefix": pytest.approx(with_prefix),
        "needs_prefix": is_needed,
    }
    warning = describe_sink(found)
    assert (f"by {harm:.2f} nats (+0.00 after a line break)" in warning) == is_needed
    assert warning.endswith(r"measure again with --prefix '\n'") == is_needed
    assert describe_sink({}) == ""


def test_a_random_model_needs_no_prefix() -> None:
    documents = [Document(np.arange(60) % 40, number=number) for number in range(3)]
    scorer = Scorer(untrained())
    found = sink_check(scorer, documents, (), (5,))
    assert found["harm"] != found["harm_with_prefix"]
    assert not found["needs_prefix"]
    assert scorer.token_forwards > 0
    assert not sink_check(scorer, [Document(np.arange(8))], (), (5,))["needs_prefix"]
