"""Evaluate one distant text: rank its units for each target, and compute the losses with k of them.

    EvaluatedText (a distant text, and the targets after it)
      ↓ for each kind of units and each selector: rank the units             `influence`, `costs`
    _Ranking      the units of each target, and the rows that L_k needs
      ↓ the rows of all rankings together: losses                            `recovery`
    RecoveryTables

The tables on the right get rows in these steps. `TextEvaluation.evaluate` is the entry point;
recovery.py calls it with each text of a document.

For each target and each k two rows are evaluated. Of a text with distant tokens d1 … d6, of which a
selector ranked d4 first and d2 second, they hold for k=2:

    with the units       d2 d4 | local window | target              its loss is L_k, `loss_set`
    without the units    d1 d3 d5 d6 | local window | target        its loss is `loss_without`

The selectors rank once for the largest k. For `ks=(1, 2)` and the losses 3.1, 2.4 (with the units)
and 1.9, 2.2 (without them), the table `recovery` gets two rows:

    target  units   selector  control  draw  k  num_tokens  loss_set  loss_without
        18  tokens  add_one   own         0  1           1       3.1           1.9
        18  tokens  add_one   own         0  2           2       2.4           2.2

Words: *spans* are targets, as indices into a block, from the first token to one past the last.
*Unit kinds* are names such as `tokens`; *units* are runs of distant tokens of one text.

Dimension key: T targets, K numbers of distant units, N rows of one call of the scorer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olmo_sparsity.analysis.measurement.agreement import (
    RandomHalves,
    evaluate_halves,
    linear_datamodeling_scores,
    reliability_of_texts,
)
from olmo_sparsity.analysis.measurement.choices import Choices
from olmo_sparsity.analysis.measurement.evaluated_text import EvaluatedText
from olmo_sparsity.analysis.measurement.recovery_tables import RankingLabels, RecoveryTables
from olmo_sparsity.analysis.results.statistics import RELIABILITY
from olmo_sparsity.analysis.results.target_rows import DOCUMENT
from olmo_sparsity.analysis.scoring.replaced import ReplacingScorer
from olmo_sparsity.analysis.scoring.rows import Row
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.influence import Choice, Question, find_selector
from olmo_sparsity.base.streams import stream
from olmo_sparsity.text.units import Spans, Units


@dataclass(frozen=True)
class _Ranking:
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
class TextEvaluation:
    """Evaluates distant texts of one document, and adds the rows to its tables."""

    scorer: Scorer
    document_number: int
    unit_kinds: tuple[str, ...]
    selectors: tuple[str, ...]
    ks: tuple[int, ...]
    num_halves: int
    """Number of random halves of the units that `lds` is computed from; with 0 it is not
    computed."""

    seed: int
    choices: Choices | None
    """Ranked units of another measurement, in place of the selectors' own."""

    tables: RecoveryTables

    def evaluate(self, text: EvaluatedText) -> None:
        """Run all selectors on all kinds of units of a text, and compute L_k of each choice."""
        rankings: list[_Ranking] = []
        for unit_kind in self.unit_kinds:
            units = text.distant.units(unit_kind)
            rankings += self._rank_with_all_selectors(text, unit_kind, units)
            if text.is_document_context:
                self._add_reliability(text, unit_kind, units)

        self._add_losses(text, rankings)
        for ranking in rankings:
            # `influence` lists one ranking for each target: that of the first draw.
            if ranking.labels.draw == 0:
                self._add_influence(text, ranking)

    # --- ranking ---

    def _rank_with_all_selectors(
        self, text: EvaluatedText, unit_kind: str, units: Units
    ) -> list[_Ranking]:
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
                indices = units.distant_indices(*unit_K[:k])
                rows_with_units.append(text.context.set_row(indices, span))
                num_tokens.append(len(indices))
                if not text.is_control:
                    # The long window without the units is a set like others: all other tokens.
                    other_indices = np.setdiff1d(all_distant, indices)
                    rows_without_units.append(text.context.set_row(other_indices, span))
        return _Ranking(
            labels=labels,
            units=units,
            spans=spans,
            choice=choice,
            num_tokens_TK=np.array(num_tokens).reshape(len(spans), len(self.ks)),
            rows_with_units=rows_with_units,
            rows_without_units=rows_without_units,
        )

    def _rank(self, text: EvaluatedText, units: Units, labels: RankingLabels) -> Choice:
        """Rank the units for all targets of a text, by a selector, or as another measurement ranked
        them. Add a row to `costs`."""
        block = text.context.block
        spans = text.all_spans
        forwards_before = self.scorer.token_forwards
        if self.choices is None:
            # The seed depends on what is ranked, not on the order of evaluation, so that a resumed
            # measurement draws the same.
            generator = stream(
                self.seed,
                "selector",
                self.document_number,
                block.start,
                labels.draw,
                text.control,
            )
            # Ranked once for the largest k: the units for a smaller k are the first of these.
            question = Question(text.context, units, spans, max(self.ks), generator)
            choice = find_selector(labels.selector)(self.scorer, question)
        else:
            places = text.places(spans).tolist()
            choice = self.choices.pick(
                self.document_number, labels, places, units, block.first_distant
            )
        # The reported cost is that of one choice, without repeated draws and controls.
        if text.is_document_context and labels.draw == 0:
            self._add_cost(labels.units, labels.selector, forwards_before, len(spans))
        return choice

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

    def _add_reliability(self, text: EvaluatedText, unit_kind: str, units: Units) -> None:
        """Add the reliability of the replacing texts to `lds`, where texts replace distant ones."""
        if not isinstance(self.scorer, ReplacingScorer):
            return
        spans = text.spans_by_part[DOCUMENT]
        reliability_T = reliability_of_texts(self.scorer, text.context, units, spans)
        if reliability_T is not None:
            labels = {"units": unit_kind, "selector": RELIABILITY}
            self.tables.add("lds", labels, target=text.places(spans), lds=reliability_T)

    # --- losses ---

    def _add_losses(self, text: EvaluatedText, rankings: list[_Ranking]) -> None:
        """Compute the losses of all rankings, and add them to `recovery`, a row for each target and
        each k."""
        # The rows of all rankings are evaluated in one call, so that they share batches.
        rows: list[Row] = []
        for ranking in rankings:
            rows += ranking.rows_with_units
            rows += ranking.rows_without_units
        loss_N = self.scorer.sums(rows)

        # The losses are in the order of the rows: of each ranking those with its units, then those
        # without them.
        first_row = 0
        for ranking in rankings:
            shape_TK = ranking.num_tokens_TK.shape
            end_with = first_row + len(ranking.rows_with_units)
            end_without = end_with + len(ranking.rows_without_units)
            loss_set_TK = loss_N[first_row:end_with].reshape(shape_TK)
            loss_without_TK = np.full(shape_TK, np.nan)
            if ranking.rows_without_units:
                loss_without_TK = loss_N[end_with:end_without].reshape(shape_TK)
            self._add_recovery(text, ranking, loss_set_TK, loss_without_TK)
            first_row = end_without

    def _add_recovery(
        self,
        text: EvaluatedText,
        ranking: _Ranking,
        loss_set_TK: np.ndarray,
        loss_without_TK: np.ndarray,
    ) -> None:
        """Add the losses of a ranking to `recovery`, a row for each target and each k."""
        # An unrelated text may serve both kinds of targets, which are ranked together and stored
        # apart.
        for distant_part, spans in text.spans_by_part.items():
            index_T = ranking.target_indices(spans)
            self.tables.add(
                "recovery",
                {"distant_part": distant_part} | ranking.labels._asdict(),
                target=text.places(spans).repeat(len(self.ks)),
                k=np.tile(np.array(self.ks), len(spans)),
                num_tokens=ranking.num_tokens_TK[index_T].ravel(),
                loss_set=loss_set_TK[index_T].ravel(),
                loss_without=loss_without_TK[index_T].ravel(),
            )

    def _add_influence(self, text: EvaluatedText, ranking: _Ranking) -> None:
        """Add the units of a ranking to `influence`, a row for each target and each rank. Their
        places are those of the document, also for an unrelated text, whose tokens have the position
        IDs of the document's."""
        block = text.context.block
        for distant_part, spans in text.spans_by_part.items():
            index_T = ranking.target_indices(spans)
            unit_TK = ranking.choice.unit_TK[index_T]
            num_ranks = unit_TK.shape[1]
            first = ranking.units.first[unit_TK].ravel()
            end = ranking.units.end[unit_TK].ravel()
            self.tables.add(
                "influence",
                {"distant_part": distant_part} | ranking.labels._asdict(),
                target=text.places(spans).repeat(num_ranks),
                rank=np.tile(np.arange(1, num_ranks + 1), len(spans)),
                distant_first=block.first_distant + first,
                distant_end=block.first_distant + end,
                distant_text=list(map(text.distant.text, first, end)),
                influence=ranking.choice.influence_TK[index_T].ravel(),
            )
