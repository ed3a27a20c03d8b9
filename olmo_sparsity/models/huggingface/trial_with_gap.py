"""Try whether a model computes right numbers when position IDs have a gap.

    trial = TrialWithGap(model, rounding)
    trial.check_gap()               # ConfigError if a gap hides tokens, or changes nothing
    trial.check_kept_states()       # ConfigError if keys and values cannot replace earlier tokens
    trial.can_share_distant()       # whether rows can share these keys and values

The gap is in the middle of the eight tokens:

    tokens         0 1 2 3  4  5  6  7
    counted IDs    0 1 2 3  4  5  6  7
    gapped IDs     0 1 2 3  8  9 10 11

The right hidden states with the gap (`expected_BLD`) are known, as an explicit causal bias hides
nothing. All checks compare with them.

compatibility.py calls it. Dimension key: B rows, L tokens of a row, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from olmo_sparsity.models.attention import causal_bias
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.huggingface.tried_model import (
    NUM_BEFORE_GAP,
    NUM_TOKENS,
    TriedModel,
    distance,
    eight_tokens,
    unfit,
)

GAP = 4
"""The number of position IDs that the gap leaves out."""

BEFORE_GAP = slice(NUM_BEFORE_GAP)
AFTER_GAP = slice(NUM_BEFORE_GAP, None)


@dataclass(frozen=True)
class _Tolerance:
    """How much two hidden states may differ that should be equal, as root mean squares."""

    rounding: float
    """The relative difference that rounding in their dtype may cause."""

    noise: float
    """The absolute difference that a tiny change of the input causes. Kernels round differently,
    and layers that round to 8 bits sometimes amplify this."""

    def are_alike(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two hidden states are equal up to rounding and noise."""
        return distance(a, b) <= self.rounding * distance(b) + self.noise

    def is_small(self, error: float, effect: float) -> bool:
        """Return whether an error is much smaller than the effect that a check looks for, such as
        that of hiding tokens: a quarter of it at most."""
        return error <= max(self.noise, effect / 4)


class TrialWithGap:
    """Runs a model on eight tokens with a gap in their position IDs, and rejects wrong results."""

    def __init__(self, tried: TriedModel, rounding: float) -> None:
        """Compute the right hidden states. `rounding`: the relative difference that rounding may
        cause in the model's dtype."""
        self.tried = tried
        self.tokens_BL, self.counted_BL = eight_tokens(tried)
        self.gapped_BL = self.counted_BL + GAP * (self.counted_BL >= NUM_BEFORE_GAP)
        self.causal_bias = causal_bias(NUM_TOKENS, tried.device)

        self.expected_BLD = self._hidden(self.gapped_BL, self.causal_bias)
        """The right hidden states with the gap."""

        self.tolerance = _Tolerance(rounding, self._measure_noise())

    def _hidden(self, positions_BL: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return hidden_BLD of the eight tokens in fp32."""
        return self.tried.hidden(self.tokens_BL, positions_BL, bias).float()

    def _measure_noise(self) -> float:
        """Return by how much a tiny change of the input may change hidden states."""
        # A ten-thousandth of the embeddings, or what their dtype resolves, with every second
        # coordinate turned round.
        nudge_BLD = self.tried.embedding(self.tokens_BL)
        nudge_BLD[..., ::2] *= -1
        nudge_BLD *= max(1e-4, torch.finfo(nudge_BLD.dtype).eps)
        nudged_BLD = self.tried.hidden(
            self.tokens_BL, self.gapped_BL, self.causal_bias, added_BLD=nudge_BLD
        ).float()
        # Twice, as one nudge is only a sample of what rounding may do.
        return 2 * distance(nudged_BLD, self.expected_BLD)

    def check_gap(self) -> None:
        """Raise ConfigError unless position IDs reach the attention, and the gap hides nothing."""
        # How transformers interprets a gap unless it is told otherwise: as the start of another
        # text, which does not see the first four tokens.
        cutting_bias = self.causal_bias.clone()
        hiding = self.causal_bias[..., 0, 1]  # the first token does not see the second
        cutting_bias[..., AFTER_GAP, BEFORE_GAP] = hiding

        counted = self._hidden(self.counted_BL)
        counted_again = self._hidden(self.counted_BL)  # by what repeating a forward pass differs
        gapped = self._hidden(self.gapped_BL)
        cut = self._hidden(self.gapped_BL, cutting_bias)

        effect_of_gap = distance(gapped[:, AFTER_GAP], counted[:, AFTER_GAP])
        if effect_of_gap <= distance(counted_again, counted):
            raise unfit(self.tried, "position IDs do not reach its attention")

        error = distance(gapped[:, AFTER_GAP], self.expected_BLD[:, AFTER_GAP])
        effect_of_cut = distance(cut[:, AFTER_GAP], self.expected_BLD[:, AFTER_GAP])
        is_right = self.tolerance.are_alike(gapped, self.expected_BLD)
        if not (is_right and self.tolerance.is_small(error, effect_of_cut)):
            problem = "its attention is not causal, or a gap in position IDs changes it"
            raise unfit(self.tried, problem)
        if not self.tolerance.are_alike(gapped[:, BEFORE_GAP], counted[:, BEFORE_GAP]):
            raise unfit(self.tried, "a gap in its position IDs changes the places before it")

    def check_kept_states(self) -> None:
        """Raise ConfigError unless the last four tokens have the right hidden states when they
        attend to kept states of the first four."""
        if not self.tolerance.are_alike(self._after_kept_BLD, self.expected_BLD[:, AFTER_GAP]):
            problem = "keys and values that it keeps of earlier places do not replace them"
            raise unfit(self.tried, problem)

    def can_share_distant(self) -> bool:
        """Return whether the last four tokens have the same hidden states when rows share the kept
        states of the first four, in place of copies of them."""
        try:
            shared_BLD = self.tried.hidden_sharing(*self._last_four, self._kept_states).float()
        except Exception:  # of the model's own code, which may use its attention in any way
            return False
        without_kept_BLD = self.tried.hidden(*self._last_four).float()
        error = distance(shared_BLD, self._after_kept_BLD)
        effect = distance(without_kept_BLD, self._after_kept_BLD)
        is_right = self.tolerance.are_alike(shared_BLD, self._after_kept_BLD)
        return is_right and self.tolerance.is_small(error, effect)

    @property
    def _last_four(self) -> tuple[Tensor, Tensor]:
        """The tokens after the gap, and their position IDs."""
        return self.tokens_BL[:, AFTER_GAP], self.gapped_BL[:, AFTER_GAP]

    @cached_property
    def _kept_states(self) -> DistantStates:
        """Keys and values of the tokens before the gap."""
        return self.tried.distant_states(
            self.tokens_BL[:, BEFORE_GAP], self.gapped_BL[:, BEFORE_GAP]
        )

    @cached_property
    def _after_kept_BLD(self) -> Tensor:
        """Hidden states of the last four tokens after copies of the kept states."""
        return self.tried.hidden(*self._last_four, distant=self._kept_states).float()
