"""Evaluate the targets of one document: choose k distant units for each, and compute L_k.

`recover` is the entry point. For each block of targets, a distant text is put before them, and each
selector ranks its units:

    block + distant text → selector → the k best units of each target → rows → L_k, and the loss
    without these units

L_k is the loss in nats of a target, given its local window and k distant units (`loss_set`).
`results/statistics.py` computes recovery from it: Σ (L_short − L_k) / Σ (L_short − L_long).

Which texts are evaluated, two columns of the tables say:

    distant_part   control     the distant text
    document       own         the document's own distant context
    document       unrelated   another document's text at the same position IDs
    placebo        own         the text by which the placebo targets were chosen
    placebo        unrelated   yet another document's text

A selector sees a context and its units, and no documents.

Words: *targets* are places in the document, as users pass them. *Spans* are the same targets as
indices into a block, from the first token to one past the last. *Unit kinds* are names such as
`tokens`; *units* are runs of distant places of one text.

Dimension key: T targets, K numbers of distant units, N rows of one forward call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.agreement import (
    RandomHalves,
    evaluate_halves,
    linear_datamodeling_scores,
    reliability_of_texts,
)
from olmo_sparsity.analysis.measurement.choices import Choices
from olmo_sparsity.analysis.measurement.parts import UnfinishedDocument
from olmo_sparsity.analysis.measurement.recovery_tables import RankingLabels, RecoveryTables
from olmo_sparsity.analysis.options import KS
from olmo_sparsity.analysis.results.statistics import RELIABILITY
from olmo_sparsity.analysis.results.target_rows import DOCUMENT
from olmo_sparsity.analysis.scoring.replaced import ReplacingScorer
from olmo_sparsity.analysis.scoring.rows import Context, Row
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.influence import Choice, Question, find_selector
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.use import with_model_in_use
from olmo_sparsity.text.controls import Controls, DistantText, ReplacedText
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import Spans, Units
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
        targets: Places in the document, or a mapping from kind of distant context to places. An
            array of two columns holds spans, from the first place to one past the last; each is
            evaluated as one target. Default: every target with a full long window, in the
            document's own context.
        controls: Where unrelated texts and the placebo come from. Without them, neither is
            evaluated, and recovery should not be reported.
        num_halves: Number of random halves of the distant units that `lds` is computed from.
        choices: Ranked units of another measurement, in place of the selectors' own.
        unfinished: Rows that an earlier start has stored for this document. Their texts are not
            evaluated again, and new rows are stored there, too.
    """
    if targets is None:
        targets = np.arange(windows.first_target, len(document.tokens))
    if not isinstance(targets, Mapping):
        targets = {DOCUMENT: np.asarray(targets)}
    evaluation = _Evaluation(
        scorer=scorer,
        document=document,
        windows=windows,
        controls=controls,
        unit_kinds=_as_tuple(units),
        selectors=_as_tuple(selectors),
        ks=tuple(ks),
        num_halves=num_halves,
        seed=seed,
        choices=choices,
        tables=RecoveryTables(unfinished),
    )
    blocks = dict(sorted(_sort_into_blocks(windows, document, targets).items()))
    if windows.has_all:
        # The distant texts of all blocks are beginnings of the same texts, whose states they share.
        if blocks:
            evaluation.evaluate_blocks(blocks)
    else:
        for bounds, spans_by_part in blocks.items():
            evaluation.evaluate_blocks({bounds: spans_by_part})
    return evaluation.tables.frames()


def _as_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


# --- targets, sorted into blocks ------------------------------------------------------------------


class _Bounds(NamedTuple):
    """The places of a block's targets in the document."""

    start: int
    """Place of the first target."""

    end: int
    """One past the place of the last target."""

    def __str__(self) -> str:
        # Part of the names of stored texts, by which a later start finds them.
        return f"({self.start}, {self.end})"


SpansByPart = dict[str, Spans]
"""Kind of distant context (`document` or `placebo`) → the targets that are evaluated with it."""


def _sort_into_blocks(
    windows: Windows, document: Document, targets: Mapping[str, np.ndarray]
) -> dict[_Bounds, SpansByPart]:
    """Sort targets into the blocks that their first tokens are in."""
    blocks: dict[_Bounds, SpansByPart] = {}
    length = len(document.tokens)
    for distant_part, places in targets.items():
        for first, end in _as_spans(places):
            if not windows.first_target <= first < end <= length:
                raise DataError(
                    f"targets: tokens {first}:{end} of document {document.number} have no full "
                    f"long window before them; choose from {windows.first_target} to {length - 1}"
                )
            start = int(windows.start_of(first))
            # A target of several tokens may reach beyond the block that its first token is in.
            block_end = min(max(start + windows.stride, end), length)
            spans_by_part = blocks.setdefault(_Bounds(start, block_end), {})
            spans_by_part.setdefault(distant_part, []).append((first - start, end - start))
    return blocks


def _as_spans(places: np.ndarray) -> Spans:
    """Return targets as spans of places, in order, each once. `places`: single tokens, or an array
    of two columns that holds spans already."""
    spans = np.asarray(places)
    if spans.ndim == 1:
        spans = np.stack([spans, spans + 1], axis=1)
    return sorted({(int(first), int(end)) for first, end in spans})


# --- what is evaluated ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _EvaluatedText:
    """One distant text before the targets of a block."""

    context: Context
    distant: DistantText
    is_control: bool
    """Whether it is an unrelated text that the targets are compared with. Otherwise it is the
    distant context that they were chosen in, the document's own or the placebo's."""

    number: int
    """The number of the unrelated text; 0 for other texts."""

    spans_by_part: SpansByPart
    """The targets that are evaluated with this text. An unrelated text may serve those of both
    kinds of distant context."""

    @property
    def control(self) -> str:
        """Return the value of the column `control`."""
        return "unrelated" if self.is_control else "own"

    @property
    def is_document_context(self) -> bool:
        """Return whether this is the document's own distant context."""
        return not self.is_control and DOCUMENT in self.spans_by_part

    @property
    def all_spans(self) -> Spans:
        """Return the targets of both kinds of distant context, each once."""
        return sorted(set(chain(*self.spans_by_part.values())))

    def places(self, spans: Spans) -> np.ndarray:
        """Return the first place of each target in the document."""
        return self.context.block.start + np.array([first for first, _ in spans])


@dataclass(frozen=True)
class _Ranking:
    """The units that a selector chose for the targets of a text, and the rows to be evaluated.

    Both lists have a row for each target and each k: first all k of the first target, then those of
    the second."""

    labels: RankingLabels
    units: Units
    spans: Spans
    choice: Choice
    num_tokens_TK: np.ndarray
    """How many distant tokens the k units hold."""

    rows_with_units: list[Row]
    """The local window and the k units: their losses are L_k."""

    rows_without_units: list[Row]
    """The long window without the k units. Empty for an unrelated text, which has no long window
    from which units could be removed."""


@dataclass(kw_only=True)
class _Evaluation:
    """Evaluates blocks of one document, and adds the rows to its tables."""

    scorer: Scorer
    document: Document
    windows: Windows
    controls: Controls | None
    unit_kinds: tuple[str, ...]
    selectors: tuple[str, ...]
    ks: tuple[int, ...]
    num_halves: int
    seed: int
    choices: Choices | None
    tables: RecoveryTables

    start_of_last_block: int = 0
    """Place of the first target of the last block that `evaluate_blocks` evaluates together with
    others. The states of a text must reach that far."""

    # --- from blocks to texts ---

    def evaluate_blocks(self, blocks: dict[_Bounds, SpansByPart]) -> None:
        """Evaluate the targets of several blocks, with all their distant texts."""
        # Text after text, and for each text all blocks: so only the states of one text are in
        # memory at a time.
        self.start_of_last_block = max(bounds.start for bounds in blocks)
        # A dict keeps the order in which the kinds are met, and so the order of evaluation.
        distant_parts = dict.fromkeys(chain(*blocks.values()))
        for distant_part in distant_parts:
            for bounds, spans_by_part in blocks.items():
                if distant_part in spans_by_part:
                    self._evaluate_own_text(bounds, distant_part, spans_by_part[distant_part])
        num_draws = 0 if self.controls is None else self.controls.num_draws
        for draw in range(num_draws):
            for bounds, spans_by_part in blocks.items():
                self._evaluate_unrelated_texts(bounds, spans_by_part, draw)

    def _evaluate_own_text(self, bounds: _Bounds, distant_part: str, spans: Spans) -> None:
        """Evaluate targets with the text by which they were chosen."""
        text_name = f"own, {distant_part}, {bounds}"
        if self.tables.has_stored(text_name):
            return
        block = self._block(bounds)
        forwards_before = self.scorer.token_forwards
        distant = self._own_distant_text(block, distant_part)
        text = _EvaluatedText(
            context=self._context(block, distant),
            distant=distant,
            is_control=False,
            number=0,
            spans_by_part={distant_part: spans},
        )
        # All kinds of units and all selectors share the states of the text.
        self._add_cost("all", "shared", forwards_before, len(spans))
        self._evaluate_text(text)
        self.tables.finish_text(text_name)

    def _evaluate_unrelated_texts(
        self, bounds: _Bounds, spans_by_part: SpansByPart, draw: int
    ) -> None:
        """Evaluate targets with the unrelated texts of one draw. The control `unrelated` has one
        text for the whole block; other controls have one for each kind of distant context or each
        token of a target."""
        assert self.controls is not None
        block = self._block(bounds)
        own_texts = {
            distant_part: ReplacedText(self._own_distant_text(block, distant_part), spans)
            for distant_part, spans in spans_by_part.items()
        }
        control_texts = self.controls.control_texts(self.document, block, own_texts, draw)
        for index, (distant, served_spans_by_part) in enumerate(control_texts):
            text_name = f"unrelated, draw {draw}, text {index}, {bounds}"
            if self.tables.has_stored(text_name):
                continue
            text = _EvaluatedText(
                context=self._context(block, distant),
                distant=distant,
                is_control=True,
                number=draw,
                spans_by_part=served_spans_by_part,
            )
            self._evaluate_text(text)
            self.tables.finish_text(text_name)

    def _block(self, bounds: _Bounds) -> Block:
        return self.windows.block(self.document.tokens, bounds.start, bounds.end)

    def _own_distant_text(self, block: Block, distant_part: str) -> DistantText:
        """Return the distant text by which the targets of this kind were chosen."""
        if distant_part == DOCUMENT:
            return DistantText.at(self.document, block.first, block.num_distant)
        assert self.controls is not None, "the placebo is a text of another document"
        return self.controls.placebo(self.document, block)

    def _context(self, block: Block, distant: DistantText) -> Context:
        """Put a distant text before the targets of a block, and compute its states."""
        block = block.with_distant(distant.tokens_F)
        states = None
        keeps_states = self.scorer.interpretation.keeps_states
        if self.windows.has_all and distant.is_run and keeps_states:
            # One pass over a text serves all blocks, if it reaches as far as the last one sees. The
            # scorer keeps the states, so that the next block finds them.
            num_seen = self.windows.tokens_before(self.start_of_last_block) - block.windows.short
            first = int(distant.places_F[0])
            distant_tokens = distant.document.tokens[first : first + num_seen]
            prefix = block.tokens[: block.num_prefix]
            states = self.scorer.states(np.concatenate([prefix, distant_tokens]))
        return self.scorer.context(block, states)

    # --- from a text to losses ---

    def _evaluate_text(self, text: _EvaluatedText) -> None:
        """Run all selectors on all kinds of units of one text, then compute L_k of each choice."""
        rankings: list[_Ranking] = []
        for unit_kind in self.unit_kinds:
            units = text.distant.units(unit_kind)
            rankings += self._rank_with_all_selectors(text, unit_kind, units)
            if text.is_document_context:
                self._add_reliability(text, unit_kind, units)

        # The rows of all rankings are evaluated in one call, so that they share batches.
        rows: list[Row] = []
        for ranking in rankings:
            rows += ranking.rows_with_units
            rows += ranking.rows_without_units
        remaining_N = self.scorer.sums(rows)
        for ranking in rankings:
            num_with = len(ranking.rows_with_units)
            num_both = num_with + len(ranking.rows_without_units)
            with_N, without_N, remaining_N = np.split(remaining_N, [num_with, num_both])
            shape = ranking.num_tokens_TK.shape
            loss_set_TK = with_N.reshape(shape)
            loss_without_TK = np.full(shape, np.nan)
            if len(without_N):
                loss_without_TK = without_N.reshape(shape)
            self._add_recovery(text, ranking, loss_set_TK, loss_without_TK)
            # `influence` lists one ranking for each target: that of the first draw.
            if ranking.labels.draw == 0:
                self._add_influence(text, ranking)

    def _rank_with_all_selectors(
        self, text: _EvaluatedText, unit_kind: str, units: Units
    ) -> list[_Ranking]:
        """Return a ranking by each selector, and by each draw of a random selector. Add rows to
        `lds` and `costs`."""
        halves = None
        # A single unit cannot be halved.
        if self.num_halves > 0 and text.is_document_context and len(units) > 1:
            halves = self._evaluate_halves(text, unit_kind, units)
        rankings = []
        for selector in self.selectors:
            # An unrelated text is itself one of several draws, so one ranking of it is enough.
            num_draws = 1 if text.is_control else find_selector(selector).draws
            for draw in range(text.number, text.number + num_draws):
                labels = RankingLabels(unit_kind, selector, text.control, draw)
                ranking = self._rank_and_list_rows(text, units, labels)
                rankings.append(ranking)
                if halves is not None and draw == 0:
                    lds_T = linear_datamodeling_scores(ranking.choice, halves)
                    places = text.places(ranking.spans)
                    self.tables.add("lds", labels._asdict(), target=places, lds=lds_T)
        return rankings

    def _rank_and_list_rows(
        self, text: _EvaluatedText, units: Units, labels: RankingLabels
    ) -> _Ranking:
        """Rank the units for all targets of a text, and list the rows that L_k needs."""
        spans = text.all_spans
        choice = self._rank(text, units, labels)
        all_distant = np.arange(text.context.block.num_distant)
        rows_with_units: list[Row] = []
        rows_without_units: list[Row] = []
        num_tokens: list[int] = []
        for span, unit_K in zip(spans, choice.unit_TK, strict=True):
            for k in self.ks:
                places = units.places(*unit_K[:k])
                rows_with_units.append(text.context.set_row(places, span))
                num_tokens.append(len(places))
                if not text.is_control:
                    other_places = np.setdiff1d(all_distant, places)
                    rows_without_units.append(text.context.set_row(other_places, span))
        return _Ranking(
            labels=labels,
            units=units,
            spans=spans,
            choice=choice,
            num_tokens_TK=np.array(num_tokens).reshape(len(spans), len(self.ks)),
            rows_with_units=rows_with_units,
            rows_without_units=rows_without_units,
        )

    def _rank(self, text: _EvaluatedText, units: Units, labels: RankingLabels) -> Choice:
        """Rank the units for all targets of a text, by a selector, or as another measurement ranked
        them. Add a row to `costs`."""
        block = text.context.block
        spans = text.all_spans
        forwards_before = self.scorer.token_forwards
        if self.choices is None:
            # The seed depends on what is ranked, not on the order of evaluation, so that a resumed
            # measurement draws the same.
            place = (self.document.number, block.start)
            generator = stream(self.seed, "selector", *place, labels.draw, text.control)
            question = Question(text.context, units, spans, max(self.ks), generator)
            choice = find_selector(labels.selector)(self.scorer, question)
        else:
            places = text.places(spans).tolist()
            choice = self.choices.pick(self.document.number, labels, places, units, block.first)
        # The reported cost is that of one choice, without repeated draws and controls.
        if text.is_document_context and labels.draw == 0:
            self._add_cost(labels.units, labels.selector, forwards_before, len(spans))
        return choice

    def _evaluate_halves(self, text: _EvaluatedText, unit_kind: str, units: Units) -> RandomHalves:
        """Evaluate random halves of the units of the document's own context. Add a row to
        `costs`."""
        spans = text.spans_by_part[DOCUMENT]
        forwards_before = self.scorer.token_forwards
        generator = stream(self.seed, "halves", self.document.number, text.context.block.start)
        question = Question(text.context, units, spans, max(self.ks), generator)
        halves = evaluate_halves(self.scorer, question, self.num_halves)
        self._add_cost(unit_kind, "halves", forwards_before, len(spans))
        return halves

    # --- rows of the tables ---

    def _add_reliability(self, text: _EvaluatedText, unit_kind: str, units: Units) -> None:
        """Add the reliability of the replacing texts to `lds`, where texts replace distant ones."""
        if not isinstance(self.scorer, ReplacingScorer):
            return
        spans = text.spans_by_part[DOCUMENT]
        reliability_T = reliability_of_texts(self.scorer, text.context, units, spans)
        if reliability_T is not None:
            labels = {"units": unit_kind, "selector": RELIABILITY}
            self.tables.add("lds", labels, target=text.places(spans), lds=reliability_T)

    def _add_recovery(
        self,
        text: _EvaluatedText,
        ranking: _Ranking,
        loss_set_TK: np.ndarray,
        loss_without_TK: np.ndarray,
    ) -> None:
        """Add the losses of a ranking to `recovery`, a row for each target and each k."""
        for distant_part, spans in text.spans_by_part.items():
            index_T = np.array([ranking.spans.index(span) for span in spans])
            self.tables.add(
                "recovery",
                {"distant_part": distant_part} | ranking.labels._asdict(),
                target=text.places(spans).repeat(len(self.ks)),
                k=np.tile(np.array(self.ks), len(spans)),
                num_tokens=ranking.num_tokens_TK[index_T].ravel(),
                loss_set=loss_set_TK[index_T].ravel(),
                loss_without=loss_without_TK[index_T].ravel(),
            )

    def _add_influence(self, text: _EvaluatedText, ranking: _Ranking) -> None:
        """Add the units of a ranking to `influence`, a row for each target and each rank. Their
        places are those of the document, also for an unrelated text, whose tokens have the position
        IDs of the document's."""
        block = text.context.block
        for distant_part, spans in text.spans_by_part.items():
            index_T = np.array([ranking.spans.index(span) for span in spans])
            unit_TK = ranking.choice.unit_TK[index_T]
            num_ranks = unit_TK.shape[1]
            first = ranking.units.first[unit_TK].ravel()
            end = ranking.units.end[unit_TK].ravel()
            self.tables.add(
                "influence",
                {"distant_part": distant_part} | ranking.labels._asdict(),
                target=text.places(spans).repeat(num_ranks),
                rank=np.tile(np.arange(1, num_ranks + 1), len(spans)),
                distant_first=block.first + first,
                distant_end=block.first + end,
                distant_text=list(map(text.distant.text, first, end)),
                influence=ranking.choice.influence_TK[index_T].ravel(),
            )

    def _add_cost(
        self, unit_kind: str, selector: str, forwards_before: int, num_targets: int
    ) -> None:
        """Add the token-forwards that the scorer has computed since it had computed
        `forwards_before` of them."""
        labels = {"units": unit_kind, "selector": selector}
        num_computed = self.scorer.token_forwards - forwards_before
        self.tables.add("costs", labels, token_forwards=[num_computed], num_targets=[num_targets])
