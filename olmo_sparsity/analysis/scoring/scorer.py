"""Compute the losses of targets given chosen parts of their context, in batches of short rows.

A row is a dense causal sequence with gaps in its position IDs: no masks, so fast attention kernels
apply. If distant tokens keep their states, a row is the local window alone, and attends to keys and
values of the chosen distant tokens, computed once for all rows of a context. All forwards are
counted.

Dimension key: B rows, L tokens of a row, F far places, W targets of a row (its last places), D
width, C targets of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self, TypeVar

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.analysis.interpretation import Interpretation, interpretation_of
from olmo_sparsity.base.devices import threads_for
from olmo_sparsity.base.errors import ConfigError, DataError, is_out_of_memory
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.attention import fast_kernels
from olmo_sparsity.models.distant_states import FarStates, to_device
from olmo_sparsity.models.identity import State
from olmo_sparsity.models.losses import LanguageModel, rows_per_chunk
from olmo_sparsity.models.prompts import Engine
from olmo_sparsity.models.use import in_use, state_of, with_model_in_use
from olmo_sparsity.text.documents import Controls, Document
from olmo_sparsity.text.windows import NOTHING, Block, Windows

Item = TypeVar("Item")
Output = TypeVar("Output")

TOGETHER = 16
"""Targets within one run of this many share row lengths, so that their rows share forwards."""

FEW_PAIRS = 2**15
"""On a CPU, rows that see different numbers of distant places share a forward if they have at most
this many pairs of a token and a distant place: more would cost more in attention."""


@dataclass(frozen=True, eq=False)
class Context:
    """A block with one distant text, prepared by `Scorer.context` for evaluation."""

    block: Block
    states: FarStates | None = None
    """States of the prefix and all far places, with contextual far states."""

    others_RF: np.ndarray | None = None
    """Unrelated texts that replace far places, with far states `replaced`."""

    def long_row(self) -> Row:
        """The long window, for all targets of the block."""
        if self.states is None and self.others_RF is None:
            return self.dense_row()
        return self.set_row(np.arange(self.block.num_far))

    def dense_row(self, last: int | None = None) -> Row:
        """The long window, computed in full, for the targets before `last`."""
        last = self.block.num_targets if last is None else last
        return Row(self, np.arange(self.block.num_before + last - 1), last)

    def set_row(self, far: np.ndarray, span: tuple[int, int] | None = None) -> Row:
        """The local window and the distant places `far` (indices, rising), for the
        targets `span` (default: all). The only place where far states differ."""
        block, wanted = self.block, span
        last = num_targets = block.num_targets
        if self.others_RF is not None:
            last = last if span is None else span[1]
            return Row(self, np.arange(block.num_before + last - 1), last, far, span or (0, last))
        if span is not None:
            # Inputs after a target do not affect it: rows for neighbours get one shape.
            first = span[0] - span[0] % TOGETHER
            last = max(min(first + TOGETHER, last), span[1])
            num_targets, wanted = last - first, (span[0] - first, span[1] - first)
        earlier, near = block.earlier(far), block.near(last)
        if self.states is not None and len(earlier):
            return Row(self, near, num_targets, earlier, wanted)
        return Row(self, np.concatenate([earlier, near]), num_targets, wanted=wanted)


@dataclass(frozen=True)
class Row:
    """The inputs at `places` of a context; their last `num_targets` places predict targets."""

    context: Context
    places: np.ndarray
    """Position IDs, rising, which are also indices into `block.tokens`."""

    num_targets: int
    """The targets are the tokens after the last `num_targets` inputs."""

    seen: np.ndarray | None = None
    """Earlier places, attended to with their states of the long window."""

    wanted: tuple[int, int] | None = None
    """The targets to evaluate: from the first to one past the last."""

    def within(self, reach: int) -> Row:
        """Without distant places that no layer sees from a later place: they have no effect."""
        if self.seen is not None:
            seen = self.seen[self.seen > self.places[0] - reach]
            return replace(self, seen=seen if len(seen) else None)
        ends = np.flatnonzero(np.diff(self.places) >= reach)
        return replace(self, places=self.places[ends[-1] + 1 :]) if len(ends) else self

    @property
    def targets(self) -> np.ndarray:
        first, end = self.wanted or (0, self.num_targets)
        return self.context.block.tokens[self.places[-self.num_targets :][first:end] + 1]


class Scorer:
    def __init__(
        self,
        model: LanguageModel,
        device: torch.device | None = None,
        *,
        far_states: str = "contextual",
        batch_tokens: int | None = None,
    ) -> None:
        """`device`: of the inputs (default: the model's)."""
        if isinstance(model, Engine):
            only = "returns log-probabilities only, which `attribute` takes; load its weights"
            raise ConfigError(f"model={type(model).__name__} {only}")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model={model!r:.80} must be the `model` of what load_model returns")
        interpretation = interpretation_of(far_states)
        if interpretation.replaces:
            raise ConfigError(
                f"far_states={far_states}: a Scorer masks what it leaves out; pass contextual or "
                "isolated"
            )
        if batch_tokens is not None and batch_tokens < 1:
            raise ConfigError(f"batch_tokens={batch_tokens} must be at least 1")
        device = device or model.device
        self.model, self.device = model, device
        self.interpretation: Interpretation = interpretation
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.batch_tokens = batch_tokens or self._tokens_at_once()
        self.token_forwards = 0
        self.after_batch: Callable[[], None] = lambda: None
        self._last: tuple[np.ndarray, FarStates, State | None] | None = None

    def _tokens_at_once(self) -> int:
        if self.device.type == "cpu":
            return 4096  # the states of a batch should stay in cache; 2,048 was as fast
        # A forward of a small model would be shorter than its launches.
        return int(16384 * min(max(1e9 / max(self.num_parameters, 1), 1), 8))

    def of_document(self, document: Document, controls: Controls) -> Self:
        return self

    def context(self, block: Block, states: FarStates | None = None) -> Context:
        """Prepare a block for evaluation: the states of its far places are computed once, here.
        `states`: states of a longer text with the same beginning, to reuse."""
        if not self.interpretation.keeps_states:
            return Context(block)
        num_earlier = block.num_prefix + block.num_far
        if states is not None:
            return Context(block, states.first(num_earlier))
        return Context(block, self.states(block.tokens[:num_earlier]))

    def states(self, tokens: np.ndarray) -> FarStates:
        """States of a text from its beginning, each token seeing those before it, computed a few
        thousand tokens at a time. The last ones are kept, as they serve every beginning of the
        text, for as long as the model stays the same."""
        with in_use(self.model), fast_kernels(self.device):
            state = state_of(self.model)
            if self._last is not None and self._last[2] is not state:
                self._last = None
            if self._last is not None and np.array_equal(self._last[0][: len(tokens)], tokens):
                return self._last[1].first(len(tokens))
            self._last = None  # two may not fit in memory
            (tokens_BL,) = to_device([tokens[None]], self.device)
            positions_BL = torch.arange(len(tokens), device=self.device)[None]
            self.token_forwards += len(tokens)
            with threads_for(self.num_parameters):
                states = self.model.far_states(tokens_BL, positions_BL, self.batch_tokens)
            self._last = tokens, states, state
            return self._last[1]

    @property
    def kept(self) -> tuple[np.ndarray | None, FarStates | None]:
        """The last text that `states` was given, and its states, while the model is in use and as
        it was."""
        if self._last is None or self._last[2] is not state_of(self.model):
            return None, None
        return self._last[0], self._last[1]

    @torch.no_grad()
    def extended(self, states: FarStates | None, tokens: np.ndarray) -> FarStates:
        """States of a text that goes on with `tokens`. `states`: of what precedes them."""
        first = 0 if states is None else states.num_places
        (tokens_1L,) = to_device([tokens[None]], self.device)
        positions_1L = first + torch.arange(len(tokens), device=self.device)[None]
        self.token_forwards += len(tokens)
        with threads_for(self.num_parameters):
            return self.model.far_states(tokens_1L, positions_1L, self.batch_tokens, states)

    @torch.no_grad()
    def hidden_after(self, states: FarStates | None, tokens_BL: np.ndarray, last: int) -> Tensor:
        """hidden_BWD of the last places of texts that begin with the text of `states`."""
        first = 0 if states is None else states.num_places
        (given_BL,) = to_device([tokens_BL], self.device)
        positions_BL = (first + torch.arange(tokens_BL.shape[1], device=self.device)).expand_as(
            given_BL
        )
        self.token_forwards += tokens_BL.size
        far = None if states is None else states.expand(len(tokens_BL))
        with threads_for(self.num_parameters):
            return self.model.hidden(given_BL, positions_BL, far=far, last=last)

    @torch.no_grad()
    def hidden(self, rows: Sequence[Row]) -> list[Tensor]:
        """hidden_WD of each row, at the places that predict its targets."""
        return self._run(rows, lambda hidden_BWD, _: hidden_BWD)

    @torch.no_grad()
    def losses(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """nll_W of each row's targets, in nats."""

        def nll(hidden_BWD: Tensor, batch: Sequence[Row]) -> Tensor:
            targets_BW = np.stack([row.targets for row in batch])
            return self.nll_of(hidden_BWD.flatten(0, 1), targets_BW.ravel()).view(targets_BW.shape)

        return self._run(rows, nll, to_host)

    def window_losses(
        self, windows: Windows, groups: dict[str, list[Block]]
    ) -> dict[str, np.ndarray]:
        """Return loss_T of all targets of a document with the local window (`loss_short`), and with
        the long windows of each group (`loss_long`, with the group's name before it).

        The blocks of all groups have the same local windows and targets.
        """
        blocks = next(iter(groups.values()))
        targets_T = np.concatenate([block.targets_W for block in blocks])
        short_rows = [Context(block).set_row(NOTHING) for block in blocks]
        short_TD = torch.cat(self.hidden(short_rows))
        long_TD = {name: _long_hidden(self, windows, group) for name, group in groups.items()}
        columns = {"loss_short": self.nll_of(short_TD, targets_T)}
        for name, hidden_TD in long_TD.items():
            columns[f"{name}loss_long"] = self.nll_of(hidden_TD, targets_T)
        # All columns are copied at once, so that the host waits for a GPU once.
        return dict(zip(columns, to_host(list(columns.values())), strict=True))

    def sums(self, rows: Sequence[Row]) -> np.ndarray:
        """The sum of each row's losses; the targets of all rows are unembedded together."""
        hidden = self.hidden(rows)
        loss_N = self.nll(torch.cat(hidden), np.concatenate([row.targets for row in rows]))
        ends = np.cumsum([len(hidden_WD) for hidden_WD in hidden])
        return np.add.reduceat(loss_N, np.concatenate([[0], ends[:-1]]))

    @torch.no_grad()
    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """(…, D) → log p (…, V)."""
        return self.model.unembed(hidden).float().log_softmax(-1)

    @property
    def chunk(self) -> int:
        """How many targets are unembedded at a time."""
        return rows_per_chunk(self.model.vocab_size, self.device)

    @torch.no_grad()
    def nll(self, hidden_ND: Tensor, targets_N: np.ndarray) -> np.ndarray:
        """−log p of one target from each state."""
        return self.nll_of(hidden_ND, targets_N).cpu().numpy()

    def nll_of(self, hidden_ND: Tensor, targets_N: np.ndarray) -> Tensor:
        """`nll`, left on the device."""
        (labels_N,) = to_device([targets_N], self.device)
        # One: small tensors made between chunks would keep the memory of logits from being reused.
        loss_N = torch.empty(len(labels_N), dtype=torch.float, device=self.device)
        for part in (slice(i, i + self.chunk) for i in range(0, len(labels_N), self.chunk)):
            logits_CV = self.model.unembed(hidden_ND[part]).float()
            loss_N[part] = F.cross_entropy(logits_CV, labels_N[part], reduction="none")
        return loss_N

    def _run(
        self,
        rows: Sequence[Row],
        read: Callable[[Tensor, Sequence[Row]], Tensor],
        finish: Callable[[list[Tensor]], Sequence[Any]] = lambda parts: parts,
    ) -> list[Any]:
        """Return what `read` computes for each row; rows of equal shape share forwards. `finish`
        gets the outputs of all batches at the end, so that the host waits for a GPU once."""
        rows, each = _distinct(rows, self.model.reach)
        order, parts = list[int](), list[Tensor]()
        for indices, hides, num_keys in self._groups(rows):

            def output(batch: Sequence[Row], hides: bool = hides) -> Tensor:
                return read(self._hidden(batch, hides), batch)

            with threads_for(self.num_parameters):
                parts += self.in_batches([rows[index] for index in indices], num_keys, output)
            order += indices
        results: list[Any] = [None] * len(rows)
        for index, result in zip(order, chain(*finish(parts)), strict=True):
            results[index] = result
        return [results[index] for index in each]

    def _groups(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], bool, int]]:
        """Rows that share forwards, whether far places are hidden from them (see `_hidden`), and
        the number of keys of each: a far state takes as much memory as a state of the row. Rows may
        see different numbers of far places, if one forward holds them all: to launch one on a GPU,
        and to read the weights on a CPU, takes longer than to compute a few rows."""
        shapes: dict[tuple, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for index, row in enumerate(rows):
            context, num_seen = (None, 0) if row.seen is None else (row.context, len(row.seen))
            num_wanted = None if row.wanted is None else row.wanted[1] - row.wanted[0]
            of_shape = shapes[len(row.places), row.num_targets, num_wanted, context]
            of_shape[num_seen].append(index)
        for (length, _, _, context), of_shape in shapes.items():
            every = list(chain(*of_shape.values()))
            if context is None:
                yield every, False, length
                continue
            num_places = context.states.num_places
            shares = self.model.shares_far(num_places, length)
            num_tokens = len(every) * length
            fits = num_tokens <= self.batch_tokens
            if self.device.type == "cpu":
                fits &= num_tokens * num_places <= FEW_PAIRS
            if shares and len(of_shape) > 1 and fits:
                yield every, True, length
                continue
            for num_seen, indices in of_shape.items():
                hides = self._hides(context, num_seen)
                num_far = num_seen if not hides else 0 if shares else num_places
                yield indices, hides, length + num_far

    def in_batches(
        self, items: Sequence[Item], num_tokens: int, compute: Callable[[Sequence[Item]], Output]
    ) -> list[Output]:
        """The output of `compute` for each batch of items with `num_tokens` tokens each. If a batch
        runs out of memory, batches are halved from it on."""
        with in_use(self.model), fast_kernels(self.device):
            return self._in_batches(items, num_tokens, compute)

    def _in_batches(
        self, items: Sequence[Item], num_tokens: int, compute: Callable[[Sequence[Item]], Output]
    ) -> list[Output]:
        outputs, first = list[Output](), 0
        while first < len(items):
            batch = items[first : first + max(1, self.batch_tokens // num_tokens)]
            before = self.token_forwards
            try:
                outputs.append(compute(batch))
            except Exception as error:
                if len(batch) == 1 or not is_out_of_memory(error):
                    raise
            else:
                first += len(batch)
                self.after_batch()
                continue
            # Outside of `except`, as its traceback would keep the memory alive.
            self.batch_tokens, self.token_forwards = len(batch) // 2 * num_tokens, before
            say(f"out of memory: batches of {self.batch_tokens:,} tokens from here on")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return outputs

    def _hides(self, context: Context, num_seen: int) -> bool:
        """Whether the far places that a row does not see are hidden from it: where they are few,
        that avoids copying nearly all states for each row. A model that scales its queries by the
        number of keys would count them."""
        config = getattr(self.model, "config", None)
        counts_keys = getattr(config, "query_scale_length", None) is not None
        states = context.states
        return states is not None and 2 * num_seen > states.num_places and not counts_keys

    def _hidden(self, batch: Sequence[Row], hides: bool) -> Tensor:
        """hidden_BWD at the places that predict targets. `hides`: rows are given all far states,
        and what they do not see is hidden; else copies of those that they see."""
        seen = [NOTHING if row.seen is None else row.seen for row in batch]
        states = batch[0].context.states
        if hides:
            assert states is not None
            visible_BF = np.zeros((len(batch), states.num_places), dtype=bool)
            for visible_F, places in zip(visible_BF, seen, strict=True):
                visible_F[places] = True
            seen = list(visible_BF)
        wanted = [np.arange(*(row.wanted or (0, row.num_targets))) for row in batch]
        tokens_BL, positions_BL, seen_BK, wanted_BW = as_tensors(batch, self.device, seen, wanted)
        self.token_forwards += tokens_BL.numel()
        far = None
        if batch[0].seen is not None and states is not None:
            if not hides:
                far = states.choose(seen_BK)
            elif visible_BF.all():
                far = states.expand(len(batch))
            else:
                shape = (len(batch), states.num_places)
                bias_BF = torch.zeros(shape, dtype=torch.float, device=self.device)
                bias_BF.masked_fill_(seen_BK == 0, torch.finfo(torch.float).min)
                far = states.expand(len(batch), bias_BF)
        hidden_BWD = self.model.hidden(tokens_BL, positions_BL, far=far, last=batch[0].num_targets)
        if batch[0].wanted is None:
            return hidden_BWD
        return hidden_BWD.take_along_dim(wanted_BW[..., None], 1)


def _distinct(rows: Sequence[Row], reach: int | None) -> tuple[Sequence[Row], Sequence[int]]:
    """The rows to compute, and which of them gives each row: without what is beyond the reach of a
    model many are the same."""
    if reach is None:
        return rows, range(len(rows))
    found: dict[Any, tuple[int, Row]] = {}
    each = []
    for row in (row.within(reach) for row in rows):
        seen = None if row.seen is None else row.seen.tobytes()
        key = id(row.context), row.places.tobytes(), row.num_targets, seen, row.wanted
        each.append(found.setdefault(key, (len(found), row))[0])
    return [row for _, row in found.values()], each


def as_tensors(
    batch: Sequence[Row], device: torch.device, *others: Sequence[np.ndarray]
) -> list[Tensor]:
    """tokens_BL and positions_BL of rows of equal length, and `others`, an array for each row."""
    places = [row.places for row in batch]
    tokens = [row.context.block.tokens[row.places] for row in batch]
    return to_device([np.stack(of_rows) for of_rows in (tokens, places, *others)], device)


def to_host(parts: Sequence[Tensor]) -> list[np.ndarray]:
    """Copy all at once."""
    if not parts:
        return []
    numbers = torch.cat([part.flatten() for part in parts]).cpu().numpy()
    ends = np.cumsum([part.numel() for part in parts])
    return [
        part_N.reshape(part.shape)
        for part_N, part in zip(np.split(numbers, ends[:-1]), parts, strict=True)
    ]


def refuse_no_numbers(losses: np.ndarray, of: str) -> None:
    """`losses`: a row, or a number, for each of them."""
    finite = np.isfinite(losses.astype(float))
    if not finite.all():
        found = f"{(~finite).sum()} of {finite.size} losses of {of} are not finite"
        raise DataError(f"{found}: weights hold NaN, or the dtype overflows (try dtype=fp32)")


# --- the losses of a document ---------------------------------------------------------------------


@torch.no_grad()
@with_model_in_use
def context_losses(
    scorer: Scorer,
    document: Document,
    windows: Windows,
    controls: Controls | None = None,
    blocks: Sequence[Block] | None = None,
) -> pd.DataFrame:
    """Return L_long and L_short of targets of `blocks` (default: every target that has a full long
    window); no rows for a document without one.

    L_long − L_short is the paper's quantity (LongPPL's LSD is its negative). With `controls` also
    whether the target and the token before it recur (`bigram`), and both for the placebo.
    """
    blocks = list(windows.blocks(document.tokens)) if blocks is None else list(blocks)
    if not blocks:
        return pd.DataFrame({n: [] for n in ("target", "token_id", "loss_short", "loss_long")})
    groups = {"": blocks}
    if controls is not None:
        groups["placebo_"] = [
            block.with_far(controls.placebo(document, block).tokens_F) for block in blocks
        ]
    targets = np.concatenate([np.arange(b.start, b.start + b.num_targets) for b in blocks])
    table = {"target": targets, "token_id": document.tokens[targets]}
    table |= scorer.window_losses(windows, groups)
    return _with_bigrams(table, groups)


def _with_bigrams(table: dict[str, Any], groups: dict[str, list[Block]]) -> pd.DataFrame:
    for name, group in groups.items() if len(groups) > 1 else ():  # with controls
        table[f"{name}bigram"] = np.concatenate([bigrams(block) for block in group])
    return pd.DataFrame(table)


@torch.no_grad()
def _long_hidden(scorer: Scorer, windows: Windows, blocks: list[Block]) -> Tensor:
    """hidden_TD at the targets of all blocks of one document, with their long windows. With
    `long="all"` one pass over the far text serves all blocks: over the document, if it is the
    document's own, and then that pass is all there is."""
    from_start = [block for block in blocks if windows.long == "all" and block.first == 0]
    contexts = [Context(block) for block in blocks[len(from_start) :]]
    hidden_TD: list[Tensor] = []
    if from_start:
        last = from_start[-1]
        if all(_begins(block, last) for block in from_start):
            last_TD = scorer.states(last.tokens[:-1]).hidden_BFD
            assert last_TD is not None
            for block in from_start:
                end = block.num_before + block.num_targets - 1
                hidden_TD.append(last_TD[0, end - block.num_targets : end])
        else:
            states = scorer.states(last.tokens[: last.num_prefix + last.num_far])
            shared = [Context(b, states.first(b.num_prefix + b.num_far)) for b in from_start]
            contexts = shared + contexts
    return torch.cat(hidden_TD + scorer.hidden([context.long_row() for context in contexts]))


def _begins(block: Block, longer: Block) -> bool:
    return np.array_equal(block.tokens, longer.tokens[: len(block.tokens)])


def bigrams(block: Block) -> np.ndarray:
    """Return for each target, from the text alone, whether its token and the one before it occur
    together among the far tokens, and nowhere in the short window."""
    tokens = block.tokens.astype(np.int64)
    pairs = (tokens[:-1] << 32) + tokens[1:]  # the pair that ends at place i + 1
    first, before = block.num_prefix, block.num_before
    far, near = set(pairs[first : first + block.num_far - 1]), first + block.num_far
    return np.array(
        [
            (pair := pairs[before + i - 1]) in far and pair not in pairs[near : before + i - 1]
            for i in range(block.num_targets)
        ]
    )
