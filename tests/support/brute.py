"""Brute force: one forward per subset, batch 1.

It shares no code with the package: it slices tokens, counts position IDs, lists the distant tokens
of every unit and calls the model itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from olmo_sparsity.analysis.interpretation import InterpretationName
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.influence import Choice, Question
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.text.distant_text import DistantText
from olmo_sparsity.text.units import Units
from olmo_sparsity.text.windows import Block, Windows
from tests.support.families import SUPPORTED, build, find
from tests.support.models import FIELDS

VOCAB = 61
CPU = torch.device("cpu")
DOCUMENT = np.random.default_rng(1).integers(0, VOCAB, 40)
shown_alone = partial(Scorer, device=CPU, distant_states="isolated")

OURS: dict[str, dict[str, Any]] = {
    "olmo": {"layer_norm_type": "rms"},
    "gpt_neox": {"architecture": "gpt_neox"},
}


def tiny(family: str) -> Any:
    torch.manual_seed(0)
    if family == "llama":
        return HuggingFaceLM(build(SUPPORTED[find("Llama 1, 2, 3")]))
    return build_model(ModelConfig(**FIELDS, **OURS[family])).eval()


ONE_FAMILY = pytest.mark.parametrize("model", ["olmo"], indirect=True)
"""For what does not depend on how a model computes."""


class Brute:
    """All quantities of one target, from their definitions."""

    def __init__(
        self,
        model: Any,
        document: np.ndarray,
        windows: Windows,
        target: int,
        distant_states: InterpretationName = "isolated",
        start: int | None = None,
    ) -> None:
        """`start`: the first target of its block, where blocks are not counted from the first."""
        self.model, self.document, self.target = model, document, target
        self.distant_states = distant_states
        first = windows.short + 1 if windows.long == "all" else windows.long
        start = target - (target - first) % windows.stride if start is None else start
        self.origin = 0 if windows.long == "all" else start - windows.long
        self.prefix = list(windows.prefix)
        self.local = list(range(start - windows.short, target))
        self.distant = list(range(self.origin, start - windows.short))
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def log_p(self, distant: Iterable[int]) -> torch.Tensor:
        """log p(· | the window and these distant tokens), `distant` counted from the origin."""
        key = tuple(sorted(distant))
        if key not in self.known:
            self.known[key] = self._log_p([self.origin + j for j in key])
        return self.known[key]

    @torch.no_grad()
    def _log_p(self, chosen: list[int]) -> torch.Tensor:
        if self.distant_states == "isolated":
            return self._read([*chosen, *self.local])
        # The long text, of which the window sees the chosen distant tokens only.
        places = [*self.distant, *self.local]
        first, end = len(self.prefix), len(self.prefix) + len(self.distant)
        seen = torch.ones(first + len(places), first + len(places)).tril().bool()
        seen[end:, first:end] &= ~torch.tensor([place not in chosen for place in self.distant])
        bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float).min)
        return self._read(places, bias[None, None])

    def _read(self, places: list[int], *bias: torch.Tensor) -> torch.Tensor:
        return self.model(*self.inputs(places), *bias)[0, -1].float().log_softmax(-1)

    def inputs(self, places: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The prefix at the first position IDs, then these places at theirs."""
        size = len(self.prefix)
        tokens = [*self.prefix, *(int(self.document[place]) for place in places)]
        positions = [*range(size), *(size + place - self.origin for place in places)]
        return torch.tensor([tokens]), torch.tensor([positions])

    def loss(self, distant: Iterable[int]) -> float:
        return -float(self.log_p(distant)[int(self.document[self.target])])

    def kl(self, distant: Iterable[int]) -> float:
        """KL(p_long ‖ p_distant)."""
        p = self.log_p(range(len(self.distant)))
        return float((p.exp() * (p - self.log_p(distant))).sum())

    def influences(self, selector: str, units: list[list[int]] | None = None) -> np.ndarray:
        every = list(range(len(self.distant)))
        units = [[j] for j in every] if units is None else units
        if selector.startswith("add_one"):
            return np.array([self.loss([]) - self.loss(unit) for unit in units])
        if selector == "drop_one":
            rests = [[j for j in every if j not in unit] for unit in units]
            return np.array([self.loss(rest) - self.loss(every) for rest in rests])
        if selector == "divergence":
            return np.array([self.kl([]) - self.kl(unit) for unit in units])
        if selector == "gradient":
            saliency = self.gradient_times_input()
            return np.array([sum(float(saliency[j]) for j in unit) for unit in units])
        raise AssertionError(selector)

    def gradient_times_input(self) -> np.ndarray:
        embedding = self.model.embedding.weight
        tokens, positions = self.inputs([*self.distant, *self.local])
        change = torch.zeros(1, tokens.shape[1], embedding.shape[1], requires_grad=True)
        hook = self.model.embedding.register_forward_hook(lambda m, i, out: out + change)
        log_p = self.model(tokens, positions)[0, -1].float().log_softmax(-1)
        (gradient,) = torch.autograd.grad(-log_p[int(self.document[self.target])], change)
        hook.remove()
        saliency = -(gradient[0] * embedding[tokens[0]]).sum(-1).detach().numpy()
        return saliency[len(self.prefix) : len(self.prefix) + len(self.distant)]


def assert_ranked(choice: Choice, row: int, influence: np.ndarray, k: int) -> None:
    """The chosen have the k largest influences, in order; ties within rounding may swap."""
    chosen = choice.unit_TK[row]
    assert len(set(chosen.tolist())) == k
    np.testing.assert_allclose(choice.influence_TK[row], influence[chosen], atol=2e-5)
    np.testing.assert_allclose(influence[chosen], np.sort(influence)[::-1][:k], atol=2e-5)


READINGS = pytest.mark.parametrize("distant_states", ["isolated", "contextual"])
WINDOWS = [Windows(16, 6, 1), Windows(16, 6, 4, prefix=(60, 3)), Windows(12, 5, 7)]
LONG_BLOCK = Windows(16, 6, 20)  # more targets than rows for single targets have in one run
RUNS = {"words": [0, 0, 1, 2, 2, 2, 3, 4, 4, 4], "sentences": [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]}
KINDS = ["tokens", "span:3", *RUNS]
OF_KINDS = [*zip([*WINDOWS[:2], *WINDOWS[1:]], KINDS, strict=True)]
"""Each kind of units with windows."""


def units_of(kind: str, num_distant: int = 10) -> tuple[Units, list[list[int]]]:
    """The distant units of a kind, and the distant tokens of each, counted by hand."""
    if kind == "tokens":
        return Units.of_tokens(num_distant), [[j] for j in range(num_distant)]
    if kind == "span:3":
        return Units.of_spans(num_distant, 3), [[j, j + 1, j + 2] for j in range(num_distant - 2)]
    runs = np.array(RUNS[kind][:num_distant])
    by_hand = [np.flatnonzero(runs == run).tolist() for run in range(max(runs) + 1)]
    return Units.of_runs(runs), by_hand


def question(
    scorer: Scorer,
    block: Block,
    targets: Sequence[int],
    k: int,
    units: Units | None = None,
) -> Question:
    """About the distant part of `block`."""
    units = Units.of_tokens(block.num_distant) if units is None else units
    context, generator = scorer.context(block), np.random.default_rng(0)
    spans = [(target, target + 1) for target in targets]
    return Question(context, units, spans, k, generator)


def behind(document: np.ndarray, block: Block, text: DistantText) -> np.ndarray:
    """The document with another text in the distant part of a block."""
    first = block.start - block.windows.long
    tokens = text.document.tokens[text.places_F]
    return np.concatenate([document[:first], tokens, document[first + len(tokens) :]])
