"""Count the token-forwards of a measurement.

    Plan, ExpectedTargets → `count_cost` → CountedCost

    losses     of all targets: counted exactly, from the lengths of documents and windows
    recovery   of the expected targets: extrapolated from a few (target_costs.py)

For a block of 2 targets with 6 local, 10 distant and no prefix tokens, the losses take

    local window        6 + 2 − 1 =  7 token-forwards
    long window        16 + 2 − 1 = 17
    placebo's window                17

With `long="all"`, one pass over the document predicts all its targets. For two such blocks, of
which the second has 12 distant tokens:

    local windows       2 × 7       = 14
    document           18 + 2 − 1   = 19
    placebo            12 + 2 × 7   = 26    the unrelated text, and the local windows after it

Nothing here computes with the model: where rows depend on losses, a scorer that only counts runs in
its place. How long the counted tokens take is up to trial.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from olmo_sparsity.analysis.measurement.expected_targets import ExpectedTargets
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.target_costs import TargetCosts
from olmo_sparsity.analysis.scoring.cost import counting_scorer
from olmo_sparsity.analysis.scoring.document_losses import context_losses
from olmo_sparsity.analysis.scoring.induction import passages_of
from olmo_sparsity.text.windows import Block


@dataclass(frozen=True)
class CountedCost:
    """The token-forwards of some documents of a measurement."""

    num_targets: int
    """Targets with losses, computed now or reused from an earlier measurement."""

    loss_forwards: float
    """Token-forwards of the losses, with those of the induction check. Each shard runs the
    whole check, so the sum over shards counts it more than once."""

    recovery_forwards: float
    """Token-forwards of the evaluated targets. It is extrapolated from a few of them, so no whole
    number."""

    @property
    def forwards(self) -> float:
        """Return all token-forwards."""
        return self.loss_forwards + self.recovery_forwards


def count_cost(plan: Plan, numbers: Sequence[int], targets: ExpectedTargets) -> CountedCost:
    """Count the token-forwards of documents.

    Args:
        numbers: The numbers of the documents.
        targets: The targets that these documents are expected to have.
    """
    blocks = {number: plan.blocks_with_losses(plan.documents[number]) for number in numbers}
    # All targets with losses; `targets` are the few of them that are expected to be evaluated.
    num_targets = sum(block.num_targets for listed in blocks.values() for block in listed)

    recovery_forwards = 0.0
    if targets.num_by_document:
        recovery_forwards = TargetCosts.of(plan, targets).total(plan, targets)
    return CountedCost(num_targets, _count_losses_and_induction(plan, blocks), recovery_forwards)


def _count_losses_and_induction(plan: Plan, blocks: dict[int, list[Block]]) -> float:
    """Return the token-forwards of the losses that are not reused, and of the induction check.

    Args:
        blocks: Document → the blocks whose losses are needed.
    """
    forwards = 0.0
    for number, blocks_of_document in blocks.items():
        if number not in plan.reused_losses.by_document:
            forwards += count_losses_of_document(plan, number, blocks_of_document)
    for passage in passages_of(plan.measured_documents, plan.passage_length):
        forwards += 2 * len(passage)  # the passage and its repetition
    return forwards


def count_losses_of_document(plan: Plan, number: int, blocks: Sequence[Block]) -> int:
    """Return the token-forwards of the losses of some blocks of a document.

    Each target has three losses: with the local window, with its own long window, and with the long
    window of the placebo, in which an unrelated text replaces the distant tokens.
    """
    if not blocks:
        return 0
    if plan.settings.interpretation.replaces:
        # Prompts with equal text are computed once, which no formula here knows.
        document = plan.documents[number]
        scorer = counting_scorer(plan.scorer).of_document(document, plan.controls)
        context_losses(scorer, document, plan.settings.windows, plan.controls, blocks)
        return scorer.token_forwards

    # One row of each block computes the losses of all its targets. The last target is predicted by
    # the token before it, so it is not an input: a row is a token shorter than the window and the
    # block together. `block.tokens` begins with the prefix; `local_tokens` does not have it yet.
    num_prefix = len(plan.settings.prefix_ids)
    short = plan.settings.short
    local_tokens = sum(short + block.num_targets - 1 for block in blocks)
    local_forwards = local_tokens + num_prefix * len(blocks)
    if not plan.settings.windows.has_all:
        long_forwards = sum(len(block.tokens) - 1 for block in blocks)
        placebo_forwards = long_forwards  # an unrelated text of the same length
        return local_forwards + long_forwards + placebo_forwards

    # With long="all" one pass over the document predicts all its targets. An unrelated text takes
    # one pass, too, and then the local windows of all blocks after it.
    last_block = blocks[-1]
    long_forwards = len(last_block.tokens) - 1
    placebo_forwards = num_prefix + last_block.num_distant + local_tokens
    return local_forwards + long_forwards + placebo_forwards
