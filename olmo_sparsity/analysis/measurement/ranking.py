"""Rank the units of one distant text by each selector, and list the rows that their losses need.

    EvaluatedText (a distant text, and the targets after it), units
        → `TextRanker.rank`, for each selector → Choice: the units of each target, best first
        → Ranking: these, and the rows of each target and k

For each target and each k two rows are listed. Of a text with distant tokens d1 … d6, of which a
selector ranked d4 first and d2 second, they hold for k=2:

    with the units       d2 d4 | local window | target              its loss is L_k, `loss_set`
    without the units    d1 d3 d5 d6 | local window | target        its loss is `loss_without`

text_evaluation.py calls `rank`, and has the rows evaluated. Here, rows are added to the tables
`costs` (what ranking took) and `lds` (how well scores predict effects).

Words: *spans* are targets, as indices into a block, from the first token to one past the last.
*Unit kinds* are names such as `tokens`; *units* are runs of distant tokens of one text.

Dimension key: T targets, K ranks or numbers of units.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olmo_sparsity.analysis.measurement.agreement import (
    RandomHalves,
    evaluate_halves,
    linear_datamodeling_scores,
)
from olmo_sparsity.analysis.measurement.choices import Choices
from olmo_sparsity.analysis.measurement.evaluated_text import EvaluatedText
from olmo_sparsity.analysis.measurement.recovery_tables import RankingLabels, RecoveryTables
from olmo_sparsity.analysis.results.target_rows import DOCUMENT
from olmo_sparsity.analysis.scoring.rows import Row
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.influence import Choice, Question, find_selector
from olmo_sparsity.base.streams import stream
from olmo_sparsity.text.units import Spans, Units


@dataclass(frozen=True)
class Ranking:
    """The units that a selector chose for the targets of a text, and the rows to be evaluated.

    Both lists of rows have one for each target and each k: for two targets and ks=(1, 2) those of
    the first target with 1 and with 2 units, then those of the second."""

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

    def target_indices(self, spans: Spans) -> np.ndarray:
        """Return index_T, the indices of these targets among those of the ranking."""
        return np.array([self.spans.index(span) for span in spans])


@dataclass(frozen=True, kw_only=True)
class TextRanker:
    """Ranks the units of distant texts of one document."""

    scorer: Scorer
    document_number: int
    selectors: tuple[str, ...]
    ks: tuple[int, ...]
    num_halves: int
    """Number of random halves of the units that `lds` is computed from; with 0 it is not
    computed."""

    seed: int
    choices: Choices | None
    """Ranked units of another measurement, in place of the selectors' own."""

    tables: RecoveryTables

    def rank(self, text: EvaluatedText, unit_kind: str, units: Units) -> list[Ranking]:
        """Return a ranking by each selector, and by each draw of a random selector. Add rows to
        `lds` and `costs`."""
        # Random halves are evaluated once, and compared with each selector's scores. A single unit
        # cannot be halved.
        halves = None
        if self.num_halves > 0 and text.is_document_context and len(units) > 1:
            halves = self._evaluate_halves(text, unit_kind, units)

        rankings = []
        for selector in self.selectors:
            # An unrelated text is itself one of several draws, so one ranking of it is enough.
            num_rankings = 1 if text.is_control else find_selector(selector).draws
            for draw in range(text.draw, text.draw + num_rankings):
                labels = RankingLabels(unit_kind, selector, text.control, draw)
                ranking = self._rank_and_list_rows(text, units, labels)
                rankings.append(ranking)
                if halves is not None and draw == 0:
                    lds_T = linear_datamodeling_scores(ranking.choice, halves)
                    places = text.places(ranking.spans)
                    self.tables.add("lds", labels._asdict(), target=places, lds=lds_T)
        return rankings

    def _rank_and_list_rows(
        self, text: EvaluatedText, units: Units, labels: RankingLabels
    ) -> Ranking:
        """Rank the units for all targets of a text, and list the rows that L_k needs."""
        spans = text.all_spans
        choice = self._choose(text, units, labels)
        all_distant = np.arange(text.context.block.num_distant)
        rows_with_units: list[Row] = []
        rows_without_units: list[Row] = []
        num_tokens: list[int] = []
        for span, unit_K in zip(spans, choice.unit_TK, strict=True):
            for k in self.ks:
                indices = units.distant_indices(*unit_K[:k])
                rows_with_units.append(text.context.set_row(indices, span))
                num_tokens.append(len(indices))
                if not text.is_control:
                    # The long window without the units is a set like others: all other tokens.
                    other_indices = np.setdiff1d(all_distant, indices)
                    rows_without_units.append(text.context.set_row(other_indices, span))
        return Ranking(
            labels=labels,
            units=units,
            spans=spans,
            choice=choice,
            num_tokens_TK=np.array(num_tokens).reshape(len(spans), len(self.ks)),
            rows_with_units=rows_with_units,
            rows_without_units=rows_without_units,
        )

    def _choose(self, text: EvaluatedText, units: Units, labels: RankingLabels) -> Choice:
        """Rank the units for all targets of a text, by a selector, or as another measurement ranked
        them. Add a row to `costs`."""
        spans = text.all_spans
        forwards_before = self.scorer.token_forwards
        if self.choices is None:
            choice = self._choose_by_selector(text, units, labels)
        else:
            places = text.places(spans).tolist()
            first_distant = text.context.block.first_distant
            choice = self.choices.pick(self.document_number, labels, places, units, first_distant)
        # The reported cost is that of one choice, without repeated draws and controls.
        if text.is_document_context and labels.draw == 0:
            self._add_cost(labels.units, labels.selector, forwards_before, len(spans))
        return choice

    def _choose_by_selector(
        self, text: EvaluatedText, units: Units, labels: RankingLabels
    ) -> Choice:
        """Rank the units for all targets of a text by a selector."""
        # The seed depends on what is ranked, not on the order of evaluation, so that a resumed
        # measurement draws the same.
        generator = stream(
            self.seed,
            "selector",
            self.document_number,
            text.context.block.start,
            labels.draw,
            text.control,
        )
        # Ranked once for the largest k: the units for a smaller k are the first of these.
        question = Question(text.context, units, text.all_spans, max(self.ks), generator)
        return find_selector(labels.selector)(self.scorer, question)

    def _evaluate_halves(self, text: EvaluatedText, unit_kind: str, units: Units) -> RandomHalves:
        """Evaluate random halves of the units of the document's own context. Add a row to
        `costs`."""
        spans = text.spans_by_part[DOCUMENT]
        forwards_before = self.scorer.token_forwards
        generator = stream(self.seed, "halves", self.document_number, text.context.block.start)
        question = Question(text.context, units, spans, max(self.ks), generator)
        halves = evaluate_halves(self.scorer, question, self.num_halves)
        self._add_cost(unit_kind, "halves", forwards_before, len(spans))
        return halves

    def _add_cost(
        self, unit_kind: str, selector: str, forwards_before: int, num_targets: int
    ) -> None:
        """Add a row to `costs`.

        Args:
            unit_kind: The kind of units.
            selector: The selector, or what else was computed, such as `halves`.
            forwards_before: The token-forwards of the scorer before the computation.
            num_targets: The number of targets that it was for.
        """
        num_forwards = self.scorer.token_forwards - forwards_before
        self.tables.add_cost(unit_kind, selector, num_forwards, num_targets)
