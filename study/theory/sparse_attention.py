"""Implement the sparse functional attention class (Definition 3.3), exactly and differentiably.

    h(X) = Σ_S key(S, X_S) · value(X_S) / Σ_S key(S, X_S)        S over all k-subsets of the string

`key` is non-negative and depends on the position IDs of S only through their differences
(relativity, Assumption 3.2 item 2), so it is a table over (relative places, tokens); `value` is a
table from tokens to a distribution over labels. Both are parameters. A module holds several
independently trained hypotheses (one per seed), which share its passes.

Dimension key: R replicas (seeds), B batch, L length, N all strings (R · B), E enumerated subsets,
J the k places of a subset, P relative-place rows, C token codes (V^k), I all entries of the table
(R · (P + 2) · C), Y labels, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from olmo_sparsity.base.errors import ConfigError
from study.theory.planted import MEMORY_LIMIT_BYTES, Planted, check_memory

PAD = -1
"""Pads strings shorter than the batch at the end. Subsets with padding do not count."""


@dataclass(frozen=True)
class KeyShape:
    """The relative places that a key function distinguishes."""

    num_places: int
    """k."""

    window: int
    """Subsets with IDs that span at most this many have their own row; 1 means one shared ID."""

    distant: Literal["zero", "initial"] = "zero"
    """The key of wider subsets. zero: 0, so the class is local; initial: always 1, as no training
    string is long enough to change it."""

    relative: bool = True
    """False: one row for all subsets, so the key depends on tokens only."""

    @property
    def num_rows(self) -> int:
        return self.window ** (self.num_places - 1) if self.relative else 1

    def rows(self, ids_EJ: np.ndarray) -> np.ndarray:
        """Row of each subset; num_rows for all wider ones."""
        if not self.relative:
            return np.zeros(len(ids_EJ), dtype=int)
        differences = ids_EJ[:, 1:] - ids_EJ[:, :1]
        rows_E = np.zeros(len(ids_EJ), dtype=int)
        for column in differences.T:
            rows_E = rows_E * self.window + column
        near_E = (differences < self.window).all(axis=1)
        return np.where(near_E, rows_E, self.num_rows)


@dataclass(frozen=True)
class Layout:
    """The enumerated subsets of one length: their places, and their rows of the key table."""

    places_EJ: torch.Tensor
    rows_E: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows_E)


def build_layout(ids_L: np.ndarray, shape: KeyShape) -> Layout:
    """Return all k-subsets of a string with a key that may differ from 0; IDs must not decrease."""
    k, length = shape.num_places, len(ids_L)
    if k > length:
        raise ConfigError(
            f"attention over k={k} places needs a string of at least {k}, not {length}"
        )
    assert (np.diff(ids_L) >= 0).all()
    ahead_L = _places_ahead(ids_L, shape)
    count = sum(math.comb(int(n), k - 1) for n in ahead_L)
    check_memory(
        count * 8.0 * (3 * k + 2),
        f"the {count:,} subsets of k={k} places at length {length}",
        f"use a local key (distant: zero with a window below {length}), a smaller k than {k}, or a "
        "shorter length",
    )
    # Offsets are listed once, for the place with most others ahead; each first place takes the ones
    # that fit.
    listed = list(combinations(range(1, int(ahead_L.max()) + 1), k - 1))
    offsets = np.array(listed, dtype=int).reshape(len(listed), k - 1)
    reach = offsets[:, -1] if k > 1 else np.zeros(1, dtype=int)
    blocks = []
    for first, ahead in enumerate(ahead_L):
        rest = offsets[reach <= ahead]
        blocks.append(np.concatenate([np.full((len(rest), 1), first), first + rest], axis=1))
    places_EJ = np.concatenate(blocks)
    assert len(places_EJ) == count
    return Layout(torch.from_numpy(places_EJ), torch.from_numpy(shape.rows(ids_L[places_EJ])))


def _places_ahead(ids_L: np.ndarray, shape: KeyShape) -> np.ndarray:
    """For each first place of a subset, the number of later places to choose the others from."""
    here_L = np.arange(len(ids_L))
    if shape.distant == "initial" or not shape.relative:
        return len(ids_L) - 1 - here_L
    return np.searchsorted(ids_L, ids_L + shape.window, side="left") - 1 - here_L


class SparseAttention(nn.Module):
    """One hypothesis per replica. Tokens come in ID order (planted.Sample.in_id_order)."""

    def __init__(
        self, shape: KeyShape, vocab_size: int, num_labels: int, num_replicas: int
    ) -> None:
        super().__init__()
        self.shape, self.vocab_size = shape, vocab_size
        num_codes = vocab_size**shape.num_places
        what = f"a key table of {shape.num_rows:,} relative places × {num_codes:,} token tuples"
        num_bytes = 8.0 * num_replicas * shape.num_rows * num_codes * (num_labels + 2)
        check_memory(num_bytes, what, "use a smaller k, window or vocabulary")
        # Initially all keys are 1, and all labels equally likely.
        self.log_key_RPC = nn.Parameter(torch.zeros(num_replicas, shape.num_rows, num_codes))
        self.value_logits_RCY = nn.Parameter(torch.zeros(num_replicas, num_codes, num_labels))

    @property
    def num_replicas(self) -> int:
        return self.log_key_RPC.shape[0]

    def values(self) -> torch.Tensor:
        return self.value_logits_RCY.softmax(dim=-1)

    def forward(self, tokens_RBL: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Label probabilities_RBY. If every key of a string is 0, all labels are equally likely."""
        num_replicas, num_strings, _ = tokens_RBL.shape
        table_IY = self._key_times_value()
        entries_NE = self._entries(tokens_RBL, layout, len(table_IY) // num_replicas)
        # Values sum to one over labels, so the sum over labels is the sum of the keys.
        attended_RBY = _sum_rows(table_IY, entries_NE).view(num_replicas, num_strings, -1)
        total_RB1 = attended_RBY.sum(dim=-1, keepdim=True)
        positive_RB1 = total_RB1 > 0
        mean_RBY = attended_RBY / torch.where(positive_RB1, total_RB1, 1.0)
        return torch.where(positive_RB1, mean_RBY, 1 / attended_RBY.shape[-1])

    def _key_times_value(self) -> torch.Tensor:
        """key · value_IY, one row per (replica, relative places, tokens): after each replica's rows
        one for all wider subsets (key 1) and one for subsets with padding (key 0)."""
        far_R1C = torch.zeros_like(self.log_key_RPC[:, :1])
        log_key_RPC = torch.cat([self.log_key_RPC, far_R1C], dim=1)
        # h does not change if all keys are scaled, so the largest becomes 1. Keys below exp(-87) of
        # it (doubles: exp(-708)) underflow to 0.
        key_RPC = (log_key_RPC - log_key_RPC.detach().amax(dim=(1, 2), keepdim=True)).exp()
        product_RPCY = key_RPC[..., None] * self.values()[:, None]
        return F.pad(product_RPCY, (0, 0, 0, 0, 0, 1)).flatten(0, 2)

    def _entries(
        self, tokens_RBL: torch.Tensor, layout: Layout, rows_per_replica: int
    ) -> torch.Tensor:
        """The row of `_key_times_value` for each subset of each string."""
        num_codes = self.log_key_RPC.shape[-1]
        num_replicas, num_strings, length = tokens_RBL.shape
        # Subsets first, strings last, 32 bits: a place of all strings is contiguous in memory.
        tokens_LN = tokens_RBL.reshape(-1, length).T.to(torch.int32).contiguous()
        filled_LN = tokens_LN.clamp(min=0)
        starts_R = torch.arange(num_replicas, dtype=torch.int32) * rows_per_replica
        entries_EN = (layout.rows_E.to(torch.int32) * num_codes)[:, None] + (
            starts_R.repeat_interleave(num_strings)
        )
        for index, places_E in enumerate(layout.places_EJ.T):
            weight = self.vocab_size ** (self.shape.num_places - 1 - index)
            entries_EN += (filled_LN * weight).index_select(0, places_E)
        if (tokens_LN[-1] == PAD).any():  # padding is at the end, so the last place shows it
            touches_EN = (tokens_LN == PAD).index_select(0, layout.places_EJ[:, -1])
            nothing_N = (starts_R + rows_per_replica - 1).repeat_interleave(num_strings)
            entries_EN = torch.where(touches_EN, nothing_N, entries_EN)
        return entries_EN.T.contiguous()


def _sum_rows(table_IY: torch.Tensor, entries_NE: torch.Tensor) -> torch.Tensor:
    """Σ over E of table_IY[entries_NE]."""
    if not torch.is_grad_enabled():
        return F.embedding_bag(entries_NE, table_IY, mode="sum")
    # On CPU the backward pass of embedding_bag is 8 times slower.
    chosen = table_IY.index_select(0, entries_NE.flatten())
    return chosen.view(*entries_NE.shape, -1).sum(dim=1)


def batches_that_fit(num_strings: int, num_replicas: int, layout: Layout) -> Iterator[slice]:
    """Slices of a batch that fit the memory limit; one string must fit."""
    per_string = num_replicas * len(layout) * 8.0 * 4  # entries and temporaries
    # A slice of a few MiB stays in cache; larger ones are slower.
    step = max(1, min(int(MEMORY_LIMIT_BYTES // per_string), int(2**25 // per_string)))
    for start in range(0, num_strings, step):
        yield slice(start, min(start + step, num_strings))


# --- its risk: 1 − h(X)_Y, the probability of the wrong label -------------------------------------


@dataclass(frozen=True)
class Risk:
    """Risk per replica, with the 95% interval of the sampling."""

    mean_R: np.ndarray
    low_R: np.ndarray
    high_R: np.ndarray


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
    return Risk(mean_R, np.maximum(mean_R - half_R, 0), mean_R + half_R)


@torch.no_grad()
def _wrong(
    model: SparseAttention, tokens_RBL: torch.Tensor, labels_RB: torch.Tensor, layout: Layout
) -> np.ndarray:
    parts = []
    for part in batches_that_fit(tokens_RBL.shape[1], model.num_replicas, layout):
        probs_RBY = model(tokens_RBL[:, part], layout)
        parts.append(1 - probs_RBY.gather(2, labels_RB[:, part, None])[..., 0])
    return torch.cat(parts, dim=1).double().numpy()
