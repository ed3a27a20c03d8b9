"""Define the three interpretations of "only k distant tokens", which users pass as
`distant_states`.

    contextual   the k tokens keep the keys and values that they have in the long window; the other
                 distant tokens are masked
    isolated     the k tokens are shown without the others, at their position IDs
    replaced     unrelated text replaces the others, and nothing is masked

Of the distant tokens "In 1921 Anna opened it" with k=1, "Anna" is shown like this:

    contextual   [  ] [    ] Anna [      ] [  ]     with the states of "Anna" after "In 1921"
    isolated     Anna                               as if nothing preceded it
    replaced     so when Anna never was             a whole text, with other words around "Anna"

`interpretation_of` is the only function that knows these names. All other code asks an
`Interpretation` what it does: a `Scorer` which tokens a forward sees, options.py which defaults
suit it, selectors/influence.py whether a selector may read states. Imports nothing large, because
`--help` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from olmo_sparsity.base.errors import ConfigError

InterpretationName = Literal["contextual", "isolated", "replaced"]


@dataclass(frozen=True)
class Interpretation:
    """One of three ways to keep only k distant units: mask the others, show the k alone, or replace
    the others by unrelated text. Callers ask it what it does, and never compare its name:

        interpretation_of("replaced").replaces  # True
    """

    name: InterpretationName

    description: str
    """Completes "distant units …", for summaries and figures."""

    keeps_states: bool = False
    """Whether distant tokens keep the keys and values that they have in the long window."""

    shows_alone: bool = False
    """Whether distant tokens are shown without the tokens that precede them."""

    replaces: bool = False
    """Whether unrelated text replaces the distant tokens that are left out. Nothing is masked, so
    the model only has to return log-probabilities, and a selector cannot read its states."""

    @property
    def default_selector(self) -> str:
        """Return the selector that `explain` uses if none is passed."""
        return "halving" if self.replaces else "add_one"

    @property
    def default_replacements(self) -> int | None:
        """Return how many unrelated texts replace distant text; None where none does."""
        # Two, so that their effects can be compared (`reliability`).
        return 2 if self.replaces else None


_INTERPRETATIONS = (
    Interpretation("contextual", "with their context", keeps_states=True),
    Interpretation("isolated", "shown alone", shows_alone=True),
    Interpretation("replaced", "among unrelated text", replaces=True),
)


def interpretation_of(distant_states: str) -> Interpretation:
    """Return the interpretation with this name. Raise ConfigError if there is none."""
    for interpretation in _INTERPRETATIONS:
        if interpretation.name == distant_states:
            return interpretation
    accepted = ", ".join(get_args(InterpretationName))
    raise ConfigError(f"distant_states={distant_states} is not known; pass one of {accepted}")
