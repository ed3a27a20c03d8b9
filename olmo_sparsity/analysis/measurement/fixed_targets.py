"""Hold the targets of a measurement that are fixed before it computes a loss.

    where targets come from               FixedTargets
    another measurement (targets=)        its targets
    another measurement (choices=)        its targets, and the units that it ranked
    names that the user passed (at=)      each token with these names
    records of a prompt and its target    each token after the prompt
    none of these                         None: targets are chosen by their losses

A table of fixed targets, for example:

    document  target  distant_part  target_set
           1      18  document      named

plan.py asks `FixedTargets.of_selection` for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd

from olmo_sparsity.analysis.measurement.at import At
from olmo_sparsity.analysis.measurement.choices import Choices
from olmo_sparsity.analysis.measurement.named_targets import named_targets, targets_of_records
from olmo_sparsity.analysis.measurement.reuse import reusable_targets
from olmo_sparsity.analysis.measurement.target_tables import TARGET_COLUMNS
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.text.documents import Documents


@dataclass(frozen=True)
class FixedTargets:
    """Targets that are fixed before any loss is computed."""

    table: pd.DataFrame
    """The targets, a row for each (target_tables.py)."""

    only_their_blocks: bool = False
    """Whether losses are computed only in the blocks of these targets. It is so if they were named,
    or if the blocks of the other measurement are not blocks here."""

    match_counts: dict[str, int] = field(default_factory=dict)
    """How many targets and units of another tokenizer are evaluated, and how many are left out for
    which reason. Empty with the same tokenizer, where all are found."""

    choices: Choices | None = None
    """Units that the other measurement has ranked. None if units are ranked here."""

    @staticmethod
    def of_selection(
        selection: Results | At | None, documents: Documents, settings: Settings, reuse_units: bool
    ) -> FixedTargets | None:
        """Return the targets that are fixed by the options or by the text. Return None if they are
        chosen by their losses.

        Args:
            selection: Another measurement, whose targets are evaluated, or names of targets. None
                if the options select none.
            documents: The documents of this measurement, which may be records with targets.
            settings: Its settings.
            reuse_units: Whether the units that the other measurement ranked are evaluated, too.
        """
        if isinstance(selection, Results):
            return _targets_of_other(selection, documents, settings, reuse_units)
        if selection is not None:
            table = named_targets(documents, selection, settings.windows)
            return FixedTargets(table, only_their_blocks=True)
        if documents.have_targets:
            return FixedTargets(targets_of_records(documents, settings.windows))
        return None


def _targets_of_other(
    other: Results, documents: Documents, settings: Settings, reuse_units: bool
) -> FixedTargets:
    """Return the targets of another measurement, as places in these documents; with `reuse_units`,
    also the units that it ranked."""
    reused = reusable_targets(other, documents, settings, reuse_units)
    has_other_tokens = reused.match_counts is not None
    return FixedTargets(
        table=reused.targets[[*TARGET_COLUMNS, "end"]].reset_index(drop=True),
        only_their_blocks=has_other_tokens or reused.has_other_windows,
        match_counts={} if reused.match_counts is None else reused.match_counts.to_dict(),
        choices=Choices.of(other, reused) if reuse_units else None,
    )
