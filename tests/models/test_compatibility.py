"""What would give wrong numbers is refused by name, and docs/extend.md says so."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers

from olmo_sparsity.analysis.results.notes import LOUD_NOISE, describe_noise
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.attention import causal_bias
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.models.huggingface.position_limits import position_limit
from olmo_sparsity.models.load import wrap_model
from tests.support.families import (
    CPU,
    PAGE,
    SUPPORTED,
    TOKENS,
    build,
    check_close,
    error,
    errors_on_the_page,
    find,
    page,
    wrap,
)
from tests.support.models import SIZES

FULL, HALF = ["full_attention"] * 2, ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("class_name", "settings", "num_positions"),
    [
        ("MistralForCausalLM", {"sliding_window": None}, 64),
        ("Llama4ForCausalLM", {"attention_chunk_size": 32, "floor_scale": 12}, 11),
        ("Qwen2ForCausalLM", {"sliding_window": 16}, 64),
        ("Olmo3ForCausalLM", {"sliding_window": 16, "layer_types": FULL}, 64),
        ("Olmo3ForCausalLM", {"sliding_window": 16, "layer_types": HALF}, 16),
        ("Olmo3ForCausalLM", {"sliding_window": 99, "layer_types": HALF}, 64),
    ],
)
def test_the_tightest_limit_counts(class_name: str, settings: Any, num_positions: int) -> None:
    config = getattr(transformers, class_name).config_class(**deepcopy(SIZES | settings))
    assert position_limit(config).num_positions == num_positions


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "num_positions", "cause"),
    [
        ("GPT-Neo", 16, "window size"),
        ("Phi 3, 4 (LongRoPE)", 16, "LongRoPE"),
        ("GPT-2", 64, "max_position_embeddings"),
    ],
)
def test_what_would_be_wrong_is_refused_where_it_begins(
    name: str, num_positions: int, cause: str
) -> None:
    model = wrap(find(name))
    tokens_BL, positions_BL = (torch.arange(num_positions + 1)[None] % n for n in (61, 10**6))
    explicit = {"attention_mask": causal_bias(num_positions, CPU), "use_cache": False}
    expected = model.model(input_ids=tokens_BL[:, :-1], **explicit).logits
    check_close(model(tokens_BL[:, :-1], positions_BL[:, :-1]), expected)
    distant = model.distant_states(tokens_BL[:, :2], positions_BL[:, :2])
    last = (tokens_BL[:, -1:], positions_BL[:, -1:])
    for ask in (
        lambda: model.hidden(tokens_BL, positions_BL),
        lambda: model.distant_states(tokens_BL, positions_BL),
        lambda: model.hidden(*last, distant=distant),
        lambda: model.last_attention(*last, distant=distant),
    ):
        with pytest.raises(ConfigError, match=f"positions .* right for: .*{cause}"):
            ask()


def test_dynamic_rope_is_refused_where_it_would_turn_by_other_angles() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = HuggingFaceLM(build(SUPPORTED[0], rope_parameters=rope))
    with pytest.raises(ConfigError, match=r"65 positions .* right for: 64 .*dynamic RoPE"):
        model(TOKENS[:, :1], torch.tensor([[64]]))
    model(TOKENS[:, :1], torch.tensor([[63]]))


@pytest.mark.accept
def test_the_page_is_current() -> None:
    errors = errors_on_the_page()
    assert PAGE.read_text() == page(errors), "write it anew: python -m tests.support.families"
    assert max(map(float, errors)) <= 1e-5
    assert all(error(index) <= 1e-5 for index in range(0, len(SUPPORTED), 5))


class RoundedTogether(torch.nn.Linear):
    """Activations in 9 bits, of one scale for a place in all rows; exact in one row."""

    largest = 255

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = x.abs().amax((0, 2), keepdim=True) / self.largest
        return super().forward((x / step).round() * step if len(x) > 1 else x)


class OfFewSteps(RoundedTogether):
    """The same in 4 bits."""

    largest = 7


class OfFullExperts(torch.nn.Linear):
    """Drops a token if four earlier ones of the batch go to the same of eight experts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y_ND = super().forward(x).flatten(0, 1)
        expert_N = x.flatten(0, 1)[:, :8].argmax(-1)
        is_same_NN = (expert_N[:, None] == expert_N).tril(-1)
        is_served_N1 = is_same_NN.sum(1, keepdim=True) < 4
        return (y_ND * is_served_N1).view(*x.shape[:-1], -1)


class OfTheBatch(torch.nn.Linear):
    """Normalized by statistics of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return (y - y.mean((0, 1))) / y.std((0, 1))


def test_what_a_loss_owes_to_its_neighbours_is_measured() -> None:
    model = build(SUPPORTED[find("Llama 1, 2, 3")], initializer_range=0.3)
    assert HuggingFaceLM(model).batch_noise < 1e-4
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
            module.__class__ = RoundedTogether
    loaded = wrap_model(model)
    assert loaded.batch_noise == loaded.model.batch_noise > LOUD_NOISE
    assert f"{loaded.batch_noise:.2f}" in describe_noise({"batch_noise": loaded.batch_noise})
    assert describe_noise({"batch_noise": 1e-5}) == ""


def int8(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def with_linear(linear: type[torch.nn.Linear]) -> Any:
    model = build(SUPPORTED[find("Llama 1, 2, 3")], initializer_range=0.3)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
            module.__class__ = linear
    return model


# Deprecated by torch, and still what many use on a CPU.
@pytest.mark.filterwarnings("ignore:.* deprecated")
@pytest.mark.parametrize("whole_prompts", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: int8(build(SUPPORTED[find("Llama 1, 2, 3")])),
        lambda: int8(build(SUPPORTED[find("Llama 1, 2, 3")], initializer_range=0.3)),
        lambda: with_linear(OfFewSteps),
        lambda: with_linear(OfFullExperts),
        lambda: with_linear(OfTheBatch),
    ],
)
def test_a_model_whose_losses_are_of_the_whole_batch_is_refused(
    make: Any, whole_prompts: bool
) -> None:
    with pytest.raises(ConfigError, match=r"with the texts in other rows.*pass it unquantized"):
        wrap_model(make(), whole_prompts=whole_prompts)


@pytest.mark.parametrize("whole_prompts", [False, True])
def test_outputs_without_names_are_refused_with_the_remedy(whole_prompts: bool) -> None:
    model = build(SUPPORTED[find("Llama 1, 2, 3")])
    model.config.return_dict = False
    with pytest.raises(ConfigError, match=r"set model\.config\.return_dict = True"):
        wrap_model(model, whole_prompts=whole_prompts)
    model.config.return_dict = True
    wrap_model(model, whole_prompts=whole_prompts)
