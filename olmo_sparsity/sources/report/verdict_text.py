"""Put the verdict on a statement into words.

Place in the flow: verdicts/verdict.py → attribution.py, which has the numbers →
**`verdict_in_words`**. One sentence for each kind of verdict:

    one         rests on faq.md (gives 3.1 nats; beats 8 of 8 decoys)
    either      rests on either of faq.md, report.pdf (3.1 and 2.9 nats)
    both        rests on faq.md and report.pdf together (6.0 nats)
    none        rests on no source (all together: 0.2 nats)
    undecided   undecided: faq.md may matter (2.1 nats); take more decoys (draws=16), of the
                sources' own kind
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.sources.verdicts.verdict import VerdictKind

DECIDED_SPREADS = 4.0
"""More decoys are advised for an undecided source only if its effect is this many spreads: then
16 decoys name it more often than eight do. With a smaller effect no number of decoys decides, and
the advice would never end."""


def verdict_in_words(
    kind: VerdictKind, cells: pd.DataFrame, nats: float, spread: float, draws: int
) -> str:
    """Return the verdict on a statement as a sentence without its end.

    Args:
        kind: The kind of the verdict.
        cells: Rows of the matrix (report/tables.py) for this statement: those of the named sources,
            or of the open ones if it is undecided. The index has the names; the columns are gives
            and lost (nats), tried_gives and tried_lost (decoys that were tried), beyond_gives and
            beyond_lost (decoys that the source beats).
        nats: Nats that all sources give together.
        spread: Standard deviation of the statement's loss when one text of the prompt is exchanged.
        draws: Largest number of decoys of a source.
    """
    if kind == "one":
        return _one_in_words(cells)
    if kind == "either":
        nats_of_each = " and ".join(f"{gives:.1f}" for gives in cells.gives)
        return f"rests on either of {', '.join(cells.index)} ({nats_of_each} nats)"
    if kind == "both":
        return f"rests on {' and '.join(cells.index)} together ({nats:.1f} nats)"
    if kind == "none":
        rounded_nats = round(nats, 1) + 0.0  # no -0.0
        return f"rests on no source (all together: {rounded_nats:.1f} nats)"
    return _undecided_in_words(cells, nats, spread, draws)


def _one_in_words(cells: pd.DataFrame) -> str:
    """Return the verdict on a statement that rests on one source, with the effect that shows it."""
    (cell,) = cells.itertuples()
    if is_shown_by_gives(cell):
        effect = f"gives {cell.gives:.1f} nats"
        beaten = f"{cell.beyond_gives} of {cell.tried_gives}"
    else:
        effect = f"the loss rises by {cell.lost:.1f} nats without it"
        beaten = f"{cell.beyond_lost} of {cell.tried_lost}"
    return f"rests on {cell.Index} ({effect}; beats {beaten} decoys)"


def is_shown_by_gives(cell: Any) -> bool:
    """Return whether the verdict on one source shows what the source gives. Otherwise it shows what
    is lost without the source. `cell`: a row of the matrix."""
    # What a source gives is NaN where it was not evaluated, and the comparison is then false. By
    # one decoy it is weaker evidence than what is lost with many.
    return bool(cell.gives > cell.lost and cell.tried_gives >= cell.tried_lost)


def _undecided_in_words(cells: pd.DataFrame, nats: float, spread: float, draws: int) -> str:
    """Return which sources may matter, and what would decide it. Without an open source, only all
    sources together have an effect."""
    if cells.empty:
        cause = f"no source alone stands out of {nats:.1f} nats of all"
        largest_effect = nats
    else:
        effects = np.fmax(cells.lost, cells.gives)
        largest_effect = effects.max()
        candidates = [f"{name} may matter ({effect:.1f} nats)" for name, effect in effects.items()]
        cause = ", ".join(candidates)

    if largest_effect >= DECIDED_SPREADS * spread:
        remedy = f"take more decoys (draws={2 * draws}), of the sources' own kind"
    else:
        remedy = (
            f"its loss varies by {spread:.1f} nats with the text in one place; take decoys that "
            "are more like the sources"
        )
    return f"undecided: {cause}; {remedy}"
