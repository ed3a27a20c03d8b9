"""Hold the units that another model ranked, to be evaluated in place of a selector's own.

    choices = Choices.of(other_results, reused_targets)
    choice = choices.pick(document_number, labels, targets, units, first_distant)

`pick` returns a `Choice`, as a selector does.

Why evaluate units that another model ranked: a unit that lowers the loss of one model by chance
lowers that of another no more than any other unit does. So recovery by such units needs no placebo;
it is called transfer.

The other measurement stored units by their places in the document. A selector, and so `pick`,
returns them by their index among the units of a block. If its distant tokens begin at place 100:

    units of the block      0: tokens 100 to 101      1: 102 to 104      2: 105

    stored   target  rank  distant_first  distant_end
                260     1            105          106      → unit 2
                260     2            100          102      → unit 0

Dimension key: T targets, K ranks or numbers of units, U distant units.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.recovery_tables import RankingLabels
from olmo_sparsity.analysis.measurement.reused_targets import ReusedTargets
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.target_rows import DOCUMENT
from olmo_sparsity.analysis.selectors.influence import Choice
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.text.units import Units


class _RankingKey(NamedTuple):
    """The columns that tell one ranking of units from others."""

    document: int
    units: str
    selector: str
    control: str
    target: int


_KEYS = list(_RankingKey._fields)


@dataclass(frozen=True)
class Choices:
    """The units that another model ranked for each target, in the document and in an unrelated
    text."""

    rankings: dict[_RankingKey, np.ndarray]
    """Each ranking as an array with a row for each rank: first place of the unit, one past its
    last, influence."""

    fingerprint: str
    """A hash of the places of all units, by rank, which identifies the choices."""

    model: dict[str, Any]
    """Name and fingerprint of the model that chose."""

    has_unrelated: bool
    """Whether units of unrelated texts were ranked, too."""

    @staticmethod
    def of(other: Results, reused: ReusedTargets) -> Choices:
        """Take the units that another measurement ranked for document targets: those of the
        document itself, and those of the first unrelated text."""
        ranked_units = reused.ranked_units
        ranked_units = ranked_units[ranked_units.distant_part == DOCUMENT]
        if not len(ranked_units):
            raise DataError("the other measurement has no ranked units; measure it again")
        rows = ranked_units.sort_values([*_KEYS, "rank"])
        places = rows[[*_KEYS, "distant_first", "distant_end"]]
        digest = hashlib.sha256(places.to_csv(index=False).encode())
        return Choices(
            rankings=_split_into_rankings(rows),
            fingerprint=digest.hexdigest(),
            model={name: other.meta.model.get(name) for name in ("name", "fingerprint")},
            has_unrelated=bool((ranked_units.control == "unrelated").any()),
        )

    def pick(
        self,
        document: int,
        labels: RankingLabels,
        targets: Sequence[int],
        units: Units,
        first_distant: int,
    ) -> Choice:
        """Return the ranked units of targets, as a selector would.

        Args:
            document: Number of the document.
            labels: Kind of units, selector and control.
            targets: Places of the targets in the document.
            units: All distant units of the block, by their index among the distant tokens.
            first_distant: Place of the block's first distant token in the document.
        """
        bounds_of_units = zip(units.first, units.end, strict=True)
        unit_by_bounds = {bounds: unit for unit, bounds in enumerate(bounds_of_units)}
        units_of_targets = []
        influences_of_targets = []
        for target in targets:
            key = _RankingKey(document, labels.units, labels.selector, labels.control, target)
            first_K, end_K, influence_K = self.rankings[key].T
            # Places in the document become distant indices of the block.
            first_index_K = first_K.astype(int) - first_distant
            end_index_K = end_K.astype(int) - first_distant
            bounds_by_rank = zip(first_index_K, end_index_K, strict=True)
            units_of_targets.append([unit_by_bounds[bounds] for bounds in bounds_by_rank])
            influences_of_targets.append(influence_K)

        unit_TK = np.array(units_of_targets)
        influence_TK = np.array(influences_of_targets)
        score_TU = np.zeros((len(unit_TK), len(units)))
        np.put_along_axis(score_TU, unit_TK, influence_TK, axis=1)
        return Choice(unit_TK, influence_TK, score_TU)


def _split_into_rankings(rows: pd.DataFrame) -> dict[_RankingKey, np.ndarray]:
    """Return the rankings of a table, as `Choices.rankings` holds them.

    Args:
        rows: Ranked units, sorted by the columns of `_RankingKey` and by rank.
    """
    # Rows of one ranking are neighbours. They are split where the next ranking begins: that
    # takes 0.4 s for 100,000 rankings, and a groupby 2.2 s.
    is_first_rank = ~rows.duplicated(_KEYS).to_numpy()
    values_of_keys = rows.loc[is_first_rank, _KEYS].itertuples(index=False, name=None)
    keys = [_RankingKey(*values) for values in values_of_keys]
    units = rows[["distant_first", "distant_end", "influence"]].to_numpy(float)
    rankings = np.split(units, np.flatnonzero(is_first_rank)[1:])
    return dict(zip(keys, rankings, strict=True))
