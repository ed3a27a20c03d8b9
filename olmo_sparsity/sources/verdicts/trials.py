"""Evaluate the losses of statements while decoys replace sources, as far as verdicts need them.

Place in the flow: layout and decoys (layout.py, decoys.py) → **`Trials.run`** → losses.py, which
evidence.py and verdicts/verdict.py judge.

A *trial* is one prompt in which decoys replace some sources. A decoy is as long as its source, so
all other texts keep their positions. No source is left out instead, because a model has never seen
a prompt with such a gap. The trials of three sources, with their first decoys:

    kind           texts of the prompt                  shows
    all            source 0   source 1   source 2
    decoys         decoy 0    decoy 1    decoy 2        what all sources give together
    among (1)      decoy 0    source 1   decoy 2        what source 1 gives
    without (1)    source 0   decoy 1    source 2       what is lost without source 1

A *draw* is the index of the decoy that replaces a source. `run` goes in rounds, and stops as soon
as more decoys would change no verdict. With four decoys of each source, for example:

    first round    all, decoys, and without each source     draw 0
    next rounds    trials of the sources that may still     draw 0; then draws 0 and 1; then draws
                   change a verdict                         0 to 3

A trial that was evaluated is not evaluated again. Its losses are kept by its kind: those of
among (1) with draw 0 at `among[:, 1, 0]`, for all statements at once.

Dimension key: T statements, S sources, D decoys of a source, W tokens of the answer, P prompts,
F distant tokens, L tokens of a source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from olmo_sparsity.analysis.scoring.tensors import check_finite
from olmo_sparsity.models.prompts import LogprobModel, Prompt
from olmo_sparsity.sources.prompt.layout import Layout
from olmo_sparsity.sources.verdicts.evidence import decoy_rounds
from olmo_sparsity.sources.verdicts.losses import StatementLosses
from olmo_sparsity.sources.verdicts.verdict import needs_more_decoys

CERTAIN_NATS = 1e-4
"""A token of a smaller loss may have the same loss, to the last digit, whatever precedes it: its
probability rounds to 1."""

MIN_UNCERTAIN_TOKENS = 4
"""With fewer tokens above `CERTAIN_NATS`, equal losses may be chance, and do not show that the
model has not read a source."""

TrialKind = Literal["all", "decoys", "among", "without"]
"""Which sources the prompt of a trial shows:

    all       all sources
    decoys    none: each is replaced by a decoy
    among     one source, among decoys of all others
    without   all sources but one, which is replaced by a decoy
"""


@dataclass(frozen=True)
class Trial:
    """A prompt to evaluate: which sources are replaced, and by which of their decoys."""

    kind: TrialKind
    source: int | None = None
    """The source that is shown among decoys, or that is replaced. None means that all sources are
    treated alike."""

    draw: int = 0
    """The index of the decoy that replaces each replaced source."""

    @property
    def loss_index(self) -> tuple[int, ...]:
        """Index of the trial's losses in the array of its kind, after the dimension of statements
        (`StatementLosses`): (draw), or (source, draw)."""
        return (self.draw,) if self.source is None else (self.source, self.draw)

    def replaced_sources(self, num_sources: int) -> set[int]:
        """Return the indices of the sources that decoys replace."""
        every_source = set(range(num_sources))
        if self.kind == "all":
            return set()
        if self.kind == "decoys":
            return every_source
        assert self.source is not None
        if self.kind == "among":
            return every_source - {self.source}
        return {self.source}


class Trials:
    """Evaluates trials of one prompt and answer, each once, and keeps the losses."""

    def __init__(
        self, logprobs: LogprobModel, layout: Layout, decoys: Sequence[np.ndarray]
    ) -> None:
        """Prepare the trials; nothing is evaluated yet.

        Args:
            logprobs: Computes log-probabilities.
            layout: The prompt with its answer.
            decoys: decoys_DL of each source. D is the same for all sources.
        """
        self.logprobs = logprobs
        self.layout = layout
        self.decoys = decoys
        self.statement_losses = self._not_evaluated(len(layout.statements))
        """By kind of trial, losses of each statement; NaN where a trial was not evaluated."""

        self._token_losses = self._not_evaluated(len(layout.block.targets_W))
        """The same for each token of the answer."""

    def run(self, rate: float, report: Callable[[int], None]) -> StatementLosses:
        """Evaluate one decoy of each source, then more decoys of those that may matter, until more
        decoys would not change a verdict.

        Args:
            rate: The fraction of the named sources that is expected to be named by chance.
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
            self.evaluate(
                next_round(shown=gives_sources, replaced=lost_sources, num_draws=num_draws)
            )
        return self.losses

    @property
    def num_draws(self) -> int:
        """Number of decoys of each source."""
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
        """Return the indices of sources that the model has not read: a decoy in place of such a
        source changes no token's loss in any digit."""
        # With the first decoy alone, as only that is evaluated for every source.
        with_all_W = self._token_losses["all"][:, 0]
        without_WS = self._token_losses["without"][:, :, 0]
        is_uncertain_W = with_all_W > CERTAIN_NATS
        if is_uncertain_W.sum() < MIN_UNCERTAIN_TOKENS:
            return []
        is_same_WS = without_WS == with_all_W[:, None]
        is_unread_S = is_same_WS[is_uncertain_W].all(0)

        # A decoy with the source's own tokens would change nothing either.
        unread = np.flatnonzero(is_unread_S).tolist()
        return [source for source in unread if self._differs_from_decoy(source)]

    def _differs_from_decoy(self, source: int) -> bool:
        """Return whether the prompt has other tokens with the first decoy of this source."""
        with_source_F = self.distant_tokens(Trial("all"))
        with_decoy_F = self.distant_tokens(Trial("without", source))
        return not np.array_equal(with_decoy_F, with_source_F)

    def evaluate(self, trials: Iterable[Trial]) -> None:
        """Evaluate each of these trials that was not evaluated before."""
        new_trials = [trial for trial in trials if not self._is_evaluated(trial)]
        if not new_trials:
            return
        prompts = [self._prompt_of(trial) for trial in new_trials]
        losses_PW = -np.stack(self.logprobs.score(prompts))
        losses_TP = self.layout.by_statement(losses_PW)
        check_finite(losses_TP, "statements, with these sources and decoys")
        for prompt_index, trial in enumerate(new_trials):
            index = (slice(None), *trial.loss_index)  # of all statements, or all tokens
            self.statement_losses[trial.kind][index] = losses_TP[:, prompt_index]
            self._token_losses[trial.kind][index] = losses_PW[prompt_index]

    def _is_evaluated(self, trial: Trial) -> bool:
        # A trial gives the losses of all statements at once, so the first one tells.
        first_statement = (0, *trial.loss_index)
        return not np.isnan(self.statement_losses[trial.kind][first_statement])

    def _prompt_of(self, trial: Trial) -> Prompt:
        """Return the prompt of a trial, with the answer as its continuation."""
        block = self.layout.block.with_distant(self.distant_tokens(trial))
        return Prompt(block.tokens[: block.num_before], block.targets_W)

    def distant_tokens(self, trial: Trial) -> np.ndarray:
        """Return distant_F: the tokens of the prompt up to the last source, with the decoys of the
        trial in it."""
        distant_F = self.layout.block.distant_F.copy()
        for source in trial.replaced_sources(len(self.decoys)):
            first = self.layout.units.first[source]
            decoy_L = self.decoys[source][trial.draw]
            distant_F[first : first + len(decoy_L)] = decoy_L
        return distant_F

    def _not_evaluated(self, num_rows: int) -> dict[TrialKind, np.ndarray]:
        """Return arrays of NaN for the losses of `num_rows` statements or tokens, by kind of
        trial."""
        num_sources = len(self.decoys)
        shapes: dict[TrialKind, tuple[int, ...]] = {
            "all": (1,),
            "decoys": (self.num_draws,),
            "among": (num_sources, self.num_draws),
            "without": (num_sources, self.num_draws),
        }
        return {kind: np.full((num_rows, *shape), np.nan) for kind, shape in shapes.items()}


def _as_losses(losses_by_kind: dict[TrialKind, np.ndarray]) -> StatementLosses:
    """Return the losses of all kinds of trials as one object."""
    return StatementLosses(
        all_T=losses_by_kind["all"][:, 0],
        decoys_TD=losses_by_kind["decoys"],
        among_TSD=losses_by_kind["among"],
        without_TSD=losses_by_kind["without"],
    )


def first_round(num_sources: int) -> list[Trial]:
    """Return the trials that show which sources may matter: one decoy of each."""
    without = [Trial("without", source) for source in range(num_sources)]
    return [Trial("all"), Trial("decoys"), *without]


def next_round(*, shown: Sequence[int], replaced: Sequence[int], num_draws: int) -> list[Trial]:
    """Return trials with the first `num_draws` decoys.

    Args:
        shown: Sources to show among decoys, for what they give.
        replaced: Sources to replace, for what is lost without them.
    """
    draws = range(num_draws)
    trials: list[Trial] = []
    for source in replaced:
        trials += [Trial("without", source, draw) for draw in draws]
    # What a source gives is compared with decoys of all sources, draw by draw. If none is shown,
    # two draws are enough for the nats that all sources give.
    num_draws_of_decoys = num_draws if shown else min(num_draws, 2)
    trials += [Trial("decoys", draw=draw) for draw in range(num_draws_of_decoys)]
    for source in shown:
        trials += [Trial("among", source, draw) for draw in draws]
    return trials
