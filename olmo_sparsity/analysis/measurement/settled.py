"""Hold what may be known before a measurement computes a loss: its targets, and losses themselves.

    another measurement, names, or records with targets ─ `FixedTargets.find` ─> FixedTargets
    another measurement with the same model             ────────────────────────> ReusedLosses

Without fixed targets, a measurement chooses its targets by their losses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.measurement.at import At
from olmo_sparsity.analysis.measurement.choices import Choices
from olmo_sparsity.analysis.measurement.named_targets import named_targets, targets_of_records
from olmo_sparsity.analysis.measurement.reuse import locate_targets
from olmo_sparsity.analysis.measurement.targets import COLUMNS
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.text.documents import Documents


@dataclass(frozen=True)
class FixedTargets:
    """Targets that are fixed before any loss is computed: those of another measurement, or named
    ones."""

    targets: pd.DataFrame

    only_named: bool = False
    """Whether only the blocks of these targets need losses: they were named, or match those of
    another tokenizer."""

    match_counts: dict[str, int] = field(default_factory=dict)
    """With targets or choices in other tokens: how many of them are evaluated, and how many left
    out for which reason."""

    choices: Choices | None = None
    """Units that the other measurement has ranked. None if units are ranked here."""

    @staticmethod
    def find(
        selection: Results | At | None, documents: Documents, settings: Settings, transfers: bool
    ) -> FixedTargets | None:
        """Return the targets that are known before any loss; None if losses choose them.

        Args:
            selection: Another measurement, or names of targets.
            documents: The documents of this measurement, which may be records with targets.
            settings: Its settings.
            transfers: Whether the units that the other measurement ranked are evaluated, too.
        """
        if isinstance(selection, Results):
            return FixedTargets.of_measurement(selection, documents, settings, transfers)
        if selection is not None:
            targets = named_targets(documents, selection, settings.windows)
            return FixedTargets(targets, only_named=True)
        if documents.have_targets:
            return FixedTargets(targets_of_records(documents, settings.windows))
        return None

    @staticmethod
    def of_measurement(
        other: Results, documents: Documents, settings: Settings, transfers: bool
    ) -> FixedTargets:
        """Take the targets of another measurement, for these documents and settings; with
        `transfers`, also the units that it ranked."""
        matched = locate_targets(other, documents, settings, transfers)
        return FixedTargets(
            targets=matched.targets[[*COLUMNS, "end"]].reset_index(drop=True),
            only_named=matched.counts is not None or matched.has_other_windows,
            match_counts={} if matched.counts is None else matched.counts.to_dict(),
            choices=Choices.of(other, matched) if transfers else None,
        )


@dataclass(frozen=True)
class ReusedLosses:
    """Losses that another measurement with the same model has computed. Empty: there is none."""

    by_document: dict[int, pd.DataFrame] = field(default_factory=dict)
    """Number of a document → its rows of the table losses."""

    origin: dict[str, Any] = field(default_factory=dict)
    """Commit, machine and command of that measurement."""
