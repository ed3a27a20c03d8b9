"""Hold what was found of another measurement: targets and ranked units, and how many are left out.

    matched.targets    document  target  end  other_target
                              1       5    7             4       token 4 there, tokens 5 and 6 here
    matched.counts     MatchCounts(targets=80, of_targets=96, targets_cut_otherwise=11, …)

reuse.py and matching.py return a `Matched`. settled.py and choices.py take targets and units of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pandas as pd

from olmo_sparsity.analysis.results.view import num_of


@dataclass(frozen=True)
class UnitCounts:
    """How many ranked units of another measurement were found."""

    of_units: int
    """All units that it ranked."""

    units_cut_otherwise: int
    """Those whose characters are not a unit here."""

    units_not_distant: int
    """Those that lie in the local window here, or outside the long window."""

    targets_with_few_units: int
    """Targets that are left out, as fewer units than the largest k remain."""


@dataclass(frozen=True)
class MatchCounts:
    """How many targets of another measurement were found, and why others were not. Results store
    the fields under their names; see docs/measure.md."""

    targets: int
    """Those that are evaluated here."""

    of_targets: int
    """All of its targets."""

    targets_in_other_text: int
    """Those of documents that read otherwise here."""

    targets_cut_otherwise: int
    """Those that begin or end inside a token."""

    targets_outside_windows: int
    """Those without a full window before them, or in two blocks."""

    units: UnitCounts | None = None
    """None if units were not matched."""

    def to_dict(self) -> dict[str, int]:
        """Return the counts as results store them, in one mapping."""
        counts = asdict(self)
        return counts | (counts.pop("units") or {})

    def __str__(self) -> str:
        text = (
            f"another tokenizer chose the targets: {self.targets:,} of "
            f"{num_of(self.of_targets, 'target')} matched; "
            f"{self.targets_in_other_text:,} lie in other text, "
            f"{self.targets_cut_otherwise:,} are not whole tokens here, "
            f"{self.targets_outside_windows:,} have no full window before them"
        )
        if self.units is not None:
            text += (
                f", {self.units.targets_with_few_units:,} have too few units left; of "
                f"{num_of(self.units.of_units, 'unit')}, {self.units.units_cut_otherwise:,} are "
                f"not units here and {self.units.units_not_distant:,} are not distant here"
            )
        return f"{text} (docs/measure.md)"


@dataclass(frozen=True)
class Matched:
    """Targets and ranked units of another measurement, as places in this one's documents."""

    targets: pd.DataFrame
    influence: pd.DataFrame
    counts: MatchCounts | None = None
    """How many targets and units are left out, and why; None with the same tokenizer, where all are
    found."""

    has_other_windows: bool = False
    """Whether the other measurement cut or sampled the text in another way. Then only the blocks of
    its targets need losses here."""
