"""The fixed text of `track`, and the numbers of one checkpoint on it.

Place in the flow: documents → rows of plain forwards, a few targets of `recover` → a sum and a
count of each number and document. Documents, unrelated texts and targets depend on text, tokenizer
and settings alone, so that differences between checkpoints are paired.

Dimension key: T targets of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.recovery import recover
from olmo_sparsity.analysis.options import MIN_GAP, TrackSettings
from olmo_sparsity.analysis.results.tracked import COLUMNS
from olmo_sparsity.analysis.scoring import scorer as scoring
from olmo_sparsity.analysis.scoring.cost import CountingScorer
from olmo_sparsity.analysis.scoring.induction import losses_of_repetition
from olmo_sparsity.analysis.scoring.scorer import Context, Row, Scorer, bigrams
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.streams import stream
from olmo_sparsity.text.documents import Controls, Document, Documents
from olmo_sparsity.text.windows import Block, Windows

FEWEST = 8
"""Documents; intervals over fewer mean nothing."""

TARGET_EVERY = 8
"""One document in so many carries a target that is searched for its best unit: a target costs as
much as several documents do otherwise."""

AT_ONCE = 8
"""Documents whose rows share batches."""

Sums = dict[str, tuple[float, float]]
"""Number → its sum over a document, and what the sum is divided by."""


@dataclass(frozen=True)
class FixedText:
    documents: Documents
    """Each of `long` tokens."""

    settings: TrackSettings
    prefix: tuple[int, ...] = ()

    @staticmethod
    def of(documents: Documents, settings: TrackSettings, prefix: Sequence[int] = ()) -> FixedText:
        """Take the first documents that are long enough."""
        enough = (d for d in documents if len(d.tokens) >= settings.long)
        items = [
            replace(document, tokens=document.tokens[: settings.long], number=number)
            for number, document in enumerate(islice(enough, settings.documents))
        ]
        if len(items) < FEWEST:
            found = f"{len(items)} of {len(documents)} documents have long={settings.long} tokens"
            raise DataError(f"{documents.name}: {found}, and {FEWEST} are needed; lower long")
        return FixedText(replace(documents, items=items), settings, tuple(prefix))

    def within(self, budget: float, scorer: Scorer) -> FixedText:
        """Keep as many documents as cost no more token-forwards than `budget`."""
        items, left = list[Document](), budget
        for document in self.documents:
            left -= self.cost(scorer, [document.number])
            if left >= 0:
                items.append(document)
        if len(items) < FEWEST:
            raise DataError(f"budget={budget:.3g} pays for {len(items)} documents, not {FEWEST}")
        return replace(self, documents=replace(self.documents, items=items))

    def cost(self, scorer: Scorer, numbers: Sequence[int]) -> int:
        """Count the token-forwards of documents."""
        counting = CountingScorer(scorer)
        self.measure(counting, numbers)
        return counting.token_forwards

    @property
    def numbers(self) -> range:
        return range(len(self.documents))

    @cached_property
    def windows(self) -> Windows:
        """The targets are the last `local` tokens of each document."""
        local = self.settings.local
        return Windows(self.settings.long - local, local, local, self.prefix)

    @cached_property
    def contexts(self) -> list[int]:
        """Tokens before the targets: the local window, doubled up to all there are."""
        contexts, longest = [self.settings.local], self.settings.long - self.settings.local
        while 2 * contexts[-1] < longest:
            contexts.append(2 * contexts[-1])
        return [*contexts, longest]

    @cached_property
    def controls(self) -> Controls:
        return Controls(self.documents, self.windows, num_draws=1, seed=self.settings.seed)

    def block(self, document: Document, context: int | None = None) -> Block:
        """The targets, with so many tokens before them."""
        long, local = self.settings.long, self.settings.local
        windows = self.windows if context is None else replace(self.windows, long=context)
        return windows.block(document.tokens, long - local, long)

    def measure(self, scorer: Scorer, numbers: Sequence[int]) -> pd.DataFrame:
        """Return a row for each number and document: `document`, `number`, `total`, `count`."""
        rows = list[tuple[int, str, float, float]]()
        for first in range(0, len(numbers), AT_ONCE):
            some = [self.documents[number] for number in numbers[first : first + AT_ONCE]]
            for document, sums in zip(some, self._sums_of(scorer, some), strict=True):
                rows += [(document.number, name, *of) for name, of in sums.items()]
        return pd.DataFrame(rows, columns=COLUMNS)

    def _sums_of(self, scorer: Scorer, documents: Sequence[Document]) -> Iterator[Sums]:
        plans = [self._rows(document) for document in documents]
        every = scorer.losses([row for plan in plans for row in plan.values()])
        scoring.refuse_no_numbers(np.concatenate(every), "tokens")
        losses = iter(every)
        passages = [d.tokens[: self.settings.long // 2] for d in documents]
        repeated = losses_of_repetition(scorer, passages).double().tolist()
        for document, plan, (first, again) in zip(documents, plans, repeated, strict=True):
            sums = self._of_losses(document, {key: next(losses).astype(float) for key in plan})
            sums["induction_drop"] = first - again, 1.0
            if document.number % TARGET_EVERY == 0:
                sums |= self._of_one_unit(scorer, document)
            yield sums

    def _rows(self, document: Document) -> dict[tuple[str, int], Row]:
        """(own or unrelated, context) → a plain forward, from position 0. The longest of the own is
        the whole document."""
        block, local = self.block(document), self.settings.local
        other_F = self._unrelated(document)
        rows = {}
        for context in self.contexts:
            part = self.block(document, context)
            rows["own", context] = Context(part).dense_row()
            if context > local:
                unrelated = part.with_far(other_F[len(other_F) - part.num_far :])
                rows["unrelated", context] = Context(unrelated).dense_row()
        num = len(block.tokens) - 1
        rows["own", self.contexts[-1]] = Row(Context(block), np.arange(num), num)
        return rows

    def _of_losses(self, document: Document, found: dict[tuple[str, int], np.ndarray]) -> Sums:
        local, (*_, longest) = self.settings.local, self.contexts
        whole = found["own", longest][-len(document.tokens) :]  # without those of the prefix
        own = {c: found["own", c][-local:] for c in self.contexts}
        unrelated = {c: found.get(("unrelated", c), own[local]) for c in self.contexts}
        sums: Sums = {}
        skipped = len(document.tokens) - len(whole)  # nothing predicts the first token
        for first, end in pairwise([0, *self.contexts[:-1], self.settings.long]):
            part = whole[max(first - skipped, 0) : end - skipped]
            sums[f"loss_{first}_{end}"] = part.sum(), len(part)
        for before, context in pairwise(self.contexts):
            gain_T = own[before] - own[context]
            of_unrelated_T = unrelated[before] - unrelated[context]
            sums[f"gain_{context}"] = gain_T.sum(), local
            sums[f"net_gain_{context}"] = (gain_T - of_unrelated_T).sum(), local
        sums["net_gain"] = (unrelated[longest] - own[longest]).sum(), local
        # Of either text, its own copies: else tokens would be chosen by one of the two.
        blocks = self.block(document), self.block(document).with_far(self._unrelated(document))
        gains_2T = own[local] - np.stack([own[longest], unrelated[longest]])
        is_copy_2T = np.stack([bigrams(block) for block in blocks])
        for name, is_2T in (("copies", is_copy_2T), ("others", ~is_copy_2T)):
            for kind, of_2T in (("net_gain", gains_2T), ("gaining", gains_2T > MIN_GAP)):
                gain, of_unrelated = (of_2T * is_2T).sum(1)
                sums[f"{kind}_{name}"] = gain - of_unrelated, local
        return sums

    def _unrelated(self, document: Document) -> np.ndarray:
        return self.controls.unrelated(document, self.block(document), 0).tokens_F

    def _of_one_unit(self, scorer: Scorer, document: Document) -> Sums:
        """Of one target, a copy if there is one: the loss reduction by the best distant token, less
        that by the best of an unrelated text."""
        block = self.block(document)
        places = np.flatnonzero(bigrams(block))
        places = places if len(places) else np.arange(block.num_targets)
        draws = stream(self.settings.seed, "track", document.number)
        target = block.start + int(draws.choice(places))
        losses = scoring.context_losses(scorer, document, self.windows, blocks=[block])
        losses = losses.set_index("target").loc[target].astype(float)
        table = recover(
            scorer, document, self.windows, np.array([target]), selectors="add_one_screened",
            ks=(1,), controls=self.controls, seed=self.settings.seed,
        )["recovery"]  # fmt: skip
        best = table.groupby("control").loss_set.mean()
        net, gap = best["foreign"] - best["own"], losses.loss_short - losses.loss_long
        return {"one_unit": (net, 1.0), "recovery": (net, gap)}
