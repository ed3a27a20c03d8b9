"""Hold what an explanation computed, as plain data.

`ExplainedText` is at the bottom of the modules that deal with explanations: page.py and
stored_form.py read it, and `Explanation` of explanation.py adds the methods that users call. A text
with one target, of which k=2 units were ranked:

    targets   target  end  text     loss_short  loss_long   gap
                  61   63  " Ayrton"      9.10       0.40  8.70

    distant   target  rank  first  end  text       nats  loss_set  loss_without
                  61     1     12   14  " Ayrton"  7.90      1.20          5.30
                  61     2     40   41  " brave"   0.30      1.10          5.60

Losses are in nats, and summed over the tokens of a target.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.explain.check import Check
from olmo_sparsity.analysis.explain.prepared import Prepared
from olmo_sparsity.analysis.options import ExplainSettings
from olmo_sparsity.analysis.results.notes import describe_sink
from olmo_sparsity.analysis.results.view import num_of
from olmo_sparsity.base.renamed import OldAttribute
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.windows import Windows


@dataclass
class ExplainedText:
    """The targets of one text, with their losses and their distant units."""

    prepared: Prepared = field(repr=False)
    """The text, its windows, the settings and the model."""

    targets: pd.DataFrame
    """A row for each target: target, end (its first token, and one past its last), text,
    loss_short, loss_long, gap."""

    distant: pd.DataFrame
    """A row for each distant unit of a target: target, rank, first, end, text; `nats`, by which the
    loss falls when the unit alone is added to the local window; `loss_set`, the loss with this unit
    and all that rank before it; `loss_without`, the loss with the long window without these."""

    tables: dict[str, pd.DataFrame] = field(repr=False)
    """The tables of `recover`, as in a measurement (docs/measure.md)."""

    unrelated: Any = field(repr=False, default="builtin:embedded")
    """The unrelated texts that a check draws from."""

    checked: Check | None = None
    """The result of the last check; None before the first."""

    sink: dict[str, Any] = field(default_factory=dict, repr=False)
    """The sink check; empty if a prefix precedes the text."""

    token_forwards: int = 0
    """Token-forwards that the explanation took, without the check."""

    far = OldAttribute("distant")
    """The earlier name of `distant`."""

    @property
    def model(self) -> LoadedModel:
        return self.prepared.model

    @property
    def document(self) -> Document:
        """Return the explained text, with its tokens."""
        return self.prepared.document

    @property
    def windows(self) -> Windows:
        return self.prepared.windows

    @property
    def settings(self) -> ExplainSettings:
        return self.prepared.settings

    @property
    def chosen_by_gap(self) -> bool:
        """Return whether targets were chosen by their gaps, and not named."""
        return self.prepared.chosen_by_gap

    @property
    def model_meta(self) -> dict[str, Any]:
        """Return the facts on the model that pages and results show."""
        names = ("name", "num_parameters", "batch_noise")
        return {name: getattr(self.model, name) for name in names}

    @property
    def reliability(self) -> float | None:
        """Return how well two halves of the unrelated texts agree on the units, where such texts
        replace distant text: the mean over targets. None otherwise."""
        lds = self.tables["lds"].lds
        return float(lds.mean()) if len(lds) else None

    @property
    def warnings(self) -> list[str]:
        """Return reasons to distrust the explanation, as text: a model that needs a prefix, and
        targets whose units are all their distant tokens."""
        warnings = [describe_sink(self.sink), self._describe_targets_with_all_tokens()]
        return [warning for warning in warnings if warning]

    def _describe_targets_with_all_tokens(self) -> str:
        """Return a warning if the k units of a target are all its distant tokens; empty if no
        target has so few."""
        recovery = self.tables["recovery"]
        # Further draws are those of units chosen at random, and of unrelated texts.
        first_draw = recovery[recovery.draw == 0]
        num_chosen = first_draw.groupby("target").num_tokens.max()
        num_distant = np.array([self._num_distant(target) for target in num_chosen.index])
        # With all distant tokens, the loss is that of the long window whatever the ranking.
        num_with_all = int((num_chosen.to_numpy() >= num_distant).sum())
        if not num_with_all:
            return ""
        return (
            f"warning: at {num_with_all} of {num_of(len(num_chosen), 'target')} the units are all "
            "distant tokens, so that their loss says nothing about which matter; pass a smaller k"
        )

    def _num_distant(self, target: int) -> int:
        """Return the number of distant tokens of a target, by its first token."""
        return int(self.windows.tokens_before(target) - self.windows.short)
