"""Evaluate the targets of one document: choose k far units for each, and compute the loss.

A target is evaluated with the document's own distant context, or with the placebo's. For either,
the same selector also ranks the units of unrelated texts at the same position IDs.

Dimension key: T targets, K numbers of far units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.reuse import Choices
from olmo_sparsity.analysis.options import KS
from olmo_sparsity.analysis.results.statistics import RELIABILITY, rank_correlations
from olmo_sparsity.analysis.results.tables import PHASES
from olmo_sparsity.analysis.scoring.replaced import ReplacingScorer
from olmo_sparsity.analysis.scoring.scorer import Context, Row, Scorer
from olmo_sparsity.analysis.selectors.influence import (
    NUM_HALVED,
    Choice,
    Question,
    falls_of_sets,
    find_selector,
    first_groups,
    halves_of,
)
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.use import with_model_in_use
from olmo_sparsity.text.documents import Controls, Document, FarText
from olmo_sparsity.text.windows import NOTHING, Block, Spans, Units, Windows

DOCUMENT, PLACEBO = "document", "placebo"  # kinds of distant context

COLUMNS = {
    name: [column for column in PHASES["recovery"][name].names if column != "document"]
    for name in ("recovery", "influence", "lds", "costs")
}


@dataclass(frozen=True)
class _Text:
    """One distant text of a block, and the targets evaluated with it."""

    context: Context
    far: FarText
    control: str
    draw: int
    targets: dict[str, Spans]  # kind of distant context → targets (indices into the block)

    def places(self, targets: Spans) -> np.ndarray:
        return self.context.block.start + np.array([first for first, _ in targets])


@dataclass(frozen=True)
class _Chosen:
    """A selector's choice for a group of targets, and the rows that give L_k for every target and
    k. For own units, as many rows follow with all far places except the chosen."""

    about: dict[str, Any]
    units: Units
    targets: Spans
    choice: Choice
    rows: list[Row]
    num_tokens_TK: np.ndarray


@with_model_in_use
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
    num_halves: int = 0,
    seed: int = 0,
    choices: Choices | None = None,
) -> dict[str, pd.DataFrame]:
    """Return tables `recovery`, `influence`, `lds` and `costs` of one document (docs/measure.md).

    `targets`: places in the document, or a mapping from kind of distant context to places (default:
    every target with a full long window, in the document's own context). Two columns are spans,
    from the first place to one past the last, each evaluated as one target. Without `controls`
    there is neither placebo nor unrelated text; recovery should not be reported without them.
    `num_halves`: random halves of the far units that `lds` is computed from. `choices`: ranked
    units of another measurement, in place of the selectors' own."""
    units, selectors = ((n,) if isinstance(n, str) else tuple(n) for n in (units, selectors))
    if targets is None:
        targets = np.arange(windows.first_target, len(document.tokens))
    if not isinstance(targets, Mapping):
        targets = {DOCUMENT: np.asarray(targets)}
    blocks = _by_block(windows, document, targets)
    evaluation = _Evaluation(
        scorer, document, windows, controls, units, selectors, tuple(ks), num_halves, seed, choices
    )
    # With long="all" the distant texts of all blocks begin the same texts.
    together = [sorted(blocks)] if windows.long == "all" else [[key] for key in sorted(blocks)]
    for keys in filter(None, together):
        evaluation.add({key: blocks[key] for key in keys})
    return {
        name: pd.DataFrame({column: np.concatenate(parts) for column, parts in columns.items()})
        if all(columns.values())
        else pd.DataFrame(columns=COLUMNS[name])
        for name, columns in evaluation.tables.items()
    }


def _by_block(
    windows: Windows, document: Document, targets: Mapping[str, np.ndarray]
) -> dict[tuple[int, int], dict[str, Spans]]:
    """Bounds of a block → kind of distant context → targets, as places in the block."""
    blocks: dict[tuple[int, int], dict[str, Spans]] = {}
    least, length = windows.first_target, len(document.tokens)
    for part, given in targets.items():
        places = np.asarray(given)
        spans = np.stack([places, places + 1], 1) if places.ndim == 1 else places
        for first, end in sorted({(int(first), int(end)) for first, end in spans}):
            if not least <= first < end <= length:
                problem = f"has no full long window; choose from {least} to {length - 1}"
                raise DataError(f"targets: {first}:{end} of document {document.number} {problem}")
            start = int(windows.start_of(first))
            last = min(max(start + windows.stride, end), length)
            parts = blocks.setdefault((start, last), {})
            parts.setdefault(part, []).append((first - start, end - start))
    return blocks


@dataclass
class _Evaluation:
    """Evaluates blocks of one document and collects the rows of the tables."""

    scorer: Scorer
    document: Document
    windows: Windows
    controls: Controls | None
    units: tuple[str, ...]
    selectors: tuple[str, ...]
    ks: tuple[int, ...]
    num_halves: int
    seed: int
    choices: Choices | None

    def __post_init__(self) -> None:
        self.tables: dict[str, dict[str, list[np.ndarray]]] = {
            name: {column: [] for column in columns} for name, columns in COLUMNS.items()
        }

    def add(self, blocks: dict[tuple[int, int], dict[str, Spans]]) -> None:
        """Evaluate blocks, given as bounds → kind of distant context → targets. Text after text,
        and all blocks of each, so that the states of one text at a time are in memory."""
        self.last_start = max(start for start, _ in blocks)
        for part in dict.fromkeys(part for wanted in blocks.values() for part in wanted):
            for bounds, wanted in blocks.items():
                if part in wanted:
                    self._add_own(bounds, part, wanted[part])
        for draw in range(self.controls.num_draws if self.controls is not None else 0):
            for bounds, wanted in blocks.items():
                self._add_foreign(bounds, wanted, draw)

    def _add_own(self, bounds: tuple[int, int], part: str, targets: Spans) -> None:
        block, before = self._block(bounds), self.scorer.token_forwards
        text = self._text(block, self._own(block, part), "own", 0, {part: targets})
        self._cost("all", "shared", before, len(targets))
        self._select(text)

    def _add_foreign(self, bounds: tuple[int, int], wanted: dict[str, Spans], draw: int) -> None:
        assert self.controls is not None
        block = self._block(bounds)
        own = {part: (self._own(block, part), targets) for part, targets in wanted.items()}
        for far, served in self.controls.foreign(self.document, block, own, draw):
            self._select(self._text(block, far, "foreign", draw, served))

    def _block(self, bounds: tuple[int, int]) -> Block:
        return self.windows.block(self.document.tokens, *bounds)

    def _own(self, block: Block, part: str) -> FarText:
        if part == DOCUMENT:
            return FarText.at(self.document, block.first, block.num_far)
        assert self.controls is not None, "the placebo is a text of another document"
        return self.controls.placebo(self.document, block)

    def _text(
        self, block: Block, far: FarText, control: str, draw: int, targets: dict[str, Spans]
    ) -> _Text:
        block, scorer, states = block.with_far(far.tokens_F), self.scorer, None
        if self.windows.long == "all" and far.is_run and scorer.interpretation.keeps_states:
            # One pass over a text serves all blocks: as far as the last one sees.
            first, last = int(far.places_F[0]), self.windows.of_all(self.last_start)
            last -= block.windows.short
            tokens = far.document.tokens[first : first + last]
            states = scorer.states(np.concatenate([block.tokens[: block.num_prefix], tokens]))
        return _Text(scorer.context(block, states), far, control, draw, targets)

    def _select(self, text: _Text) -> None:
        """Run all selectors on all kinds of units of one text, then compute L_k of each choice."""
        choices: list[_Chosen] = []
        all_targets = sorted({span for targets in text.targets.values() for span in targets})
        for kind in self.units:
            units = text.far.units(kind)
            is_own = text.control == "own" and DOCUMENT in text.targets
            is_tested = self.num_halves > 0 and is_own and len(units) > 1  # one has no half
            kept_and_falls = self._halves(text, units, kind) if is_tested else None
            for selector in self.selectors:
                num_draws = find_selector(selector).draws if text.control == "own" else 1
                for draw in range(text.draw, text.draw + num_draws):
                    about = {"units": kind, "selector": selector, "control": text.control}
                    chosen = self._choose(text, units, about | {"draw": draw}, all_targets)
                    choices.append(chosen)
                    if kept_and_falls is not None and draw == text.draw:
                        # How well the sum of a half's scores predicts its fall in loss.
                        kept_AU, fall_TA = kept_and_falls
                        predicted_TA = chosen.choice.score_TU @ kept_AU.T
                        lds_T = rank_correlations(predicted_TA, fall_TA, of_equal_values=0.0)
                        self._add("lds", about, target=text.places(all_targets), lds=lds_T)
            if is_own and self.scorer.interpretation.replaces:
                self._reliability(text, units, kind)
        # The rows of all choices share batches.
        rows = [row for chosen in choices for row in chosen.rows]
        loss_N = self.scorer.sums(rows)
        first = 0
        for chosen in choices:
            end, shape = first + len(chosen.rows), (len(chosen.targets), len(self.ks))
            none_TK = np.full(shape, np.nan)
            loss_TK, without_TK = [*loss_N[first:end].reshape(-1, *shape), none_TK][:2]
            self._write(text, chosen, {"loss_set": loss_TK, "loss_without": without_TK})
            first = end

    def _halves(self, text: _Text, units: Units, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Random halves of the units, and the fall in loss that each gives to each target."""
        block, targets = text.context.block, text.targets[DOCUMENT]
        generator = stream(self.seed, "halves", self.document.number, block.start)
        before = self.scorer.token_forwards
        question = Question(text.context, units, targets, max(self.ks), generator)
        kept_AU = units.halves(self.num_halves, generator)
        fall_TA = falls_of_sets(self.scorer, question, kept_AU)
        self._cost(kind, "halves", before, len(targets))
        return kept_AU, fall_TA

    def _reliability(self, text: _Text, units: Units, kind: str) -> None:
        """The rank correlation of groups' effects by two halves of the texts, Spearman–Brown."""
        assert isinstance(self.scorer, ReplacingScorer)
        groups = first_groups(units, text.context.block.num_far)
        while len(groups) <= NUM_HALVED and (halves := halves_of(groups)):
            groups = halves
        if self.scorer.num_texts < 2 or len(groups) <= NUM_HALVED:
            return
        far, targets = [NOTHING, *(units.run(*one) for one in groups)], text.targets[DOCUMENT]
        rows = [text.context.set_row(places, span) for span in targets for places in far]
        losses = [nll_RW.sum(1) for nll_RW in self.scorer.by_text(rows)]
        loss_TGR = np.array(losses).reshape(len(targets), len(far), -1)
        one, other = (loss_TGR[..., first::2].mean(-1) for first in (0, 1))
        falls = one[:, :1] - one[:, 1:], other[:, :1] - other[:, 1:]
        r_T = np.maximum(-1 / 3, rank_correlations(falls[0], falls[1], of_equal_values=0.0))
        lds_T = 2 * r_T / (1 + r_T)  # -1 at least
        about = {"units": kind, "selector": RELIABILITY}
        self._add("lds", about, target=text.places(targets), lds=lds_T)

    def _choose(self, text: _Text, units: Units, about: dict[str, Any], targets: Spans) -> _Chosen:
        block = text.context.block
        keys = self.document.number, block.start, about["draw"], text.control
        generator = stream(self.seed, "selector", *keys)
        question = Question(text.context, units, targets, max(self.ks), generator)
        before = self.scorer.token_forwards
        if self.choices is None:
            choice = find_selector(about["selector"])(self.scorer, question)
        else:
            starts = text.places(targets).tolist()
            choice = self.choices.pick(self.document.number, about, starts, units, block.first)
        if text.control == "own" and DOCUMENT in text.targets and about["draw"] == 0:
            self._cost(about["units"], about["selector"], before, len(targets))
        far_TK = [[units.places(*unit_K[:k]) for k in self.ks] for unit_K in choice.unit_TK]
        sets = [(far, span) for span, far_K in zip(targets, far_TK, strict=True) for far in far_K]
        if text.control == "own":
            sets += [(np.setdiff1d(np.arange(block.num_far), far), span) for far, span in sets]
        rows = [text.context.set_row(far, span) for far, span in sets]
        num_tokens_TK = np.array([[len(far) for far in far_K] for far_K in far_TK])
        return _Chosen(about, units, targets, choice, rows, num_tokens_TK)

    def _write(self, text: _Text, chosen: _Chosen, columns: dict[str, np.ndarray]) -> None:
        """Add the rows of each kind of distant context, with `columns` by target and k. Places are
        places of the document, also for an unrelated text."""
        block, ks = text.context.block, np.array(self.ks)
        for part, spans in text.targets.items():
            rows = np.array([chosen.targets.index(span) for span in spans])
            target = text.places(spans)
            about = {"far_part": part} | chosen.about
            self._add(
                "recovery",
                about,
                target=target.repeat(len(ks)),
                k=np.tile(ks, len(rows)),
                num_tokens=chosen.num_tokens_TK[rows].ravel(),
                **{name: values_TK[rows].ravel() for name, values_TK in columns.items()},
            )
            if chosen.about["draw"] > 0:
                continue
            unit_TK = chosen.choice.unit_TK[rows]
            first, end = chosen.units.first[unit_TK].ravel(), chosen.units.end[unit_TK].ravel()
            self._add(
                "influence",
                about,
                target=target.repeat(unit_TK.shape[1]),
                rank=np.tile(np.arange(1, unit_TK.shape[1] + 1), len(rows)),
                far_first=block.first + first,
                far_end=block.first + end,
                far_text=[text.far.text(a, b) for a, b in zip(first, end, strict=True)],
                influence=chosen.choice.influence_TK[rows].ravel(),
            )

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
