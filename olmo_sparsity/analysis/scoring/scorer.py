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
rows of a context. Only the tokens that predict a target are unembedded. How the model is run, in
batches that fit in memory, is in model_runner.py.

Dimension key: B rows of a batch, W targets of a row or block, F distant tokens, T targets, N items
of a list (the targets of all rows), D width. A suffix 1 is a dimension of size 1. Losses are in
nats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from olmo_sparsity.analysis.interpretation import Interpretation, interpretation_of
from olmo_sparsity.analysis.scoring.model_runner import ModelRunner
from olmo_sparsity.analysis.scoring.row_batch import hidden_of_batch
from olmo_sparsity.analysis.scoring.row_groups import RowGroup, RowGrouping
from olmo_sparsity.analysis.scoring.rows import Context, Row, distinct_rows
from olmo_sparsity.analysis.scoring.tensors import to_host
from olmo_sparsity.base.devices import threads_for
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.renamed import accepts_old_names
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.language_model import LanguageModel
from olmo_sparsity.models.prompts import PromptModel
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import NO_INDICES
from olmo_sparsity.text.windows import Block, Windows


@dataclass(frozen=True)
class WindowLosses:
    """The losses of all targets of a document, in nats."""

    short_T: np.ndarray
    """L_short: with the local window alone."""

    long_T: np.ndarray
    """L_long: with the long window of the document itself."""

    placebo_long_T: np.ndarray | None
    """L_long with the distant tokens of the placebo; None without a placebo."""


class Scorer(ModelRunner):
    """Computes losses of targets with one model, on one device, and counts what it computes.

    `losses` evaluates any rows together: equal ones once, and those of one shape in batches.
    `window_losses` does it for all targets of a document. `token_forwards` counts all tokens that
    went through the model.

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
        super().__init__(model, device, batch_tokens)
        self.interpretation: Interpretation = interpretation

    def of_document(self, document: Document, controls: Controls) -> Self:
        """Return a scorer for this document. Only `ReplacingScorer` depends on the document."""
        return self

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

    # --- rows ---

    @torch.no_grad()
    def losses(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Return nll_W of each row's targets, in nats."""

        def nll(hidden_BWD: Tensor, batch: Sequence[Row]) -> Tensor:
            targets_BW = np.stack([row.targets for row in batch])
            nll_N = self.nll_on_device(hidden_BWD.flatten(0, 1), targets_BW.ravel())
            return nll_N.view(targets_BW.shape)

        # All batches are copied at once, so that the host waits for a GPU once.
        return self._evaluate(rows, nll, collect=to_host)

    @torch.no_grad()
    def hidden(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return hidden_WD of each row, at the tokens that predict its targets."""
        return self._evaluate(rows, lambda hidden_BWD, _: hidden_BWD, collect=list)

    def sums(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the sum of each row's losses. The targets of all rows are unembedded together,
        however many forwards they took."""
        hidden_of_rows = self.hidden(rows)
        hidden_ND = torch.cat(hidden_of_rows)
        targets_N = np.concatenate([row.targets for row in rows])
        loss_N = self.nll(hidden_ND, targets_N)

        # Rows have different numbers of targets, so no dimension can be summed. Losses are added
        # from the first target of each row to that of the next: of 1.0 0.5 | 2.0, which begin at 0
        # and 2, the sums are 1.5 and 2.0.
        num_targets = [len(hidden_WD) for hidden_WD in hidden_of_rows]
        first_targets = np.cumsum([0, *num_targets[:-1]])
        return np.add.reduceat(loss_N, first_targets)

    def _evaluate(
        self,
        rows: Sequence[Row],
        read: Callable[[Tensor, Sequence[Row]], Tensor],
        collect: Callable[[list[Tensor]], Sequence[Any]],
    ) -> list[Any]:
        """Return a result for each row.

        Of five rows, the second may equal the fifth. Then four distinct rows are computed, such as
        0, 2 and 3 in one batch and 1 in another, and the rows have the results 0 1 2 3 1.

        Args:
            rows: Rows of any contexts.
            read: Computes a tensor of results, one for each row in its first dimension, from the
                hidden states of a batch, hidden_BWD, and its rows.
            collect: Returns the results of all batches in the form that the caller needs.
        """
        distinct, index_of_row = distinct_rows(rows, self.model.reach)
        # A function returns the size of a batch, as it may be halved between two groups.
        grouping = RowGrouping(self.model, self.device, lambda: self.batch_tokens)
        outputs: list[Tensor] = []
        computed_indices: list[int] = []
        for group in grouping.groups(distinct):
            group_rows = [distinct[index] for index in group.indices]
            outputs += self._evaluate_group(group, group_rows, read)
            computed_indices += group.indices

        results = chain(*collect(outputs))
        result_of_distinct = dict(zip(computed_indices, results, strict=True))
        return [result_of_distinct[index] for index in index_of_row]

    def _evaluate_group(
        self,
        group: RowGroup,
        group_rows: list[Row],
        read: Callable[[Tensor, Sequence[Row]], Tensor],
    ) -> list[Tensor]:
        """Return what `read` computes from each batch of the rows of a group."""

        def compute(batch: Sequence[Row]) -> Tensor:
            self.token_forwards += sum(len(row.positions) for row in batch)
            hidden_BWD = hidden_of_batch(self.model, self.device, batch, group.is_masked)
            return read(hidden_BWD, batch)

        with threads_for(self.num_parameters):
            return self.in_batches(group_rows, group.num_keys, compute)

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


def _num_earlier(block: Block) -> int:
    """Return the number of tokens before the local window of a block: prefix and distant."""
    return block.num_prefix + block.num_distant


def _are_beginnings(blocks: Sequence[Block]) -> bool:
    """Return whether the tokens of each block are a beginning of those of the last one."""
    longest = blocks[-1].tokens
    return all(np.array_equal(block.tokens, longest[: len(block.tokens)]) for block in blocks)
