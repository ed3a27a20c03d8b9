"""Hold the losses of statements with and without sources, and the effects that follow from them.

Place in the flow: trials.py evaluates **`StatementLosses`** → evidence.py tests them → verdict.py.
The module needs NumPy only, not PyTorch.

The loss of a statement is the sum of −log p over its tokens, in nats. It depends on which texts the
prompt shows. With three sources A, B and C, and decoys a, b and c of the same lengths:

    field         texts of the prompt   what the loss is compared with
    all_T         A  B  C
    without_TSD   A  b  C               all_T: what is *lost* without B
    decoys_TD     a  b  c               all_T: what all sources give together (the gap)
    among_TSD     a  B  c               decoys_TD: what B *gives* among decoys

effect_tests.py has an example by numbers.

Both effects of a source are needed. If A and B say the same, nothing is lost without B, although B
alone would give everything. If a statement needs A and B together, B alone gives little, although
much is lost without it.

Dimension key: T statements, S sources, D decoys of a source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class StatementLosses:
    """Losses of each statement with different texts in the prompt, in nats.

    A loss that no verdict needed was not computed, and is NaN. Decoys are evaluated in their order,
    so along D only the last entries may be NaN.

    T may also be the tokens of the answer, each as a statement of its own.
    """

    all_T: np.ndarray
    """All sources are in the prompt."""

    decoys_TD: np.ndarray
    """Each source is replaced by one of its decoys."""

    among_TSD: np.ndarray
    """Each source but one is replaced by one of its decoys."""

    without_TSD: np.ndarray
    """One source is replaced by one of its decoys."""

    @cached_property
    def cap_T(self) -> np.ndarray:
        """The usual loss with decoys in place of all sources: the median over decoys. Effects count
        a larger loss as this one. A text that raises the loss further misleads the model, which
        says nothing about what sources give."""
        return np.nanmedian(self.decoys_TD, -1)

    @property
    def gap_T(self) -> np.ndarray:
        """Nats that all sources give together, compared with decoys in place of all."""
        return np.nanmean(np.minimum(self.decoys_TD, self.cap_T[:, None]), -1) - self.all_T

    @property
    def gives_TSD(self) -> np.ndarray:
        """Nats that a source gives when decoys replace all others."""
        cap_T11 = self.cap_T[:, None, None]
        # Draw by draw: both prompts have the same decoys in place of the other sources.
        return np.minimum(self.decoys_TD[:, None], cap_T11) - np.minimum(self.among_TSD, cap_T11)

    @property
    def lost_TSD(self) -> np.ndarray:
        """Nats that are lost when a decoy replaces the source and all others stay."""
        return np.minimum(self.without_TSD, self.cap_T[:, None, None]) - self.all_T[:, None, None]

    def of_first_decoys(self, num_decoys: int) -> StatementLosses:
        """Return the losses with the first `num_decoys` decoys of each source only."""
        return replace(
            self,
            decoys_TD=self.decoys_TD[:, :num_decoys],
            among_TSD=self.among_TSD[:, :, :num_decoys],
            without_TSD=self.without_TSD[:, :, :num_decoys],
        )


def mean_over_decoys(nats_TSD: np.ndarray) -> np.ndarray:
    """Return the mean over the decoys that were evaluated; NaN where none was."""
    num_evaluated_TS = np.isfinite(nats_TSD).sum(-1)
    # Division by NaN, not by 0, so that NumPy does not warn.
    return np.nansum(nats_TSD, -1) / np.where(num_evaluated_TS > 0, num_evaluated_TS, np.nan)
