"""Evaluate the targets of one document: choose k distant units for each, and compute the loss.

A target is evaluated with the document's own distant context, or with the placebo's. For either,
the same selector also ranks the units of unrelated texts at the same position IDs. The tables call
these two the control `own` and `unrelated`, and the two kinds of distant context `distant_part`.

Dimension key: T targets, K numbers of distant units, A random halves of the units, G groups of
units and none of them, R unrelated texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.parts import UnfinishedDocument
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
from olmo_sparsity.text.controls import Controls, DistantText
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.windows import NOTHING, Block, Spans, Units, Windows

DOCUMENT = "document"
PLACEBO = "placebo"
"""The kinds of distant context, as the column `distant_part` stores them."""

COLUMNS = {
    name: [column for column in PHASES["recovery"][name].names if column != "document"]
    for name in ("recovery", "influence", "lds", "costs")
}
"""Columns of the tables of one document, which lack its number."""

Bounds = tuple[int, int]
"""A block, by the places of its first target and of one past its last in the document."""


@dataclass(frozen=True)
class _Text:
    """One distant text of a block, and the targets that are evaluated with it."""

    context: Context
    distant: DistantText
    control: str  # "own" or "unrelated"
    draw: int  # which of the unrelated texts; 0 for an own text
    targets: dict[str, Spans]  # kind of distant context → targets (indices into the block)

    @property
    def is_own(self) -> bool:
        """Return whether the targets are measured with this text, as their own distant context or
        as that of placebo targets, and not with an unrelated text as a control."""
        return self.control == "own"

    @property
    def is_documents_own(self) -> bool:
        """Return whether this is the document's own distant context."""
        return self.is_own and DOCUMENT in self.targets

    @property
    def all_targets(self) -> Spans:
        """The targets of both kinds of distant context, each once."""
        return sorted(set(chain(*self.targets.values())))

    def places(self, targets: Spans) -> np.ndarray:
        """Return the first place of each target in the document."""
        return self.context.block.start + np.array([first for first, _ in targets])


@dataclass(frozen=True)
class _Halves:
    """Random halves of the units, and how far each lowers the loss of each target."""

    kept_AU: np.ndarray
    fall_TA: np.ndarray


@dataclass(frozen=True)
class _Ranked:
    """A selector's choice for several targets, and the rows whose losses are L_k.

    There is a row for each target and each k: the local window and the k chosen units. For an own
    text, as many rows follow with all distant places except the chosen ones."""

    labels: dict[str, Any]  # the columns `units`, `selector`, `control` and `draw`
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
    unfinished: UnfinishedDocument | None = None,
) -> dict[str, pd.DataFrame]:
    """Return tables `recovery`, `influence`, `lds` and `costs` of one document (docs/measure.md).

    `targets`: places in the document, or a mapping from kind of distant context to places (default:
    every target with a full long window, in the document's own context). Two columns are spans,
    from the first place to one past the last, each evaluated as one target. Without `controls`
    there is neither placebo nor unrelated text; recovery should not be reported without them.
    `num_halves`: random halves of the distant units that `lds` is computed from. `choices`: ranked
    units of another measurement, in place of the selectors' own. `unfinished`: what an earlier
    start has evaluated of this document, which is not evaluated again; rows are stored there."""
    if targets is None:
        targets = np.arange(windows.first_target, len(document.tokens))
    if not isinstance(targets, Mapping):
        targets = {DOCUMENT: np.asarray(targets)}
    evaluation = _Evaluation(
        scorer=scorer,
        document=document,
        windows=windows,
        controls=controls,
        units=_as_tuple(units),
        selectors=_as_tuple(selectors),
        ks=tuple(ks),
        num_halves=num_halves,
        seed=seed,
        choices=choices,
        unfinished=unfinished,
    )
    blocks = dict(sorted(_by_block(windows, document, targets).items()))
    if windows.has_all:
        # The distant texts of all blocks begin the same texts, so that their states are shared.
        if blocks:
            evaluation.add(blocks)
    else:
        for bounds, block_targets in blocks.items():
            evaluation.add({bounds: block_targets})
    tables = evaluation.frames()
    return tables if unfinished is None else unfinished.joined(tables)


def _as_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _frame(name: str, columns: dict[str, list[np.ndarray]]) -> pd.DataFrame:
    """Join the parts of each column of a table; no row was added if a column has no part."""
    if not all(columns.values()):
        return pd.DataFrame(columns=COLUMNS[name])
    return pd.DataFrame({column: np.concatenate(parts) for column, parts in columns.items()})


def _by_block(
    windows: Windows, document: Document, targets: Mapping[str, np.ndarray]
) -> dict[Bounds, dict[str, Spans]]:
    """Sort targets into blocks: bounds → kind of distant context → targets, as places in the
    block."""
    blocks: dict[Bounds, dict[str, Spans]] = {}
    least = windows.first_target
    length = len(document.tokens)
    for distant_part, places in targets.items():
        spans = np.asarray(places)
        if spans.ndim == 1:
            spans = np.stack([spans, spans + 1], 1)
        for first, end in sorted({(int(first), int(end)) for first, end in spans}):
            if not least <= first < end <= length:
                raise DataError(
                    f"targets: tokens {first}:{end} of document {document.number} have no full "
                    f"long window before them; choose from {least} to {length - 1}"
                )
            start = int(windows.start_of(first))
            # A target of several tokens may reach beyond the block that its first token is in.
            block_end = min(max(start + windows.stride, end), length)
            block_targets = blocks.setdefault((start, block_end), {})
            block_targets.setdefault(distant_part, []).append((first - start, end - start))
    return blocks


def _compared_groups(units: Units, num_distant: int) -> list[tuple[int, int]]:
    """Return the groups of units whose effects are compared between two halves of the texts: those
    that `halving` begins with, halved until there are more than it halves, or only single units."""
    groups = first_groups(units, num_distant)
    while len(groups) <= NUM_HALVED:
        halves = halves_of(groups)
        if not halves:
            break
        groups = halves
    return groups


def _empty_tables() -> dict[str, dict[str, list[np.ndarray]]]:
    return {name: {column: [] for column in columns} for name, columns in COLUMNS.items()}


@dataclass(kw_only=True)
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
    unfinished: UnfinishedDocument | None
    tables: dict[str, dict[str, list[np.ndarray]]] = field(default_factory=_empty_tables)
    """Table → column → its parts, of the texts that are not stored yet."""

    unstored_names: list[str] = field(default_factory=list)
    """Names of these texts."""

    start_of_last_block: int = 0
    """Where the last of the blocks begins that `add` evaluates together: the states of a text must
    reach that far."""

    def add(self, blocks: dict[Bounds, dict[str, Spans]]) -> None:
        """Evaluate blocks, given as bounds → kind of distant context → targets. Text after text,
        and all blocks of each, so that the states of one text at a time are in memory."""
        self.start_of_last_block = max(start for start, _ in blocks)
        # Each once, in the order in which they are met.
        distant_parts = dict.fromkeys(chain(*blocks.values()))
        for distant_part in distant_parts:
            for bounds, targets in blocks.items():
                if distant_part in targets:
                    self._add_own_text(bounds, distant_part, targets[distant_part])
        num_draws = 0 if self.controls is None else self.controls.num_draws
        for draw in range(num_draws):
            for bounds, targets in blocks.items():
                self._add_unrelated_texts(bounds, targets, draw)

    def frames(self) -> dict[str, pd.DataFrame]:
        return {name: _frame(name, columns) for name, columns in self.tables.items()}

    def _is_stored(self, name: str) -> bool:
        """Return whether an earlier start has evaluated the text of this name."""
        return self.unfinished is not None and name in self.unfinished.texts

    def _finish(self, name: str) -> None:
        """Store the rows of all texts that are not stored yet, every few seconds."""
        if self.unfinished is None:
            return
        self.unstored_names.append(name)
        if self.unfinished.is_due:
            self.unfinished.store(self.unstored_names, self.frames())
            self.unstored_names = []
            self.tables = _empty_tables()

    def _add_own_text(self, bounds: Bounds, distant_part: str, targets: Spans) -> None:
        name = f"own, {distant_part}, {bounds}"
        if self._is_stored(name):
            return
        block = self._block(bounds)
        forwards_before = self.scorer.token_forwards
        distant = self._own_distant_text(block, distant_part)
        text = self._text(block, distant, control="own", draw=0, targets={distant_part: targets})
        self._add_cost("all", "shared", forwards_before, len(targets))
        self._evaluate(text)
        self._finish(name)

    def _add_unrelated_texts(self, bounds: Bounds, targets: dict[str, Spans], draw: int) -> None:
        """Evaluate the unrelated texts of one draw: one for the whole block, or, with other
        controls than `unrelated`, one for each kind of distant context or each target token."""
        assert self.controls is not None
        block = self._block(bounds)
        own_texts = {
            distant_part: (self._own_distant_text(block, distant_part), spans)
            for distant_part, spans in targets.items()
        }
        texts = self.controls.control_texts(self.document, block, own_texts, draw)
        for number, (distant, served) in enumerate(texts):
            name = f"unrelated, draw {draw}, text {number}, {bounds}"
            if self._is_stored(name):
                continue
            text = self._text(block, distant, control="unrelated", draw=draw, targets=served)
            self._evaluate(text)
            self._finish(name)

    def _block(self, bounds: Bounds) -> Block:
        return self.windows.block(self.document.tokens, *bounds)

    def _own_distant_text(self, block: Block, distant_part: str) -> DistantText:
        if distant_part == DOCUMENT:
            return DistantText.at(self.document, block.first, block.num_distant)
        assert self.controls is not None, "the placebo is a text of another document"
        return self.controls.placebo(self.document, block)

    def _text(
        self,
        block: Block,
        distant: DistantText,
        *,
        control: str,
        draw: int,
        targets: dict[str, Spans],
    ) -> _Text:
        """Put a distant text before the targets of a block, and compute its states."""
        block = block.with_distant(distant.tokens_F)
        states = None
        keeps_states = self.scorer.interpretation.keeps_states
        if self.windows.has_all and distant.is_run and keeps_states:
            # One pass over a text serves all blocks: as far as the last one sees.
            first = int(distant.places_F[0])
            num_distant = self.windows.tokens_before(self.start_of_last_block) - block.windows.short
            distant_tokens = distant.document.tokens[first : first + num_distant]
            prefix = block.tokens[: block.num_prefix]
            states = self.scorer.states(np.concatenate([prefix, distant_tokens]))
        context = self.scorer.context(block, states)
        return _Text(context, distant, control, draw, targets)

    def _evaluate(self, text: _Text) -> None:
        """Run all selectors on all kinds of units of one text, then compute L_k of each choice."""
        evaluated: list[_Ranked] = []
        for kind in self.units:
            units = text.distant.units(kind)
            evaluated += self._rank_with_all_selectors(text, kind, units)
            if text.is_documents_own and self.scorer.interpretation.replaces:
                self._add_reliability(text, units, kind)
        # One call for the rows of all choices, so that they share batches.
        loss_N = self.scorer.sums(list(chain(*(ranked.rows for ranked in evaluated))))
        first = 0
        for ranked in evaluated:
            end = first + len(ranked.rows)
            shape = (len(ranked.targets), len(self.ks))
            # First the rows of only the k units, then, of own texts, of all but them (_choose).
            losses = loss_N[first:end].reshape(-1, *shape)
            loss_TK = losses[0]
            # Removal is measured for own texts only: an unrelated text has no long window.
            without_TK = losses[1] if text.is_own else np.full(shape, np.nan)
            self._add_ranked(text, ranked, loss_TK, without_TK)
            first = end

    def _rank_with_all_selectors(self, text: _Text, kind: str, units: Units) -> list[_Ranked]:
        """Return the ranking by each selector, and by each draw of a random one. Add rows to `lds`
        and `costs`."""
        halves = None
        # A single unit cannot be halved.
        if self.num_halves > 0 and text.is_documents_own and len(units) > 1:
            halves = self._halves(text, units, kind)
        rankings = []
        for selector in self.selectors:
            # An unrelated text is itself one of several draws, so one choice of it is enough.
            num_draws = find_selector(selector).draws if text.is_own else 1
            # Of an own text these are draws of the selector, from 0. An unrelated text has one,
            # which is numbered as the text is.
            for draw in range(text.draw, text.draw + num_draws):
                labels = {
                    "units": kind,
                    "selector": selector,
                    "control": text.control,
                    "draw": draw,
                }
                ranked = self._choose(text, units, labels)
                rankings.append(ranked)
                if halves is not None and draw == text.draw:
                    self._add_lds(text, ranked, halves)
        return rankings

    def _add_lds(self, text: _Text, ranked: _Ranked, halves: _Halves) -> None:
        """Add to `lds` how well a selector's scores, summed over the units of a half, predict by
        how much the half lowers the loss."""
        predicted_TA = ranked.choice.score_TU @ halves.kept_AU.T
        lds_T = rank_correlations(predicted_TA, halves.fall_TA, of_equal_values=0.0)
        self._add("lds", ranked.labels, target=text.places(ranked.targets), lds=lds_T)

    def _halves(self, text: _Text, units: Units, kind: str) -> _Halves:
        block = text.context.block
        targets = text.targets[DOCUMENT]
        generator = stream(self.seed, "halves", self.document.number, block.start)
        forwards_before = self.scorer.token_forwards
        question = Question(text.context, units, targets, max(self.ks), generator)
        kept_AU = units.halves(self.num_halves, generator)
        fall_TA = falls_of_sets(self.scorer, question, kept_AU)
        self._add_cost(kind, "halves", forwards_before, len(targets))
        return _Halves(kept_AU, fall_TA)

    def _add_reliability(self, text: _Text, units: Units, kind: str) -> None:
        """Add the reliability of the replacing texts to `lds`: the rank correlation of the effects
        of groups of units between two halves of the texts, corrected by Spearman and Brown to
        that of all texts."""
        assert isinstance(self.scorer, ReplacingScorer)
        groups = _compared_groups(units, text.context.block.num_distant)
        # One text has no halves, and few groups have no order to speak of.
        if self.scorer.num_texts < 2 or len(groups) <= NUM_HALVED:
            return
        targets = text.targets[DOCUMENT]
        sets = [NOTHING, *(units.run(first, end) for first, end in groups)]
        rows = []
        for span in targets:
            rows += [text.context.set_row(places, span) for places in sets]
        losses = [nll_RW.sum(1) for nll_RW in self.scorer.by_text(rows)]
        loss_TGR = np.array(losses).reshape(len(targets), len(sets), -1)
        even_TG = loss_TGR[..., 0::2].mean(-1)
        odd_TG = loss_TGR[..., 1::2].mean(-1)
        even_falls = even_TG[:, :1] - even_TG[:, 1:]
        odd_falls = odd_TG[:, :1] - odd_TG[:, 1:]
        r_T = rank_correlations(even_falls, odd_falls, of_equal_values=0.0)
        r_T = np.maximum(-1 / 3, r_T)  # below, the correction would give less than −1
        lds_T = 2 * r_T / (1 + r_T)
        labels = {"units": kind, "selector": RELIABILITY}
        self._add("lds", labels, target=text.places(targets), lds=lds_T)

    def _choose(self, text: _Text, units: Units, labels: dict[str, Any]) -> _Ranked:
        """Rank the units for all targets of a text, and list the rows that L_k needs."""
        block = text.context.block
        targets = text.all_targets
        choice = self._rank(text, units, labels)
        sets: list[tuple[np.ndarray, tuple[int, int]]] = []
        for span, unit_K in zip(targets, choice.unit_TK, strict=True):
            for k in self.ks:
                sets.append((units.places(*unit_K[:k]), span))
        rows = [text.context.set_row(distant, span) for distant, span in sets]
        if text.is_own:
            all_distant = np.arange(block.num_distant)
            rows += [
                text.context.set_row(np.setdiff1d(all_distant, distant), span)
                for distant, span in sets
            ]
        num_tokens = np.array([len(distant) for distant, _ in sets])
        num_tokens_TK = num_tokens.reshape(len(targets), len(self.ks))
        return _Ranked(
            labels=labels,
            units=units,
            targets=targets,
            choice=choice,
            rows=rows,
            num_tokens_TK=num_tokens_TK,
        )

    def _rank(self, text: _Text, units: Units, labels: dict[str, Any]) -> Choice:
        """Rank the units for all targets of a text, by a selector or as another measurement did.
        Add a row to `costs`."""
        block = text.context.block
        targets = text.all_targets
        forwards_before = self.scorer.token_forwards
        if self.choices is None:
            # Seeded by what is ranked, so that a draw does not depend on the order of evaluation.
            place = (self.document.number, block.start)
            generator = stream(self.seed, "selector", *place, labels["draw"], text.control)
            question = Question(text.context, units, targets, max(self.ks), generator)
            choice = find_selector(labels["selector"])(self.scorer, question)
        else:
            starts = text.places(targets).tolist()
            choice = self.choices.pick(self.document.number, labels, starts, units, block.first)
        # The cost that is reported is that of one choice: repeated draws and controls are not.
        if text.is_documents_own and labels["draw"] == 0:
            self._add_cost(labels["units"], labels["selector"], forwards_before, len(targets))
        return choice

    def _add_ranked(
        self, text: _Text, ranked: _Ranked, loss_TK: np.ndarray, without_TK: np.ndarray
    ) -> None:
        """Add the rows of each kind of distant context. Places are places of the document, also for
        an unrelated text, whose tokens have the same position IDs."""
        block = text.context.block
        for distant_part, spans in text.targets.items():
            index_T = np.array([ranked.targets.index(span) for span in spans])
            target_T = text.places(spans)
            labels = {"distant_part": distant_part} | ranked.labels
            self._add(
                "recovery",
                labels,
                target=target_T.repeat(len(self.ks)),
                k=np.tile(np.array(self.ks), len(spans)),
                num_tokens=ranked.num_tokens_TK[index_T].ravel(),
                loss_set=loss_TK[index_T].ravel(),
                loss_without=without_TK[index_T].ravel(),
            )
            # `influence` lists one ranking for each target: that of the first draw.
            if ranked.labels["draw"] > 0:
                continue
            unit_TK = ranked.choice.unit_TK[index_T]
            num_ranks = unit_TK.shape[1]
            first = ranked.units.first[unit_TK].ravel()
            end = ranked.units.end[unit_TK].ravel()
            self._add(
                "influence",
                labels,
                target=target_T.repeat(num_ranks),
                rank=np.tile(np.arange(1, num_ranks + 1), len(spans)),
                distant_first=block.first + first,
                distant_end=block.first + end,
                distant_text=list(map(text.distant.text, first, end)),
                influence=ranked.choice.influence_TK[index_T].ravel(),
            )

    def _add_cost(self, kind: str, selector: str, forwards_before: int, num_targets: int) -> None:
        """Add the token-forwards since the scorer had computed `forwards_before` of them."""
        labels = {"units": kind, "selector": selector}
        spent = self.scorer.token_forwards - forwards_before
        self._add("costs", labels, token_forwards=[spent], num_targets=[num_targets])

    def _add(self, table: str, labels: Mapping[str, Any], **values: Any) -> None:
        """Add rows to a table: columns of `values`, and one label for all rows in the others."""
        num_rows = len(next(iter(values.values())))
        for column, parts in self.tables[table].items():
            # Arrays, and one frame in the end: a frame for each choice costs more than the choice.
            value = values[column] if column in values else [labels[column]] * num_rows
            is_text = num_rows > 0 and isinstance(value[0], str)
            parts.append(np.array(value, dtype=object if is_text else None))
