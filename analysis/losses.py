"""L_long and L_short of every target that has a full long window.

Place in the flow: documents → **losses** → chosen targets.

L_long − L_short is the paper's quantity (LongPPL's LSD is its negative); the code speaks of the
gap G = L_short − L_long: what long context gives, in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.scoring import Scorer, long_row
from analysis.windows import NOTHING, Windows


@dataclass
class ContextLosses:
    """One document's targets, in order."""

    target: np.ndarray
    """Place in the document."""

    token_id: np.ndarray
    loss_long: np.ndarray
    loss_short: np.ndarray

    @property
    def gap(self) -> np.ndarray:
        return self.loss_short - self.loss_long


def context_losses(scorer: Scorer, document: np.ndarray, windows: Windows) -> ContextLosses:
    """Empty arrays for a document that is not longer than the long window."""
    blocks = list(windows.blocks(document))
    long = scorer.losses([long_row(block) for block in blocks])
    short = scorer.losses([scorer.set_row(block, NOTHING) for block in blocks])
    targets = np.arange(windows.long, max(windows.long, len(document)))
    return ContextLosses(
        target=targets,
        token_id=document[targets],
        loss_long=np.concatenate([*long, np.empty(0)]).astype(np.float32),
        loss_short=np.concatenate([*short, np.empty(0)]).astype(np.float32),
    )
