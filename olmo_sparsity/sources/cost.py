"""Count what requests cost, without a model's forward: what `attribute --dry-run` prints.

Place in the flow: request → layouts (run_request.py) → **`count_cost`** → a `Cost` (`cost_of` for
several questions). How many trials verdicts need depends on the losses, so two numbers are counted:

    at most       all decoys of all sources, shown and replaced
    if clear      one decoy of each source, and two of the first: that source is clear at once

A *token-forward* is one token through the model. Prompts with the same beginning share it. Of three
sources with eight decoys each, for example, the prompts at most are

    1 with all sources, 8 with decoys in place of all, 3 × 8 with decoys in place of one source,
    and 3 × 8 with decoys in place of all but one: 57
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from olmo_sparsity.analysis.scoring.cost import Cost
from olmo_sparsity.analysis.scoring.logprobs import CountingLogprobs
from olmo_sparsity.sources.prompt.layout import Layout
from olmo_sparsity.sources.prompt.pieces import SourcePrompt
from olmo_sparsity.sources.request import AttributeRequest
from olmo_sparsity.sources.run_request import LoadedRequest, load_model_of
from olmo_sparsity.sources.verdicts.evidence import decoy_rounds
from olmo_sparsity.sources.verdicts.trials import Trial, Trials, first_round, next_round


@dataclass(frozen=True)
class TrialCount:
    """What some trials cost."""

    token_forwards: int
    num_prompts: int

    def __add__(self, other: TrialCount) -> TrialCount:
        return TrialCount(
            self.token_forwards + other.token_forwards, self.num_prompts + other.num_prompts
        )


NO_TRIALS = TrialCount(0, 0)


def count_cost(request: AttributeRequest) -> Cost:
    """Return what a request costs, without computing it."""
    return cost_of([LoadedRequest(load_model_of(request, only_counts=True), request)])


def cost_of(questions: Sequence[LoadedRequest]) -> Cost:
    """Return what these questions cost together. With reasoning, each of its sentences is counted
    as if the answer relied on it."""
    at_most = NO_TRIALS
    if_clear = NO_TRIALS
    # With the code that runs trials, so that a rule is not counted otherwise than it is applied.
    for question in questions:
        draws = question.request.settings.draws
        for prompt, layout in question.layouts:
            at_most += _count_at_most(prompt, layout, draws)
            if_clear += _count_if_clear(prompt, layout, draws)
    num_parameters = questions[0].model.num_parameters
    cost = Cost(at_most.token_forwards, num_parameters)
    cost_if_clear = Cost(if_clear.token_forwards, num_parameters)

    lines = [
        f"token-forwards  {if_clear.token_forwards:,} in {if_clear.num_prompts:,} prompts if the "
        "first source is clear at once",
        f"at most         {at_most.token_forwards:,} in {at_most.num_prompts:,} prompts",
    ]
    # A server does not say how many parameters its model has.
    if num_parameters and torch.cuda.is_available():
        lines.append(f"FLOPs at most   {cost.flops:.2e} (2 per parameter)")
    elif num_parameters:
        speed = flops_per_second()
        seconds_if_clear = cost_if_clear.flops / speed
        seconds_at_most = cost.flops / speed
        rule = f"2 FLOPs per parameter; {speed / 1e9:,.0f} GFLOP/s in products of matrices"
        lines.append(f"FLOPs at most   {cost.flops:.2e}")
        lines.append(
            f"on this CPU     about {seconds_if_clear:,.0f} s if clear at once, at most "
            f"{seconds_at_most:,.0f} s ({rule})"
        )
    return replace(cost, details="\n".join(lines))


def flops_per_second() -> float:
    """Return the speed of products of matrices on this machine. It is measured, which takes a
    fraction of a second."""
    size = 768  # the width of a model of about 100M parameters
    matrix = torch.ones(size, size)
    seconds: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - began)
    # The median, as other processes slow down single products.
    return float(2 * size**3 / np.median(seconds))


def _count_at_most(prompt: SourcePrompt, layout: Layout, draws: int) -> TrialCount:
    """Count all trials that verdicts may need."""
    every_source = range(len(prompt.names))
    rounds = [
        next_round(shown=every_source, replaced=every_source, num_draws=num_draws)
        for num_draws in [1, *decoy_rounds(draws)]
    ]
    return _count(prompt, layout, draws, rounds)


def _count_if_clear(prompt: SourcePrompt, layout: Layout, draws: int) -> TrialCount:
    """Count the trials if one decoy of each source and two of the first source are enough."""
    round_of_first_source = next_round(shown=[], replaced=[0], num_draws=2)
    return _count(prompt, layout, draws, [round_of_first_source])


def _count(
    prompt: SourcePrompt, layout: Layout, draws: int, rounds: Sequence[list[Trial]]
) -> TrialCount:
    """Count the trials of the first round and of further rounds. Beginnings that prompts share are
    counted as often as the model computes them.

    Args:
        prompt: The prompt.
        layout: The prompt with its answer.
        draws: Number of decoys of each source.
        rounds: The trials of each further round.
    """
    server = prompt.model.prompt_model
    if server is None:
        # The states of what precedes the question are computed once, for all trials.
        counter = CountingLogprobs(shares=True, known=layout.before_question)
    else:
        counter = CountingLogprobs(shares=server.shares)
    trials = Trials(counter, layout, _distinct_decoys(prompt, draws))
    for trials_of_round in [first_round(len(prompt.names)), *rounds]:
        trials.evaluate(trials_of_round)
    return TrialCount(counter.token_forwards, counter.num_prompts)


def _distinct_decoys(prompt: SourcePrompt, draws: int) -> list[np.ndarray]:
    """Return decoys_DL of each source for counting: no two have a token in common, so that prompts
    share no more than they must. Their tokens are negative, which no text has."""
    decoys: list[np.ndarray] = []
    next_token = -1  # tokens of texts are 0 and above
    for sections in prompt.sections_by_source:
        for ids in sections:
            num_tokens = draws * len(ids)
            decoys.append((next_token - np.arange(num_tokens)).reshape(draws, len(ids)))
            next_token -= num_tokens
    return decoys
