"""Compute the losses of targets given chosen parts of their context, in batches of short rows.

Every measurement evaluates the model here; selectors and recovery differ only in their rows:

    Block (tokens of a window) → Context (with states of its distant places) → Row (which places a
    forward sees) → Scorer.losses(rows) → nats of each target

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

TARGETS_OF_ONE_LENGTH = 16
"""The rows of so many neighbouring targets have one length, so that they share forwards."""

FEW_PAIRS = 2**15
"""On a CPU, rows that attend to different numbers of distant places share a forward if they have at
most this many pairs of a token and a distant place: more would cost more in attention."""


@dataclass(frozen=True, eq=False)
class Context:
    """A block with one distant text, prepared by `Scorer.context` for evaluation."""

    block: Block
    states: DistantStates | None = None
    """States of the prefix and all distant places; only for contextual distant states."""

    unrelated_RF: np.ndarray | None = None
    """Unrelated texts that replace distant places; only for distant states `replaced`."""

    def long_row(self) -> Row:
        """Return the row of the long window, for all targets of the block."""
        if self.states is None and self.unrelated_RF is None:
            return self.dense_row()
        return self.set_row(np.arange(self.block.num_distant))

    def dense_row(self, num_targets: int | None = None) -> Row:
        """Return the row of the long window, computed in full without stored states, for the first
        `num_targets` targets (default: all)."""
        if num_targets is None:
            num_targets = self.block.num_targets
        return Row(self, np.arange(self.block.num_before + num_targets - 1), num_targets)

    def set_row(self, distant: np.ndarray, span: tuple[int, int] | None = None) -> Row:
        """Return the row of the local window and the distant places `distant` (indices among the
        distant tokens, rising), for the targets `span` (default: all). The interpretations of
        distant states differ only here."""
        block = self.block
        if self.unrelated_RF is not None:
            # A whole prompt, in which the distant tokens that are not kept are replaced.
            end = block.num_targets if span is None else span[1]
            places = np.arange(block.num_before + end - 1)
            return Row(self, places, end, span=span or (0, end), kept_distant=distant)

        first = 0
        end = block.num_targets
        if span is not None:
            # Inputs after a target do not affect it, so a row may be longer than its target needs.
            # Rows of neighbouring targets get one length, and share forwards.
            span_first, span_end = span
            first = span_first - span_first % TARGETS_OF_ONE_LENGTH
            end = max(min(first + TARGETS_OF_ONE_LENGTH, block.num_targets), span_end)
            span = (span_first - first, span_end - first)
        earlier = block.earlier(distant)
        local = block.local(end)
        if self.states is not None and len(earlier):
            return Row(self, local, end - first, distant=earlier, span=span)
        return Row(self, np.concatenate([earlier, local]), end - first, span=span)


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
    """The targets to evaluate, as indices into the row's targets: from the first to one past the
    last (default: all)."""

    kept_distant: np.ndarray | None = None
    """Indices of the distant tokens that unrelated texts do not replace."""

    def within(self, reach: int) -> Row:
        """Return the row without the distant places that have no effect, as no layer sees them from
        a later place. `reach`: how many places a layer with a sliding window attends to, its own
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


class _Shape(NamedTuple):
    """What rows must have in common to share forwards."""

    num_places: int
    num_targets: int
    num_evaluated: int | None
    """The number of targets that are evaluated; None: all."""

    context: Context | None
    """The context whose distant states the row attends to; None without distant states."""


@dataclass(frozen=True)
class KnownText:
    """A text whose states a scorer keeps."""

    tokens: np.ndarray
    states: DistantStates
    model_state: State | None
    """The state of the model that computed them. A change to the model makes them stale."""


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
        self.batch_tokens = batch_tokens or self._default_batch_tokens()
        self.token_forwards = 0
        self.after_batch: Callable[[], None] = lambda: None
        self._known_text: KnownText | None = None

    def _default_batch_tokens(self) -> int:
        """Return the default size of a batch, in tokens."""
        if self.device.type == "cpu":
            return 4096  # the states of a batch should stay in cache; 2,048 was as fast
        # A small model gets larger batches, as its forward would take less time than the launches
        # of its kernels.
        return int(16384 * min(max(1e9 / max(self.num_parameters, 1), 1), 8))

    def of_document(self, document: Document, controls: Controls) -> Self:
        """Return a scorer for this document. Only `ReplacingScorer` depends on the document."""
        return self

    def context(self, block: Block, states: DistantStates | None = None) -> Context:
        """Prepare a block for evaluation, and compute the states of its distant places, once for
        all rows. `states`: states of a longer text with the same beginning, which are used
        instead."""
        if not self.interpretation.keeps_states:
            return Context(block)
        num_earlier = block.num_prefix + block.num_distant
        if states is not None:
            return Context(block, states.first(num_earlier))
        return Context(block, self.states(block.tokens[:num_earlier]))

    def states(self, tokens: np.ndarray) -> DistantStates:
        """Return the states of a text, in which each token sees those before it.

        The text is computed a few thousand tokens at a time. The states of the last text are kept
        for as long as the model stays the same, as they serve every beginning of the text.
        """
        with in_use(self.model), fast_kernels(self.device):
            state = state_of(self.model)
            known = self._known_text
            if known is not None and known.model_state is state:
                beginning = known.tokens[: len(tokens)]
                if np.array_equal(beginning, tokens):
                    return known.states.first(len(tokens))
            # Freed before new states are computed, as those of two texts may not fit in memory.
            known = None
            self._known_text = None
            (tokens_BL,) = to_device([tokens[None]], self.device)
            positions_BL = torch.arange(len(tokens), device=self.device)[None]
            self.token_forwards += len(tokens)
            with threads_for(self.num_parameters):
                states = self.model.distant_states(tokens_BL, positions_BL, self.batch_tokens)
            self._known_text = KnownText(tokens, states, state)
            return states

    @property
    def known_text(self) -> KnownText | None:
        """Return the last text that `states` was given, with its states; None unless the model is
        in use and unchanged since."""
        known = self._known_text
        if known is None or known.model_state is not state_of(self.model):
            return None
        return known

    @torch.no_grad()
    def extended(self, states: DistantStates | None, tokens: np.ndarray) -> DistantStates:
        """Return the states of a text that is continued by `tokens`. `states`: the states of the
        text before them; None if there is none."""
        first = 0 if states is None else states.num_places
        (tokens_1L,) = to_device([tokens[None]], self.device)
        positions_1L = first + torch.arange(len(tokens), device=self.device)[None]
        self.token_forwards += len(tokens)
        with threads_for(self.num_parameters):
            return self.model.distant_states(tokens_1L, positions_1L, self.batch_tokens, states)

    @torch.no_grad()
    def hidden_after(
        self, states: DistantStates | None, tokens_BL: np.ndarray, num_last: int
    ) -> Tensor:
        """Return hidden_BWD of the last `num_last` places of texts. All begin with the text of
        `states`, and continue with `tokens_BL`."""
        first = 0 if states is None else states.num_places
        (inputs_BL,) = to_device([tokens_BL], self.device)
        positions_L = first + torch.arange(tokens_BL.shape[1], device=self.device)
        positions_BL = positions_L.expand_as(inputs_BL)
        self.token_forwards += tokens_BL.size
        distant = None if states is None else states.expand(len(tokens_BL))
        with threads_for(self.num_parameters):
            return self.model.hidden(inputs_BL, positions_BL, distant=distant, last=num_last)

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
        """Return the losses of all targets of a document, by the name of their column.

        `groups`: a prefix of a column → blocks. The groups differ in their distant tokens alone:
        the document's own have the prefix "", those of the placebo "placebo_". The columns are
        `loss_short`, with the local window, which all groups share, and for each group `loss_long`,
        with its long windows, after its prefix."""
        blocks = next(iter(groups.values()))
        targets_T = np.concatenate([block.targets_W for block in blocks])
        short_rows = [Context(block).set_row(NOTHING) for block in blocks]
        short_TD = torch.cat(self.hidden(short_rows))
        long_TD = {prefix: _long_hidden(self, windows, group) for prefix, group in groups.items()}
        columns = {"loss_short": self.nll_of(short_TD, targets_T)}
        for prefix, hidden_TD in long_TD.items():
            columns[f"{prefix}loss_long"] = self.nll_of(hidden_TD, targets_T)
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
    def targets_per_chunk(self) -> int:
        """Return how many targets are unembedded at a time."""
        return rows_per_chunk(self.model.vocab_size, self.device)

    @torch.no_grad()
    def nll(self, hidden_ND: Tensor, targets_N: np.ndarray) -> np.ndarray:
        """Return −log p of a target for each hidden state, in nats."""
        return self.nll_of(hidden_ND, targets_N).cpu().numpy()

    def nll_of(self, hidden_ND: Tensor, targets_N: np.ndarray) -> Tensor:
        """Return the same as `nll`, on the device, so that the host need not wait."""
        (labels_N,) = to_device([targets_N], self.device)
        # One tensor, filled in place: small ones made between chunks would keep the memory of the
        # logits from being reused.
        loss_N = torch.empty(len(labels_N), dtype=torch.float, device=self.device)
        for first in range(0, len(labels_N), self.targets_per_chunk):
            part = slice(first, first + self.targets_per_chunk)
            logits_CV = self.model.unembed(hidden_ND[part]).float()
            loss_N[part] = F.cross_entropy(logits_CV, labels_N[part], reduction="none")
        return loss_N

    def _evaluate(
        self,
        rows: Sequence[Row],
        read: Callable[[Tensor, Sequence[Row]], Tensor],
        finish: Callable[[list[Tensor]], Sequence[Any]] = lambda parts: parts,
    ) -> list[Any]:
        """Return a result for each row.

        `read`: computes the results of a batch of rows from their hidden states. `finish`: turns
        the outputs of all batches into results at the end, such as by one copy to the host, which
        then waits for a GPU once."""
        distinct, index_of_row = _distinct(rows, self.model.reach)
        evaluated_indices: list[int] = []
        outputs: list[Tensor] = []
        for group in self._groups(distinct):

            def compute(batch: Sequence[Row], is_masked: bool = group.is_masked) -> Tensor:
                return read(self._hidden(batch, is_masked), batch)

            group_rows = [distinct[index] for index in group.indices]
            with threads_for(self.num_parameters):
                outputs += self.in_batches(group_rows, group.num_keys, compute)
            evaluated_indices += group.indices

        # Groups are in another order than the rows.
        results: list[Any] = [None] * len(distinct)
        for index, result in zip(evaluated_indices, chain(*finish(outputs)), strict=True):
            results[index] = result
        return [results[index] for index in index_of_row]

    def _groups(self, rows: Sequence[Row]) -> Iterator[_Group]:
        """Sort rows into groups that share forwards.

        Rows of one shape that attend to no distant states share forwards, whatever their context.
        Rows with distant states share forwards if these are of one context and, in general, as
        many, so that copies of them stack. Rows with different numbers of them share one as well,
        under a mask, if it is a single forward and costs no copies: to launch a forward on a GPU,
        or to read the weights on a CPU, takes longer than to compute a few rows.
        """
        # Shape → number of distant states → indices of rows.
        indices_by_shape: dict[_Shape, dict[int, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for index, row in enumerate(rows):
            shape = _Shape(
                num_places=len(row.places),
                num_targets=row.num_targets,
                num_evaluated=None if row.span is None else row.span[1] - row.span[0],
                context=None if row.distant is None else row.context,
            )
            num_distant = 0 if row.distant is None else len(row.distant)
            indices_by_shape[shape][num_distant].append(index)

        for shape, indices_by_number in indices_by_shape.items():
            if shape.context is None:
                all_indices = list(chain(*indices_by_number.values()))
                yield _Group(all_indices, is_masked=False, num_keys=shape.num_places)
            else:
                yield from self._groups_with_states(shape, shape.context, indices_by_number)

    def _groups_with_states(
        self, shape: _Shape, context: Context, indices_by_number: dict[int, list[int]]
    ) -> Iterator[_Group]:
        """Sort rows of one shape that attend to states of one context into groups.
        `indices_by_number`: number of distant states → indices of rows."""
        assert context.states is not None
        length = shape.num_places
        num_states = context.states.num_places
        # Whether the model attends to distant states without a copy for each row.
        shares = self.model.shares_distant(num_states, length)

        all_indices = list(chain(*indices_by_number.values()))
        num_tokens = len(all_indices) * length
        is_one_forward = num_tokens <= self.batch_tokens
        if self.device.type == "cpu":
            is_one_forward &= num_tokens * num_states <= FEW_PAIRS
        if shares and len(indices_by_number) > 1 and is_one_forward:
            yield _Group(all_indices, is_masked=True, num_keys=length)
            return

        for num_distant, indices in indices_by_number.items():
            is_masked = self._prefers_mask(context, num_distant)
            if not is_masked:
                num_copied = num_distant
            elif shares:
                num_copied = 0
            else:
                num_copied = num_states
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
        """Do the work of `in_batches` while the model is in use."""
        outputs: list[Output] = []
        first = 0
        while first < len(items):
            batch = items[first : first + max(1, self.batch_tokens // num_tokens)]
            forwards_before = self.token_forwards
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
            self.token_forwards = forwards_before  # the batch that failed is computed again
            say(f"out of memory: batches of {self.batch_tokens:,} tokens from here on")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return outputs

    def _prefers_mask(self, context: Context, num_distant: int) -> bool:
        """Return whether rows that attend to `num_distant` distant states get all states of their
        context, under a mask, instead of copies of their own ones."""
        # A model that scales its queries by the number of keys would count the masked ones.
        config = getattr(self.model, "config", None)
        counts_keys = getattr(config, "scales_queries", False)
        # A mask avoids a copy of nearly all states for each row; below half a copy is smaller.
        states = context.states
        return states is not None and 2 * num_distant > states.num_places and not counts_keys

    def _hidden(self, batch: Sequence[Row], is_masked: bool) -> Tensor:
        """Return hidden_BWD at the places that predict targets, of rows that `_groups` has put
        together. `is_masked`: rows get all distant states of their context, under a mask of those
        that they do not attend to; otherwise each row gets copies of its own ones."""
        states = batch[0].context.states
        # To the device goes, for each row, an index of the distant places that it attends to, or a
        # mask of all.
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
    """Return the rows to compute, and for each of `rows` the index of the computed row that serves
    it. Many rows are the same without the places that no layer of the model reaches."""
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
    """Return tokens_BL and positions_BL of rows of equal length, then each of `arrays`, stacked.
    Each of `arrays` has an array for each row. All are copied to the device together."""
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


def check_finite(losses: np.ndarray, noun: str) -> None:
    """Raise DataError if a loss is NaN or infinite. `noun`: how the error names what has losses, in
    the plural."""
    is_finite = np.isfinite(losses.astype(float))
    if not is_finite.all():
        raise DataError(
            f"{(~is_finite).sum()} of {is_finite.size} losses of {noun} are not finite: weights "
            "hold NaN, or the dtype overflows; check the weights, or pass dtype=fp32"
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
    """Return a table of L_long and L_short, a row for each target of `blocks` (default: every
    target of the document that has a full long window).

    L_long − L_short is the paper's quantity (LongPPL's LSD is its negative). With `controls` the
    table also says whether the target and the token before it recur (`bigram`), and has both
    columns for the placebo.
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
        last_block = from_start[-1]
        if all(_begins(block, last_block) for block in from_start):
            # The document's own distant text: one pass over the document predicts all targets.
            hidden_BFD = scorer.states(last_block.tokens[:-1]).hidden_BFD
            assert hidden_BFD is not None
            for block in from_start:
                end = block.num_before + block.num_targets - 1
                hidden_TD.append(hidden_BFD[0, end - block.num_targets : end])
        else:
            # An unrelated distant text: one pass over it, then the local windows of all blocks.
            num_seen = last_block.num_prefix + last_block.num_distant
            states = scorer.states(last_block.tokens[:num_seen])
            contexts_of_text = [
                Context(block, states.first(block.num_prefix + block.num_distant))
                for block in from_start
            ]
            contexts = contexts_of_text + contexts
    return torch.cat(hidden_TD + scorer.hidden([context.long_row() for context in contexts]))


def _begins(block: Block, longer: Block) -> bool:
    """Return whether the tokens of a block are the beginning of those of a longer one."""
    return np.array_equal(block.tokens, longer.tokens[: len(block.tokens)])


def bigrams(block: Block) -> np.ndarray:
    """Return for each target, from the text alone, whether its token and the one before it occur
    together among the distant tokens, and nowhere in the local window."""
    tokens = block.tokens.astype(np.int64)
    # Each pair as one number: pairs[i] holds the tokens at places i and i + 1.
    pairs = (tokens[:-1] << 32) + tokens[1:]
    first_distant = block.num_prefix
    first_local = first_distant + block.num_distant
    distant = set(pairs[first_distant : first_local - 1])
    recurs = []
    for target in range(block.num_before, block.num_before + block.num_targets):
        pair = pairs[target - 1]
        recurs.append(pair in distant and pair not in pairs[first_local : target - 1])
    return np.array(recurs)
