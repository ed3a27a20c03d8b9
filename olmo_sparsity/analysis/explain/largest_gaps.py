"""Find the tokens of one text that gain most from distant text.

    target  loss_short  loss_long
        61        9.10       0.40    gap 8.70
        62        3.20       3.10    gap 0.10, below MIN_GAP
        70        4.00       2.90    gap 1.10

    largest_gaps(losses)    # [(61, 62), (70, 71)], as spans of tokens

target_choice.py chooses the targets of an explanation so, and checking.py those of its placebo.
"""

from __future__ import annotations

import pandas as pd

from olmo_sparsity.analysis.options import MIN_GAP
from olmo_sparsity.text.units import Spans, span_width
from olmo_sparsity.text.windows import Windows


def first_place_with_units(windows: Windows, units: str) -> int:
    """Return the first place of a text at which a target has a full window and a distant unit."""
    # Spans have a fixed width. Of other units one token may be enough.
    return max(windows.first_target, windows.short + (span_width(units) or 1))


def largest_gaps(losses: pd.DataFrame, column: str = "loss_long", num_targets: int = 8) -> Spans:
    """Return the tokens of one document with the largest gaps, in the order of the text. Gaps below
    `MIN_GAP` are left out; if all are below, return the largest one.

    Args:
        losses: Losses of a document.
        column: The column of the loss with the long window, which is another for the placebo.
        num_targets: The largest number of tokens to return.
    """
    if not len(losses):
        return []
    gaps = (losses.loss_short - losses[column]).set_axis(losses.target).nlargest(num_targets)
    large = gaps[gaps >= MIN_GAP]
    if not len(large):
        large = gaps[:1]
    return [(int(place), int(place) + 1) for place in sorted(large.index)]
