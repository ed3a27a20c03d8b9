"""Every question about one document: which k far units matter to a target, and what they give back.

Place in the flow: document + chosen targets → selectors → losses of their choices → **rows**.

A target is asked about one of two far parts: the document's own, or the placebo that stands in its
place. For either, the same selector also chooses among the units of foreign texts at the same
position IDs.

Dimension key: T targets, K numbers of far units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis.documents import Controls, Document, FarText
from analysis.influence import AIMED, SELECTORS, Choice, Question
from analysis.scoring import Context, Row, Scorer
from analysis.tables import PHASES
from analysis.windows import Block, Spans, Units, Windows
from olmo_sparsity.errors import DataError
from olmo_sparsity.model.far_states import FarStates

KS = (1, 2, 4, 8, 16)
DOCUMENT, PLACEBO = "document", "placebo"
"""Far parts."""

NUM_DRAWS = {"random": 3}
"""Draws of the own control; every other selector is deterministic."""

COLUMNS = {
    name: [column for column in PHASES["recovery"][name].names if column != "document"]
    for name in ("recovery", "influence", "costs")
}


@dataclass(frozen=True)
class _Text:
    """One text in the far part of a block, and the targets that are asked about it."""

    context: Context
    far: FarText
    control: str
    draw: int
    targets: dict[str, Spans]
    """far part → targets (indices into the block)."""


@dataclass(frozen=True)
class _Chosen:
    """A selector's choice for some targets, and the rows that give L_k, for every target and k.
    Where the far part is the target's own, as many follow with all far places but the chosen."""

    about: dict[str, Any]
    units: Units
    targets: Spans
    parts: dict[str, Spans]
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
    done: Callable[[int], None] | None = None,
) -> dict[str, pd.DataFrame]:
    """The tables `recovery`, `influence` and `costs` of one document (docs/formats.md).

    `targets` are places in the document, of each far part that is asked about (default: the
    document's own, every target with a full long window); two columns are spans of places, from the
    first to before the second, that are asked about as one. Without `controls` there is neither
    placebo nor foreign text, and no recovery should be shown without one. `done` is told, from time
    to time, how many targets are.
    """
    units, selectors = ((n,) if isinstance(n, str) else tuple(n) for n in (units, selectors))
    if targets is None:
        targets = np.arange(windows.first_target, len(document.tokens))
    if not isinstance(targets, Mapping):
        targets = {DOCUMENT: np.asarray(targets)}
    blocks: dict[tuple[int, int], dict[str, Spans]] = {}
    for part, places in targets.items():
        for first, end in _as_spans(windows, document, np.asarray(places)):
            start = int(windows.start_of(first))
            last = min(max(start + windows.stride, end), len(document.tokens))
            parts = blocks.setdefault((start, last), {})
            parts.setdefault(part, []).append((first - start, end - start))
    longest = max((start for start, _ in blocks), default=0) if windows.long == "all" else None
    questions = _Questions(scorer, document, longest, units, selectors, tuple(ks), seed)
    num_done = 0
    for start, last in sorted(blocks):
        block = windows.block(document.tokens, start, last)
        questions.ask(block, blocks[start, last], controls)
        num_done += sum(map(len, blocks[start, last].values()))
        if done is not None:
            done(num_done)
    return {
        name: pd.DataFrame({column: np.concatenate(parts) for column, parts in columns.items()})
        if all(columns.values())
        else pd.DataFrame(columns=COLUMNS[name])
        for name, columns in questions.tables.items()
    }


def _as_spans(windows: Windows, document: Document, places: np.ndarray) -> Spans:
    spans = [(p, p + 1) for p in places.tolist()] if places.ndim == 1 else [*map(tuple, places)]
    first, length = windows.first_target, len(document.tokens)
    for start, end in spans:
        if not first <= start < end <= length:
            raise DataError(
                f"target {start}{'' if end == start + 1 else f' to {end - 1}'}: those of document "
                f"{document.number} with a full long window are {first} to {length - 1}"
            )
    return sorted({(int(start), int(end)) for start, end in spans})


class _Questions:
    """What is asked of every block of a document, and the rows of the answers."""

    def __init__(
        self,
        scorer: Scorer,
        document: Document,
        longest: int | None,
        units: tuple[str, ...],
        selectors: tuple[str, ...],
        ks: tuple[int, ...],
        seed: int,
    ) -> None:
        """`longest`: where all far parts begin with their text, the last place at which a block
        begins."""
        self.scorer, self.document, self.longest, self.seed = scorer, document, longest, seed
        self.units, self.selectors, self.ks = units, selectors, ks
        self.tables: dict[str, dict[str, list[np.ndarray]]] = {
            name: {column: [] for column in columns} for name, columns in COLUMNS.items()
        }
        self._states: dict[tuple, FarStates] = {}

    def ask(self, block: Block, wanted: dict[str, Spans], controls: Controls | None) -> None:
        before, own = self.scorer.token_forwards, {}
        for part, targets in wanted.items():
            if part == DOCUMENT:
                far = FarText.at(self.document, block.first, block.num_far)
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
        self, block: Block, far: FarText, control: str, draw: int, targets: dict[str, Spans]
    ) -> _Text:
        block = block.with_far(far.tokens_F)
        states = None
        if self.longest and far.is_run and self.scorer.far_states == "contextual":
            # One pass over a text serves all blocks.
            key = (id(far.document), int(far.places_F[0]))
            if key not in self._states:
                end = int(far.places_F[0]) + self.longest - block.windows.short
                tokens = far.document.tokens[far.places_F[0] : end]
                whole = np.concatenate([block.tokens[: block.num_prefix], tokens])
                self._states[key] = self.scorer.states(whole)
            states = self._states[key]
        return _Text(self.scorer.context(block, states), far, control, draw, targets)

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
        together = sorted({span for targets in text.targets.values() for span in targets})
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
        hidden = self.scorer.hidden(rows)
        loss_N = self.scorer.nll(torch.cat(hidden), np.concatenate([row.targets for row in rows]))
        ends = np.cumsum([len(hidden_WD) for hidden_WD in hidden])
        loss_N = np.add.reduceat(loss_N, np.concatenate([[0], ends[:-1]]))  # of each row
        first = 0
        for one in chosen:
            end, shape = first + len(one.rows), (len(one.targets), len(self.ks))
            kl_TK, without_TK = np.full(shape, np.nan), np.full(shape, np.nan)
            loss_TK = loss_N[first : first + kl_TK.size].reshape(shape)
            if len(one.rows) > kl_TK.size:
                without_TK = loss_N[first + kl_TK.size : end].reshape(shape)
            if one.aim_WV is not None:
                for i, (start, last) in enumerate(one.targets):
                    some = torch.stack(hidden[first + i * shape[1] : first + (i + 1) * shape[1]])
                    kl_TK[i] = self.scorer.kl(one.aim_WV[start:last], some).sum(-1)
            self._write(
                text, one, {"loss_set": loss_TK, "loss_without": without_TK, "kl_set": kl_TK}
            )
            first = end

    def _choose(
        self,
        text: _Text,
        units: Units,
        about: dict[str, Any],
        targets: Spans,
        parts: dict[str, Spans],
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
        far_TK = [[units.places(*unit_K[:k]) for k in self.ks] for unit_K in choice.unit_TK]
        asked = [(far, span) for span, far_K in zip(targets, far_TK, strict=True) for far in far_K]
        if text.control == "own":
            every = np.arange(block.num_far)
            asked += [(np.setdiff1d(every, far), span) for far, span in asked]
        rows = [text.context.set_row(far, span) for far, span in asked]
        num_tokens_TK = np.array([[len(far) for far in far_K] for far_K in far_TK])
        return _Chosen(about, units, targets, parts, choice, aim_WV, rows, num_tokens_TK)

    def _write(self, text: _Text, one: _Chosen, found: dict[str, np.ndarray]) -> None:
        """Rows for each far part that has a target, with what was `found` of each target and k.
        Places are those of the document, whatever text stands there."""
        block, ks = text.context.block, np.array(self.ks)
        for part, spans in one.parts.items():
            rows = np.array([one.targets.index(span) for span in spans])
            target = block.start + np.array([first for first, _ in spans])
            about = {"far_part": part} | one.about
            self._add(
                "recovery", about, target=target.repeat(len(ks)), k=np.tile(ks, len(rows)),
                num_tokens=one.num_tokens_TK[rows].ravel(),
                **{name: values_TK[rows].ravel() for name, values_TK in found.items()},
            )  # fmt: skip
            if one.about["draw"] > 0:
                continue
            unit_TK = one.choice.unit_TK[rows]
            first, end = one.units.first[unit_TK].ravel(), one.units.end[unit_TK].ravel()
            self._add(
                "influence", about, target=target.repeat(unit_TK.shape[1]),
                rank=np.tile(np.arange(1, unit_TK.shape[1] + 1), len(rows)),
                far_first=block.first + first, far_end=block.first + end,
                far_text=[text.far.text(a, b) for a, b in zip(first, end, strict=True)],
                influence=one.choice.influence_TK[rows].ravel(),
            )  # fmt: skip

    def _cost(self, kind: str, selector: str, before: int, num_targets: int) -> None:
        spent = self.scorer.token_forwards - before
        about = {"units": kind, "selector": selector}
        self._add("costs", about, token_forwards=[spent], num_targets=[num_targets])

    def _add(self, table: str, about: Mapping[str, Any], **values: Any) -> None:
        num_rows = len(next(iter(values.values())))
        for column, parts in self.tables[table].items():
            # Arrays, and one frame in the end: a frame for each choice costs more than the choice.
            value = values[column] if column in values else [about[column]] * num_rows
            is_text = num_rows > 0 and isinstance(value[0], str)
            parts.append(np.array(value, dtype=object if is_text else None))
