"""Compute the losses of targets given chosen parts of their context, in batches of short rows.

Every measurement evaluates the model here; selectors and recovery differ only in their rows:

    Block (tokens of a window) → Context (with states of its distant places) → Row (which places a
    forward sees) → Scorer.losses(rows) → nats of each target

rows.py says what a row holds, and row_groups.py which rows share a forward. If distant tokens keep
their states, a row attends to keys and values that are computed once for all rows of a context.
Only the places that predict a target are unembedded. Every forward is counted in token-forwards,
the unit of cost in all results.

Dimension key: B rows, L tokens of a row, F distant places, K states that a row attends to, W
targets of a row (its last places), N targets of all rows, D width, C targets of a chunk, V
vocabulary, T targets of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.analysis.interpretation import Interpretation, interpretation_of
from olmo_sparsity.analysis.scoring.row_groups import RowGrouping
from olmo_sparsity.analysis.scoring.rows import Context, Row, distinct_rows
from olmo_sparsity.analysis.scoring.tensors import as_tensors, to_host
from olmo_sparsity.base.devices import threads_for
from olmo_sparsity.base.errors import ConfigError, is_out_of_memory
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.renamed import accepts_old_names
from olmo_sparsity.models.attention import fast_kernels
from olmo_sparsity.models.distant_states import DistantStates, to_device
from olmo_sparsity.models.identity import State
from olmo_sparsity.models.losses import LanguageModel, rows_per_chunk
from olmo_sparsity.models.prompts import PromptModel
from olmo_sparsity.models.use import in_use, state_of
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import NOTHING
from olmo_sparsity.text.windows import Block, Windows

Item = TypeVar("Item")
Output = TypeVar("Output")


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
            return self.model.hidden(inputs_BL, positions_BL, distant=distant, num_last=num_last)

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
        self, windows: Windows, blocks_by_prefix: dict[str, list[Block]]
    ) -> dict[str, np.ndarray]:
        """Return the losses of all targets of a document, by the name of their column.

        `blocks_by_prefix`: prefix of a column → blocks, which differ in their distant tokens alone:
        the document's own have the prefix "", those of the placebo "placebo_". The columns are
        `loss_short`, with the local window, which all share, and for each prefix `loss_long`, with
        the long windows of its blocks."""
        any_blocks = next(iter(blocks_by_prefix.values()))
        targets_T = np.concatenate([block.targets_W for block in any_blocks])
        short_rows = [Context(block).set_row(NOTHING) for block in any_blocks]
        short_TD = torch.cat(self.hidden(short_rows))
        long_TD = {
            prefix: self._long_hidden(windows, blocks)
            for prefix, blocks in blocks_by_prefix.items()
        }
        columns = {"loss_short": self.nll_of(short_TD, targets_T)}
        for prefix, hidden_TD in long_TD.items():
            columns[f"{prefix}loss_long"] = self.nll_of(hidden_TD, targets_T)
        # All columns are copied at once, so that the host waits for a GPU once.
        return dict(zip(columns, to_host(list(columns.values())), strict=True))

    @torch.no_grad()
    def _long_hidden(self, windows: Windows, blocks: list[Block]) -> Tensor:
        """Return hidden_TD at the targets of all blocks of one document, in their long windows."""
        # With `long="all"` the long windows of the first blocks begin where the text begins, so
        # that one pass over the text serves them all. Windows with a limit begin later and later.
        from_start = [block for block in blocks if windows.has_all and block.first == 0]
        contexts = [Context(block) for block in blocks[len(from_start) :]]
        hidden_TD: list[Tensor] = []
        if from_start:
            last_block = from_start[-1]
            if all(_begins(block, last_block) for block in from_start):
                hidden_TD = self._hidden_in_one_pass(from_start)
            else:
                # An unrelated distant text: one pass over it, then the local windows of all blocks.
                num_seen = last_block.num_prefix + last_block.num_distant
                states = self.states(last_block.tokens[:num_seen])
                contexts_of_text = [
                    Context(block, states.first(block.num_prefix + block.num_distant))
                    for block in from_start
                ]
                contexts = contexts_of_text + contexts
        return torch.cat(hidden_TD + self.hidden([context.long_row() for context in contexts]))

    def _hidden_in_one_pass(self, blocks: list[Block]) -> list[Tensor]:
        """Return hidden_WD at the targets of blocks whose tokens are all beginnings of those of the
        last block, as in a document with its own distant text."""
        # The tokens before a target predict it, so the last target itself is not an input.
        hidden_BFD = self.states(blocks[-1].tokens[:-1]).hidden_BFD
        assert hidden_BFD is not None
        hidden = []
        for block in blocks:
            # A target is predicted at the place before it.
            end = block.num_before + block.num_targets - 1
            hidden.append(hidden_BFD[0, end - block.num_targets : end])
        return hidden

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
        distinct, index_of_row = distinct_rows(rows, self.model.reach)
        grouping = RowGrouping(self.model, self.device, lambda: self.batch_tokens)
        evaluated_indices: list[int] = []
        outputs: list[Tensor] = []
        for group in grouping.groups(distinct):

            def compute(batch: Sequence[Row], is_masked: bool = group.is_masked) -> Tensor:
                return read(self._hidden_of_batch(batch, is_masked), batch)

            group_rows = [distinct[index] for index in group.indices]
            with threads_for(self.num_parameters):
                outputs += self.in_batches(group_rows, group.num_keys, compute)
            evaluated_indices += group.indices

        # Groups are in another order than the rows.
        results: list[Any] = [None] * len(distinct)
        for index, result in zip(evaluated_indices, chain(*finish(outputs)), strict=True):
            results[index] = result
        return [results[index] for index in index_of_row]

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

    def _hidden_of_batch(self, batch: Sequence[Row], is_masked: bool) -> Tensor:
        """Return hidden_BWD at the places that predict targets, of rows that `RowGrouping` has put
        together. `is_masked`: rows get all states of their context, under a mask of those that they
        do not attend to; otherwise each row gets copies of its own ones."""
        first_row = batch[0]
        states = first_row.context.states
        # For each row, an index of the states that it attends to, or a mask of all.
        attended = [NOTHING if row.attended is None else row.attended for row in batch]
        sees_all = False
        if is_masked:
            assert states is not None
            is_visible_BF = _visibility(attended, states.num_places)
            attended = list(is_visible_BF)
            sees_all = bool(is_visible_BF.all())
        evaluated = [np.arange(*row.evaluated_span) for row in batch]
        # One copy to the device for all four: each copy makes the host wait.
        tokens_BL, positions_BL, attended_BK, evaluated_BW = as_tensors(
            batch, self.device, attended, evaluated
        )
        self.token_forwards += tokens_BL.numel()

        distant = None
        if first_row.attended is not None and states is not None:
            if not is_masked:
                distant = states.choose(attended_BK)
            elif sees_all:
                # Without a bias faster kernels apply.
                distant = states.expand(len(batch))
            else:
                shape = (len(batch), states.num_places)
                bias_BF = torch.zeros(shape, dtype=torch.float, device=self.device)
                bias_BF.masked_fill_(attended_BK == 0, torch.finfo(torch.float).min)
                distant = states.expand(len(batch), bias_BF)
        hidden_BWD = self.model.hidden(
            tokens_BL, positions_BL, distant=distant, num_last=first_row.num_targets
        )
        if first_row.span is None:
            return hidden_BWD
        return hidden_BWD.take_along_dim(evaluated_BW[..., None], 1)


def _visibility(attended: Sequence[np.ndarray], num_places: int) -> np.ndarray:
    """Return is_visible_BF, whether each row attends to each state of its context."""
    is_visible_BF = np.zeros((len(attended), num_places), dtype=bool)
    for is_visible_F, places in zip(is_visible_BF, attended, strict=True):
        is_visible_F[places] = True
    return is_visible_BF


def _begins(block: Block, longer: Block) -> bool:
    """Return whether the tokens of a block are the beginning of those of a longer one."""
    return np.array_equal(block.tokens, longer.tokens[: len(block.tokens)])
