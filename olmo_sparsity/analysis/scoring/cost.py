"""Count the cost of an explanation, an attribution or a measurement without running the model.

    counted = counting_scorer(scorer)               # the same interface, but computes nothing
    add_one(counted, question)                      # anything that takes a scorer
    Cost(counted.token_forwards, num_parameters)    # 12,480 token-forwards, 3.3e+12 FLOPs, …

So a selector, a control or a kind of units needs no formula of its cost: it is counted by running
it. Its losses are random. With equal losses, rules that choose rows by their losses would choose
other rows than in a real run, and their cost would be wrong.

Dimension key: B rows of a batch, L tokens of a row, F distant tokens, N items of a list, D width, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from olmo_sparsity.analysis.scoring.replaced import ReplacingScorer
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.base.progress import format_duration
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.language_model import LanguageModel

GPU_FLOPS = 4e14
"""FLOPs a second of the GPU that a printed time assumes. Assumed, not measured."""

LONG_S = 120
"""The printed cost says how to compute less if it takes more seconds than this."""


@dataclass(frozen=True)
class Cost:
    """The cost of a call. `str` of it returns the lines that a dry run prints."""

    token_forwards: int
    """How many tokens pass through the model."""

    num_parameters: int
    details: str = ""
    """For a measurement: the printed lines on documents, targets, memory and time, which follow
    from a short trial."""

    seconds: float | None = None
    """For an explanation: about how long it takes on this machine, by a trial of two passages; None
    without a trial."""

    @property
    def flops(self) -> float:
        """Return the FLOPs: 2 for each parameter and token, without attention."""
        return 2.0 * self.num_parameters * self.token_forwards

    def __str__(self) -> str:
        if self.details:
            return self.details
        lines = [f"token-forwards  {self.token_forwards:,}"]
        if self.seconds is not None:
            lines.append(f"time            about {format_duration(self.seconds)} here (tried)")
            if self.seconds > LONG_S:
                lines.append(
                    "to shrink       name fewer targets (--at), lower --k or --long, or "
                    "--selector add_one_screened"
                )
        # A server does not tell how many parameters its model has.
        if self.num_parameters:
            seconds = self.flops / GPU_FLOPS
            lines.append(
                f"FLOPs           {self.flops:.2e} (2 per parameter): {seconds:,.1f} s of a GPU "
                f"that does {GPU_FLOPS / 1e12:.0f} TFLOP/s"
            )
        return "\n".join(lines)


def counting_scorer(scorer: Scorer) -> Scorer:
    """Return a scorer that counts what this one would compute, and computes nothing."""
    if isinstance(scorer, ReplacingScorer):
        return scorer.counting_scorer()
    return CountingScorer(scorer)


class CountingScorer(Scorer):
    """Counts the token-forwards that another scorer would compute. Its model computes nothing, and
    its losses are random."""

    def __init__(self, real: Scorer) -> None:
        """Begin to count the forwards of a scorer."""
        empty_model = cast(LanguageModel, CountingModel(real.model))
        super().__init__(empty_model, torch.device("cpu"), distant_states=real.interpretation.name)
        self._generator = torch.Generator().manual_seed(0)

    def nll_on_device(self, hidden_ND: Tensor, targets_N: np.ndarray) -> Tensor:
        return torch.rand(len(targets_N), generator=self._generator, dtype=torch.float)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        return torch.zeros(*hidden.shape[:-1], 1, dtype=torch.float)


class CountingModel(nn.Module):
    """A `LanguageModel` of width 1 without layers, in place of a real one. It answers questions
    about shapes, reach and recomputation as the real model does, because the number of
    token-forwards depends on the answers."""

    def __init__(self, real: LanguageModel) -> None:
        super().__init__()
        self.real = [real]  # a list, as the weights of an attribute are weights of this module
        self.vocab_size = real.vocab_size
        self.device = torch.device("cpu")
        # The global generator may belong to a training loop around this, so another one is used.
        generator = torch.Generator().manual_seed(0)
        weights_V1 = torch.randn(real.vocab_size, 1, generator=generator)
        self.embedding = nn.Embedding(real.vocab_size, 1, _weight=weights_V1)
        self.reach = real.reach

    def hidden(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        attention_bias: Tensor | None = None,
        *,
        distant: DistantStates | None = None,
        num_last: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Return hidden_BLD of width 1, to which the gates of distant tokens add."""
        hidden_BL1 = self.embedding(tokens_BL)
        if distant is not None and distant.bias_BF is not None:
            # The gates must have gradients, or a selector that reads these would fail.
            hidden_BL1 = hidden_BL1 + distant.bias_BF.clamp(min=-1).sum(-1)[:, None, None]
        return hidden_BL1 if num_last is None else hidden_BL1[:, -num_last:]

    def unembed(self, hidden: Tensor) -> Tensor:
        return hidden.expand(*hidden.shape[:-1], self.vocab_size)

    def distant_states(
        self, tokens_BL: Tensor, positions_BL: Tensor, tokens_at_once: int | None = None
    ) -> DistantStates:
        shape = (*tokens_BL.shape, 1, 1)
        layers = [(torch.zeros(shape), torch.zeros(shape))]
        states_BF1 = torch.zeros(*tokens_BL.shape, 1)
        return DistantStates(positions_BL.expand_as(tokens_BL), layers, hidden_BFD=states_BF1)

    def shares_distant(self, num_distant: int, length: int) -> bool:
        # It decides only how rows are grouped into forwards, not how many tokens they have.
        return False

    def last_attention(
        self, tokens_BL: Tensor, positions_BL: Tensor, distant: DistantStates
    ) -> Tensor:
        return torch.zeros(len(tokens_BL), 1, distant.num_tokens + tokens_BL.shape[1])

    def recomputes(self, num_tokens: int, num_keys: int) -> bool:
        return self.real[0].recomputes(num_tokens, num_keys)
