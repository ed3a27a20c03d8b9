"""Compare the verdict on a statement with the verdict that an earlier run gave on it.

Place in the flow: matching.py pairs the statements of both runs → **`StatementChange`** of each
pair → baseline.py, which makes a check of it.

A statement is worse if it no longer relies on a source that it relied on, and noise does not
explain that. Each effect is a mean over random decoys, with a standard error, so two runs of one
model never measure exactly the same:

    earlier run                         this run                            worse?
    a gives 4.0 ± 0.3 nats, named       a gives 3.1 ± 0.3 nats, not named   no: differ by 2.1 errors
    a gives 4.0 ± 0.3 nats, named       a gives 0.5 ± 0.3 nats, not named   yes: differ by 8.2
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

from olmo_sparsity.sources.gate.answers import StoredCell, StoredStatement

NOISE = 3.0
"""An effect has changed if the difference of its means over decoys exceeds this many standard
errors. With other decoys and the same model, 4 of 720 comparisons then failed by chance
(docs/sources.md)."""


@dataclass(frozen=True)
class StatementChange:
    """A statement in both runs. The sources of the earlier one have the names of today."""

    statement: StoredStatement
    earlier: StoredStatement

    @property
    def gained_sources(self) -> list[str]:
        """Return the sources that only the new verdict names."""
        return sorted(set(self.statement.origins) - set(self.earlier.origins))

    @property
    def lost_sources(self) -> list[str]:
        """Return the sources that only the earlier verdict names."""
        return sorted(set(self.earlier.origins) - set(self.statement.origins))

    @property
    def is_reworded(self) -> bool:
        return self.statement.text != self.earlier.text

    @property
    def cannot_get_worse(self) -> bool:
        """Return whether any new verdict passes, as the earlier one named no source that could be
        lost, nor said that there is none."""
        return self.earlier.is_undecided and not self.earlier.origins

    @property
    def is_worse(self) -> bool:
        """Return whether a source is lost beyond noise."""
        if self.is_reworded:
            # Effects on other words are other effects, so no noise can be told from a change.
            return bool(self.lost_sources)
        return any(self._is_lost_beyond_noise(name) for name in self.lost_sources)

    def _is_lost_beyond_noise(self, source: str) -> bool:
        """Return whether the effect of a lost source has changed by more than noise."""
        was_named_itself = source in self.earlier.sources
        has_effects = source in self.earlier.cells and source in self.statement.cells
        if not was_named_itself or not has_effects:
            # It was reached through reasoning, and has no effect of its own, or one run lacks it.
            # Then nothing says that only noise has changed.
            return True
        return _has_changed(self.statement.cells[source], self.earlier.cells[source])

    def notes(self, numbers: str, is_as_expected: bool) -> list[str]:
        """Return what differs from the earlier statement without failing.

        Args:
            numbers: The question and the statement in words, with which each note begins.
            is_as_expected: Whether the statement passes its `expect`, so that it may lose a source.
        """
        verdict = self.statement.verdict
        notes: list[str] = []
        if self.is_worse:
            # Otherwise it fails, and the check says what was lost.
            if is_as_expected:
                notes.append(f"{numbers} differs from the baseline, as `expect` says: {verdict}")
        else:
            if self.gained_sources:
                names = ", ".join(self.gained_sources)
                notes.append(f"{numbers} now rests on {names}: {verdict}")
            if self.lost_sources:
                names = ", ".join(self.lost_sources)
                notes.append(f"{numbers} lost {names} by no more than noise: {verdict}")
        if self.is_reworded:
            notes.append(
                f"{numbers} is reworded: '{self.statement.text}', before '{self.earlier.text}'"
            )
        return notes


def _has_changed(cell: StoredCell, earlier_cell: StoredCell) -> bool:
    """Return whether what a source gives, or what is lost without it, has changed by more than
    noise. If no effect was evaluated in both runs, nothing can be compared, and it has."""
    num_compared = 0
    for effect, earlier_effect in zip(cell.effects, earlier_cell.effects, strict=True):
        if effect is None or earlier_effect is None:
            continue
        num_compared += 1
        # The standard error of a difference of two independent means.
        standard_error = hypot(effect.se, earlier_effect.se)
        if abs(effect.nats - earlier_effect.nats) > NOISE * standard_error:
            return True
    return num_compared == 0
