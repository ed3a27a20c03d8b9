"""Put the verdict on a statement into words.

Place in the flow: verdicts/verdict.py → attribution.py, which has the numbers →
**`verdict_in_words`**. One sentence for each kind of verdict:

    one         rests on faq.md (gives 3.1 nats; beats 8 of 8 decoys)
                rests on faq.md (the loss rises by 3.1 nats without it; beats 8 of 8 decoys)
    either      rests on either of faq.md, report.pdf (3.1 and 2.9 nats)
    both        rests on faq.md and report.pdf together (6.0 nats)
    none        rests on no source (all together: 0.2 nats)
    undecided   undecided: faq.md may matter (2.1 nats); take more decoys (draws=16), of the
                sources' own kind

The sources in a sentence are `SourceEffects`: one row of the matrix (report/tables.py) each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.sources.verdicts.verdict import VerdictKind

DECIDED_SPREADS = 4.0
"""More decoys are advised for an undecided source only if its effect is this many spreads: then
16 decoys name it more often than eight do. With a smaller effect no number of decoys decides, and
the advice would never end."""


class Effect(NamedTuple):
    """One effect of a source on a statement."""

    nats: float
    """Its mean over decoys; NaN if it was not evaluated."""

    num_tried: int
    """How many decoys it was evaluated with."""

    num_beaten: int
    """With how many of them it was above 0."""


class SourceEffects(NamedTuple):
    """Both effects of a source on a statement."""

    source: str
    """The name of the source."""

    gives: Effect
    lost: Effect

    @staticmethod
    def of_rows(rows: pd.DataFrame) -> list[SourceEffects]:
        """Return the effects in rows of the matrix for one statement, by the names of sources."""
        return [
            SourceEffects(
                str(row.Index),
                gives=Effect(row.gives, row.tried_gives, row.beyond_gives),
                lost=Effect(row.lost, row.tried_lost, row.beyond_lost),
            )
            for row in rows.itertuples()
        ]

    @property
    def is_shown_by_gives(self) -> bool:
        """Whether the verdict on this source alone shows what it gives. Otherwise it shows what is
        lost without it."""
        # What a source gives is NaN where it was not evaluated, and the comparison is then false.
        # By one decoy it is weaker evidence than what is lost with many.
        is_larger = self.gives.nats > self.lost.nats
        return bool(is_larger and self.gives.num_tried >= self.lost.num_tried)

    @property
    def largest_nats(self) -> float:
        """The larger of the effects that were evaluated, in nats."""
        return float(np.fmax(self.lost.nats, self.gives.nats))


def verdict_in_words(
    kind: VerdictKind, sources: Sequence[SourceEffects], nats: float, spread: float, draws: int
) -> str:
    """Return the verdict on a statement as a sentence without its end.

    Args:
        kind: The kind of the verdict.
        sources: The named sources, or the open ones if the statement is undecided.
        nats: Nats that all sources give together.
        spread: Standard deviation of the statement's loss when one text of the prompt is exchanged.
        draws: Largest number of decoys of a source.
    """
    names = [effects.source for effects in sources]
    if kind == "one":
        (effects,) = sources
        return f"rests on {effects.source} ({_shown_effect_in_words(effects)})"
    if kind == "either":
        nats_of_each = " and ".join(f"{effects.gives.nats:.1f}" for effects in sources)
        return f"rests on either of {', '.join(names)} ({nats_of_each} nats)"
    if kind == "both":
        return f"rests on {' and '.join(names)} together ({nats:.1f} nats)"
    if kind == "none":
        rounded_nats = round(nats, 1) + 0.0  # no -0.0
        return f"rests on no source (all together: {rounded_nats:.1f} nats)"

    cause, largest_nats = _undecided_cause(sources, nats)
    if largest_nats >= DECIDED_SPREADS * spread:
        remedy = f"take more decoys (draws={2 * draws}), of the sources' own kind"
    else:
        remedy = (
            f"its loss varies by {spread:.1f} nats with the text in one place; take decoys that "
            "are more like the sources"
        )
    return f"undecided: {cause}; {remedy}"


def _shown_effect_in_words(effects: SourceEffects) -> str:
    """Return the effect that shows that a statement rests on a source, and how many decoys it
    beats."""
    if effects.is_shown_by_gives:
        shown = effects.gives
        effect = f"gives {shown.nats:.1f} nats"
    else:
        shown = effects.lost
        effect = f"the loss rises by {shown.nats:.1f} nats without it"
    return f"{effect}; beats {shown.num_beaten} of {shown.num_tried} decoys"


class _Cause(NamedTuple):
    """Why a statement is undecided."""

    words: str
    largest_nats: float
    """The largest effect that is named in the words."""


def _undecided_cause(open_sources: Sequence[SourceEffects], nats: float) -> _Cause:
    """Return which sources may matter. If none is open, only all sources together have an effect,
    of `nats`."""
    if not open_sources:
        return _Cause(f"no source alone stands out of {nats:.1f} nats of all", nats)
    candidates = [
        f"{effects.source} may matter ({effects.largest_nats:.1f} nats)" for effects in open_sources
    ]
    largest_nats = max(effects.largest_nats for effects in open_sources)
    return _Cause(", ".join(candidates), largest_nats)
