"""Evaluate the losses of statements while decoys replace sources, as far as verdicts need them.

Place in the flow: layout and decoys (layout.py, decoys.py) → **`Trials.run`** → losses.py, which
evidence.py and verdicts.py judge.

A *trial* is one prompt in which decoys replace some sources. A decoy is as long as its source, so
all other texts keep their positions. No source is left out instead, because a model has never seen
a prompt with such a gap. The trials of three sources are

    way            texts of the prompt                shows
    all            source 0   source 1   source 2
    decoys         decoy 0    decoy 1    decoy 2      what all sources give together
    among, 1       decoy 0    source 1   decoy 2      what source 1 gives
    without, 1     source 0   decoy 1    source 2     what is lost without source 1

`run` begins with one decoy of each source. Then it evaluates 2, 4, 8, … decoys of those sources
that may still change a verdict, and stops as soon as there are none.

Dimension key: T statements, S sources, D decoys of a source, W tokens of the answer, P prompts,
F distant tokens, L tokens of a source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from olmo_sparsity.analysis.scoring.tensors import check_finite
from olmo_sparsity.models.prompts import LogprobModel, Prompt
from olmo_sparsity.sources.evidence import decoy_rounds
from olmo_sparsity.sources.layout import Layout
from olmo_sparsity.sources.losses import StatementLosses
from olmo_sparsity.sources.verdicts import needs_more_decoys

CERTAIN_NATS = 1e-4
"""A token of a smaller loss may have the same loss, to the last digit, whatever precedes it: its
probability rounds to 1."""

MIN_UNCERTAIN_TOKENS = 4
"""With fewer tokens above `CERTAIN_NATS`, equal losses may be chance, and do not show that the
model has not read a source."""


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
        """Index of the loss in the array of its way, behind the index of the statement."""
        return (self.draw,) if self.source is None else (self.source, self.draw)

    def replaced_sources(self, num_sources: int) -> set[int]:
        """Return the numbers of the sources that decoys replace."""
        every_source = set(range(num_sources))
        if self.way == "all":
            return set()
        if self.way == "decoys":
            return every_source
        assert self.source is not None
        return every_source - {self.source} if self.way == "among" else {self.source}


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

        # As `statement_losses`, with a row for each token of the answer. Allocated by the first
        # trials, since a test's layout need not say how many tokens there are.
        self._token_losses = dict[str, np.ndarray]()

    def run(self, rate: float, report: Callable[[int], None]) -> StatementLosses:
        """Evaluate one decoy of each source, then more decoys of those that may matter, until more
        decoys would not change a verdict.

        rate: Share of the named sources that is expected to be named by chance.
        report: Called with the number of rounds that are done.
        """
        self.evaluate(first_round(len(self.decoys)))
        for num_rounds, num_draws in enumerate([1, *decoy_rounds(self.num_draws)], start=1):
            report(num_rounds)
            more_decoys = needs_more_decoys(self.losses, rate)
            gives_sources = np.flatnonzero(more_decoys.gives_S).tolist()
            lost_sources = np.flatnonzero(more_decoys.lost_S).tolist()
            if not gives_sources and not lost_sources:
                break
            self.evaluate(next_round(gives_sources, lost_sources, num_draws))
        return self.losses

    @property
    def num_draws(self) -> int:
        return len(self.decoys[0])

    @property
    def losses(self) -> StatementLosses:
        """The losses of each statement."""
        return _as_losses(self.statement_losses)

    @property
    def token_losses(self) -> StatementLosses:
        """The losses of each token of the answer."""
        return _as_losses(self._token_losses)

    def unread_sources(self) -> list[int]:
        """Return the numbers of sources whose replacement by a decoy changes no token's loss in any
        digit: the model has not read them."""
        with_all_W = self._token_losses["all"][:, 0]
        without_WS = self._token_losses["without"][:, :, 0]
        is_uncertain_W = with_all_W > CERTAIN_NATS
        if is_uncertain_W.sum() < MIN_UNCERTAIN_TOKENS:
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
        new_trials = [
            trial
            for trial in trials
            if np.isnan(self.statement_losses[trial.way][(0, *trial.place)])
        ]
        if not new_trials:
            return
        prompts = [self._prompt_of(trial) for trial in new_trials]
        losses_PW = -np.stack(self.logprobs.score(prompts))
        losses_TP = self.layout.by_statement(losses_PW)
        check_finite(losses_TP, "statements, with these sources and decoys")
        if not self._token_losses:
            self._token_losses = self._not_evaluated(losses_PW.shape[1])
        for number, trial in enumerate(new_trials):
            place = (slice(None), *trial.place)
            self.statement_losses[trial.way][place] = losses_TP[:, number]
            self._token_losses[trial.way][place] = losses_PW[number]

    def _prompt_of(self, trial: Trial) -> Prompt:
        block = self.layout.block.with_distant(self.distant_tokens(trial))
        return Prompt(block.tokens[: block.num_before], block.targets_W)

    def distant_tokens(self, trial: Trial) -> np.ndarray:
        """Return distant_F: the distant part of the prompt, with decoys in it."""
        distant_F = self.layout.block.distant_F.copy()
        for source in trial.replaced_sources(len(self.decoys)):
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


def _as_losses(losses_by_way: dict[str, np.ndarray]) -> StatementLosses:
    return StatementLosses(
        all_T=losses_by_way["all"][:, 0],
        decoys_TD=losses_by_way["decoys"],
        among_TSD=losses_by_way["among"],
        without_TSD=losses_by_way["without"],
    )


def first_round(num_sources: int) -> list[Trial]:
    """Return the trials that show which sources may matter: one decoy of each."""
    without = [Trial("without", source) for source in range(num_sources)]
    return [Trial("all"), Trial("decoys"), *without]


def next_round(
    gives_sources: Sequence[int], lost_sources: Sequence[int], num_draws: int
) -> list[Trial]:
    """Return trials with the first `num_draws` decoys of some sources.

    gives_sources: Sources to show among decoys, for what they give.
    lost_sources: Sources to replace, for what is lost without them.
    """
    draws = range(num_draws)
    trials = list[Trial]()
    for source in lost_sources:
        trials += [Trial("without", source, draw) for draw in draws]
    # What a source gives is compared with decoys in all places, draw by draw. If none is tested,
    # two draws are enough for the nats that all sources give.
    num_of_all_replaced = num_draws if gives_sources else min(num_draws, 2)
    trials += [Trial("decoys", draw=draw) for draw in range(num_of_all_replaced)]
    for source in gives_sources:
        trials += [Trial("among", source, draw) for draw in draws]
    return trials
