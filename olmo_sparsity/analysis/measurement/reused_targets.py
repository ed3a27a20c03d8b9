"""Hold the targets and ranked units of another measurement, and how many of them are left out.

Its model may have another tokenizer. Then a target or unit is found by its characters, and some are
not found:

    reused.targets         document  target  end  other_target
                                  1       5    7             4    token 4 there, 5 and 6 here
    reused.match_counts    MatchCounts(targets=80, of_targets=96, targets_cut_otherwise=11, …)

`reusable_targets` of reuse.py returns a `ReusedTargets`, for other tokens by the help of
matching.py. fixed_targets.py and choices.py read it.
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
    """Those whose characters are not a unit in the tokens here."""

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
    """All targets of the other measurement."""

    targets_in_other_text: int
    """Those in documents whose text here is another one."""

    targets_cut_otherwise: int
    """Those that begin or end inside a token of this tokenizer."""

    targets_outside_windows: int
    """Those that have no full window before them here, or whose tokens lie in two blocks."""

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
class ReusedTargets:
    """Targets and ranked units of another measurement, as places in this one's documents."""

    targets: pd.DataFrame
    ranked_units: pd.DataFrame
    """Rows of the table `influence`. They are read only if the ranked units are reused, too."""

    match_counts: MatchCounts | None = None
    """How many targets and units are left out, and why. None with the same tokenizer, where all are
    found."""

    has_other_windows: bool = False
    """Whether the other measurement cut or sampled the text in another way. Then only the blocks of
    its targets need losses here."""
