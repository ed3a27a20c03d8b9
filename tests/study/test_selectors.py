"""Rules of the study against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from olmo_sparsity.analysis.interpretation import InterpretationName
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.text.windows import Windows
from study import selectors
from tests.support.brute import (
    CPU,
    DOCUMENT,
    OF_KINDS,
    READINGS,
    Brute,
    assert_ranked,
    question,
    tiny,
    units_of,
)


@READINGS
@pytest.mark.parametrize(("windows", "kind"), OF_KINDS)
@pytest.mark.parametrize("rule", ["drop_one", "divergence"])
def test_rules_against_brute_force(
    windows: Windows, kind: str, rule: str, distant_states: InterpretationName
) -> None:
    model = tiny("olmo")
    scorer = Scorer(model, CPU, distant_states=distant_states, batch_tokens=128)
    block = list(windows.blocks(DOCUMENT))[2]
    targets = list(range(block.num_targets))[-3:]
    units, by_hand = units_of(kind, block.num_distant)
    k = min(4, len(by_hand))
    choice = getattr(selectors, rule)(scorer, question(scorer, block, targets, k, units))
    for row, target in enumerate(targets):
        brute = Brute(model, DOCUMENT, windows, block.start + target, distant_states)
        expected = brute.influences(rule, by_hand)
        np.testing.assert_allclose(choice.score_TU[row], expected, atol=2e-5)
        assert_ranked(choice, row, expected, k)
