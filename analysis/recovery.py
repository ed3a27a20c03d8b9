"""Every question about one document: which k far units matter to a target, and what they give back.

Place in the flow: document + chosen targets → selectors → losses of their choices → **rows**.

A target is asked about one of two far parts: the document's own, or the placebo that stands in its
place. For either, the same selector also chooses among the units of foreign texts at the same
position IDs.

Dimension key: T targets, K numbers of far units.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis.documents import Controls, Document, FarText
from analysis.influence import AIMED, SELECTORS, Choice, Question
from analysis.scoring import Context, Row, Scorer
from analysis.windows import Block, Units, Windows
from olmo_sparsity.errors import DataError

KS = (1, 2, 4, 8, 16)
DOCUMENT, PLACEBO = "document", "placebo"
"""Far parts."""

NUM_DRAWS = {"random": 3}
"""Draws of the own control; every other selector is deterministic."""

Table = defaultdict[str, list]


@dataclass(frozen=True)
class _Text:
    """One text in the far part of a block, and the targets that are asked about it."""

    context: Context
    far: FarText
    control: str
    draw: int
    targets: dict[str, np.ndarray]
    """far part → targets (indices into the block)."""


@dataclass(frozen=True)
class _Chosen:
    """A selector's choice for some targets, and the rows that give L_k."""

    about: dict[str, Any]
    units: Units
    targets: np.ndarray
    parts: dict[str, np.ndarray]
    """far part → those of the targets that were asked about it."""

    choice: Choice
    aim_WV: Tensor | None
    rows: list[Row]
    num_tokens_TK: np.ndarray


def recover(
    scorer: Scorer,
    document: Document,
    windows: Windows,
    targets: Mapping[str, np.ndarray] | np.ndarray | None = None,
    *,
    units: str | Sequence[str] = "tokens",
    selectors: str | Sequence[str] = "add_one",
    ks: Sequence[int] = KS,
    controls: Controls | None = None,
    seed: int = 0,
) -> dict[str, pd.DataFrame]:
    """The tables `recovery`, `influence` and `costs` of one document (docs/formats.md).

    `targets` are places in the document, of each far part that is asked about (default: the
    document's own, every target with a full long window). Without `controls` there is neither
    placebo nor foreign text, and no recovery should be shown without one.
    """
    units, selectors = ((n,) if isinstance(n, str) else tuple(n) for n in (units, selectors))
    if targets is None:
        targets = np.arange(windows.long, len(document.tokens))
    if not isinstance(targets, Mapping):
        targets = {DOCUMENT: np.asarray(targets)}
    for places in targets.values():
        if len(places) and not windows.long <= min(places) <= max(places) < len(document.tokens):
            raise DataError(
                f"targets {min(places)} to {max(places)}: those of document {document.number} "
                f"with a full long window are {windows.long} to {len(document.tokens) - 1}"
            )
    questions = _Questions(scorer, document, units, selectors, tuple(ks), seed)
    for block in windows.blocks(document.tokens):
        inside = {
            part: places[windows.start_of(places) == block.start] - block.start
            for part, places in targets.items()
        }
        wanted = {part: np.sort(indices) for part, indices in inside.items() if len(indices)}
        if wanted:
            questions.ask(block, wanted, controls)
    return {name: pd.DataFrame(columns) for name, columns in questions.tables.items()}


class _Questions:
    """What is asked of every block of a document, and the rows of the answers."""

    def __init__(
        self,
        scorer: Scorer,
        document: Document,
        units: tuple[str, ...],
        selectors: tuple[str, ...],
        ks: tuple[int, ...],
        seed: int,
    ) -> None:
        self.scorer, self.document, self.seed = scorer, document, seed
        self.units, self.selectors, self.ks = units, selectors, ks
        self.tables: dict[str, Table] = {
            name: defaultdict(list) for name in ("recovery", "influence", "costs")
        }

    def ask(self, block: Block, wanted: dict[str, np.ndarray], controls: Controls | None) -> None:
        before, own = self.scorer.token_forwards, {}
        for part, targets in wanted.items():
            if part == DOCUMENT:
                far = FarText.at(self.document, block.first, block.windows.num_far)
            else:
                assert controls is not None, "the placebo is a text of another document"
                far = controls.placebo(self.document, block)
            own[part] = self._text(block, far, "own", 0, {part: targets})
        aims: dict[str, Tensor] = {}
        if AIMED & set(self.selectors):
            for part, text in own.items():
                (hidden_WD,) = self.scorer.hidden([text.context.long_row()])
                aims[part] = self.scorer.log_probabilities(hidden_WD)
        self._cost("all", "shared", before, sum(map(len, wanted.values())))
        for text in own.values():
            self._select(text, aims)
        if controls is not None:
            for text in self._foreign(block, own, controls):
                self._select(text, aims)

    def _text(
        self, block: Block, far: FarText, control: str, draw: int, targets: dict[str, np.ndarray]
    ) -> _Text:
        context = self.scorer.context(block.with_far(far.tokens_F))
        return _Text(context, far, control, draw, targets)

    def _foreign(self, block: Block, own: dict[str, _Text], controls: Controls) -> Iterator[_Text]:
        for draw in range(controls.num_draws):
            if controls.kind == "unrelated":  # one text for all far parts: asked once
                far = controls.unrelated(self.document, block, draw)
                targets = {part: text.targets[part] for part, text in own.items()}
                yield self._text(block, far, "foreign", draw, targets)
                continue
            for part, text in own.items():
                for far, some in controls.foreign(
                    self.document, block, text.far, text.targets[part], draw
                ):
                    yield self._text(block, far, "foreign", draw, {part: some})

    def _select(self, text: _Text, aims: dict[str, Tensor]) -> None:
        """Every selector on every kind of units of one text, then L_k of all their choices."""
        chosen: list[_Chosen] = []
        together = np.unique(np.concatenate(list(text.targets.values())))
        for kind in self.units:
            units = text.far.units(kind)
            for selector in self.selectors:
                # What aims at the prediction of a far part differs between far parts.
                groups = [(together, text.targets)]
                if selector in AIMED:
                    groups = [(targets, {part: targets}) for part, targets in text.targets.items()]
                num_draws = NUM_DRAWS.get(selector, 1) if text.control == "own" else 1
                for draw in range(text.draw, text.draw + num_draws):
                    about = {"units": kind, "selector": selector, "control": text.control}
                    for targets, parts in groups:
                        aim = aims[next(iter(parts))] if selector in AIMED else None
                        chosen.append(
                            self._choose(text, units, about | {"draw": draw}, targets, parts, aim)
                        )
        # One pass over the rows of all choices, whoever made them.
        rows = [row for one in chosen for row in one.rows]
        hidden_ND = torch.cat(self.scorer.hidden(rows))
        loss_N = self.scorer.nll(hidden_ND, np.concatenate([row.targets for row in rows]))
        first = 0
        for one in chosen:
            end, shape = first + len(one.rows), one.num_tokens_TK.shape
            kl_N = np.full(len(one.rows), np.nan)
            if one.aim_WV is not None:
                pairs = zip(
                    one.targets.tolist(), hidden_ND[first:end].split(len(self.ks)), strict=True
                )
                kl_N = np.concatenate([self.scorer.kl(one.aim_WV[t], some) for t, some in pairs])
            self._write(text, one, loss_N[first:end].reshape(shape), kl_N.reshape(shape))
            first = end

    def _choose(
        self,
        text: _Text,
        units: Units,
        about: dict[str, Any],
        targets: np.ndarray,
        parts: dict[str, np.ndarray],
        aim_WV: Tensor | None,
    ) -> _Chosen:
        block = text.context.block
        seeds = [self.seed, self.document.number, block.start, about["draw"], len(text.control)]
        generator = np.random.default_rng(seeds)
        question = Question(text.context, units, targets, max(self.ks), generator, aim_WV)
        before = self.scorer.token_forwards
        choice = SELECTORS[about["selector"]](self.scorer, question)
        if text.control == "own" and DOCUMENT in parts and about["draw"] == 0:
            self._cost(about["units"], about["selector"], before, len(targets))
        rows, num_tokens = [], []
        for target, unit_K in zip(targets.tolist(), choice.unit_TK.tolist(), strict=True):
            for k in self.ks:
                far = units.places(*unit_K[:k])
                rows.append(text.context.set_row(far, target))
                num_tokens.append(len(far))
        return _Chosen(about, units, targets, parts, choice, aim_WV, rows,
                       np.array(num_tokens).reshape(-1, len(self.ks)))  # fmt: skip

    def _write(self, text: _Text, one: _Chosen, loss_TK: np.ndarray, kl_TK: np.ndarray) -> None:
        """Rows for each far part that has a target."""
        start = text.context.block.start
        for part, some in one.parts.items():
            for row in np.searchsorted(one.targets, some).tolist():
                about = {"target": start + int(one.targets[row]), "far_part": part} | one.about
                for column, k in enumerate(self.ks):
                    _append(
                        self.tables["recovery"], about, k=k,
                        num_tokens=int(one.num_tokens_TK[row, column]),
                        loss_set=float(loss_TK[row, column]), kl_set=float(kl_TK[row, column]),
                    )  # fmt: skip
                if one.about["draw"] == 0:
                    self._influence(about, text, one.units, one.choice, row)

    def _influence(
        self, about: dict[str, Any], text: _Text, units: Units, choice: Choice, row: int
    ) -> None:
        """Places are those of the document, whatever text stands there."""
        about = {name: value for name, value in about.items() if name != "draw"}
        origin = text.context.block.first
        for rank, unit in enumerate(choice.unit_TK[row].tolist(), start=1):
            first, end = int(units.first[unit]), int(units.end[unit])
            _append(
                self.tables["influence"], about, rank=rank, far_first=origin + first,
                far_end=origin + end, far_text=text.far.text(first, end),
                influence=float(choice.influence_TK[row, rank - 1]),
            )  # fmt: skip

    def _cost(self, kind: str, selector: str, before: int, num_targets: int) -> None:
        spent = self.scorer.token_forwards - before
        about = {"units": kind, "selector": selector}
        _append(self.tables["costs"], about, token_forwards=spent, num_targets=num_targets)


def _append(table: Table, about: Mapping[str, Any], **values: Any) -> None:
    for name, value in (dict(about) | values).items():
        table[name].append(value)
