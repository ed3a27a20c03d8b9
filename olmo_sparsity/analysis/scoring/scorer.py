"""Compute the losses of targets given chosen parts of their context, in batches of short rows.

Every measurement evaluates the model here; selectors and recovery differ only in their rows.

A row is a dense causal sequence with gaps in its position IDs: no masks, so fast attention kernels
apply. If distant tokens keep their states, a row is the local window alone, and attends to keys and
values of the chosen distant tokens, computed once for all rows of a context. Only the places that
predict a target are unembedded. Every forward is counted in token-forwards, the unit of cost in all
results.

Dimension key: B rows, L tokens of a row, F distant places, K distant places that a row attends to,
W targets of a row (its last places), N targets of all rows, D width, C targets of a chunk, V
vocabulary, T targets of a document.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.analysis.interpretation import Interpretation, interpretation_of
from olmo_sparsity.base.devices import threads_for
from olmo_sparsity.base.errors import ConfigError, DataError, is_out_of_memory
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.renamed import accepts_old_names
from olmo_sparsity.models.attention import fast_kernels
from olmo_sparsity.models.distant_states import DistantStates, to_device
from olmo_sparsity.models.identity import State
from olmo_sparsity.models.losses import LanguageModel, rows_per_chunk
from olmo_sparsity.models.prompts import PromptModel
from olmo_sparsity.models.use import in_use, state_of, with_model_in_use
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.windows import NOTHING, Block, Windows

Item = TypeVar("Item")
Output = TypeVar("Output")

TOGETHER = 16
"""Targets within one run of this many share row lengths, so that their rows share forwards."""

FEW_PAIRS = 2**15
"""On a CPU, rows that attend to different numbers of distant places share a forward if they have at
most this many pairs of a token and a distant place: more would cost more in attention."""


@dataclass(frozen=True, eq=False)
class Context:
    """A block with one distant text, prepared by `Scorer.context` for evaluation."""

    block: Block
    states: DistantStates | None = None
    """States of the prefix and all distant places, with contextual distant states."""

    unrelated_RF: np.ndarray | None = None
    """Unrelated texts that replace distant places, with distant states `replaced`."""

    def long_row(self) -> Row:
        """Return the row of the long window, for all targets of the block."""
        if self.states is None and self.unrelated_RF is None:
            return self.dense_row()
        return self.set_row(np.arange(self.block.num_distant))

    def dense_row(self, last: int | None = None) -> Row:
        """Return the row of the long window, computed in full, for the targets before `last`."""
        if last is None:
            last = self.block.num_targets
        return Row(self, np.arange(self.block.num_before + last - 1), last)

    def set_row(self, distant: np.ndarray, span: tuple[int, int] | None = None) -> Row:
        """Return the row of the local window and the distant places `distant` (indices, rising),
        for the targets `span` (default: all). Only here do the interpretations differ."""
        block = self.block
        if self.unrelated_RF is not None:
            # A whole prompt, in which the distant tokens that are not kept are replaced.
            last = block.num_targets if span is None else span[1]
            places = np.arange(block.num_before + last - 1)
            return Row(self, places, last, span=span or (0, last), kept_distant=distant)
        first = 0
        last = block.num_targets
        if span is not None:
            # Inputs after a target do not affect it: rows for neighbours get one shape.
            first = span[0] - span[0] % TOGETHER
            last = max(min(first + TOGETHER, block.num_targets), span[1])
            span = (span[0] - first, span[1] - first)
        earlier = block.earlier(distant)
        local = block.local(last)
        if self.states is not None and len(earlier):
            return Row(self, local, last - first, distant=earlier, span=span)
        return Row(self, np.concatenate([earlier, local]), last - first, span=span)


@dataclass(frozen=True)
class Row:
    """The inputs at `places` of a context; their last `num_targets` places predict targets."""

    context: Context
    places: np.ndarray
    """Position IDs, rising, which are also indices into `block.tokens`."""

    num_targets: int
    """The targets are the tokens after the last `num_targets` inputs."""

    distant: np.ndarray | None = None
    """Position IDs of earlier places, attended to with their states of the long window."""

    span: tuple[int, int] | None = None
    """The targets to evaluate: from the first to one past the last (default: all)."""

    kept_distant: np.ndarray | None = None
    """Indices of the distant tokens that unrelated texts do not replace."""

    def within(self, reach: int) -> Row:
        """Return the row without distant places that no layer sees from a later place, as they have
        no effect. `reach`: how many places back a layer with a sliding window attends, itself
        included."""
        if self.distant is not None:
            distant = self.distant[self.distant > self.places[0] - reach]
            return replace(self, distant=distant if len(distant) else None)
        # Information passes from place to place, so it stops at a gap as wide as the reach.
        gaps = np.flatnonzero(np.diff(self.places) >= reach)
        if not len(gaps):
            return self
        return replace(self, places=self.places[gaps[-1] + 1 :])

    @property
    def targets(self) -> np.ndarray:
        """Return the token IDs of the targets to evaluate."""
        first, end = self.span or (0, self.num_targets)
        inputs = self.places[-self.num_targets :][first:end]
        return self.context.block.tokens[inputs + 1]


class _Group(NamedTuple):
    """Rows that can share forwards."""

    indices: list[int]

    is_masked: bool
    """Whether each row gets all distant states of its context, under a mask (see `_hidden`)."""

    num_keys: int
    """The memory of a row, in tokens: a distant state takes as much as a state of the row."""


@dataclass(frozen=True)
class _LastText:
    """The text whose states were computed last."""

    tokens: np.ndarray
    states: DistantStates
    model_state: State | None  # a change to the model makes the states stale


class Scorer:
    """Computes losses of targets with one model, on one device, and counts what it computes.

    A scorer knows the model, the interpretation of distant states, the size of a batch, and the
    states of the text that it read last. It makes a `Context` of a block: the states of the block's
    distant places, computed once. A `Row` says which places of a context a forward sees, and which
    of its targets are evaluated. `losses` evaluates any rows together: equal ones once, and those
    of one shape in batches, which are halved if memory runs out. `token_forwards` counts all that.

        scorer = Scorer(load_model("runs/mine").model)
        for block in Windows(long=64, short=16, stride=8).blocks(document.tokens):
            context = scorer.context(block)
            rows = [context.set_row(NOTHING), context.long_row()]
            short_W, long_W = scorer.losses(rows)  # nats of each target of the block
    """

    @accepts_old_names
    def __init__(
        self,
        model: LanguageModel,
        device: torch.device | None = None,
        *,
        distant_states: str = "contextual",
        batch_tokens: int | None = None,
    ) -> None:
        """`device`: of the inputs (default: the model's)."""
        if isinstance(model, PromptModel):
            raise ConfigError(
                f"model={type(model).__name__} returns log-probabilities only, and a Scorer needs "
                "states; pass it to `attribute`, or load its weights with load_model"
            )
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model={model!r:.80} must be a model in memory; pass load_model(…).model"
            )
        interpretation = interpretation_of(distant_states)
        if interpretation.replaces:
            raise ConfigError(
                f"distant_states={distant_states}: a Scorer masks what it leaves out; pass "
                "contextual or isolated"
            )
        if batch_tokens is not None and batch_tokens < 1:
            raise ConfigError(
                f"batch_tokens={batch_tokens} must be at least 1; omit it for the default"
            )
        self.model = model
        self.device = device or model.device
        self.interpretation: Interpretation = interpretation
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.batch_tokens = batch_tokens or self._tokens_at_once()
        self.token_forwards = 0
        self.after_batch: Callable[[], None] = lambda: None
        self._last: _LastText | None = None

    def _tokens_at_once(self) -> int:
        """Return the default size of a batch, in tokens."""
        if self.device.type == "cpu":
            return 4096  # the states of a batch should stay in cache; 2,048 was as fast
        # A forward of a small model would be shorter than its launches.
        return int(16384 * min(max(1e9 / max(self.num_parameters, 1), 1), 8))

    def of_document(self, document: Document, controls: Controls) -> Self:
        """Return the scorer of a document. Only one that replaces distant text depends on it."""
        return self

    def context(self, block: Block, states: DistantStates | None = None) -> Context:
        """Prepare a block for evaluation: the states of its distant places are computed once, here.
        `states`: states of a longer text with the same beginning, to reuse."""
        if not self.interpretation.keeps_states:
            return Context(block)
        num_earlier = block.num_prefix + block.num_distant
        if states is not None:
            return Context(block, states.first(num_earlier))
        return Context(block, self.states(block.tokens[:num_earlier]))

    def states(self, tokens: np.ndarray) -> DistantStates:
        """Return the states of a text from its beginning, each token seeing those before it. They
        are computed a few thousand tokens at a time. Those of the last text are kept for as long as
        the model stays the same, as they serve every beginning of the text."""
        with in_use(self.model), fast_kernels(self.device):
            state = state_of(self.model)
            if self._last is not None and self._last.model_state is not state:
                self._last = None
            if self._last is not None:
                beginning = self._last.tokens[: len(tokens)]
                if np.array_equal(beginning, tokens):
                    return self._last.states.first(len(tokens))
            self._last = None  # two may not fit in memory
            (tokens_BL,) = to_device([tokens[None]], self.device)
            positions_BL = torch.arange(len(tokens), device=self.device)[None]
            self.token_forwards += len(tokens)
            with threads_for(self.num_parameters):
                states = self.model.distant_states(tokens_BL, positions_BL, self.batch_tokens)
            self._last = _LastText(tokens, states, state)
            return states

    @property
    def last_text(self) -> tuple[np.ndarray | None, DistantStates | None]:
        """Return the last text that `states` was given, and its states; nothing unless the model is
        in use and unchanged since."""
        if self._last is None or self._last.model_state is not state_of(self.model):
            return None, None
        return self._last.tokens, self._last.states

    @torch.no_grad()
    def extended(self, states: DistantStates | None, tokens: np.ndarray) -> DistantStates:
        """Return the states of a text that goes on with `tokens`. `states`: of what precedes
        them."""
        first = 0 if states is None else states.num_places
        (tokens_1L,) = to_device([tokens[None]], self.device)
        positions_1L = first + torch.arange(len(tokens), device=self.device)[None]
        self.token_forwards += len(tokens)
        with threads_for(self.num_parameters):
            return self.model.distant_states(tokens_1L, positions_1L, self.batch_tokens, states)

    @torch.no_grad()
    def hidden_after(
        self, states: DistantStates | None, tokens_BL: np.ndarray, last: int
    ) -> Tensor:
        """Return hidden_BWD of the last places of texts that begin with the text of `states`."""
        first = 0 if states is None else states.num_places
        (inputs_BL,) = to_device([tokens_BL], self.device)
        positions_L = first + torch.arange(tokens_BL.shape[1], device=self.device)
        positions_BL = positions_L.expand_as(inputs_BL)
        self.token_forwards += tokens_BL.size
        distant = None if states is None else states.expand(len(tokens_BL))
        with threads_for(self.num_parameters):
            return self.model.hidden(inputs_BL, positions_BL, distant=distant, last=last)

    @torch.no_grad()
    def hidden(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return hidden_WD of each row, at the places that predict its targets."""
        return self._evaluate(rows, lambda hidden_BWD, _: hidden_BWD)

    @torch.no_grad()
    def losses(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Return nll_W of each row's targets, in nats."""

        def nll(hidden_BWD: Tensor, batch: Sequence[Row]) -> Tensor:
            targets_BW = np.stack([row.targets for row in batch])
            return self.nll_of(hidden_BWD.flatten(0, 1), targets_BW.ravel()).view(targets_BW.shape)

        return self._evaluate(rows, nll, to_host)

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
        """Return the sum of each row's losses. The targets of all rows are unembedded together,
        however many forwards they took."""
        hidden = self.hidden(rows)
        loss_N = self.nll(torch.cat(hidden), np.concatenate([row.targets for row in rows]))
        ends = np.cumsum([len(hidden_WD) for hidden_WD in hidden])
        return np.add.reduceat(loss_N, np.concatenate([[0], ends[:-1]]))

    @torch.no_grad()
    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Return log p (…, V) of the next token for hidden states (…, D)."""
        return self.model.unembed(hidden).float().log_softmax(-1)

    @property
    def chunk(self) -> int:
        """Return how many targets are unembedded at a time."""
        return rows_per_chunk(self.model.vocab_size, self.device)

    @torch.no_grad()
    def nll(self, hidden_ND: Tensor, targets_N: np.ndarray) -> np.ndarray:
        """Return −log p of one target from each state."""
        return self.nll_of(hidden_ND, targets_N).cpu().numpy()

    def nll_of(self, hidden_ND: Tensor, targets_N: np.ndarray) -> Tensor:
        """Return the same as `nll`, left on the device."""
        (labels_N,) = to_device([targets_N], self.device)
        # One tensor, filled in place: small ones made between chunks would keep the memory of the
        # logits from being reused.
        loss_N = torch.empty(len(labels_N), dtype=torch.float, device=self.device)
        for first in range(0, len(labels_N), self.chunk):
            part = slice(first, first + self.chunk)
            logits_CV = self.model.unembed(hidden_ND[part]).float()
            loss_N[part] = F.cross_entropy(logits_CV, labels_N[part], reduction="none")
        return loss_N

    def _evaluate(
        self,
        rows: Sequence[Row],
        read: Callable[[Tensor, Sequence[Row]], Tensor],
        finish: Callable[[list[Tensor]], Sequence[Any]] = lambda parts: parts,
    ) -> list[Any]:
        """Return what `read` computes for each row, from the hidden states of a batch of rows.
        `finish` gets the outputs of all batches at the end, so that the host waits for a GPU
        once."""
        distinct, index_of_row = _distinct(rows, self.model.reach)
        order: list[int] = []
        outputs: list[Tensor] = []
        for group in self._groups(distinct):

            def compute(batch: Sequence[Row], is_masked: bool = group.is_masked) -> Tensor:
                return read(self._hidden(batch, is_masked), batch)

            group_rows = [distinct[index] for index in group.indices]
            with threads_for(self.num_parameters):
                outputs += self.in_batches(group_rows, group.num_keys, compute)
            order += group.indices
        # Groups are in another order than the rows.
        results: list[Any] = [None] * len(distinct)
        for index, result in zip(order, chain(*finish(outputs)), strict=True):
            results[index] = result
        return [results[index] for index in index_of_row]

    def _groups(self, rows: Sequence[Row]) -> Iterator[_Group]:
        """Sort rows into groups that share forwards.

        Rows of one shape that attend to no distant states share forwards, whatever their context.
        Rows with distant states share forwards if these are of one context and, in general, as
        many, so that copies of them stack. Rows with different numbers of them share one as well,
        under a mask, if it is a single forward and costs no copies: to launch a forward on a GPU,
        or to read the weights on a CPU, takes longer than to compute a few rows."""
        # Shape → number of distant states → rows.
        shapes: dict[tuple, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for index, row in enumerate(rows):
            context = None if row.distant is None else row.context
            num_distant = 0 if row.distant is None else len(row.distant)
            num_evaluated = None if row.span is None else row.span[1] - row.span[0]
            shape = (len(row.places), row.num_targets, num_evaluated, context)
            shapes[shape][num_distant].append(index)
        for (length, _, _, context), indices_by_number in shapes.items():
            all_indices = list(chain(*indices_by_number.values()))
            if context is None:
                yield _Group(all_indices, is_masked=False, num_keys=length)
                continue
            num_places = context.states.num_places
            # Whether the model attends to distant states without a copy for each row.
            shares = self.model.shares_distant(num_places, length)
            num_tokens = len(all_indices) * length
            is_one_forward = num_tokens <= self.batch_tokens
            if self.device.type == "cpu":
                is_one_forward &= num_tokens * num_places <= FEW_PAIRS
            if shares and len(indices_by_number) > 1 and is_one_forward:
                yield _Group(all_indices, is_masked=True, num_keys=length)
                continue
            for num_distant, indices in indices_by_number.items():
                is_masked = self._prefers_mask(context, num_distant)
                if not is_masked:
                    num_copied = num_distant
                elif shares:
                    num_copied = 0
                else:
                    num_copied = num_places
                yield _Group(indices, is_masked=is_masked, num_keys=length + num_copied)

    def in_batches(
        self, items: Sequence[Item], num_tokens: int, compute: Callable[[Sequence[Item]], Output]
    ) -> list[Output]:
        """Return the output of `compute` for each batch of items with `num_tokens` tokens each. If
        a batch runs out of memory, batches are halved from it on."""
        with in_use(self.model), fast_kernels(self.device):
            return self._in_batches(items, num_tokens, compute)

    def _in_batches(
        self, items: Sequence[Item], num_tokens: int, compute: Callable[[Sequence[Item]], Output]
    ) -> list[Output]:
        """Do the work of `in_batches`, with the model in use."""
        outputs: list[Output] = []
        first = 0
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
            self.batch_tokens = len(batch) // 2 * num_tokens
            self.token_forwards = before  # what failed is computed again
            say(f"out of memory: batches of {self.batch_tokens:,} tokens from here on")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return outputs

    def _prefers_mask(self, context: Context, num_distant: int) -> bool:
        """Return whether rows that attend to `num_distant` distant states get all of them, under a
        mask. If a row attends to more than half of them, that avoids a copy of nearly all states
        for each row. A model that scales its queries by the number of keys would count the masked
        ones."""
        config = getattr(self.model, "config", None)
        counts_keys = getattr(config, "scales_queries", False)
        states = context.states
        return states is not None and 2 * num_distant > states.num_places and not counts_keys

    def _hidden(self, batch: Sequence[Row], is_masked: bool) -> Tensor:
        """Return hidden_BWD at the places that predict targets. `is_masked`: rows get all distant
        states of their context, and those that they do not attend to are masked; otherwise each
        row gets copies of its own ones."""
        states = batch[0].context.states
        # What is copied for each row: the distant places that it attends to, or a mask of all.
        attended = [NOTHING if row.distant is None else row.distant for row in batch]
        sees_all = False
        if is_masked:
            assert states is not None
            visible_BF = np.zeros((len(batch), states.num_places), dtype=bool)
            for visible_F, places in zip(visible_BF, attended, strict=True):
                visible_F[places] = True
            attended = list(visible_BF)
            sees_all = bool(visible_BF.all())
        evaluated = []
        for row in batch:
            first, end = row.span or (0, row.num_targets)
            evaluated.append(np.arange(first, end))
        # One copy to the device for all four: each copy makes the host wait.
        tokens_BL, positions_BL, distant_BK, evaluated_BW = as_tensors(
            batch, self.device, attended, evaluated
        )
        self.token_forwards += tokens_BL.numel()
        distant = None
        if batch[0].distant is not None and states is not None:
            if not is_masked:
                distant = states.choose(distant_BK)
            elif sees_all:
                # Without a bias faster kernels apply.
                distant = states.expand(len(batch))
            else:
                shape = (len(batch), states.num_places)
                bias_BF = torch.zeros(shape, dtype=torch.float, device=self.device)
                bias_BF.masked_fill_(distant_BK == 0, torch.finfo(torch.float).min)
                distant = states.expand(len(batch), bias_BF)
        hidden_BWD = self.model.hidden(
            tokens_BL, positions_BL, distant=distant, last=batch[0].num_targets
        )
        if batch[0].span is None:
            return hidden_BWD
        return hidden_BWD.take_along_dim(evaluated_BW[..., None], 1)


def _distinct(rows: Sequence[Row], reach: int | None) -> tuple[Sequence[Row], Sequence[int]]:
    """Return the rows to compute, and the index of the one among them that serves each row. Without
    the places beyond the reach of a model many rows are the same."""
    if reach is None:
        return rows, range(len(rows))
    distinct: list[Row] = []
    index_of_key: dict[Any, int] = {}
    index_of_row = []
    for row in rows:
        reduced = row.within(reach)
        distant = None if reduced.distant is None else reduced.distant.tobytes()
        key = (
            id(reduced.context),
            reduced.places.tobytes(),
            reduced.num_targets,
            distant,
            reduced.span,
        )
        if key not in index_of_key:
            index_of_key[key] = len(distinct)
            distinct.append(reduced)
        index_of_row.append(index_of_key[key])
    return distinct, index_of_row


def as_tensors(
    batch: Sequence[Row], device: torch.device, *arrays: Sequence[np.ndarray]
) -> list[Tensor]:
    """Return tokens_BL and positions_BL of rows of equal length, and each of `arrays`, which have
    an array for each row, stacked. All are copied to the device together."""
    places = [row.places for row in batch]
    tokens = [row.context.block.tokens[row.places] for row in batch]
    return to_device([np.stack(row_arrays) for row_arrays in (tokens, places, *arrays)], device)


def to_host(parts: Sequence[Tensor]) -> list[np.ndarray]:
    """Copy tensors to arrays of the same shapes, all in one transfer."""
    if not parts:
        return []
    numbers = torch.cat([part.flatten() for part in parts]).cpu().numpy()
    ends = np.cumsum([part.numel() for part in parts])
    pieces = np.split(numbers, ends[:-1])
    return [piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def refuse_no_numbers(losses: np.ndarray, what: str) -> None:
    """Raise DataError if a loss is NaN or infinite. `what`: the plural of what has losses."""
    finite = np.isfinite(losses.astype(float))
    if not finite.all():
        raise DataError(
            f"{(~finite).sum()} of {finite.size} losses of {what} are not finite: weights hold "
            "NaN, or the dtype overflows; check the weights, or pass dtype=fp32"
        )


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
    blocks = list(windows.blocks(document.tokens) if blocks is None else blocks)
    if not blocks:
        return pd.DataFrame(columns=["target", "token_id", "loss_short", "loss_long"], dtype=float)
    groups = {"": blocks}
    if controls is not None:
        groups["placebo_"] = [
            block.with_distant(controls.placebo(document, block).tokens_F) for block in blocks
        ]
    targets = np.concatenate(
        [np.arange(block.start, block.start + block.num_targets) for block in blocks]
    )
    table = {"target": targets, "token_id": document.tokens[targets]}
    table |= scorer.window_losses(windows, groups)
    if controls is not None:
        for name, group in groups.items():
            table[f"{name}bigram"] = np.concatenate([bigrams(block) for block in group])
    return pd.DataFrame(table)


@torch.no_grad()
def _long_hidden(scorer: Scorer, windows: Windows, blocks: list[Block]) -> Tensor:
    """Return hidden_TD at the targets of all blocks of one document, with their long windows."""
    # With `long="all"` the long windows of the first blocks begin where the text begins.
    from_start = [block for block in blocks if windows.has_all and block.first == 0]
    contexts = [Context(block) for block in blocks[len(from_start) :]]
    hidden_TD: list[Tensor] = []
    if from_start:
        last = from_start[-1]
        if all(_begins(block, last) for block in from_start):
            # The document's own distant text: one pass over the document predicts all targets.
            last_TD = scorer.states(last.tokens[:-1]).hidden_BFD
            assert last_TD is not None
            for block in from_start:
                end = block.num_before + block.num_targets - 1
                hidden_TD.append(last_TD[0, end - block.num_targets : end])
        else:
            # An unrelated distant text: one pass over it, then the local windows of all blocks.
            states = scorer.states(last.tokens[: last.num_prefix + last.num_distant])
            shared = [
                Context(block, states.first(block.num_prefix + block.num_distant))
                for block in from_start
            ]
            contexts = shared + contexts
    return torch.cat(hidden_TD + scorer.hidden([context.long_row() for context in contexts]))


def _begins(block: Block, longer: Block) -> bool:
    return np.array_equal(block.tokens, longer.tokens[: len(block.tokens)])


def bigrams(block: Block) -> np.ndarray:
    """Return for each target, from the text alone, whether its token and the one before it occur
    together among the distant tokens, and nowhere in the local window."""
    tokens = block.tokens.astype(np.int64)
    pairs = (tokens[:-1] << 32) + tokens[1:]  # pairs[i]: the tokens at places i and i + 1
    first_distant = block.num_prefix
    first_local = first_distant + block.num_distant
    distant = set(pairs[first_distant : first_local - 1])
    recurs = []
    for target in range(block.num_before, block.num_before + block.num_targets):
        pair = pairs[target - 1]
        recurs.append(pair in distant and pair not in pairs[first_local : target - 1])
    return np.array(recurs)
