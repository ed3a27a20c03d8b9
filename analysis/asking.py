"""Every question about one document, and the rows of all tables that the answers make.

Place in the flow: document + chosen targets → selectors → losses of their choices → **rows**.

All draws are seeded by (seed, document, block, draw): who measures a document, and in which order,
leaves no trace in its numbers.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from analysis.influence import SELECTORS, Question
from analysis.losses import ContextLosses, context_losses
from analysis.pieces import token_pieces
from analysis.recovery import set_losses
from analysis.scoring import Scorer
from analysis.settings import Settings
from analysis.sources import Source
from analysis.targets import TargetChooser
from analysis.windows import Block

NUM_DRAWS = {"random": 5}
"""Draws of the own control; every other selector is deterministic."""

Rows = dict[str, list]


class Asker:
    def __init__(
        self,
        scorer: Scorer,
        source: Source,
        settings: Settings,
        chooser: TargetChooser,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.scorer, self.source, self.settings = scorer, source, settings
        self.chooser, self.tokenizer = chooser, tokenizer
        first = 0 if source.planted is None else len(source.planted)
        self.strangers = [
            number
            for number, document in enumerate(source.documents)
            if len(document) > settings.windows.long and number >= first
        ]

    def tables(self, number: int, losses: ContextLosses | None = None) -> dict[str, Rows]:
        """All rows of one document; its losses, where they are known already."""
        document, windows = self.source.documents[number], self.settings.windows
        losses = losses or context_losses(self.scorer, document, windows)
        half = self.chooser.half(number)
        tables: dict[str, Rows] = defaultdict(lambda: defaultdict(list))
        tables["losses"] = {
            "target": losses.target.tolist(),
            "token_id": losses.token_id.tolist(),
            "loss_long": losses.loss_long.tolist(),
            "loss_short": losses.loss_short.tolist(),
            "half": [half] * len(losses.target),
        }
        if half == "threshold":
            return tables
        texts = [""] * len(document)
        if self.tokenizer is not None:
            texts = token_pieces(self.tokenizer, document.tolist())
        tables["tokens"] = {
            "place": list(range(len(document))),
            "token_id": document.tolist(),
            "text": texts,
        }
        if self.source.planted is not None and number < len(self.source.planted):
            tables["planted"] = {"place": self.source.planted[number].tolist()}
        draw = np.random.default_rng([self.settings.seed, number])
        sets_of = defaultdict(list)
        for name, indices in self.chooser.choose(number, document, losses, windows, draw).items():
            for index in indices.tolist():
                sets_of[index].append(name)
        for block in windows.blocks(document):
            first = block.start - windows.long
            wanted = [i for i in range(block.num_targets) if first + i in sets_of]
            if wanted:
                names = [sets_of[first + i] for i in wanted]
                self._ask(number, block, np.array(wanted), names, tables)
        return tables

    def _ask(
        self,
        number: int,
        block: Block,
        targets: np.ndarray,
        names: list[list[str]],
        tables: dict[str, Rows],
    ) -> None:
        for selector in self.settings.selectors:
            for draw in range(NUM_DRAWS.get(selector, 1)):
                self._run(number, block, block, targets, names, selector, "own", draw, tables)
            for draw in range(self.settings.num_foreign):
                foreign = block.with_far(self._foreign_far(number, block, draw))
                self._run(number, foreign, block, targets, names, selector, "foreign", draw, tables)

    def _foreign_far(self, number: int, block: Block, draw: int) -> np.ndarray:
        """As many consecutive tokens of another document; the same for every selector."""
        generator = np.random.default_rng([self.settings.seed, number, block.start, draw])
        others = [other for other in self.strangers if not self.source.same_text(other, number)]
        document = self.source.documents[others[generator.integers(len(others))]]
        offset = generator.integers(len(document) - self.settings.windows.num_far + 1)
        return document[offset : offset + self.settings.windows.num_far]

    def _run(
        self,
        number: int,
        block: Block,
        own: Block,
        targets: np.ndarray,
        names: list[list[str]],
        selector: str,
        control: str,
        draw: int,
        tables: dict[str, Rows],
    ) -> None:
        generator = np.random.default_rng(
            [self.settings.seed, number, block.start, draw, len(control)]
        )
        question = Question(block, own, targets, max(self.settings.ks), generator)
        before = self.scorer.token_forwards
        choice = SELECTORS[selector](self.scorer, question)
        if control == "own" and draw == 0:
            _append(
                tables["costs"],
                selector=selector,
                token_forwards=self.scorer.token_forwards - before,
                num_targets=len(targets),
            )
        found = set_losses(
            self.scorer,
            block,
            own,
            targets,
            choice,
            self.settings.ks,
            with_kl=selector == "divergence",
        )
        for row, target in enumerate(targets.tolist()):
            place = own.start + target
            if draw == 0:
                for rank, far in enumerate(choice.far_TK[row].tolist(), start=1):
                    _append(
                        tables["influence"],
                        target=place,
                        selector=selector,
                        control=control,
                        rank=rank,
                        far_position=own.start - own.windows.long + far,
                        far_token_id=int(block.tokens[far]),
                        influence=float(choice.influence_TK[row, rank - 1]),
                    )
            for target_set in names[row]:
                for column, k in enumerate(self.settings.ks):
                    _append(
                        tables["recovery"],
                        target=place,
                        target_set=target_set,
                        selector=selector,
                        control=control,
                        draw=draw,
                        k=k,
                        loss_set=float(found.loss_TK[row, column]),
                        kl_set=None if found.kl_TK is None else float(found.kl_TK[row, column]),
                        kl_short=None if found.kl_short_T is None else float(found.kl_short_T[row]),
                    )


def _append(table: Rows, **values: Any) -> None:
    for name, value in values.items():
        table[name].append(value)
