"""Define a selector: a rule that ranks distant units, and what the tool must know of it.

Place in the flow: below influence.py, which has the rules of this package. A rule of your own is
a function `(scorer, question) → Choice`, or a `Selector` of one, which you name as `file.py:name`
or offer as an entry point of the group `olmo_sparsity.selectors`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from olmo_sparsity.analysis.inputs.windows import Spans, Units
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.extend import find_added

if TYPE_CHECKING:
    from olmo_sparsity.analysis.scoring.scorer import Context, Scorer


@dataclass(frozen=True)
class Question:
    """The targets and candidates that a selector ranks."""

    context: Context
    """Its distant tokens are the candidates."""

    units: Units
    spans: Spans
    """The targets, as indices into the block."""

    k: int
    generator: np.random.Generator
    """For random selectors."""

    def total(self, score_UW: np.ndarray) -> np.ndarray:
        """score_TU: sums over the tokens of each target."""
        return np.stack([score_UW[:, first:end].sum(1) for first, end in self.spans])


@dataclass(frozen=True)
class Choice:
    unit_TK: np.ndarray
    """The chosen units, the most influential first."""

    influence_TK: np.ndarray
    """Their scores by the selector."""

    score_TU: np.ndarray
    """The scores of all units; 0 for units that the selector did not evaluate."""


@dataclass(frozen=True)
class Selector:
    call: Callable[[Scorer, Question], Choice]
    evaluates_every_unit: bool = False
    """Its score of a unit is a difference of losses, for each unit."""

    draws: int = 1
    """How often a random rule is drawn."""

    def __call__(self, scorer: Scorer, question: Question) -> Choice:
        return self.call(scorer, question)


SELECTORS: dict[str, Selector] = {}
"""The selectors of this package, by name."""


def find_selector(name: str) -> Selector:
    from olmo_sparsity.analysis.selectors import influence  # noqa: F401 (its rules are registered)

    if name in SELECTORS:
        return SELECTORS[name]
    found = find_added(name, "olmo_sparsity.selectors", "selectors")
    if found is None:
        raise ConfigError(
            f"selectors: '{name}' is not a selector; pass one of {', '.join(SELECTORS)}, or write "
            "your_file.py:your_rule"
        )
    if not callable(found):
        raise ConfigError(f"selectors: '{name}' is not a function (scorer, question) → Choice")
    return found if isinstance(found, Selector) else Selector(found)
