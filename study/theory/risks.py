"""Compute the risk of a hypothesis at a length: exactly where possible, else by sampling.

Place in the flow: planted.py + sparse_attention.py → risks, which are compared with bounds.py.

The loss is 1 − h(X)_Y, the probability of the wrong label, which is at most one. There are two
methods:

- `transfer_risk`: exact at all lengths for local keys. See the comment above it.
- `sampled_risk`: Monte Carlo with a 95% interval; the attention over subsets is exact.

Dimension key: R replicas, B batch, L length, J the k places of a set, I first places, Z planted
tuples, Y labels, T nodes of the integral, M memory states (the last window − 1 tokens, a blank edge
before the string counting as a token of its own), W = V + 1 tokens with that edge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch

from olmo_sparsity.errors import ConfigError
from study.theory.planted import Planted, check_memory
from study.theory.sparse_attention import (
    Layout,
    SparseAttention,
    batches_that_fit,
    build_layout,
)


@dataclass(frozen=True)
class Risk:
    """Risk per replica, with the 95% interval of the sampling (equal ends if exact)."""

    mean_R: np.ndarray
    low_R: np.ndarray
    high_R: np.ndarray
    method: str


def sampled_risk(
    model: SparseAttention, planted: Planted, length: int, num_strings: int, seeds: list[int]
) -> Risk:
    layout = build_layout(planted.ids(length), model.shape)
    drawn = [
        planted.sample(length, num_strings, np.random.default_rng([seed, length])) for seed in seeds
    ]
    tokens_RBL = torch.from_numpy(np.stack([sample.in_id_order() for sample in drawn]))
    labels_RB = torch.from_numpy(np.stack([sample.labels_B for sample in drawn]))
    wrong_RB = _wrong(model, tokens_RBL, labels_RB, layout)
    mean_R = wrong_RB.mean(axis=1)
    half_R = 1.96 * wrong_RB.std(axis=1, ddof=1) / math.sqrt(num_strings)
    return Risk(mean_R, np.maximum(mean_R - half_R, 0), mean_R + half_R, "sampled")


@torch.no_grad()
def _wrong(
    model: SparseAttention, tokens_RBL: torch.Tensor, labels_RB: torch.Tensor, layout: Layout
) -> np.ndarray:
    parts = []
    for part in batches_that_fit(tokens_RBL.shape[1], model.num_replicas, layout):
        probs_RBY = model(tokens_RBL[:, part], layout)
        parts.append(1 - probs_RBY.gather(2, labels_RB[:, part, None])[..., 0])
    return torch.cat(parts, dim=1).double().numpy()


# --- exact at all lengths -------------------------------------------------------------------------
#
# With a local key, h(X)_y = A / D, where both are sums over places of a function of the last
# `window` tokens. Their ratio is not a sum, but 1 / D = ∫ exp(−tD) dt over t > 0, and E[A exp(−tD)]
# at a fixed t takes one pass along the string, with a state for the last window − 1 tokens. The
# integral uses t = exp(u) and evenly spaced u: for this integrand the error falls like
# exp(−π² / step), under 1e-6 relative at the step below. A planted set is inserted by forcing its
# tokens; prefixes and suffixes come from two passes that all planted sets share.

_STEP = 0.6
_TAIL = 17.0  # cuts off exp(−17) < 5e-8 at the small end
_TOP = 3.2  # cuts off exp(−exp(3.2)) < 5e-11 at the large end


def can_transfer(model: SparseAttention, planted: Planted) -> bool:
    """Local keys without coupled IDs; or k = 1, where places do not matter."""
    return (
        not planted.coupled
        and (model.shape.num_places == 1 or (model.shape.far == "zero" and model.shape.relative))
        and (len(planted.background_V) + 1) ** _memory(model) <= 1024
    )


def _memory(model: SparseAttention) -> int:
    """The number of earlier tokens that affect the contribution of a new one."""
    return model.shape.window - 1 if model.shape.num_places > 1 else 0


def transfer_risk(model: SparseAttention, planted: Planted, length: int) -> Risk:
    with torch.no_grad():
        tables = zip(model.log_key_RPC, model.values(), strict=True)
        mean_R = np.array([float(transfer_risk_of(*of, model, planted, length)) for of in tables])
    return Risk(mean_R, mean_R, mean_R, "transfer")


def transfer_risk_of(
    log_key_PC: torch.Tensor,
    values_CY: torch.Tensor,
    model: SparseAttention,
    planted: Planted,
    length: int,
) -> torch.Tensor:
    """The exact risk of one hypothesis, differentiable in its two tables."""
    if not can_transfer(model, planted):
        raise ConfigError(
            "the transfer method needs a local key (far: zero) over uncoupled places and at most "
            f"1024 memory states; window={model.shape.window} with {len(planted.background_V)} "
            "tokens does not qualify; use sampled_risk"
        )
    chain = _Chain(log_key_PC.double(), values_CY.double(), model, planted, length)
    places_NJ, mass_N = planted.law.table(length)
    shapes_PJ, shape_N = np.unique(places_NJ - places_NJ[:, :1], axis=0, return_inverse=True)
    correct = torch.zeros((), dtype=torch.double)
    for index, shape_J in enumerate(shapes_PJ):
        chosen = shape_N.ravel() == index
        correct = correct + chain.correct_mass(shape_J, places_NJ[chosen, 0], mass_N[chosen])
    return 1 - correct


class _Chain:
    """E[exp(−tD)] and E[A exp(−tD)] before, inside and after a planted set."""

    def __init__(
        self,
        log_key_PC: torch.Tensor,
        values_CY: torch.Tensor,
        model: SparseAttention,
        planted: Planted,
        length: int,
    ) -> None:
        self.planted, self.length = planted, length
        self.num_tokens = len(planted.background_V) + 1
        self.memory = _memory(model)
        num_states = self.num_tokens**self.memory
        top = log_key_PC.detach().max()
        if not torch.isfinite(top):
            raise ConfigError("the key function is 0 everywhere; make some log key finite")
        d_MW, a_YMW = self._per_place((log_key_PC - top).exp(), values_CY, model)
        low = float(log_key_PC.detach().min() - top)
        if not math.isfinite(low):
            raise ConfigError("the transfer method needs positive keys; use -50 for a key of 0")
        subsets = length * max(1, math.comb(self.memory, model.shape.num_places - 1))
        nodes = torch.arange(-_TAIL - math.log(subsets), _TOP - low + _STEP, _STEP).double()
        self.weight_T = nodes.exp() * _STEP
        check_memory(
            8.0 * len(nodes) * num_states * (length + 1) * 2 * (1 + len(a_YMW)),
            f"the transfer method at length {length} with {num_states:,} states",
            "use sampled_risk",
        )
        self.decay_TMW = (-nodes.exp()[:, None, None] * d_MW).exp()
        self.a_YMW = a_YMW
        background_W = torch.from_numpy(np.append(planted.background_V, 0.0))
        self.background_TMW = self.decay_TMW * background_W
        edge_M = torch.zeros(num_states, dtype=torch.double)
        edge_M[-1] = 1  # every remembered token is the edge, the last token of W
        before = edge_M.expand(len(nodes), -1)
        sums = torch.zeros(len(a_YMW), *before.shape, dtype=torch.double)
        self.before = [(before, sums)]
        for _ in range(length):
            self.before.append(self._forward(*self.before[-1], self.background_TMW, self.a_YMW))
        ones = torch.ones_like(before)
        self.after = [(ones, torch.zeros_like(sums))]
        for _ in range(length):
            self.after.append(self._backward(*self.after[-1]))

    def _per_place(
        self, key_PC: torch.Tensor, values_CY: torch.Tensor, model: SparseAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Contributions of a new token to D and A: its subsets with the remembered tokens."""
        k, window, vocab = model.shape.num_places, model.shape.window, model.vocab_size
        grid = np.indices([self.num_tokens] * (self.memory + 1)).reshape(self.memory + 1, -1)
        d = torch.zeros(grid.shape[1], dtype=torch.double)
        a_Y = torch.zeros(values_CY.shape[1], grid.shape[1], dtype=torch.double)
        for earlier in combinations(range(self.memory), k - 1):
            slots = (*earlier, self.memory)
            row = 0
            for slot in slots[1:]:
                row = row * window + slot - slots[0]
            real = (grid[list(slots)] < vocab).all(axis=0)
            code = np.zeros(grid.shape[1], dtype=int)
            for slot in slots:
                code = code * vocab + np.minimum(grid[slot], vocab - 1)
            key = key_PC[row if model.shape.relative else 0][code] * torch.from_numpy(real)
            d = d + key
            a_Y = a_Y + key * values_CY[code].T
        return d.view(-1, self.num_tokens), a_Y.view(len(a_Y), -1, self.num_tokens)

    def _forward(
        self, f: torch.Tensor, g: torch.Tensor, step_TMW: torch.Tensor, a_YMW: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one token: f is E[exp(−tD)] per state, g E[A exp(−tD)]. Leading axes are free."""
        moved = f[..., None] * step_TMW
        gained = g[..., None] * step_TMW + moved.unsqueeze(-4) * a_YMW[:, None]
        return self._drop_oldest(moved), self._drop_oldest(gained)

    def _drop_oldest(self, moved: torch.Tensor) -> torch.Tensor:
        if self.memory == 0:
            return moved.sum(dim=-1)
        return moved.unflatten(-2, (moved.shape[-1], -1)).sum(dim=-3).flatten(-2)

    def _backward(self, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepend one token: b is E[exp(−tD)] from each state on, c E[A exp(−tD)]."""
        next_b, next_c = self._after_step(b), self._after_step(c)
        b_new = (self.background_TMW * next_b).sum(dim=-1)
        c_new = (self.background_TMW * (next_c + self.a_YMW[:, None] * next_b)).sum(dim=-1)
        return b_new, c_new

    def _after_step(self, values: torch.Tensor) -> torch.Tensor:
        """values[state after] → [state before, token]."""
        if self.memory == 0:
            return values[..., None].expand(*values.shape, self.num_tokens)
        folded = values.unflatten(-1, (-1, self.num_tokens)).unsqueeze(-3)
        return folded.expand(*values.shape[:-1], self.num_tokens, -1, -1).flatten(-3, -2)

    def correct_mass(
        self, shape_J: np.ndarray, starts_I: np.ndarray, mass_I: np.ndarray
    ) -> torch.Tensor:
        """E[h(X)_Y] over all sets of one shape, weighted by their probability."""
        total = torch.zeros((), dtype=torch.double)
        # After the first few places no state contains the edge, which leaves fewer states.
        inside_M = [
            state
            for state, tokens in enumerate(np.ndindex(*([self.num_tokens] * self.memory)))
            if self.num_tokens - 1 not in tokens
        ]
        late_I = starts_I >= self.memory
        for part_I, states_M, num_tokens in (
            (~late_I, slice(None), self.num_tokens),
            (late_I, inside_M, self.num_tokens - 1),
        ):
            if part_I.any():
                total = total + self._correct_mass(
                    shape_J, starts_I[part_I], mass_I[part_I], states_M, num_tokens
                )
        return total

    def _correct_mass(
        self,
        shape_J: np.ndarray,
        starts_I: np.ndarray,
        mass_I: np.ndarray,
        states_M: slice | list[int],
        num_tokens: int,
    ) -> torch.Tensor:
        span = int(shape_J[-1]) + 1
        decay_TMW = self.decay_TMW[:, states_M, :num_tokens]
        background_TMW = self.background_TMW[:, states_M, :num_tokens]
        a_YMW = self.a_YMW[:, states_M, :num_tokens]
        weight_I = torch.from_numpy(mass_I)[:, None, None]
        total = torch.zeros((), dtype=torch.double)
        before = [self.before[start] for start in starts_I]
        after = [self.after[self.length - start - span] for start in starts_I]
        prefix_f, prefix_g = (
            torch.stack(part)[..., states_M] for part in zip(*before, strict=True)
        )
        suffix_b, suffix_c = (torch.stack(part)[..., states_M] for part in zip(*after, strict=True))
        for tokens_J, label, mass in zip(
            self.planted.tokens_ZJ, self.planted.labels_Z, self.planted.mass_Z, strict=True
        ):
            a_1MW = a_YMW[label : label + 1]
            f, g = prefix_f, prefix_g[:, label : label + 1]
            for place in range(span):
                step_TMW = background_TMW
                if place in shape_J:
                    forced_W = torch.zeros(num_tokens, dtype=torch.double)
                    forced_W[tokens_J[list(shape_J).index(place)]] = 1
                    step_TMW = decay_TMW * forced_W
                f, g = self._forward(f, g, step_TMW, a_1MW)
            attended_ITM = g[:, 0] * suffix_b + f * suffix_c[:, label]
            total = total + mass * (attended_ITM * weight_I * self.weight_T[:, None]).sum()
        return total
