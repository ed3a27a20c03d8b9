"""Hold what a measurement has settled before it computes anything, and compute one document.

    for each document:    plan.losses(number)              L_short and L_long of its tokens
    then, once:           plan.targets(losses)             the targets of all documents
    for each document:    plan.recovery(number, targets)   L_k of its targets, ranked units, costs

planning.py makes a plan of a request. The methods of `Plan` write nothing; measurement.py calls
them for all documents, and stores what they return.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.at import At
from olmo_sparsity.analysis.measurement.fitting import fraction_of_blocks
from olmo_sparsity.analysis.measurement.parts import Parts, without_idle_min_gap
from olmo_sparsity.analysis.measurement.recovery import recover
from olmo_sparsity.analysis.measurement.reuse import losses_of, with_blocks_of
from olmo_sparsity.analysis.measurement.settled import FixedTargets, ReusedLosses
from olmo_sparsity.analysis.measurement.targets import (
    choose_targets,
    fit_threshold,
    sampled_blocks,
    targets_by_text,
    targets_fingerprint,
    targets_of_document,
)
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.tables import PHASES, Columns
from olmo_sparsity.analysis.results.target_rows import half_of
from olmo_sparsity.analysis.results.view import num_of
from olmo_sparsity.analysis.scoring.document_losses import context_losses
from olmo_sparsity.analysis.scoring.induction import repetition_drop
from olmo_sparsity.analysis.scoring.replaced import scorer_of
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.scoring.sink import sink_check
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.extend import fingerprint_of_files
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.streams import VERSION
from olmo_sparsity.models.identity.use import check_unchanged, last_identity
from olmo_sparsity.models.loaded import LoadedModel, identity_of, using
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.units import span_width
from olmo_sparsity.text.windows import Block

SMALLER_UNITS = "pass smaller units (a paragraph ends at a blank line, not at a line break)"
"""What to do about a text of few units."""


@dataclass
class Plan:
    """Holds model, documents and settings of a measurement, and computes the rows of a document.

    A plan knows what is settled before anything is computed: the documents, already cut to what the
    model takes; the settings, with defaults filled in; the scorer; the unrelated texts; and the
    targets, where they are not chosen here. Its methods compute one document at a time, so that
    processes can share the documents. They write nothing, and depend on no other document but
    through the losses from which targets are chosen.

        planned = plan(MeasureRequest.of(model="runs/mine", documents="text.txt", long=64))
        losses = join_documents({n: planned.losses(n)["losses"] for n in planned.measured})
        targets = planned.targets(losses)
        tables = planned.recovery(1, targets)  # recovery, influence, lds, costs, tokens
    """

    model: LoadedModel
    documents: Documents
    settings: Settings
    scorer: Scorer
    controls: Controls
    """Where unrelated texts and the placebo come from."""

    fixed: FixedTargets | None = None
    """The targets, if they are known before any loss. None: they are chosen by the losses."""

    reused_losses: ReusedLosses = field(default_factory=ReusedLosses)

    def __post_init__(self) -> None:
        with using(self.model):
            self._model_identity = last_identity(self.model.model)

    def check_model_unchanged(self) -> None:
        """Raise DataError if the model is not what it was when the plan was made."""
        check_unchanged(self.model.model, self._model_identity, "plan")

    @staticmethod
    def of(
        model: LoadedModel,
        documents: Documents,
        settings: Settings,
        selection: Results | At | None = None,
        *,
        batch_tokens: int | None = None,
        transfers: bool = False,
    ) -> Plan:
        """Make a plan of checked settings.

        Args:
            selection: Another measurement, whose targets are evaluated, or names of targets.
            transfers: Whether the units that the other measurement ranked are evaluated, too.
        """
        # Before anything is computed: a model that takes fewer positions fails at once.
        windows = settings.windows
        longest = max(len(document.tokens) for document in documents)
        model.check_positions(windows.num_positions(longest))

        # A number of blocks is stored as the fraction that it is of all blocks.
        settings = replace(settings, sample=fraction_of_blocks(documents, settings), blocks=None)
        if isinstance(selection, Results):
            settings = with_blocks_of(selection, documents, settings)
        fixed = FixedTargets.find(selection, documents, settings, transfers)
        return Plan(
            model=model,
            documents=documents,
            settings=settings,
            scorer=scorer_of(model, settings, batch_tokens),
            controls=Controls(documents, windows, settings.control, settings.draws, settings.seed),
            fixed=fixed,
        )

    def with_losses(self, other: Results) -> Plan:
        """Return the plan with the losses of another measurement, so that they are not computed
        again."""
        losses = losses_of(other, self.model, self.documents, self.settings)
        origin = {name: getattr(other.meta, name) for name in ("commit", "machine", "command")}
        return replace(self, reused_losses=ReusedLosses(losses, origin))

    @cached_property
    def measured(self) -> list[int]:
        """Return the numbers of the documents that have a target. DataError if they are too few for
        thresholds and controls."""
        # A document itself, the unrelated ones, and the placebo.
        num_needed = self.settings.draws + 2
        if len(self.documents) == 1:
            raise DataError(
                f"text: {self.documents.name} is one document, and measure requires {num_needed}; "
                "split it (--split-at)"
            )
        first_target = self.settings.windows.first_target
        numbers = [
            document.number for document in self.documents if len(document.tokens) > first_target
        ]

        # Thresholds are fitted on one half of the documents, and used on the other.
        if {half_of(number) for number in numbers} != {"threshold", "report"}:
            raise DataError(
                f"text: {len(numbers)} of {len(self.documents)} documents are longer than "
                f"{first_target} tokens; measure requires one at an even and one at an odd place: "
                "pass more, or lower long and short"
            )
        if self.controls.num_candidates < num_needed:
            raise DataError(
                f"text: {self.controls.num_candidates} documents can replace each other, and "
                f"draws={self.settings.draws} requires {num_needed}; pass more documents"
            )
        return numbers

    def warn_of_few_units(self) -> None:
        """Warn of each kind of units, such as paragraphs, of which no document has more than the
        smallest k. All distant text is then added, and recovery is 1 by construction."""
        smallest_k = min(self.settings.ks)
        for units in self.settings.units:
            # Every document has as many tokens, or spans of them, as `Settings.check` requires.
            if span_width(units) is not None:
                continue
            if not any(self._num_units(units, number) > smallest_k for number in self.measured):
                singular = units.removesuffix("s")
                all_units = num_of(smallest_k, singular)
                say(
                    f"warning: no document has more than {all_units} of distant text, so "
                    f"k={smallest_k} adds all of it; {SMALLER_UNITS}"
                )

    def _num_units(self, units: str, number: int) -> int:
        """Return the number of distant units of a document's last target, which has most of
        them."""
        document = self.documents[number]
        # The distant tokens of a target at the document's end.
        num_distant = max(1, len(document.tokens) - self.settings.short)
        return len(document.units(units, 0, num_distant))

    @property
    def chooses_by_gap(self) -> bool:
        """Return whether targets are chosen by their gaps. Otherwise they are fixed."""
        return self.fixed is None

    def induction_texts(self) -> tuple[list[Document], int]:
        """Return the arguments of the induction check: the documents whose beginnings it repeats,
        and the length of such a passage. A passage and its repetition fit into a long window."""
        documents = [self.documents[number] for number in self.measured]
        return documents, self.settings.windows.first_target // 2

    def induction(self) -> dict[str, Any]:
        """Return the induction check: by how much the loss falls on a repeated passage."""
        documents, length = self.induction_texts()
        return repetition_drop(self.scorer, documents, length)

    def sink(self) -> dict[str, Any]:
        """Return the result of the sink check: whether the model needs a prefix. Return an empty
        dict if a prefix was passed, or if none can be tried."""
        tokenizer = self.model.tokenizer
        keeps_states = self.settings.interpretation.keeps_states
        if self.settings.prefix_ids or tokenizer is None or not keeps_states:
            return {}
        documents = [self.documents[number] for number in self.measured]
        # A line break is tried as the prefix, as it says nothing about the text.
        line_break = self.model.encode(["\n"])[0]
        return sink_check(self.scorer, documents, prefix=(), dummy=line_break)

    def blocks(self, document: Document) -> list[Block]:
        """Return the blocks of a document whose losses are computed: those of the sample. If only
        named targets need losses, blocks without such a target are left out."""
        blocks = sampled_blocks(document, self.settings)
        if self.fixed is None or not self.fixed.only_named:
            return blocks
        targets = self.fixed.targets
        named = targets.target[targets.document == document.number].to_numpy()
        starts = set(self.settings.windows.start_of(named).tolist())
        return [block for block in blocks if block.start in starts]

    def losses(self, number: int) -> dict[str, Columns]:
        """Compute the first phase of one document: table → its rows, of `documents` and
        `losses`."""
        document = self.documents[number]
        losses = self.reused_losses.by_document.get(number)
        if losses is None:
            windows = self.settings.windows
            blocks = self.blocks(document)
            scorer = self.scorer.of_document(document, self.controls)
            losses = context_losses(scorer, document, windows, self.controls, blocks)
            if not blocks:
                # The sample has none of this document, but it counts as measured: a table without
                # rows, and with the columns of the others.
                names = PHASES["losses"]["losses"].names
                losses = pd.DataFrame({name: [] for name in names if name != "document"})
        return {"documents": {"name": [document.name]}, "losses": dict(losses)}

    def threshold(self, losses: pd.DataFrame) -> float | None:
        """Return the smallest gap of a target, in nats. Return None if any gap makes a target, or
        if targets are not chosen by it."""
        if not self.chooses_by_gap:
            return None
        half = losses[losses.document.map(half_of) == "threshold"]
        return fit_threshold(half, self.settings.share, self.settings.min_gap)

    def targets(self, losses: pd.DataFrame) -> pd.DataFrame:
        """Return the table of targets.

        Args:
            losses: The table of all documents that are finished, which must include the threshold
                half. Targets are chosen in these documents alone.
        """
        if self.fixed is not None:
            return self.fixed.targets
        chosen = choose_targets(losses, self.threshold(losses), self.settings)
        by_text = self._by_text[self._by_text.document.isin(losses.document)]
        return pd.concat([chosen, by_text]).sort_values(list(chosen), ignore_index=True)

    @cached_property
    def _by_text(self) -> pd.DataFrame:
        """Return the targets that are drawn from the text without any losses, in the documents of
        the report half."""
        numbers = [number for number in self.measured if half_of(number) == "report"]
        return targets_by_text([self.documents[number] for number in numbers], self.settings)

    def recovery(
        self, number: int, targets: pd.DataFrame, parts: Parts | None = None
    ) -> dict[str, Columns]:
        """Compute the second phase of one document: table → its rows, of `recovery`, `influence`,
        `lds`, `costs` and `tokens`.

        Args:
            number: Number of the document.
            targets: The targets of all documents.
            parts: The folder of the measurement, in which the finished texts of a long document are
                stored, so that the next start does not evaluate them again. None: nothing is
                stored.
        """
        document = self.documents[number]
        settings = self.settings
        document_targets = targets_of_document(targets, document)
        unfinished = None if parts is None else parts.unfinished(number, document_targets)

        choices = None if self.fixed is None else self.fixed.choices
        # Units that another model ranked need unrelated ones that it ranked, too, to be compared.
        has_controls = choices is None or choices.has_unrelated
        recovered = recover(
            self.scorer.of_document(document, self.controls),
            document,
            settings.windows,
            document_targets,
            units=settings.units,
            selectors=settings.selectors,
            ks=settings.ks,
            controls=self.controls if has_controls else None,
            num_halves=settings.halves,
            seed=settings.seed,
            choices=choices,
            unfinished=unfinished,
        )

        tables: dict[str, Columns] = {name: dict(rows) for name, rows in recovered.items()}
        tables["tokens"] = {
            "place": np.arange(len(document.tokens)),
            "token_id": document.tokens,
            "text": document.texts,
        }
        return tables

    def identity(self) -> dict[str, Any]:
        """Return everything that processes must share to measure into one folder."""
        fixed = self.fixed
        choices = None if fixed is None else fixed.choices
        settings = asdict(self.settings)
        if fixed is not None or not self.settings.chooses_by_size:
            settings = without_idle_min_gap(settings)
        identity: dict[str, Any] = {
            **identity_of(self.model),
            "data": self.documents.fingerprint,
            "num_documents": len(self.documents),
            "random_streams": VERSION,
            "settings": settings,
        }
        # Earlier versions did not write these keys. They are left out where they say nothing, so
        # that folders of earlier versions can be resumed.
        files = fingerprint_of_files((*self.settings.selectors, *self.settings.units))
        if files:
            identity["files"] = files
        if fixed is not None and fixed.only_named:
            identity["only_named"] = True
        identity["targets"] = None if fixed is None else targets_fingerprint(fixed.targets)
        identity["choices"] = None if choices is None else choices.fingerprint
        return identity
