"""Compute the losses of targets given chosen tokens of their context, in batches of short rows.

Every measurement evaluates the model here; selectors and recovery differ only in their rows:

    context = scorer.context(block)                              # 40 distant tokens, targets t0 t1
    rows = [context.set_row(NO_INDICES), context.set_row(np.array([7]))]
    scorer.losses(rows)     # [6.3, 2.0] without distant tokens, [5.1, 2.0] with d7: nats of t0, t1

A call goes these steps:

    Block         the tokens of a window: distant tokens, local window, targets
      ↓ Scorer.context
    Context       the same with the states of its distant tokens, computed once
      ↓ Context.set_row, long_row                     (rows.py)
    Row           which tokens of the context a forward sees
      ↓ Scorer.losses: equal rows once → groups       (row_groups.py)
                       → batches → hidden states      (row_batch.py) → losses
    losses        nll_W of each row, a loss for each of its targets

If distant tokens keep their states, a row attends to keys and values that are computed once for all
rows of a context. Only the tokens that predict a target are unembedded. Every forward is counted in
token-forwards, the unit of cost in all results.

Dimension key: B rows of a batch, L tokens of a row, W targets of a row or block, F distant tokens,
T targets, N items of a list (the targets of all rows), D width, C targets of a chunk, V vocabulary.
A suffix 1 is a dimension of size 1. Losses are in nats.
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
from olmo_sparsity.analysis.scoring.row_batch import hidden_of_batch
from olmo_sparsity.analysis.scoring.row_groups import RowGrouping
from olmo_sparsity.analysis.scoring.rows import Context, Row, distinct_rows
from olmo_sparsity.analysis.scoring.tensors import to_host
from olmo_sparsity.base.devices import threads_for
from olmo_sparsity.base.errors import ConfigError, is_out_of_memory
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.renamed import accepts_old_names
from olmo_sparsity.models.attention import fast_kernels
from olmo_sparsity.models.distant_states import DistantStates, to_device
from olmo_sparsity.models.identity.model_identity import ModelIdentity
from olmo_sparsity.models.identity.use import in_use, last_identity
from olmo_sparsity.models.language_model import LanguageModel
from olmo_sparsity.models.losses import rows_per_chunk
from olmo_sparsity.models.prompts import PromptModel
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import NO_INDICES
from olmo_sparsity.text.windows import Block, Windows

Item = TypeVar("Item")
Output = TypeVar("Output")


@dataclass(frozen=True)
class KnownText:
    """A text that a scorer has read, with its states."""

    tokens: np.ndarray
    states: DistantStates
    model_identity: ModelIdentity | None
    """The identity of the model that computed them. A change to the model makes them stale."""


@dataclass(frozen=True)
class WindowLosses:
    """The losses of all targets of a document, in nats."""

    short_T: np.ndarray
    """L_short: with the local window alone."""

    long_T: np.ndarray
    """L_long: with the long window of the document itself."""

    placebo_long_T: np.ndarray | None
    """L_long with the distant tokens of the placebo; None without a placebo."""


@dataclass(frozen=True)
class _BatchOutputs:
    """The outputs of batches, and where each row has its result in them.

    Of five rows, the second equals the fifth, so that four distinct rows are computed: 0, 2 and 3
    in one batch, 1 in another.

        outputs            [tensor of 3 results, tensor of 1 result]
        distinct_indices   [0, 2, 3, 1]
        index_of_row       [0, 1, 2, 3, 1]
    """

    outputs: list[Tensor]
    """One tensor for each batch, with a result for each of its rows."""

    distinct_indices: list[int]
    """Which distinct row each result is of, in the order of the results."""

    index_of_row: Sequence[int]
    """Which distinct row serves each row. Rows that are equal to the model are computed once."""

    def by_row(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the result of each row, from `self.outputs` or copies of them."""
        result_by_index = dict(zip(self.distinct_indices, chain(*outputs), strict=True))
        return [result_by_index[index] for index in self.index_of_row]


class Scorer:
    """Computes losses of targets with one model, on one device, and counts what it computes.

    A scorer knows the model, the interpretation of distant states, the size of a batch, and the
    states of the text that it read last. `losses` evaluates any rows together: equal ones once, and
    those of one shape in batches, which are halved if memory runs out. `token_forwards` counts all
    tokens that went through the model.

        scorer = Scorer(load_model("runs/mine").model)
        for block in Windows(long=64, short=16, stride=8).blocks(document.tokens):
            context = scorer.context(block)
            rows = [context.set_row(NO_INDICES), context.long_row()]
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
        """Check that the model is one that this class can evaluate.

        Args:
            model: A model in memory.
            device: Device of the inputs. Default: the model's.
            distant_states: `contextual` or `isolated`, as in `explain`.
            batch_tokens: Tokens of one forward. Default: 4,096 on a CPU, more on a GPU.
        """
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
        """Called after each batch, to show progress."""

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

    # --- states of texts ---

    def context(self, block: Block, states: DistantStates | None = None) -> Context:
        """Prepare a block for evaluation: compute the states of its distant tokens, once for all
        rows.

        Args:
            block: The block.
            states: States of a longer text with the same beginning. With them nothing is computed.
        """
        if not self.interpretation.keeps_states:
            return Context(block)
        num_earlier = _num_earlier(block)
        if states is not None:
            return Context(block, states.first(num_earlier))
        return Context(block, self.states(block.tokens[:num_earlier]))

    def states(self, tokens: np.ndarray) -> DistantStates:
        """Return the states of a text, in which each token sees those before it.

        The text is computed a few thousand tokens at a time. The scorer keeps the states of the
        last text: as long as the model stays the same, a later call for any beginning of this text
        computes nothing.
        """
        with in_use(self.model), fast_kernels(self.device):
            known_states = self._known_states(tokens)
            if known_states is not None:
                return known_states

            # Freed before new states are computed, as those of two texts may not fit in memory.
            self._known_text = None
            (tokens_1L,) = to_device([tokens[None]], self.device)
            positions_1L = torch.arange(len(tokens), device=self.device)[None]
            self.token_forwards += len(tokens)
            with threads_for(self.num_parameters):
                states = self.model.distant_states(tokens_1L, positions_1L, self.batch_tokens)
            self._known_text = KnownText(tokens, states, last_identity(self.model))
            return states

    def _known_states(self, tokens: np.ndarray) -> DistantStates | None:
        """Return the states of a text if it is a beginning of the known text, else None."""
        known = self.known_text
        if known is None or not np.array_equal(known.tokens[: len(tokens)], tokens):
            return None
        return known.states.first(len(tokens))

    @property
    def known_text(self) -> KnownText | None:
        """Return the text that `states` computed last. Return None if there is none, or if the
        model has changed since, which is noticed when it is used (`in_use`)."""
        known = self._known_text
        if known is None or known.model_identity is not last_identity(self.model):
            return None
        return known

    @torch.no_grad()
    def extended(self, states: DistantStates | None, tokens: np.ndarray) -> DistantStates:
        """Return the states of a text to which tokens are appended.

        Args:
            states: The states of the text. None if there is none, so that the tokens are all.
            tokens: The tokens that are appended.
        """
        num_before = 0 if states is None else states.num_tokens
        (tokens_1L,) = to_device([tokens[None]], self.device)
        positions_1L = num_before + torch.arange(len(tokens), device=self.device)[None]
        self.token_forwards += len(tokens)
        with threads_for(self.num_parameters):
            return self.model.distant_states(tokens_1L, positions_1L, self.batch_tokens, states)

    @torch.no_grad()
    def hidden_after(
        self, states: DistantStates | None, tokens_BL: np.ndarray, num_last: int
    ) -> Tensor:
        """Return hidden_BWD of the last `num_last` tokens of a batch of texts.

        Args:
            states: The states of a text with which all begin; None if they share no beginning.
            tokens_BL: The tokens of each text after that beginning.
            num_last: W, the number of tokens whose hidden states are returned.
        """
        num_before = 0 if states is None else states.num_tokens
        (inputs_BL,) = to_device([tokens_BL], self.device)
        positions_L = num_before + torch.arange(tokens_BL.shape[1], device=self.device)
        positions_BL = positions_L.expand_as(inputs_BL)
        self.token_forwards += tokens_BL.size
        distant = None if states is None else states.expand(len(tokens_BL))
        with threads_for(self.num_parameters):
            return self.model.hidden(inputs_BL, positions_BL, distant=distant, num_last=num_last)

    # --- rows ---

    @torch.no_grad()
    def hidden(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return hidden_WD of each row, at the tokens that predict its targets."""
        computed = self._evaluate(rows, lambda hidden_BWD, _: hidden_BWD)
        return computed.by_row(computed.outputs)

    @torch.no_grad()
    def losses(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Return nll_W of each row's targets, in nats."""

        def nll(hidden_BWD: Tensor, batch: Sequence[Row]) -> Tensor:
            targets_BW = np.stack([row.targets for row in batch])
            nll_N = self.nll_on_device(hidden_BWD.flatten(0, 1), targets_BW.ravel())
            return nll_N.view(targets_BW.shape)

        computed = self._evaluate(rows, nll)
        # All batches are copied at once, so that the host waits for a GPU once.
        return computed.by_row(to_host(computed.outputs))

    def sums(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the sum of each row's losses. The targets of all rows are unembedded together,
        however many forwards they took."""
        hidden_of_rows = self.hidden(rows)
        hidden_ND = torch.cat(hidden_of_rows)
        targets_N = np.concatenate([row.targets for row in rows])
        loss_N = self.nll(hidden_ND, targets_N)

        # Rows have different numbers of targets, so no dimension can be summed. Losses are added
        # from the first target of each row to that of the next.
        num_targets = [len(hidden_WD) for hidden_WD in hidden_of_rows]
        first_targets = np.cumsum([0, *num_targets[:-1]])
        return np.add.reduceat(loss_N, first_targets)

    # --- the windows of a document ---

    def window_losses(
        self, windows: Windows, blocks: list[Block], placebo_blocks: list[Block] | None = None
    ) -> WindowLosses:
        """Return the losses of all targets of a document.

        Args:
            windows: The windows of the document.
            blocks: The blocks of the document.
            placebo_blocks: The same blocks with the distant tokens of the placebo. Default: no
                placebo.
        """
        # Local windows and targets are the same with the placebo, so they are computed once.
        targets_T = np.concatenate([block.targets_W for block in blocks])
        short_rows = [Context(block).set_row(NO_INDICES) for block in blocks]
        hidden = [torch.cat(self.hidden(short_rows)), self._long_hidden(windows, blocks)]
        if placebo_blocks is not None:
            hidden.append(self._long_hidden(windows, placebo_blocks))

        losses = [self.nll_on_device(hidden_TD, targets_T) for hidden_TD in hidden]
        # All are copied at once, so that the host waits for a GPU once.
        short_T, long_T, *placebo_long = to_host(losses)
        return WindowLosses(short_T, long_T, placebo_long[0] if placebo_long else None)

    @torch.no_grad()
    def _long_hidden(self, windows: Windows, blocks: list[Block]) -> Tensor:
        """Return hidden_TD at the targets of all blocks of one document, in their long windows."""
        # With `long="all"` the long windows of the first blocks begin where the text begins, so
        # that one pass over the text serves them all. Windows with a limit begin later and later.
        from_start = [block for block in blocks if windows.has_all and block.first_distant == 0]
        later = blocks[len(from_start) :]

        hidden_of_blocks: list[Tensor] = []
        contexts: list[Context] = []
        if from_start and _are_beginnings(from_start):
            hidden_of_blocks = self._hidden_in_one_pass(from_start)
        elif from_start:
            # The distant text is the placebo's, so the document goes on after it in another way for
            # each block: one pass over the distant text, then the local windows of all blocks.
            last_block = from_start[-1]
            states = self.states(last_block.tokens[: _num_earlier(last_block)])
            contexts = [Context(block, states.first(_num_earlier(block))) for block in from_start]
        contexts += [Context(block) for block in later]
        hidden_of_blocks += self.hidden([context.long_row() for context in contexts])
        return torch.cat(hidden_of_blocks)

    def _hidden_in_one_pass(self, blocks: list[Block]) -> list[Tensor]:
        """Return hidden_WD at the targets of blocks whose tokens are all beginnings of those of the
        last block, as in a document with its own distant text."""
        # The losses need no prediction after the last target, so it is not an input.
        hidden_1FD = self.states(blocks[-1].tokens[:-1]).hidden_BFD
        assert hidden_1FD is not None
        hidden_of_blocks = []
        for block in blocks:
            # Each target is predicted at the token before it.
            first = block.num_before - 1
            hidden_of_blocks.append(hidden_1FD[0, first : first + block.num_targets])
        return hidden_of_blocks

    # --- from hidden states to losses ---

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
        return self.nll_on_device(hidden_ND, targets_N).cpu().numpy()

    def nll_on_device(self, hidden_ND: Tensor, targets_N: np.ndarray) -> Tensor:
        """Return what `nll` returns, as a tensor on the device, so that the host need not wait for
        it."""
        (labels_N,) = to_device([targets_N], self.device)
        # One tensor, filled in place: small ones made between chunks would keep the memory of the
        # logits from being reused.
        loss_N = torch.empty(len(labels_N), dtype=torch.float, device=self.device)
        chunk_size = self.targets_per_chunk
        for start in range(0, len(labels_N), chunk_size):
            chunk = slice(start, start + chunk_size)
            logits_CV = self.model.unembed(hidden_ND[chunk]).float()
            loss_N[chunk] = F.cross_entropy(logits_CV, labels_N[chunk], reduction="none")
        return loss_N

    # --- batches ---

    def _evaluate(
        self, rows: Sequence[Row], read: Callable[[Tensor, Sequence[Row]], Tensor]
    ) -> _BatchOutputs:
        """Compute a result for each row.

        Args:
            rows: Rows of any contexts.
            read: Computes a tensor of results, one for each row in its first dimension, from the
                hidden states of a batch, hidden_BWD, and its rows.
        """
        distinct, index_of_row = distinct_rows(rows, self.model.reach)
        # A function returns the size of a batch, as it may be halved between two groups.
        grouping = RowGrouping(self.model, self.device, lambda: self.batch_tokens)
        distinct_indices: list[int] = []
        outputs: list[Tensor] = []
        for group in grouping.groups(distinct):
            # A default keeps the value of this turn; a closure would follow the loop.
            def compute(batch: Sequence[Row], is_masked: bool = group.is_masked) -> Tensor:
                self.token_forwards += sum(len(row.positions) for row in batch)
                hidden_BWD = hidden_of_batch(self.model, self.device, batch, is_masked)
                return read(hidden_BWD, batch)

            group_rows = [distinct[index] for index in group.indices]
            with threads_for(self.num_parameters):
                outputs += self.in_batches(group_rows, group.num_keys, compute)
            distinct_indices += group.indices
        return _BatchOutputs(outputs, distinct_indices, index_of_row)

    def in_batches(
        self, items: Sequence[Item], num_tokens: int, compute: Callable[[Sequence[Item]], Output]
    ) -> list[Output]:
        """Cut items into batches, and return what `compute` returns for each batch. If a batch runs
        out of memory, it and all later ones are halved.

        Args:
            items: What is computed, such as rows of one group.
            num_tokens: The memory of one item, as a number of tokens. A batch has as many items as
                `batch_tokens` allows, and at least one.
            compute: Computes the output of a batch.
        """
        with in_use(self.model), fast_kernels(self.device):
            return self._in_batches(items, num_tokens, compute)

    def _in_batches(
        self, items: Sequence[Item], num_tokens: int, compute: Callable[[Sequence[Item]], Output]
    ) -> list[Output]:
        """Compute all batches while the model is in use; see `in_batches`."""
        outputs: list[Output] = []
        num_done = 0
        while num_done < len(items):
            batch_size = max(1, self.batch_tokens // num_tokens)
            batch = items[num_done : num_done + batch_size]
            forwards_before = self.token_forwards
            fits_in_memory = True
            try:
                outputs.append(compute(batch))
            except Exception as error:
                if len(batch) == 1 or not is_out_of_memory(error):
                    raise
                fits_in_memory = False

            if fits_in_memory:
                num_done += len(batch)
                self.after_batch()
            else:
                # Outside of `except`, as its traceback would keep the memory alive.
                self.token_forwards = forwards_before  # this batch is computed again
                self._halve_batches(len(batch), num_tokens)
        return outputs

    def _halve_batches(self, num_items: int, num_tokens: int) -> None:
        """Halve the size of all later batches, as one of `num_items` items with `num_tokens` tokens
        each ran out of memory."""
        self.batch_tokens = num_items // 2 * num_tokens
        say(f"out of memory: batches of {self.batch_tokens:,} tokens from here on")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _num_earlier(block: Block) -> int:
    """Return the number of tokens before the local window of a block: prefix and distant."""
    return block.num_prefix + block.num_distant


def _are_beginnings(blocks: Sequence[Block]) -> bool:
    """Return whether the tokens of each block are a beginning of those of the last one."""
    longest = blocks[-1].tokens
    return all(np.array_equal(block.tokens, longest[: len(block.tokens)]) for block in blocks)
