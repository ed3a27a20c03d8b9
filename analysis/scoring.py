"""The one way this package asks a model anything: many short rows, batched, a few targets each.

Place in the flow: blocks → **losses**. Selectors and recovery differ only in the rows they ask for.

A row is a dense causal sequence with gaps in its position IDs: no masks, so fast attention kernels
apply. Only the places that predict a target are unembedded. Every forward is counted in
token-forwards, the unit of cost in all results.

With `far_states="contextual"` far tokens keep the states they have in the full long context, and
the window may see only the chosen ones: a row is the short window alone, and looks back at their
keys and values, which are made once for all rows of a block.

Dimension key: B rows, L tokens of a row, F far tokens, W targets of a row (its last places), D
width, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from analysis.windows import NOTHING, Block
from olmo_sparsity.model.far_states import FarStates
from olmo_sparsity.model.losses import LanguageModel, rows_per_chunk

Reading = Literal["isolated", "contextual"]


@dataclass(frozen=True)
class Row:
    """The inputs at `places` of a block; their last `num_targets` places predict targets."""

    block: Block
    places: np.ndarray
    """Position IDs, rising: also the index of each token in `block.tokens`."""

    num_targets: int
    """The targets are the tokens after the last `num_targets` inputs."""

    seen: np.ndarray | None = None
    """Far places that are seen with the states they have in the long window."""


def long_row(block: Block) -> Row:
    return Row(block, block.long_places(), block.num_targets)


class Scorer:
    def __init__(
        self,
        model: LanguageModel,
        device: torch.device | None = None,
        *,
        far_states: Reading = "contextual",
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
        # A document's own far tokens, and those of its foreign texts.
        self._remembered: deque[tuple[Block, FarStates]] = deque(maxlen=4)

    def set_row(self, block: Block, far: np.ndarray, target: int | None = None) -> Row:
        """The short window and the far tokens at `far`, for one target or for all of the block."""
        far = np.sort(far)
        last = block.num_targets if target is None else target + 1
        num_targets = block.num_targets if target is None else 1
        if self.far_states == "contextual" and len(far):
            return Row(block, block.set_places(NOTHING, last), num_targets, seen=far)
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
            looks_back = None if row.seen is None else (id(row.block), len(row.seen))
            shapes[len(row.places), row.num_targets, looks_back].append(index)
        for (length, _, looks_back), indices in shapes.items():
            # Far states that are looked back at take as much memory as the row's own.
            num_keys = length if looks_back is None else length + looks_back[1]
            size = max(1, self.batch_tokens // num_keys)
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
        far = None
        if batch[0].seen is not None:
            seen = [row.seen for row in batch if row.seen is not None]
            seen_BF = torch.from_numpy(np.stack(seen)).to(self.device)
            far = self._far_states(batch[0].block).choose(seen_BF)
        return self.model.hidden(tokens_BL, positions_BL, far=far, last=batch[0].num_targets)

    def _far_states(self, block: Block) -> FarStates:
        """Of all far tokens of the block; asked for by many batches of rows."""
        for known, states in self._remembered:
            if known is block:
                return states
        tokens_BL, positions_BL = as_tensors(
            [Row(block, np.arange(block.windows.num_far), 0)], self.device
        )
        self.token_forwards += tokens_BL.numel()
        self._remembered.append((block, self.model.far_states(tokens_BL, positions_BL)))
        return self._remembered[-1][1]


def as_tensors(batch: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor]:
    """tokens_BL and positions_BL of rows of equal length."""
    places = np.stack([row.places for row in batch])
    tokens = np.stack([row.block.tokens[row.places] for row in batch])
    return (
        torch.from_numpy(tokens.astype(np.int64)).to(device),
        torch.from_numpy(places.astype(np.int64)).to(device),
    )


def _targets(row: Row) -> np.ndarray:
    return row.block.tokens[row.places[-row.num_targets :] + 1]
