"""Evaluate one distant text: have its units ranked, and compute the losses with k of them.

    EvaluatedText (a distant text, and the targets after it)
      ↓ for each kind of units and each selector: rank the units (ranking.py)    `costs`, `lds`
    Ranking       the units of each target, and the rows that L_k needs
      ↓ the rows of all rankings together: losses                                `recovery`
      ↓ the ranked units                                                         `influence`
    RecoveryTables

`lds` holds linear datamodeling scores. The tables on the right get rows in these steps.
`TextEvaluator.evaluate` is the entry point; recovery.py calls it with each text of a document.

The selectors rank once for the largest k. For `ks=(1, 2)` and the losses 3.1, 2.4 (with the units)
and 1.9, 2.2 (without them), the table `recovery` gets two rows:

    target  units   selector  control  draw  k  num_tokens  loss_set  loss_without
        18  tokens  add_one   own         0  1           1       3.1           1.9
        18  tokens  add_one   own         0  2           2       2.4           2.2

Dimension key: T targets, K ranks or numbers of units, N items of a list (the rows of all rankings).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olmo_sparsity.analysis.measurement.agreement import reliability_of_texts
from olmo_sparsity.analysis.measurement.evaluated_text import EvaluatedText
from olmo_sparsity.analysis.measurement.ranking import Ranking, TextRanker
from olmo_sparsity.analysis.measurement.recovery_tables import RecoveryTables
from olmo_sparsity.analysis.results.statistics import RELIABILITY
from olmo_sparsity.analysis.results.target_rows import DOCUMENT
from olmo_sparsity.analysis.scoring.replaced import ReplacingScorer
from olmo_sparsity.analysis.scoring.rows import Row
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.text.units import Units


@dataclass(frozen=True, kw_only=True)
class TextEvaluator:
    """Evaluates distant texts of one document, and adds the rows to its tables."""

    scorer: Scorer
    ranker: TextRanker
    unit_kinds: tuple[str, ...]
    ks: tuple[int, ...]
    tables: RecoveryTables

    def evaluate(self, text: EvaluatedText) -> None:
        """Run all selectors on all kinds of units of a text, and compute L_k of each choice."""
        rankings: list[Ranking] = []
        for unit_kind in self.unit_kinds:
            units = text.distant.units(unit_kind)
            # One ranking for each selector, and for each draw of a random one. `rank` also adds its
            # rows to the tables `costs` and `lds`.
            rankings += self.ranker.rank(text, unit_kind, units)
            if text.is_document_context and isinstance(self.scorer, ReplacingScorer):
                self._add_reliability(self.scorer, text, unit_kind, units)

        self._add_losses(text, rankings)
        for ranking in rankings:
            # `influence` lists one ranking for each target: that of the first draw.
            if ranking.labels.draw == 0:
                self._add_influence(text, ranking)

    def _add_reliability(
        self, scorer: ReplacingScorer, text: EvaluatedText, unit_kind: str, units: Units
    ) -> None:
        """Add to `lds` how well two halves of the replacing texts agree on what matters."""
        spans = text.spans_by_part[DOCUMENT]
        reliability_T = reliability_of_texts(scorer, text.context, units, spans)
        if reliability_T is not None:
            labels = {"units": unit_kind, "selector": RELIABILITY}
            self.tables.add("lds", labels, target=text.places(spans), lds=reliability_T)

    def _add_losses(self, text: EvaluatedText, rankings: list[Ranking]) -> None:
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
        remaining_N = loss_N
        for ranking in rankings:
            shape_TK = ranking.num_tokens_TK.shape
            num_with = len(ranking.rows_with_units)
            num_without = len(ranking.rows_without_units)
            with_N, without_N, remaining_N = np.split(
                remaining_N, [num_with, num_with + num_without]
            )
            loss_set_TK = with_N.reshape(shape_TK)
            loss_without_TK = np.full(shape_TK, np.nan)
            if num_without:
                loss_without_TK = without_N.reshape(shape_TK)
            self._add_recovery(text, ranking, loss_set_TK, loss_without_TK)

    def _add_recovery(
        self,
        text: EvaluatedText,
        ranking: Ranking,
        loss_set_TK: np.ndarray,
        loss_without_TK: np.ndarray,
    ) -> None:
        """Add the losses of a ranking to `recovery`, a row for each target and each k."""
        # An unrelated text may serve document and placebo targets, which are ranked together and
        # stored apart.
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

    def _add_influence(self, text: EvaluatedText, ranking: Ranking) -> None:
        """Add the units of a ranking to `influence`, a row for each target and each rank. Their
        places are those of the document, also for an unrelated text, whose tokens have the position
        IDs of the document's."""
        block = text.context.block
        for distant_part, spans in text.spans_by_part.items():
            index_T = ranking.target_indices(spans)
            unit_TK = ranking.choice.unit_TK[index_T]
            num_ranks = unit_TK.shape[1]
            first_index = ranking.units.first[unit_TK].ravel()
            end_index = ranking.units.end[unit_TK].ravel()
            self.tables.add(
                "influence",
                {"distant_part": distant_part} | ranking.labels._asdict(),
                target=text.places(spans).repeat(num_ranks),
                rank=np.tile(np.arange(1, num_ranks + 1), len(spans)),
                distant_first=block.first_distant + first_index,
                distant_end=block.first_distant + end_index,
                distant_text=list(map(text.distant.text, first_index, end_index)),
                influence=ranking.choice.influence_TK[index_T].ravel(),
            )
