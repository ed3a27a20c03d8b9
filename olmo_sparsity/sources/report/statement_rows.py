"""Make the table of statements of an `Attribution`: one row for each statement, with its verdict.

Place in the flow: verdicts/verdict.py, tables.py → **`StatementRows`** → attribution.py, which adds
what needs the attributions of reasoning. docs/sources.md explains the columns. A row, for
example:

    text      It was opened in June 1921.
    nats      9.6                                       all sources together
    spread    0.4                                       what one exchanged text changes
    p         0.0002                                    smallest p-value, corrected for all tests
    kind      one
    sources   (bridge.txt,)                             what the verdict names
    open      ()                                        sources that are neither named nor excluded
    verdict   rests on bridge.txt (gives 9.2 nats; beats 2 of 2 decoys)
    by_word   by word, in nats: June +3.1, 1921. +5.0; less than 1: It was opened in

Dimension key: T statements, S sources, W tokens of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.sources.prompt.layout import Layout
from olmo_sparsity.sources.report.verdict_text import SourceEffects, verdict_in_words
from olmo_sparsity.sources.report.words import WordNats, describe_words, nats_by_word
from olmo_sparsity.sources.verdicts.effect_tests import EFFECTS
from olmo_sparsity.sources.verdicts.losses import StatementLosses, mean_over_decoys
from olmo_sparsity.sources.verdicts.verdict import Judgement, Verdict


@dataclass(frozen=True)
class StatementRows:
    """Makes the rows of the table, of what is known of an answer and its verdicts."""

    names: Sequence[str]
    """Names of the sources."""

    texts: Sequence[str]
    """The text of each statement."""

    layout: Layout
    losses: StatementLosses
    token_losses: StatementLosses | None
    """Losses of each token of the answer. None means that `by_word` is empty."""

    judgement: Judgement
    matrix: pd.DataFrame
    """A row for each statement and source (report/tables.py)."""

    draws: int
    """Largest number of decoys of each source."""

    def row(self, index: int) -> dict[str, Any]:
        """Return the row of the statement with this index, by its columns."""
        evidence = self.judgement.evidence
        verdict = self.judgement.verdicts[index]
        named = [self.names[source] for source in verdict.sources]
        open_sources = np.flatnonzero(evidence.is_open_TS[index])
        open_names = [self.names[source] for source in open_sources]

        # An undecided verdict is about the sources that may matter.
        described_names = open_names if verdict.kind == "undecided" else named
        described = SourceEffects.of_rows(self.matrix.loc[index].loc[described_names])
        nats = self.losses.gap_T[index]
        # One number for the statement; sources differ only where there are more than four.
        spread = evidence.spread_TS[index].mean()
        # Bonferroni over both effects of each source.
        smallest_p = evidence.p_ETS[:, index].min()
        p = (len(EFFECTS) * len(self.names) * smallest_p).clip(max=1.0)
        return {
            "text": self.texts[index].strip(),
            "nats": nats,
            "spread": spread,
            "p": p,
            "kind": verdict.kind,
            "sources": tuple(named),
            "open": tuple(open_names),
            "verdict": verdict_in_words(verdict.kind, described, nats, spread, self.draws),
            "by_word": self._by_word(index, verdict, described),
        }

    def _by_word(self, index: int, verdict: Verdict, named: Sequence[SourceEffects]) -> str:
        """Return how the nats of a statement are spread over its words, by the effect that its
        verdict shows; empty if it rests on no source. `named`: the effects of the sources that the
        verdict names."""
        if self.token_losses is None or not verdict.sources:
            return ""
        gives_WS = mean_over_decoys(self.token_losses.gives_TSD)
        lost_WS = mean_over_decoys(self.token_losses.lost_TSD)
        if verdict.kind == "both":
            # Several lists of words, so each says of which source it is.
            words_by_source = {
                self.names[source]: self._nats_by_word(index, lost_WS[:, source])
                for source in verdict.sources
            }
            return describe_words(words_by_source)

        if verdict.kind == "either":
            # Alternatives replace each other, so nothing is lost without one of them: shown are the
            # nats of all sources together.
            nats_W = self.token_losses.gap_T
        else:
            (source,) = verdict.sources
            shown_WS = gives_WS if named[0].is_shown_by_gives else lost_WS
            nats_W = shown_WS[:, source]
        # A single list of words needs no name, as the verdict above it has the name.
        return describe_words({"": self._nats_by_word(index, nats_W)})

    def _nats_by_word(self, index: int, nats_W: np.ndarray) -> list[WordNats]:
        """Return the words of a statement with their nats. `nats_W`: nats of each token of the
        answer."""
        first, end = self.layout.statements[index]
        place = self.layout.block.start + first
        return nats_by_word(self.layout.document, place, nats_W[first:end])
