"""Prompts that share beginnings: the same numbers as one by one, at the cost that was counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_sparsity.analysis.scoring.logprobs import ModelLogprobs, count_forwards
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.models.prefix_tree import MIN_SHARED_TOKENS
from olmo_sparsity.models.prompts import Prompt
from tests.support.models import tiny_olmo
from tests.support.sources import FAMILIES, model_of


@torch.no_grad()
def plain(family: str, prompt: Prompt) -> np.ndarray:
    tokens = np.concatenate([prompt.prefix, prompt.continuation])
    log_p_LV = model_of(family)(torch.tensor(tokens[None])).logits[0].log_softmax(-1).numpy()
    places = np.arange(len(prompt.prefix), len(tokens))
    return log_p_LV[places - 1, tokens[places]]


def prompts_of(seed: int, texts: list[list[int]], num_targets: list[int]) -> list[Prompt]:
    """`texts`: numbers of the passages that follow each other in each prompt."""
    generator = np.random.default_rng(seed)
    passages = [generator.integers(3, 45, length) for length in (20, 20, 17, 30, 5, 1)]
    found = []
    for numbers, num in zip(texts, num_targets, strict=True):
        tokens = np.concatenate([[1, 2], *(passages[number] for number in numbers)])
        found.append(Prompt(tokens, generator.integers(3, 45, num)))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 3)),
        min_size=1,
        max_size=7,
    )
)
@settings(max_examples=15, deadline=None)
def test_log_probabilities_are_those_of_plain_transformers(
    family: str, given: list[tuple[list[int], int]]
) -> None:
    prompts = prompts_of(0, *map(list, zip(*given, strict=True)))
    scorer = Scorer(HuggingFaceLM(model_of(family)), batch_tokens=64)
    logprobs = ModelLogprobs(scorer)
    for prompt, log_p in zip(prompts, logprobs.score(prompts), strict=True):
        np.testing.assert_allclose(log_p, plain(family, prompt), atol=2e-5)
    assert logprobs.token_forwards == count_forwards(prompts)
    assert count_forwards(prompts) <= sum(len(prompt.inputs) for prompt in prompts)
    # The states of one prompt's beginning serve the others.
    known = prompts[-1].prefix[: 3 * len(prompts[-1].prefix) // 4]
    scorer.states(known)
    before = scorer.token_forwards
    for prompt, log_p in zip(prompts, logprobs.score(prompts), strict=True):
        np.testing.assert_allclose(log_p, plain(family, prompt), atol=2e-5)
    assert scorer.token_forwards - before == count_forwards(prompts, known)


def test_a_beginning_is_computed_once() -> None:
    """Here: 2 + 20 + 20 tokens of all, then 17 or 30 of two each, then what differs."""
    numbers = [[0, 1, 2, 0], [0, 1, 2, 1], [0, 1, 3, 0], [0, 1, 3, 1]]
    prompts = prompts_of(0, numbers, [1, 1, 1, 1])
    firsts = [prompt.prefix[-20] for prompt in prompts[:2]]
    assert firsts[0] != firsts[1]
    assert count_forwards(prompts) == 42 + 17 + 30 + 4 * 20
    assert count_forwards([*prompts, prompts[0]]) == count_forwards(prompts)
    assert count_forwards(prompts, prompts[0].prefix[:59]) == 30 + 4 * 20
    assert count_forwards(prompts, prompts[0].prefix) == 30 + 3 * 20 + 1
    # Too little in common to be worth a forward of its own.
    short = prompts_of(0, [[4, 0], [4, 1]], [1, 1])
    assert len(short[0].prefix) - 20 < MIN_SHARED_TOKENS
    assert count_forwards(short) == 7 + 2 * 20


@pytest.mark.parametrize("changed", [{}, {"alibi": True, "rope": False}])
def test_own_models_go_on_from_states(changed: dict[str, bool]) -> None:
    """A text in two parts has the states that it has as a whole."""
    model = tiny_olmo(**changed).eval()
    tokens = torch.arange(24)[None] % model.vocab_size
    positions = torch.arange(24)[None]
    whole = model.distant_states(tokens, positions)
    first = model.distant_states(tokens[:, :9], positions[:, :9])
    joined = model.distant_states(tokens[:, 9:], positions[:, 9:], 4, first)
    torch.testing.assert_close(joined.hidden_BFD, whole.hidden_BFD, atol=1e-5, rtol=1e-5)
    assert joined.positions_BF.tolist() == whole.positions_BF.tolist()
    for ours, theirs in zip(joined.layers, whole.layers, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
