"""Hold the units that another model ranked, to be evaluated in place of a selector's own.

    choices = Choices.of(other_results, matched)
    choice = choices.pick(document_number, labels, targets, units, offset)  # as a selector returns

Why evaluate units that another model ranked: a unit that lowers the loss of one model by chance
lowers that of another no more than any other unit does. So recovery by such units needs no placebo;
it is called transfer.

The other measurement stored units by their places in the document. A selector, and so `pick`,
returns them by their index among the units of a block whose distant tokens begin at `offset`:

    stored   target  rank  distant_first  distant_end      offset=100, units (0,2) (2,5) (5,6)
                260     1            105          106      → unit 2
                260     2            100          102      → unit 0

Dimension key: T targets, K ranks or numbers of units, U distant units.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.matched import Matched
from olmo_sparsity.analysis.measurement.recovery_tables import RankingLabels
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.target_rows import DOCUMENT
from olmo_sparsity.analysis.selectors.influence import Choice
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.text.units import Units

CHOICE_KEYS = ["document", "units", "selector", "control", "target"]
"""The columns that tell one ranking of units from others."""


@dataclass(frozen=True)
class Choices:
    """The units that another model ranked for each target, in the document and in an unrelated
    text."""

    ranked: dict[tuple[Any, ...], np.ndarray]
    """Values of `CHOICE_KEYS` → an array with a row for each rank: first place of the unit, one
    past its last, influence."""

    fingerprint: str
    """A hash of the places of all units, by rank, which identifies the choices."""

    model: dict[str, Any]
    """Name and fingerprint of the model that chose."""

    has_unrelated: bool
    """Whether units of unrelated texts were ranked, too."""

    @staticmethod
    def of(results: Results, matched: Matched) -> Choices:
        """Take the ranked units of targets in the documents' own distant context, and those of the
        first unrelated text."""
        influence = matched.influence[matched.influence.distant_part == DOCUMENT]
        if not len(influence):
            raise DataError("the other measurement has no ranked units; measure it again")
        rows = influence.sort_values([*CHOICE_KEYS, "rank"])
        places = rows[[*CHOICE_KEYS, "distant_first", "distant_end"]]
        digest = hashlib.sha256(places.to_csv(index=False).encode())
        return Choices(
            ranked=_split_into_rankings(rows),
            fingerprint=digest.hexdigest(),
            model={name: results.meta.model.get(name) for name in ("name", "fingerprint")},
            has_unrelated=bool((influence.control == "unrelated").any()),
        )

    def pick(
        self,
        document: int,
        labels: RankingLabels,
        targets: Sequence[int],
        units: Units,
        offset: int,
    ) -> Choice:
        """Return the ranked units of targets, as a selector would.

        Args:
            document: Number of the document.
            labels: Kind of units, selector and control.
            targets: Places of the targets in the document.
            units: All distant units of the block, by their index among the distant tokens.
            offset: Place of the first distant token in the document.
        """
        all_bounds = zip(units.first, units.end, strict=True)
        unit_of_bounds = {bounds: unit for unit, bounds in enumerate(all_bounds)}
        units_of_targets = []
        influences_of_targets = []
        for target in targets:
            key = (document, labels.units, labels.selector, labels.control, target)
            first_K, end_K, influence_K = self.ranked[key].T
            bounds_K = zip(first_K.astype(int) - offset, end_K.astype(int) - offset, strict=True)
            units_of_targets.append([unit_of_bounds[bounds] for bounds in bounds_K])
            influences_of_targets.append(influence_K)

        unit_TK = np.array(units_of_targets)
        influence_TK = np.array(influences_of_targets)
        score_TU = np.zeros((len(unit_TK), len(units)))
        np.put_along_axis(score_TU, unit_TK, influence_TK, axis=1)
        return Choice(unit_TK, influence_TK, score_TU)


def _split_into_rankings(rows: pd.DataFrame) -> dict[tuple[Any, ...], np.ndarray]:
    """Return the rankings of a table, as `Choices.ranked` holds them. The rows are ranked units,
    sorted by `CHOICE_KEYS` and rank."""
    # Rows of one ranking are neighbours. They are split where the next ranking begins: that
    # takes 0.4 s for 100,000 rankings, and a groupby 2.2 s.
    is_first_rank = ~rows.duplicated(CHOICE_KEYS).to_numpy()
    keys = rows.loc[is_first_rank, CHOICE_KEYS].itertuples(index=False, name=None)
    values = rows[["distant_first", "distant_end", "influence"]].to_numpy(float)
    rankings = np.split(values, np.flatnonzero(is_first_rank)[1:])
    return dict(zip(keys, rankings, strict=True))
