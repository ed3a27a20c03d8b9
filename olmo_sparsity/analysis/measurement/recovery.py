"""Evaluate the targets of one document: choose k distant units for each, and compute L_k.

`recover` is the entry point. `Plan.evaluate_targets` calls it for each document, and `explain` for
its one text. It puts one distant text after another before each block of targets:

    targets → sort_into_blocks → block + distant text → TextEvaluator → rows of the tables

Two columns of the tables say which text it was:

    distant_part   control     the distant text
    document       own         the document's own distant context
    document       unrelated   another document's text at the same position IDs
    placebo        own         the text by which the placebo targets were chosen
    placebo        unrelated   yet another document's text

text_evaluation.py computes the losses with one text, and ranking.py ranks its units. L_k is the
loss in nats of a target, given its local window and k distant units (`loss_set`).
`results/statistics.py` computes recovery from it: Σ (L_short − L_k) / Σ (L_short − L_long).

Dimension key: F distant tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.choices import Choices
from olmo_sparsity.analysis.measurement.evaluated_text import (
    BlockBounds,
    EvaluatedText,
    SpansByPart,
    sort_into_blocks,
)
from olmo_sparsity.analysis.measurement.ranking import TextRanker
from olmo_sparsity.analysis.measurement.recovery_tables import RecoveryTables
from olmo_sparsity.analysis.measurement.text_evaluation import TextEvaluator
from olmo_sparsity.analysis.measurement.unfinished import UnfinishedDocument
from olmo_sparsity.analysis.options import KS
from olmo_sparsity.analysis.results.target_rows import DOCUMENT
from olmo_sparsity.analysis.scoring.rows import Context
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.models.identity.use import with_model_in_use
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.distant_text import DistantText, ReplacedText
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import Spans
from olmo_sparsity.text.windows import Block, Windows


@with_model_in_use
def recover(
    scorer: Scorer,
    document: Document,
    windows: Windows,
    targets: Mapping[str, np.ndarray] | np.ndarray | None = None,
    *,
    units: str | Sequence[str] = "tokens",
    selectors: str | Sequence[str] = "add_one",
    ks: Sequence[int] = KS,
    controls: Controls | None = None,
    num_halves: int = 0,
    seed: int = 0,
    choices: Choices | None = None,
    unfinished: UnfinishedDocument | None = None,
) -> dict[str, pd.DataFrame]:
    """Return tables `recovery`, `influence`, `lds` and `costs` of one document (docs/measure.md).

    Args:
        targets: Places in the document, or a mapping from distant part (`document` or `placebo`)
            to places. An array of two columns holds spans, from the first place to one past the
            last; each is evaluated as one target. Default: every target with a full long window,
            after the document's own distant text.
        controls: Where unrelated texts and the placebo come from. Without them, neither is
            evaluated, and recovery should not be reported.
        num_halves: Number of random halves of the distant units that `lds` is computed from.
        choices: Ranked units of another measurement, in place of the selectors' own.
        unfinished: Rows that an earlier start has stored for this document. Their texts are not
            evaluated again, and new rows are stored there, too.
    """
    if targets is None:
        targets = np.arange(windows.first_target, len(document.tokens))
    targets_by_part = targets if isinstance(targets, Mapping) else {DOCUMENT: np.asarray(targets)}
    tables = RecoveryTables(unfinished)
    ranker = TextRanker(
        scorer=scorer,
        document_number=document.number,
        selectors=_as_tuple(selectors),
        ks=tuple(ks),
        num_halves=num_halves,
        seed=seed,
        choices=choices,
        tables=tables,
    )
    text_evaluator = TextEvaluator(
        scorer=scorer,
        ranker=ranker,
        unit_kinds=_as_tuple(units),
        ks=tuple(ks),
        tables=tables,
    )
    blocks = sort_into_blocks(windows, document, targets_by_part)
    for group in _groups_that_share_texts(windows, blocks):
        _BlocksEvaluator(
            scorer=scorer,
            document=document,
            windows=windows,
            controls=controls,
            blocks=group,
            text_evaluator=text_evaluator,
            tables=tables,
        ).evaluate()
    return tables.frames()


def _groups_that_share_texts(
    windows: Windows, blocks: dict[BlockBounds, SpansByPart]
) -> list[dict[BlockBounds, SpansByPart]]:
    """Split the blocks of a document into groups that are evaluated together: all blocks if their
    long windows begin where the document begins, or else each block alone."""
    if windows.has_all:
        # The distant texts of all blocks are beginnings of the same texts, whose states they share.
        return [blocks] if blocks else []
    return [{bounds: spans_by_part} for bounds, spans_by_part in blocks.items()]


def _as_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return one name, or several, as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True, kw_only=True)
class _BlocksEvaluator:
    """Puts all distant texts before some blocks of a document, one after another, and has each
    evaluated by `TextEvaluator`."""

    scorer: Scorer
    document: Document
    windows: Windows
    controls: Controls | None
    blocks: dict[BlockBounds, SpansByPart]
    """The targets of each block, by distant part."""

    text_evaluator: TextEvaluator
    tables: RecoveryTables

    def evaluate(self) -> None:
        """Evaluate the targets of the blocks with all their distant texts."""
        # Text after text, and for each text all blocks: so only the states of one text are in
        # memory at a time. A dict keeps the order in which distant parts are met.
        distant_parts = dict.fromkeys(chain(*self.blocks.values()))
        for distant_part in distant_parts:
            for bounds, spans_by_part in self.blocks.items():
                if distant_part in spans_by_part:
                    self._evaluate_own_text(bounds, distant_part, spans_by_part[distant_part])
        num_draws = 0 if self.controls is None else self.controls.num_draws
        for draw in range(num_draws):
            for bounds, spans_by_part in self.blocks.items():
                self._evaluate_unrelated_texts(bounds, spans_by_part, draw)

    def _evaluate_own_text(self, bounds: BlockBounds, distant_part: str, spans: Spans) -> None:
        """Evaluate targets of one kind with the text by which they were chosen."""
        text_name = f"own, {distant_part}, {bounds}"
        if self.tables.has_stored(text_name):
            return
        block = self._block(bounds)
        forwards_before = self.scorer.token_forwards
        distant = self._own_distant_text(block, distant_part)
        text = EvaluatedText(
            context=self._context(block, distant),
            distant=distant,
            is_control=False,
            draw=0,
            spans_by_part={distant_part: spans},
        )
        # All kinds of units and all selectors share the states of the text.
        num_forwards = self.scorer.token_forwards - forwards_before
        self.tables.add_cost("all", "shared", num_forwards, len(spans))
        self.text_evaluator.evaluate(text)
        self.tables.finish_text(text_name)

    def _evaluate_unrelated_texts(
        self, bounds: BlockBounds, spans_by_part: SpansByPart, draw: int
    ) -> None:
        """Evaluate targets with the unrelated texts of one draw. The control `unrelated` has one
        text for the whole block; other controls have one for each distant part, or for each token
        of a target."""
        assert self.controls is not None
        block = self._block(bounds)
        own_texts = {
            distant_part: ReplacedText(self._own_distant_text(block, distant_part), spans)
            for distant_part, spans in spans_by_part.items()
        }
        # Which texts replace the own ones depends on these, as `shuffled` takes their tokens.
        control_texts = self.controls.control_texts(self.document, block, own_texts, draw)
        for index, (distant, spans_of_text) in enumerate(control_texts):
            text_name = f"unrelated, draw {draw}, text {index}, {bounds}"
            if self.tables.has_stored(text_name):
                continue
            text = EvaluatedText(
                context=self._context(block, distant),
                distant=distant,
                is_control=True,
                draw=draw,
                spans_by_part=spans_of_text,
            )
            self.text_evaluator.evaluate(text)
            self.tables.finish_text(text_name)

    def _block(self, bounds: BlockBounds) -> Block:
        """Return the block of targets with these places, in the document's own context."""
        return self.windows.block(self.document.tokens, bounds.start, bounds.end)

    def _own_distant_text(self, block: Block, distant_part: str) -> DistantText:
        """Return the distant text by which the targets of this kind were chosen."""
        if distant_part == DOCUMENT:
            return DistantText.at(self.document, block.first_distant, block.num_distant)
        assert self.controls is not None, "the placebo is a text of another document"
        return self.controls.placebo(self.document, block)

    def _context(self, block: Block, distant: DistantText) -> Context:
        """Put a distant text before the targets of a block, and compute its states."""
        block_with_text = block.with_distant(distant.tokens_F)
        states = None
        keeps_states = self.scorer.interpretation.keeps_states
        if self.windows.has_all and distant.is_run and keeps_states:
            # One pass over a text serves all blocks, if it reaches as far as the last one sees. The
            # scorer keeps the states, so that the next block finds them.
            start_of_last_block = max(bounds.start for bounds in self.blocks)
            num_seen = self.windows.tokens_before(start_of_last_block) - block.windows.short
            first = int(distant.places_F[0])
            distant_tokens = distant.document.tokens[first : first + num_seen]
            prefix = block.tokens[: block.num_prefix]
            states = self.scorer.states(np.concatenate([prefix, distant_tokens]))
        return self.scorer.context(block_with_text, states)
