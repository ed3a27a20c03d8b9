"""The three interpretations of "k distant tokens": what a row keeps, and what takes the place of
the distant tokens that it leaves out.

Place in the flow: below the options. `interpretation_of` is the only place that knows the names
that users pass as `distant_states`; everything else asks an `Interpretation` what it does. Imports
nothing large, because `--help` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from olmo_sparsity.base.errors import ConfigError

InterpretationName = Literal["contextual", "isolated", "replaced"]


@dataclass(frozen=True)
class Interpretation:
    """How the distant tokens that are left out are treated when only k of them are kept.

    interpretation_of("replaced").replaces  # True
    """

    name: InterpretationName

    description: str
    """Completes "distant units …", for summaries and figures."""

    keeps_states: bool = False
    """Distant tokens keep the keys and values that they have in the long window."""

    shows_alone: bool = False
    """Distant tokens are shown without the tokens that precede them."""

    replaces: bool = False
    """Unrelated text replaces the distant tokens that are left out. Nothing is masked, so the model
    only has to return log-probabilities: a selector cannot read its states."""

    @property
    def default_selector(self) -> str:
        """The selector of one prediction."""
        return "halving" if self.replaces else "add_one"

    @property
    def default_replacements(self) -> int | None:
        """How many unrelated texts replace distant text: two, whose halves are compared."""
        return 2 if self.replaces else None


_ALL = (
    Interpretation("contextual", "with their context", keeps_states=True),
    Interpretation("isolated", "shown alone", shows_alone=True),
    Interpretation("replaced", "among unrelated text", replaces=True),
)


def interpretation_of(distant_states: str) -> Interpretation:
    """Return the interpretation that an option names."""
    for interpretation in _ALL:
        if interpretation.name == distant_states:
            return interpretation
    accepted = ", ".join(get_args(InterpretationName))
    raise ConfigError(f"distant_states={distant_states} is not known; pass one of {accepted}")
