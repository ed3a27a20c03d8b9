"""Notice steps whose update should be skipped (`optimizer.skip_sigmas`).

With skip_sigmas=6, after 128 steps whose losses have the mean 2.50 and the deviation 0.05:

    loss 2.79    no jump: at most 2.50 + 6 × 0.05
    loss 2.85    a jump: the engine leaves out the update of this step, and goes on

As OLMo-core's optimizers do. engines/engine.py asks in each step; checkpoints hold the losses and
norms of the last steps, so a resumed run decides alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


class JumpDetector:
    """Notices steps whose loss or gradient norm is more than `sigmas` standard deviations above the
    mean of the last `WINDOW` steps."""

    WINDOW = 128
    """The number of steps that are remembered, as in OLMo-core."""

    def __init__(self, sigmas: float, recent: list[list[float]], num_skipped: int) -> None:
        """Continue a run.

        Args:
            sigmas: The number of standard deviations above the mean from which a step is a jump.
            recent: Loss and gradient norm of the run's last steps, also of skipped ones.
            num_skipped: How many steps have been skipped so far.
        """
        self.sigmas = sigmas
        self.recent = recent
        self.num_skipped = num_skipped

    def is_jump(self, loss: float, norm: float) -> bool:
        """Return whether a step jumps, and remember it for the next ones."""
        if not math.isfinite(loss + norm):
            return True  # the run ends when it writes this step's metrics
        earlier_steps = self.recent
        # Also a step that jumps: if the loss stays high, steps are not skipped for ever.
        self.recent = [*earlier_steps, [loss, norm]][-self.WINDOW :]
        if len(earlier_steps) < self.WINDOW // 4:  # too few for a deviation
            return False
        earlier_losses, earlier_norms = zip(*earlier_steps, strict=True)
        return self._is_far_above(loss, earlier_losses) or self._is_far_above(norm, earlier_norms)

    def _is_far_above(self, value: float, earlier: Sequence[float]) -> bool:
        """Return whether a value is more than `sigmas` standard deviations above earlier ones."""
        return value > statistics.fmean(earlier) + self.sigmas * statistics.pstdev(earlier)
