"""Hold a finished measurement: its tables, and what was measured.

    `measure` → a folder → `read_results` (stored_results.py) → Results
                                                                ├ compare.py    differences of two
                                                                ├ summary.py    text for a terminal
                                                                └ report/       pages and figures

`results.summary` has the answer, a row for each target set, kind of units, selector and k:

    target_set  units   selector  k  recovery   low  high  excess  …
    gap         tokens  add_one   1      0.94  0.80  1.05    0.61
    gap         tokens  add_one   2      0.97  0.85  1.07    0.58

All other tables are what it was computed from. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from olmo_sparsity.analysis.results.meta import SETS, Meta
from olmo_sparsity.analysis.results.schemas import SCHEMAS
from olmo_sparsity.analysis.results.target_rows import SplitDocuments, half_of
from olmo_sparsity.analysis.results.view import spell
from olmo_sparsity.base.path_options import path_of


@dataclass(repr=False)
class Results:
    """One finished measurement. `SCHEMAS` and docs/measure.md list the columns of its tables."""

    documents: pd.DataFrame
    tokens: pd.DataFrame
    losses: pd.DataFrame
    targets: pd.DataFrame
    influence: pd.DataFrame
    recovery: pd.DataFrame
    lds: pd.DataFrame
    costs: pd.DataFrame
    summary: pd.DataFrame
    meta: Meta

    def __repr__(self) -> str:
        return (
            f"Results of {self.meta.model.get('name')}: {len(self.targets):,} targets in "
            f"{self.targets.document.nunique():,} documents. Tables: {', '.join(SCHEMAS)}"
        )

    @property
    def missing(self) -> str:
        """Return a warning that the measurement is partial; empty if it is complete."""
        num_left = self.meta.counts.get("documents_left", 0)
        if not num_left:
            return ""
        num_documents = num_left + self.meta.counts.get("documents_measured", 0)
        return f"partial: {num_left:,} of {num_documents:,} documents are not finished"

    @property
    def parts(self) -> SplitDocuments:
        """Return the numbers of the parts of each document that was split; empty if none was."""
        return self.meta.data.get("parts", {})

    @property
    def reported(self) -> pd.DataFrame:
        """Return the losses of the documents that the summary covers."""
        documents = self.losses.document
        # Only one half of the documents is reported if the other half has set the threshold.
        if self.meta.targets.get("threshold") is not None:
            return self.losses[documents.map(half_of) == "report"]
        return self.losses[documents.isin(self.targets.document)]

    def plot(self, path: str | Path) -> None:
        """Draw Figure 2 as .png, .pdf or .svg."""
        from olmo_sparsity.analysis.report.figures import draw_figure2  # imports matplotlib

        draw_figure2([self], path_of("path", path))

    def spell_set(self, name: str) -> str:
        """Return a readable name of a target set."""
        spelled = SETS.get(name, spell(name))
        if "given" in self.meta.targets:
            return spelled.replace("large gap", "chosen in other results")
        if self.meta.targets.get("share") == 1:
            return spelled.replace("large gap", "all")
        return spelled
