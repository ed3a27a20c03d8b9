"""Put the verdict on a statement into words, such as `rests on faq.md (gives 3.1 nats; …)`.

Place in the flow: verdicts.py → statements.py, which has the numbers → **`in_words`**.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

DECIDED_SPREADS = 4.0
"""More decoys are advised for an undecided source only if its effect is so many spreads: then
16 decoys name it more often than eight do. With a smaller effect no number of decoys decides, and
the advice would never end."""


def in_words(kind: str, cells: pd.DataFrame, nats: float, spread: float, draws: int) -> str:
    """Return the verdict in words.

    kind: one, either, both, none or undecided.
    cells: The rows of the matrix for this statement and the named sources; if it is undecided, for
        the sources that are open.
    nats: Nats that all sources give together.
    spread: Standard deviation of the statement's loss when the text in one place changes.
    draws: Largest number of decoys of a source.
    """
    names = list(cells.index)
    if kind == "undecided":
        return _undecided_in_words(cells, nats, spread, draws)
    if kind == "one":
        (cell,) = cells.itertuples()
        if shows_what_it_gives(cell):
            effect = f"gives {cell.gives:.1f} nats"
            beaten = f"{cell.beyond_gives} of {cell.tried_gives}"
        else:
            effect = f"the loss rises by {cell.lost:.1f} nats without it"
            beaten = f"{cell.beyond_lost} of {cell.tried_lost}"
        return f"rests on {names[0]} ({effect}; beats {beaten} decoys)"
    if kind == "either":
        nats_of_each = " and ".join(f"{gives:.1f}" for gives in cells.gives)
        return f"rests on either of {', '.join(names)} ({nats_of_each} nats)"
    if kind == "both":
        return f"rests on {' and '.join(names)} together ({nats:.1f} nats)"
    rounded_nats = round(nats, 1) + 0.0  # no -0.0
    return f"rests on no source (all together: {rounded_nats:.1f} nats)"


def shows_what_it_gives(cell: Any) -> bool:
    """Return whether the verdict on one source shows what the source gives, and not what is lost
    without it. `cell`: the row of the matrix."""
    # What a source gives is NaN where it was not evaluated, and the comparison is then false. By
    # one decoy it is weaker evidence than what is lost with many.
    return bool(cell.gives > cell.lost and cell.tried_gives >= cell.tried_lost)


def _undecided_in_words(cells: pd.DataFrame, nats: float, spread: float, draws: int) -> str:
    """Return which sources may matter, and what would decide it."""
    effects = np.fmax(cells.lost, cells.gives) if len(cells) else pd.Series(dtype=float)
    largest_effect = effects.max() if len(cells) else nats
    if largest_effect >= DECIDED_SPREADS * spread:
        remedy = f"take more decoys (draws={2 * draws}), of the sources' own kind"
    else:
        remedy = (
            f"its loss varies by {spread:.1f} nats with the text in one place; take decoys that "
            "are more like the sources"
        )
    if cells.empty:
        return f"undecided: no source alone stands out of {nats:.1f} nats of all; {remedy}"
    candidates = [f"{name} may matter ({effect:.1f} nats)" for name, effect in effects.items()]
    return f"undecided: {', '.join(candidates)}; {remedy}"
