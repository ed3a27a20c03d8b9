"""Gradients and attention at distant tokens, against finite differences and whole windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from olmo_sparsity.analysis.interpretation import InterpretationName
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.gates import gate_gradients
from olmo_sparsity.analysis.selectors.influence import SELECTORS
from olmo_sparsity.text.windows import Windows
from tests.support.brute import (
    CPU,
    DOCUMENT,
    OURS,
    READINGS,
    assert_ranked,
    question,
    shown_alone,
    tiny,
    units_of,
)


@pytest.fixture(scope="module", params=[*OURS, "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@READINGS
def test_the_gate_gradient_is_a_finite_difference(
    model: Any, distant_states: InterpretationName
) -> None:
    """Against opening one distant token's gate a little, in a mask written out by hand."""
    block = next(iter(Windows(14, 6, 1).blocks(DOCUMENT)))
    scorer = Scorer(model, CPU, distant_states=distant_states)
    found = gate_gradients(scorer, scorer.context(block), [(0, 1)])[0]
    tokens = torch.from_numpy(block.tokens[:-1])[None]
    positions = torch.arange(14)[None]

    @torch.no_grad()
    def loss(gates: torch.Tensor) -> float:
        bias = torch.full((14, 14), torch.finfo(torch.float).min)
        for query in range(14):
            for key in range(query + 1):
                if key < 8 <= query:
                    bias[query, key] = gates[key]
                elif query >= 8 or query == key or distant_states == "contextual":
                    bias[query, key] = 0.0
        logits = model(tokens, positions, bias[None, None])[0, -1].float()
        return -float(logits.log_softmax(-1)[int(block.targets_W[0])])

    for j in range(8):
        up, down = (torch.full((8,), float(np.log(0.1))) for _ in range(2))
        up[j] += 0.05
        down[j] -= 0.05
        assert found[j] == pytest.approx((loss(down) - loss(up)) / 0.1, abs=2e-3)


@pytest.mark.parametrize("kind", ["tokens", "span:3"])
def test_attention_is_that_of_the_long_window(kind: str) -> None:
    """Against all weights of all layers, which transformers gives for a whole window."""
    model = tiny("llama")
    model.model.set_attn_implementation("eager")
    for windows in (Windows(14, 4, 3), Windows(14, 4, 3, prefix=(60, 3))):
        block, size = next(iter(windows.blocks(DOCUMENT))), len(windows.prefix)
        scorer, (units, by_hand) = shown_alone(model), units_of(kind)
        choice = SELECTORS["attention"](scorer, question(scorer, block, [0, 2], 3, units))
        for row, target in enumerate((0, 2)):
            tokens = torch.tensor([[*windows.prefix, *DOCUMENT[: 14 + target].tolist()]])
            with torch.no_grad():
                layers = model.model(tokens, output_attentions=True).attentions
            weights = torch.stack(layers)[:, 0, :, -1].mean((0, 1))[size:]
            expected = np.array([sum(float(weights[j]) for j in unit) for unit in by_hand])
            assert_ranked(choice, row, expected, 3)
