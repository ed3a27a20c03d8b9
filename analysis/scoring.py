"""The one way this package asks a model anything: many short rows, batched, a few targets each.

Place in the flow: blocks → **losses**. Selectors and recovery differ only in the rows they ask for.

A row is a dense causal sequence with gaps in its position IDs: no masks, so fast attention kernels
apply. Only the places that predict a target are unembedded. Every forward is counted in
token-forwards, the unit of cost in all results.

With `far_states="contextual"` far tokens keep the states they have in the full long context, and
the window's queries may see only the chosen ones: the same rows, asked with an attention bias.

Dimension key: B rows, L tokens of a row, W targets of a row (its last places), D width, V
vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from analysis.windows import Block
from olmo_sparsity.model.losses import LanguageModel, rows_per_chunk

FarStates = Literal["isolated", "contextual"]


@dataclass(frozen=True)
class Row:
    """The inputs at `places` of a block; their last `num_targets` places predict targets."""

    block: Block
    places: np.ndarray
    """Position IDs, rising: also the index of each token in `block.tokens`."""

    num_targets: int
    """The targets are the tokens after the last `num_targets` inputs."""

    visible: np.ndarray | None = None
    """Only for contextual far states: the far places that the window may see."""


def long_row(block: Block) -> Row:
    return Row(block, block.long_places(), block.num_targets)


class Scorer:
    def __init__(
        self,
        model: LanguageModel,
        device: torch.device | None = None,
        *,
        far_states: FarStates = "isolated",
        batch_tokens: int | None = None,
    ) -> None:
        """`device`: where its inputs go (default: where its embedding is)."""
        device = device or model.embedding.weight.device
        self.model, self.device, self.far_states = model, device, far_states
        # On CPU the states of a batch should stay in cache: 2,048 and 4,096 were fastest.
        self.batch_tokens = batch_tokens or (4096 if device.type == "cpu" else 16384)
        if device.type == "cpu":
            # Having freed one block of this size, glibc keeps freed memory instead of giving it
            # back after each layer, which costs a tenth of the time in page faults.
            torch.empty(31 * 2**20, dtype=torch.uint8)
        self.token_forwards = 0

    def set_row(self, block: Block, far: np.ndarray, target: int | None = None) -> Row:
        """The short window and the far tokens at `far`, for one target or for all of the block."""
        far = np.sort(far)
        last = block.num_targets if target is None else target + 1
        num_targets = block.num_targets if target is None else 1
        if self.far_states == "contextual" and len(far):
            return Row(block, block.long_places(last=last), num_targets, visible=far)
        return Row(block, block.set_places(far, last), num_targets)

    @torch.no_grad()
    def losses(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """nll_W of each row's targets, in nats."""
        return self._run(rows, self._nll)

    @torch.no_grad()
    def divergences(self, rows: Sequence[Row], log_p_WV: Sequence[Tensor]) -> list[np.ndarray]:
        """KL(p ‖ p_row) of each row's targets, p given as log-probabilities for each row."""
        by_row = {id(row): log_p for row, log_p in zip(rows, log_p_WV, strict=True)}

        def kl(hidden_BWD: Tensor, batch: Sequence[Row]) -> np.ndarray:
            found = []
            num_targets = hidden_BWD.shape[1]
            size = max(1, rows_per_chunk(self.model.vocab_size, self.device) // num_targets)
            for start in range(0, len(batch), size):
                part = slice(start, start + size)
                log_p_CWV = torch.stack([by_row[id(row)] for row in batch[part]]).to(self.device)
                log_q_CWV = self.model.unembed(hidden_BWD[part]).float().log_softmax(-1)
                found.append((log_p_CWV.exp() * (log_p_CWV - log_q_CWV)).sum(-1))
            return torch.cat(found).cpu().numpy()

        return self._run(rows, kl)

    @torch.no_grad()
    def log_probabilities(self, row: Row) -> Tensor:
        """log p_WV of one row's targets, on the device."""
        hidden_BWD = self._hidden([row])
        return self.model.unembed(hidden_BWD[0]).float().log_softmax(-1)

    def _nll(self, hidden_BWD: Tensor, batch: Sequence[Row]) -> np.ndarray:
        targets = np.stack([_targets(row) for row in batch])
        targets_BW = torch.from_numpy(targets.astype(np.int64)).to(self.device)
        hidden_ND, targets_N = hidden_BWD.flatten(0, 1), targets_BW.flatten()
        chunk = rows_per_chunk(self.model.vocab_size, self.device)
        parts = []
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            logits_CV = self.model.unembed(hidden_ND[part]).float()
            parts.append(
                torch.nn.functional.cross_entropy(logits_CV, targets_N[part], reduction="none")
            )
        return torch.cat(parts).view(targets_BW.shape).cpu().numpy()

    def _run(
        self, rows: Sequence[Row], read: Callable[[Tensor, Sequence[Row]], np.ndarray]
    ) -> list[np.ndarray]:
        """Rows of equal shape share forwards; answers come back in the order of the rows."""
        found: list[np.ndarray] = [np.empty(0)] * len(rows)
        shapes: dict[tuple, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            shapes[len(row.places), row.num_targets, row.visible is None].append(index)
        for (length, _, _), indices in shapes.items():
            size = max(1, self.batch_tokens // length)
            for start in range(0, len(indices), size):
                chosen = indices[start : start + size]
                batch = [rows[index] for index in chosen]
                for index, answer in zip(chosen, read(self._hidden(batch), batch), strict=True):
                    found[index] = answer
        return found

    def _hidden(self, batch: Sequence[Row]) -> Tensor:
        """hidden_BWD at the places that predict targets."""
        tokens_BL, positions_BL = as_tensors(batch, self.device)
        self.token_forwards += tokens_BL.numel()
        bias = None if batch[0].visible is None else visibility_bias(batch, self.device)
        return self.model.hidden(tokens_BL, positions_BL, bias, last=batch[0].num_targets)


def as_tensors(batch: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor]:
    """tokens_BL and positions_BL of rows of equal length."""
    places = np.stack([row.places for row in batch])
    tokens = np.stack([row.block.tokens[row.places] for row in batch])
    return (
        torch.from_numpy(tokens.astype(np.int64)).to(device),
        torch.from_numpy(places.astype(np.int64)).to(device),
    )


def visibility_bias(batch: Sequence[Row], device: torch.device) -> Tensor:
    """bias_B1LL: causal, and from the window on blind to far tokens that were not chosen."""
    length, num_far = len(batch[0].places), batch[0].block.windows.num_far
    allowed = np.tril(np.ones((length, length), dtype=bool))
    allowed_BLL = np.repeat(allowed[None], len(batch), axis=0)
    for allowed_LL, row in zip(allowed_BLL, batch, strict=True):
        seen = np.zeros(num_far, dtype=bool)
        seen[row.visible] = True
        allowed_LL[num_far:, :num_far] &= seen
    lowest = torch.finfo(torch.float).min
    bias = torch.zeros(allowed_BLL.shape, device=device)
    return bias.masked_fill_(~torch.from_numpy(allowed_BLL).to(device), lowest)[:, None]


def _targets(row: Row) -> np.ndarray:
    return row.block.tokens[row.places[-row.num_targets :] + 1]
