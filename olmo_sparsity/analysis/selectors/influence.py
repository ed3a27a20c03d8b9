"""List the selectors, which rank distant units by how much they matter to a target.

Every selector has one signature, `(scorer, question) → Choice`, and runs its own forwards, so that
costs can be compared. `SELECTORS` lists them by name. `find_selector` finds one, or a rule of a
user's file, by the word that a user passes:

    find_selector("add_one")              the selector of Eq. (20)
    find_selector("my_rules.py:longest")  the function `longest` of that file

They are in these files:

    add_one.py    Eq. (20): each unit is added alone; with two faster approximations
    halving.py    the same from coarse to fine, by losses alone
    pairs.py      units that help only together
    here          rules that read the inside of the model (`gradient`, `attention`), and controls
                  (`nearest`, `random`)

question.py says what a selector is asked and what it answers.

Dimension key: T targets, F distant tokens, U distant units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from olmo_sparsity.analysis.interpretation import Interpretation
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.add_one import (
    add_one,
    add_one_nested,
    add_one_screened,
    influence_map,
)
from olmo_sparsity.analysis.selectors.halving import halving
from olmo_sparsity.analysis.selectors.pairs import pairs
from olmo_sparsity.analysis.selectors.question import (
    Choice,
    Question,
    Selector,
    best_of,
    choice_of,
    loss_reductions,
)
from olmo_sparsity.analysis.selectors.saliency import embedding_saliency, head_attention
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.extend import find_added
from olmo_sparsity.base.renamed import getattr_with_old_names

# Users import these from here.
__all__ = [
    "SELECTORS",
    "Choice",
    "Question",
    "Selector",
    "add_one",
    "add_one_nested",
    "add_one_screened",
    "attention",
    "best_of",
    "choice_of",
    "find_selector",
    "gradient",
    "halving",
    "influence_map",
    "loss_reductions",
    "nearest",
    "pairs",
    "random",
]

# Selectors of users may have been written for the last release. Type checkers would believe that
# the module has every name.
if not TYPE_CHECKING:
    __getattr__ = getattr_with_old_names(__name__, {"scored": "choice_of"})


def gradient(scorer: Scorer, question: Question) -> Choice:
    """Choose the units of largest −gradient · embedding, with the long window: to first order, by
    how much the loss rises without the embeddings of a unit."""
    saliency_TF = embedding_saliency(scorer, question.context, question.spans)
    return best_of(question.units.sum_by_unit(saliency_TF), question.k)


def attention(scorer: Scorer, question: Question) -> Choice:
    """Choose the units that get most attention from the tokens that predict the target, in the mean
    over all heads of all layers."""
    weights_TF = head_attention(scorer, question.context, question.spans).mean(1)
    return best_of(question.units.sum_by_unit(weights_TF), question.k)


def nearest(scorer: Scorer, question: Question) -> Choice:
    """Choose the distant units next to the local window, as a control."""
    scores_U = question.units.end.astype(float)
    return best_of(np.tile(scores_U, (len(question.spans), 1)), question.k)


def random(scorer: Scorer, question: Question) -> Choice:
    """Choose random distant units, as a control."""
    # Numbers are drawn for all targets of the block, also for those that are not in the question.
    # So the draw of one target does not depend on which others are evaluated.
    shape = (question.context.block.num_targets, len(question.units))
    firsts = [first for first, _ in question.spans]
    return best_of(question.generator.random(shape)[firsts], question.k)


SELECTORS: dict[str, Selector] = {
    "add_one": Selector(add_one, evaluates_every_unit=True),
    "add_one_screened": Selector(add_one_screened, reads_states=True),
    "add_one_nested": Selector(add_one_nested, reads_states=True),
    "pairs": Selector(pairs, reads_states=True),
    "halving": Selector(halving),
    "gradient": Selector(gradient, reads_states=True),
    "attention": Selector(attention, reads_states=True),
    "nearest": Selector(nearest),
    "random": Selector(random, draws=3),
}


def find_selector(name: str, interpretation: Interpretation | None = None) -> Selector:
    """Return a selector by its name, or by the name of a user's rule, FILE.py:RULE. Raise
    ConfigError if there is none, or if it needs states that the model does not have.

    Args:
        interpretation: The interpretation of distant states. Default: any.
    """
    selector = SELECTORS.get(name) or _added_selector(name)
    if selector.reads_states and interpretation is not None and interpretation.replaces:
        allowed = [other for other, rule in SELECTORS.items() if not rule.reads_states]
        raise ConfigError(
            f"selectors: '{name}' needs states, which distant_states=replaced does not have; pass "
            f"{', '.join(allowed)}"
        )
    return selector


def _added_selector(name: str) -> Selector:
    """Return a rule of a user's file or of another package. Raise ConfigError if there is none."""
    added = find_added(name, "olmo_sparsity.selectors", "selectors")
    if added is None:
        raise ConfigError(
            f"selectors: '{name}' is not a selector; pass one of {', '.join(SELECTORS)}, or "
            "your_file.py:your_rule"
        )
    if not callable(added):
        raise ConfigError(
            f"selectors: '{name}' is not a function but {type(added).__name__}; pass one "
            "(scorer, question) → Choice"
        )
    return added if isinstance(added, Selector) else Selector(added)
