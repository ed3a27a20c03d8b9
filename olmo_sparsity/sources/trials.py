"""Evaluate the losses of statements while decoys replace sources, as far as verdicts need them.

Place in the flow: prompt and decoys (prompt.py, decoys.py) → **losses** → verdicts.py.

A decoy is as long as its source, so all other texts keep their positions. A model that has never
seen a prompt with a source missing is not asked to score one.

Dimension key: T statements, S sources, D decoys of a source, W tokens of the answer, P prompts,
F distant tokens, L tokens of a source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from olmo_sparsity.analysis.scoring.logprobs import CountingLogprobs
from olmo_sparsity.analysis.scoring.scorer import refuse_no_numbers
from olmo_sparsity.models.prompts import LogprobModel, Prompt
from olmo_sparsity.sources.prompt import Layout, SourcePrompt
from olmo_sparsity.sources.verdicts import Losses, looks, sources_to_look_at

CERTAIN_NATS = 1e-4
"""A token of a smaller loss may have the same loss, to the last digit, whatever precedes it."""

LEAST_UNCERTAIN_TOKENS = 4
"""If a source changes that the model reads, at least one of so many tokens of the answer changes
its loss."""


@dataclass(frozen=True)
class Trial:
    """A prompt to evaluate: which sources are replaced, and by which of their decoys."""

    way: str
    """`all`: no source is replaced. `decoys`: all are. `among`: all but `source`. `without`:
    `source` alone."""

    source: int | None = None
    draw: int = 0
    """The number of the decoy that replaces each of these sources."""

    @property
    def place(self) -> tuple[int, ...]:
        """Where the loss is stored in the array of its way, after the statement."""
        return (self.draw,) if self.source is None else (self.source, self.draw)

    def replaced(self, num_sources: int) -> set[int]:
        """Return the numbers of the sources that decoys replace."""
        every = set(range(num_sources))
        if self.way == "all":
            return set()
        if self.way == "decoys":
            return every
        assert self.source is not None
        return every - {self.source} if self.way == "among" else {self.source}


class Trials:
    """Evaluates trials with one layout, each once, and keeps the losses."""

    def __init__(
        self, logprobs: LogprobModel, layout: Layout, decoys: Sequence[np.ndarray]
    ) -> None:
        """`decoys`: decoys_DL of each source."""
        self.logprobs = logprobs
        self.layout = layout
        self.decoys = decoys
        self.statement_losses = self._not_evaluated(len(layout.statements))
        """By way, losses of each statement in all trials; NaN where a trial was not evaluated."""

        self._token_losses = dict[str, np.ndarray]()

    def run(self, rate: float, report: Callable[[int], None]) -> Losses:
        """Evaluate one decoy of each source, and of those that may matter 2, 4, 8, … until the
        verdicts are clear. `report` gets the number of rounds that are done."""
        self.evaluate(first_round(len(self.decoys)))
        for num_rounds, num_draws in enumerate([1, *looks(self.num_draws)], start=1):
            report(num_rounds)
            gives_S, lost_S = sources_to_look_at(self.losses, rate)
            if not (gives_S | lost_S).any():
                break
            gives = np.flatnonzero(gives_S).tolist()
            lost = np.flatnonzero(lost_S).tolist()
            self.evaluate(next_round(gives, lost, num_draws))
        return self.losses

    @property
    def num_draws(self) -> int:
        return len(self.decoys[0])

    @property
    def losses(self) -> Losses:
        """The losses of each statement."""
        return _as_losses(self.statement_losses)

    @property
    def token_losses(self) -> Losses:
        """The losses of each token of the answer."""
        return _as_losses(self._token_losses)

    def unread_sources(self) -> list[int]:
        """Return the numbers of sources whose replacement by a decoy changes no token's loss in any
        digit: the model has not read them."""
        with_all_W = self._token_losses["all"][:, 0]
        without_WS = self._token_losses["without"][:, :, 0]
        is_uncertain_W = with_all_W > CERTAIN_NATS
        if is_uncertain_W.sum() < LEAST_UNCERTAIN_TOKENS:
            return []
        is_same_WS = without_WS == with_all_W[:, None]
        is_unread_S = is_same_WS[is_uncertain_W].all(0)
        unread = list[int]()
        sources_F = self.distant_tokens(Trial("all"))
        for source in np.flatnonzero(is_unread_S).tolist():
            # A decoy with the source's own tokens would change nothing either.
            with_decoy_F = self.distant_tokens(Trial("without", source))
            if not np.array_equal(with_decoy_F, sources_F):
                unread.append(source)
        return unread

    def evaluate(self, trials: Iterable[Trial]) -> None:
        """Evaluate those of these trials that were not evaluated before."""
        new = [
            trial
            for trial in trials
            if np.isnan(self.statement_losses[trial.way][(0, *trial.place)])
        ]
        if not new:
            return
        blocks = [self.layout.block.with_distant(self.distant_tokens(trial)) for trial in new]
        prompts = [Prompt(block.tokens[: block.num_before], block.targets_W) for block in blocks]
        losses_PW = -np.stack(self.logprobs.score(prompts))
        losses_TP = self.layout.by_statement(losses_PW)
        refuse_no_numbers(losses_TP, "statements, with these sources and decoys")
        if not self._token_losses:
            self._token_losses = self._not_evaluated(losses_PW.shape[1])
        for number, trial in enumerate(new):
            place = (slice(None), *trial.place)
            self.statement_losses[trial.way][place] = losses_TP[:, number]
            self._token_losses[trial.way][place] = losses_PW[number]

    def distant_tokens(self, trial: Trial) -> np.ndarray:
        """Return distant_F: the distant part of the prompt, with decoys in it."""
        distant_F = self.layout.block.distant_F.copy()
        for source in trial.replaced(len(self.decoys)):
            first = self.layout.units.first[source]
            decoy_L = self.decoys[source][trial.draw]
            distant_F[first : first + len(decoy_L)] = decoy_L
        return distant_F

    def _not_evaluated(self, num_rows: int) -> dict[str, np.ndarray]:
        """Return arrays of NaN for the losses of so many statements or tokens."""
        num_sources = len(self.decoys)
        shapes: dict[str, tuple[int, ...]] = {
            "all": (1,),
            "decoys": (self.num_draws,),
            "among": (num_sources, self.num_draws),
            "without": (num_sources, self.num_draws),
        }
        return {way: np.full((num_rows, *shape), np.nan) for way, shape in shapes.items()}


def _as_losses(by_way: dict[str, np.ndarray]) -> Losses:
    return Losses(
        all_T=by_way["all"][:, 0],
        decoys_TD=by_way["decoys"],
        among_TSD=by_way["among"],
        without_TSD=by_way["without"],
    )


def first_round(num_sources: int) -> list[Trial]:
    """Return the trials that show which sources may matter: one decoy of each."""
    without = [Trial("without", source) for source in range(num_sources)]
    return [Trial("all"), Trial("decoys"), *without]


def next_round(gives: Iterable[int], lost: Iterable[int], num: int) -> list[Trial]:
    """Return trials of the first `num` decoys of these sources: `gives`, of what they give among
    decoys; `lost`, of what is lost without them."""
    draws = range(num)
    sources_that_give = list(gives)
    trials = list[Trial]()
    for source in lost:
        trials += [Trial("without", source, draw) for draw in draws]
    # What a source gives is compared with decoys in all places, draw by draw. If none is tested,
    # two draws are enough for the nats that all sources give.
    for draw in draws if sources_that_give else draws[:2]:
        trials.append(Trial("decoys", draw=draw))
    for source in sources_that_give:
        trials += [Trial("among", source, draw) for draw in draws]
    return trials


@dataclass(frozen=True)
class TrialCount:
    """Counts what the trials of a prompt cost."""

    token_forwards: int
    num_prompts: int

    def __add__(self, other: TrialCount) -> TrialCount:
        return TrialCount(
            self.token_forwards + other.token_forwards, self.num_prompts + other.num_prompts
        )


NOTHING = TrialCount(0, 0)


def count_at_most(prompt: SourcePrompt, layout: Layout, draws: int) -> TrialCount:
    """Count all trials that verdicts may need."""
    every = range(len(prompt.names))
    rounds = [next_round(every, every, num) for num in [1, *looks(draws)]]
    return _count(prompt, layout, draws, rounds)


def count_if_clear(prompt: SourcePrompt, layout: Layout, draws: int) -> TrialCount:
    """Count the trials if one decoy of each source and two of the first source are enough."""
    return _count(prompt, layout, draws, [next_round([], [0], 2)])


def _count(
    prompt: SourcePrompt, layout: Layout, draws: int, rounds: Sequence[list[Trial]]
) -> TrialCount:
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
    """Return decoys_DL of each source that share no token, so that prompts share no more than they
    must. Their tokens are negative, which no text has."""
    decoys = list[np.ndarray]()
    next_token = -1
    for parts in prompt.wholes:
        for ids in parts:
            num_tokens = draws * len(ids)
            decoys.append((next_token - np.arange(num_tokens)).reshape(draws, len(ids)))
            next_token -= num_tokens
    return decoys
