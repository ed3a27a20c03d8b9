"""Evaluate the targets of one document: choose k distant units for each, and compute the loss.

For each block of targets, a distant text is put before them, and each selector ranks its units:

    block + distant text → selector → the k best units of each target → rows → L_k, and the loss
    without these units

Which texts these are, two columns of the tables say:

    distant_part   control     the distant text
    document       own         the document's own distant context
    document       unrelated   another document's text at the same position IDs
    placebo        own         the text by which the placebo targets were chosen
    placebo        unrelated   yet another document's text

`recover` is the entry point. A selector sees a context and its units, and no documents.

Dimension key: T targets, K numbers of distant units, A random halves of the units, G groups of
units (the empty group comes first), R unrelated texts.
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
from olmo_sparsity.analysis.results.intervals import rank_correlations
from olmo_sparsity.analysis.results.statistics import RELIABILITY
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
    control: str
    """`own` or `unrelated`."""

    draw: int
    """The number of the unrelated text; 0 for an own text."""

    targets: dict[str, Spans]
    """Kind of distant context → targets, as indices into the block."""

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
        """Return the targets of both kinds of distant context, each once."""
        return sorted(set(chain(*self.targets.values())))

    def places(self, targets: Spans) -> np.ndarray:
        """Return the first place of each target in the document."""
        return self.context.block.start + np.array([first for first, _ in targets])


@dataclass(frozen=True)
class _Halves:
    """Random halves of the units, and how far each half lowers the loss of each target."""

    kept_AU: np.ndarray
    """Whether a half holds a unit."""

    fall_TA: np.ndarray
    """Nats by which the loss of a target falls when the units of a half are added."""


@dataclass(frozen=True)
class _Ranked:
    """A selector's choice for several targets, and the rows whose losses are L_k.

    There is a row for each target and each k: the local window and the k chosen units. For an own
    text, as many rows follow with all distant places except the chosen ones."""

    labels: dict[str, Any]
    """The columns `units`, `selector`, `control` and `draw`."""

    units: Units
    targets: Spans
    choice: Choice
    rows: list[Row]
    num_tokens_TK: np.ndarray
    """How many distant tokens the chosen units hold."""


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

    Args:
        targets: Places in the document, or a mapping from kind of distant context to places. An
            array of two columns holds spans, from the first place to one past the last; each is
            evaluated as one target. Default: every target with a full long window, in the
            document's own context.
        controls: Where unrelated texts and the placebo come from. Without them, neither is
            evaluated, and recovery should not be reported.
        num_halves: Number of random halves of the distant units that `lds` is computed from.
        choices: Ranked units of another measurement, in place of the selectors' own.
        unfinished: Rows that an earlier start has stored for this document. Their texts are not
            evaluated again, and new rows are stored there, too.
    """
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
    blocks = dict(sorted(_sort_into_blocks(windows, document, targets).items()))
    if windows.has_all:
        # The distant texts of all blocks are beginnings of the same texts, whose states they share.
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
    """Return a table from the parts of its columns."""
    # Without any part, no row was added.
    if not all(columns.values()):
        return pd.DataFrame(columns=COLUMNS[name])
    return pd.DataFrame({column: np.concatenate(parts) for column, parts in columns.items()})


def _sort_into_blocks(
    windows: Windows, document: Document, targets: Mapping[str, np.ndarray]
) -> dict[Bounds, dict[str, Spans]]:
    """Sort targets into blocks: return bounds → kind of distant context → targets, as indices into
    the block."""
    blocks: dict[Bounds, dict[str, Spans]] = {}
    first_target = windows.first_target
    length = len(document.tokens)
    for distant_part, places in targets.items():
        spans = np.asarray(places)
        if spans.ndim == 1:
            spans = np.stack([spans, spans + 1], 1)
        for first, end in sorted({(int(first), int(end)) for first, end in spans}):
            if not first_target <= first < end <= length:
                raise DataError(
                    f"targets: tokens {first}:{end} of document {document.number} have no full "
                    f"long window before them; choose from {first_target} to {length - 1}"
                )
            start = int(windows.start_of(first))
            # A target of several tokens may reach beyond the block that its first token is in.
            block_end = min(max(start + windows.stride, end), length)
            block_targets = blocks.setdefault((start, block_end), {})
            block_targets.setdefault(distant_part, []).append((first - start, end - start))
    return blocks


def _compared_groups(units: Units, num_distant: int) -> list[tuple[int, int]]:
    """Return the groups of units whose effects two halves of the texts should agree on. These are
    the groups that the selector `halving` begins with, halved until there are more of them than it
    keeps in a step, or only single units."""
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
    """Evaluates blocks of one document, and collects the rows of the tables."""

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
    """Table → column → its parts, with the rows of all texts that are not stored yet."""

    unstored_names: list[str] = field(default_factory=list)
    """Names of the texts that are evaluated and not stored yet."""

    start_of_last_block: int = 0
    """Place of the first target of the last block that `add` evaluates together with others. The
    states of a text must reach that far."""

    def add(self, blocks: dict[Bounds, dict[str, Spans]]) -> None:
        """Evaluate blocks: bounds → kind of distant context → targets."""
        # Text after text, and for each text all blocks: so only the states of one text are in
        # memory at a time.
        self.start_of_last_block = max(start for start, _ in blocks)
        # A dict keeps the order in which the kinds are met, and so the order of evaluation.
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
        """Return the tables with the rows of all texts that are not stored."""
        return {name: _frame(name, columns) for name, columns in self.tables.items()}

    def _is_stored(self, name: str) -> bool:
        """Return whether an earlier start has evaluated the text with this name."""
        return self.unfinished is not None and name in self.unfinished.texts

    def _finish(self, name: str) -> None:
        """Mark the text with this name as evaluated, and every few seconds store the rows of all
        such texts."""
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
        """Evaluate the unrelated texts of one draw. The control `unrelated` has one text for the
        whole block; other controls have one for each kind of distant context or each token of a
        target."""
        assert self.controls is not None
        block = self._block(bounds)
        own_texts = {
            distant_part: (self._own_distant_text(block, distant_part), spans)
            for distant_part, spans in targets.items()
        }
        texts = self.controls.control_texts(self.document, block, own_texts, draw)
        for number, (distant, targets_of_text) in enumerate(texts):
            name = f"unrelated, draw {draw}, text {number}, {bounds}"
            if self._is_stored(name):
                continue
            text = self._text(
                block, distant, control="unrelated", draw=draw, targets=targets_of_text
            )
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
            # One pass over a text serves all blocks, if it reaches as far as the last one sees. The
            # scorer keeps the states, so that the next block finds them.
            num_seen = self.windows.tokens_before(self.start_of_last_block) - block.windows.short
            first = int(distant.places_F[0])
            distant_tokens = distant.document.tokens[first : first + num_seen]
            prefix = block.tokens[: block.num_prefix]
            states = self.scorer.states(np.concatenate([prefix, distant_tokens]))
        context = self.scorer.context(block, states)
        return _Text(context, distant, control, draw, targets)

    def _evaluate(self, text: _Text) -> None:
        """Run all selectors on all kinds of units of one text, then compute L_k of each choice."""
        rankings: list[_Ranked] = []
        for kind in self.units:
            units = text.distant.units(kind)
            rankings += self._rank_with_all_selectors(text, kind, units)
            if text.is_documents_own and self.scorer.interpretation.replaces:
                self._add_reliability(text, units, kind)

        # The rows of all choices are evaluated in one call, so that they share batches.
        rows_of_rankings = [ranked.rows for ranked in rankings]
        loss_N = self.scorer.sums(list(chain(*rows_of_rankings)))
        ends = np.cumsum([len(rows) for rows in rows_of_rankings])
        for ranked, losses in zip(rankings, np.split(loss_N, ends[:-1]), strict=True):
            shape = (len(ranked.targets), len(self.ks))
            if text.is_own:
                # `_choose` lists the rows with only the k units first, then those without them.
                loss_TK, without_TK = losses.reshape(2, *shape)
            else:
                # An unrelated text has no long window from which units could be removed.
                loss_TK = losses.reshape(shape)
                without_TK = np.full(shape, np.nan)
            self._add_ranked(text, ranked, loss_TK, without_TK)

    def _rank_with_all_selectors(self, text: _Text, kind: str, units: Units) -> list[_Ranked]:
        """Return a ranking by each selector, and by each draw of a random selector. Add rows to
        `lds` and `costs`."""
        halves = None
        # A single unit cannot be halved.
        if self.num_halves > 0 and text.is_documents_own and len(units) > 1:
            halves = self._halves(text, units, kind)
        rankings = []
        for selector in self.selectors:
            # An unrelated text is itself one of several draws, so one choice of it is enough.
            num_draws = find_selector(selector).draws if text.is_own else 1
            # For an own text, `draw` numbers the draws of the selector, from 0. For an unrelated
            # text it is the number of the text, of which there is one ranking.
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
        """Add the linear datamodeling score of a ranking to `lds`: the rank correlation, over
        random halves of the units, of a half's summed scores with the fall of the loss by this
        half."""
        predicted_TA = ranked.choice.score_TU @ halves.kept_AU.T
        lds_T = rank_correlations(predicted_TA, halves.fall_TA, of_equal_values=0.0)
        self._add("lds", ranked.labels, target=text.places(ranked.targets), lds=lds_T)

    def _halves(self, text: _Text, units: Units, kind: str) -> _Halves:
        """Draw random halves of the units, and evaluate how far each lowers the losses."""
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
        """Add the reliability of the replacing texts to `lds`.

        The effects of groups of units are measured twice, by either half of the texts, and
        compared by rank. The formula of Spearman and Brown, 2 r / (1 + r), turns this correlation
        of two halves into that of all texts.
        """
        assert isinstance(self.scorer, ReplacingScorer)
        groups = _compared_groups(units, text.context.block.num_distant)
        # One text has no halves, and the order of a few groups says little.
        if self.scorer.num_texts < 2 or len(groups) <= NUM_HALVED:
            return
        targets = text.targets[DOCUMENT]
        sets = [NOTHING, *(units.run(first, end) for first, end in groups)]
        rows = []
        for span in targets:
            rows += [text.context.set_row(places, span) for places in sets]
        losses = [nll_RW.sum(1) for nll_RW in self.scorer.by_text(rows)]
        loss_TGR = np.array(losses).reshape(len(targets), len(sets), -1)

        # The first set is empty: the fall of the loss is relative to the local window alone.
        even_TG = loss_TGR[..., 0::2].mean(-1)
        odd_TG = loss_TGR[..., 1::2].mean(-1)
        even_falls = even_TG[:, :1] - even_TG[:, 1:]
        odd_falls = odd_TG[:, :1] - odd_TG[:, 1:]
        r_T = rank_correlations(even_falls, odd_falls, of_equal_values=0.0)
        r_T = np.maximum(-1 / 3, r_T)  # below −1/3 the formula would give less than −1
        lds_T = 2 * r_T / (1 + r_T)
        labels = {"units": kind, "selector": RELIABILITY}
        self._add("lds", labels, target=text.places(targets), lds=lds_T)

    def _choose(self, text: _Text, units: Units, labels: dict[str, Any]) -> _Ranked:
        """Rank the units for all targets of a text, and list the rows that L_k needs."""
        block = text.context.block
        targets = text.all_targets
        choice = self._rank(text, units, labels)
        all_distant = np.arange(block.num_distant)
        rows_with_units: list[Row] = []
        rows_without_units: list[Row] = []
        num_tokens: list[int] = []
        for span, unit_K in zip(targets, choice.unit_TK, strict=True):
            for k in self.ks:
                places = units.places(*unit_K[:k])
                rows_with_units.append(text.context.set_row(places, span))
                num_tokens.append(len(places))
                if text.is_own:
                    other_places = np.setdiff1d(all_distant, places)
                    rows_without_units.append(text.context.set_row(other_places, span))
        num_tokens_TK = np.array(num_tokens).reshape(len(targets), len(self.ks))
        return _Ranked(
            labels=labels,
            units=units,
            targets=targets,
            choice=choice,
            rows=rows_with_units + rows_without_units,
            num_tokens_TK=num_tokens_TK,
        )

    def _rank(self, text: _Text, units: Units, labels: dict[str, Any]) -> Choice:
        """Rank the units for all targets of a text, by a selector, or as another measurement ranked
        them. Add a row to `costs`."""
        block = text.context.block
        targets = text.all_targets
        forwards_before = self.scorer.token_forwards
        if self.choices is None:
            # The seed depends on what is ranked, not on the order of evaluation, so that a resumed
            # measurement draws the same.
            place = (self.document.number, block.start)
            generator = stream(self.seed, "selector", *place, labels["draw"], text.control)
            question = Question(text.context, units, targets, max(self.ks), generator)
            choice = find_selector(labels["selector"])(self.scorer, question)
        else:
            starts = text.places(targets).tolist()
            choice = self.choices.pick(self.document.number, labels, starts, units, block.first)
        # The reported cost is that of one choice, without repeated draws and controls.
        if text.is_documents_own and labels["draw"] == 0:
            self._add_cost(labels["units"], labels["selector"], forwards_before, len(targets))
        return choice

    def _add_ranked(
        self, text: _Text, ranked: _Ranked, loss_TK: np.ndarray, without_TK: np.ndarray
    ) -> None:
        """Add the rows of a ranking to `recovery` and `influence`. Places are those of the
        document, also for an unrelated text, whose tokens have the position IDs of the
        document's."""
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
        """Add the token-forwards that the scorer has computed since it had computed
        `forwards_before` of them."""
        labels = {"units": kind, "selector": selector}
        spent = self.scorer.token_forwards - forwards_before
        self._add("costs", labels, token_forwards=[spent], num_targets=[num_targets])

    def _add(self, table: str, labels: Mapping[str, Any], **values: Any) -> None:
        """Add rows to a table: `values` are columns, and a label is the same in all rows."""
        # Arrays are kept, and joined to one frame at the end: a frame for each choice would take
        # longer than the choice.
        num_rows = len(next(iter(values.values())))
        for column, parts in self.tables[table].items():
            value = values[column] if column in values else [labels[column]] * num_rows
            is_text = num_rows > 0 and isinstance(value[0], str)
            parts.append(np.array(value, dtype=object if is_text else None))
