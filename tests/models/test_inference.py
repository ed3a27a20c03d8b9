"""The short cut to the last places computes what the whole forward pass computes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.text import PositionsConfig
from olmo_sparsity.models.attention import causal_bias
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.olmo import first_layer, layer_steps
from olmo_sparsity.models.olmo.projections import project
from tests.support.models import FIELDS, randomize_vectors

YARN = PositionsConfig(scaling="yarn", factor=8, original_length=8).rope_scaling
RMS: dict[str, Any] = {"layer_norm_type": "rms"}
NORMED = RMS | {"attention_layer_norm": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "quick": NORMED | {"norm_after": True},
    "norm_before": {"include_bias": True},
    "one_layer": RMS | {"n_layers": 1},
    "grouped": {"n_kv_heads": 2, "clip_qkv": 0.3, "activation_type": "gelu"},
    "alibi": {"rope": False, "alibi": True},
    "no_positions": {"rope": False, "query_scale_length": 12, "embedding_layer_norm": True},
    "odd_heads": NORMED | {"d_model": 36},
    "half_rotated": {"rotary_fraction": 0.5, "query_scale_length": 12},
    "wide_heads": NORMED
    | {"head_width": 12, "n_kv_heads": 2, "attention_norm_per_head": True, "rotary_fraction": 0.5},
    "scales_learned": RMS | {"n_kv_heads": 2, "query_scale_learned": True},
    "second_without_positions": RMS | {"nope_every": 2, "query_scale_length": 12},
    "yarn": RMS | {"qkv_bias": True, "n_kv_heads": 2, "rope_scaling": YARN},
}


def model_of(variant: str) -> Any:
    torch.manual_seed(0)
    model = build_model(ModelConfig(**FIELDS | {"n_layers": 3} | VARIANTS[variant])).eval()
    # Learned scales and norms begin at 1, where a forgotten one changes nothing.
    randomize_vectors(model)
    return model


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that differ in their first token, at different position IDs, as questions do."""
    window = torch.randint(0, 61, (9,), generator=torch.Generator().manual_seed(1))
    tokens_BL = torch.cat([torch.tensor([[3], [8], [3]]), window.expand(3, 9)], dim=1)
    positions_BL = torch.cat([torch.tensor([[0], [4], [11]]), torch.arange(20, 29).expand(3, 9)], 1)
    return tokens_BL, positions_BL


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("last", [1, 4, 10])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_last_places_are_those_of_the_whole_row(
    variant: str, last: int, biased: bool, alike: bool, rows: tuple[torch.Tensor, torch.Tensor]
) -> None:
    model = model_of(variant)
    if not alike:  # another token inside the window of one row
        rows[0][1, 6] = (rows[0][1, 6] + 1) % 61
    bias = None
    if biased:  # one place that later ones may not see
        bias = causal_bias(10, torch.device("cpu")).repeat(3, 1, 1, 1)
        bias[:, :, 5:, 2] = torch.finfo(torch.float).min
    whole = model.hidden(*rows, bias)  # with gradients: the ordinary path
    assert whole.requires_grad
    with torch.no_grad():
        found = model.hidden(*rows, bias, num_last=last)
    assert found.shape == (3, last, model.config.d_model)
    torch.testing.assert_close(found, whole[:, -last:].detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(model.hidden(*rows, bias, num_last=last), whole[:, -last:])


@pytest.fixture
def text() -> tuple[torch.Tensor, torch.Tensor]:
    """A text of 40 tokens, and its position IDs. The last 10 are local."""
    tokens_BL = torch.randint(0, 61, (1, 40), generator=torch.Generator().manual_seed(1))
    return tokens_BL, torch.arange(40)[None]


NUM_DISTANT = 30
"""More than local ones, so that a model shares their states if it can."""


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_local_tokens_after_distant_states_are_those_of_the_whole_text(
    variant: str, text: tuple[torch.Tensor, torch.Tensor]
) -> None:
    model = model_of(variant)
    distant_rows = [ids_BL[:, :NUM_DISTANT] for ids_BL in text]
    local_rows = [ids_BL[:, NUM_DISTANT:] for ids_BL in text]
    distant = model.distant_states(*distant_rows, tokens_at_once=20)
    hidden_BLD = model.hidden(*local_rows, distant=distant)
    whole_BLD = model.hidden(*text)
    torch.testing.assert_close(hidden_BLD, whole_BLD[:, NUM_DISTANT:], atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_weights_are_those_that_mix_the_values(
    variant: str, text: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last token, in the first layer."""
    model = model_of(variant)
    distant = model.distant_states(*(ids_BL[:, :NUM_DISTANT] for ids_BL in text))
    local_rows = [ids_BL[:, NUM_DISTANT:] for ids_BL in text]
    num_heads = model.config.n_heads
    weights_BHS = model.last_attention(*local_rows, distant)[:, :num_heads]

    block = model.blocks[0]
    mix = block.mix
    mixed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def mix_and_remember(q: Any, k: Any, v: Any, *rest: Any) -> torch.Tensor:
        mixed.append((mix(q, k, v, *rest), v))
        return mixed[-1][0]

    monkeypatch.setattr(block, "mix", mix_and_remember)
    block.attention_record = []  # so that distant states are joined, not shared
    model.hidden(*local_rows, distant=distant, num_last=1)
    mixed_BHLK, values_BGLK = mixed[0]
    values_BHLK = values_BGLK.repeat_interleave(num_heads // values_BGLK.shape[1], dim=1)
    expected_BHK = (weights_BHS[:, :, None] @ values_BHLK)[:, :, 0]
    torch.testing.assert_close(mixed_BHLK[:, :, -1], expected_BHK, atol=1e-4, rtol=0)


def test_equal_pairs_are_projected_once(
    rows: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    projected_shapes = []

    def spy(block: Any, x: torch.Tensor, *rest: Any) -> Any:
        projected_shapes.append(x.shape[:-1])
        return project(block, x, *rest)

    monkeypatch.setattr(first_layer, "project", spy)
    monkeypatch.setattr(layer_steps, "project", spy)
    with torch.no_grad():
        model_of("quick").hidden(*rows, num_last=1)
    first, *others = projected_shapes
    assert first == (9 + 3,)  # nine pairs of the window, and three first tokens
    assert others == [(3, 10), (3, 10)]
