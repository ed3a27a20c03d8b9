"""Hold what a measurement has settled before it computes anything, and compute one document.

planning.py makes a `Plan` of a request. measurement.py calls its methods in three steps, and stores
what they return. Of four documents, 0 and 2 fit the threshold, and targets are chosen in 1 and 3:

    1. plan.compute_losses(n)             n = 0, 1, 2, 3   L_short and L_long of every token
    2. plan.select_targets(losses)        once             token 18 of document 1, token 40 of 3, …
    3. plan.evaluate_targets(n, targets)  n = 1, 3         ranked units of each target, and L_k

Steps 1 and 3 need nothing that was computed for other documents, only the text of some, so
processes can share the documents. A document's *number* is its index in the text, from 0. It is the
column `document` of all tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.at import At
from olmo_sparsity.analysis.measurement.enough_text import find_measured_numbers
from olmo_sparsity.analysis.measurement.fitting import fraction_of_blocks
from olmo_sparsity.analysis.measurement.fixed_targets import FixedTargets
from olmo_sparsity.analysis.measurement.identity import identity_of_measurement
from olmo_sparsity.analysis.measurement.parts import Parts
from olmo_sparsity.analysis.measurement.recovery import recover
from olmo_sparsity.analysis.measurement.reuse import (
    ReusedLosses,
    reusable_losses,
    with_blocks_of,
)
from olmo_sparsity.analysis.measurement.target_tables import targets_of_document
from olmo_sparsity.analysis.measurement.targets import (
    choose_targets,
    fit_threshold,
    sampled_blocks,
    targets_by_text,
)
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.meta import InductionCheck, SinkCheck
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.schemas import PHASES, Columns
from olmo_sparsity.analysis.results.target_rows import half_of
from olmo_sparsity.analysis.scoring.document_losses import context_losses
from olmo_sparsity.analysis.scoring.induction import repetition_drop
from olmo_sparsity.analysis.scoring.replaced import scorer_of
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.scoring.sink import sink_check
from olmo_sparsity.models.identity.known_identities import check_unchanged, last_identity
from olmo_sparsity.models.loaded import LoadedModel, using
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document, Documents
from olmo_sparsity.text.windows import Block


@dataclass
class Plan:
    """Holds model, documents and settings of a measurement, and computes the rows of a document.

    A plan has all that is known before anything is computed: the documents, already cut to what the
    model takes; the settings, with defaults filled in; the scorer; the unrelated texts; and the
    targets, if they are not chosen by their losses. Its methods write nothing, except that
    `evaluate_targets` stores pieces of a long document if it is given the folder.

        plan = make_plan(MeasureRequest.of(model="runs/mine", documents="text.txt", long=64))
        rows = {n: plan.compute_losses(n)["losses"] for n in plan.measured_numbers}
        targets = plan.select_targets(join_documents(rows))
        tables = plan.evaluate_targets(1, targets)  # recovery, influence, lds, costs, tokens
    """

    model: LoadedModel
    documents: Documents
    settings: Settings
    scorer: Scorer
    controls: Controls
    """Where unrelated texts and the placebo come from."""

    fixed_targets: FixedTargets | None = None
    """The targets, if they are fixed before any loss. None if they are chosen by the losses."""

    reused_losses: ReusedLosses = field(default_factory=ReusedLosses)

    def __post_init__(self) -> None:
        with using(self.model):
            self._model_identity = last_identity(self.model.model)

    # --- making a plan ---

    @staticmethod
    def of(
        model: LoadedModel,
        documents: Documents,
        settings: Settings,
        selection: Results | At | None = None,
        *,
        batch_tokens: int | None = None,
        reuse_units: bool = False,
    ) -> Plan:
        """Make a plan of checked settings.

        Args:
            selection: Another measurement, whose targets are evaluated, or names of targets.
            batch_tokens: Tokens of one forward. Default: as many as suit the device.
            reuse_units: Whether the units that the other measurement ranked are evaluated, too.
        """
        # Before anything is computed: a model that takes fewer positions fails at once.
        windows = settings.windows
        longest = max(len(document.tokens) for document in documents)
        model.check_positions(windows.num_positions(longest))

        # A number of blocks is stored as the fraction that it is of all blocks, so that both ways
        # to say it are one measurement, whose folder either can resume.
        settings = replace(settings, sample=fraction_of_blocks(documents, settings), blocks=None)
        if isinstance(selection, Results):
            settings = with_blocks_of(selection, documents, settings)
        return Plan(
            model=model,
            documents=documents,
            settings=settings,
            scorer=scorer_of(model, settings, batch_tokens),
            controls=Controls(documents, windows, settings.control, settings.draws, settings.seed),
            fixed_targets=FixedTargets.of_selection(selection, documents, settings, reuse_units),
        )

    def with_losses(self, other: Results) -> Plan:
        """Return the plan with the losses of another measurement, so that they are not computed
        again."""
        losses = reusable_losses(other, self.model, self.documents, self.settings)
        return replace(self, reused_losses=losses)

    # --- facts and checks ---

    @cached_property
    def measured_numbers(self) -> list[int]:
        """Return the numbers of the documents that have a target. Raise DataError if they are too
        few for thresholds and controls."""
        return find_measured_numbers(self.documents, self.settings, self.controls.num_candidates)

    @property
    def measured_documents(self) -> list[Document]:
        """Return the documents that have a target."""
        return [self.documents[number] for number in self.measured_numbers]

    @property
    def chooses_by_gap(self) -> bool:
        """Return whether targets are chosen by their gaps. Otherwise they are fixed."""
        return self.fixed_targets is None

    def check_model_unchanged(self) -> None:
        """Raise DataError if the model is not what it was when the plan was made."""
        check_unchanged(self.model.model, self._model_identity, "plan")

    @property
    def passage_length(self) -> int:
        """Return the length of the passages that the induction check repeats, in tokens: a passage
        and its repetition fit into a long window."""
        return self.settings.windows.first_target // 2

    def run_induction_check(self) -> InductionCheck:
        """Return by how much the loss falls on a repeated passage (`repetition_drop`)."""
        return repetition_drop(self.scorer, self.measured_documents, self.passage_length)

    def run_sink_check(self) -> SinkCheck | None:
        """Return whether the model needs a prefix (`sink_check`). Return None if a prefix was
        passed, or if none can be tried."""
        tokenizer = self.model.tokenizer
        keeps_states = self.settings.interpretation.keeps_states
        if self.settings.prefix_ids or tokenizer is None or not keeps_states:
            return None
        # A line break is tried as the prefix, as it says nothing about the text.
        line_break = self.model.encode(["\n"])[0]
        return sink_check(self.scorer, self.measured_documents, prefix=(), tried_prefix=line_break)

    # --- step 1: losses ---

    def compute_losses(self, number: int) -> dict[str, Columns]:
        """Return the rows of one document in the tables `documents` and `losses`, by the name of
        the table. The losses are taken from another measurement if they are reused."""
        document = self.documents[number]
        losses = self.reused_losses.by_document.get(number)
        if losses is None:
            losses = self._compute_losses_of_blocks(document)
        return {"documents": {"name": [document.name]}, "losses": dict(losses)}

    def _compute_losses_of_blocks(self, document: Document) -> pd.DataFrame:
        """Return the losses of the blocks of a document that need them."""
        blocks = self.blocks_with_losses(document)
        scorer = self.scorer.of_document(document, self.controls)
        windows = self.settings.windows
        losses = context_losses(scorer, document, windows, self.controls, blocks)
        if not blocks:
            # The sample has none of this document, but it counts as measured: a table without rows,
            # and with the columns of the others.
            names = PHASES["losses"]["losses"].names
            losses = pd.DataFrame({name: [] for name in names if name != "document"})
        return losses

    def blocks_with_losses(self, document: Document) -> list[Block]:
        """Return the blocks of a document whose losses are computed: those of the sample. If only
        fixed targets need losses, blocks without a target are left out."""
        blocks = sampled_blocks(document, self.settings)
        if self.fixed_targets is None or not self.fixed_targets.only_their_blocks:
            return blocks
        targets = self.fixed_targets.table
        places = targets.target[targets.document == document.number].to_numpy()
        starts = set(self.settings.windows.start_of(places).tolist())
        return [block for block in blocks if block.start in starts]

    # --- step 2: targets ---

    def select_targets(self, losses: pd.DataFrame) -> pd.DataFrame:
        """Return the table of targets.

        Args:
            losses: The table of all documents that are finished, which must include the threshold
                half. Targets are chosen in these documents alone.
        """
        if self.fixed_targets is not None:
            return self.fixed_targets.table
        by_losses = choose_targets(losses, self.find_threshold(losses), self.settings)
        by_text = self._targets_by_text
        by_text = by_text[by_text.document.isin(losses.document)]
        targets = pd.concat([by_losses, by_text])
        return targets.sort_values(list(by_losses), ignore_index=True)

    def find_threshold(self, losses: pd.DataFrame) -> float | None:
        """Return the smallest gap of a target, in nats. Return None if any gap makes a target, or
        if targets are not chosen by it."""
        if not self.chooses_by_gap:
            return None
        half = losses[losses.document.map(half_of) == "threshold"]
        return fit_threshold(half, self.settings.share, self.settings.min_gap)

    @cached_property
    def _targets_by_text(self) -> pd.DataFrame:
        """Return the targets that are drawn from the text without any losses, in the documents of
        the report half."""
        reported = [doc for doc in self.measured_documents if half_of(doc.number) == "report"]
        return targets_by_text(reported, self.settings)

    # --- step 3: recovery ---

    def evaluate_targets(
        self, number: int, targets: pd.DataFrame, parts: Parts | None = None
    ) -> dict[str, Columns]:
        """Return the rows of one document in the tables `recovery`, `influence`, `lds`, `costs` and
        `tokens`, by the name of the table.

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
        unfinished = None if parts is None else parts.open_unfinished(number, document_targets)

        choices = None if self.fixed_targets is None else self.fixed_targets.choices
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
        # Results keep the tokens, so that pages can show a target in its text without a tokenizer.
        tables["tokens"] = {
            "place": np.arange(len(document.tokens)),
            "token_id": document.tokens,
            "text": document.texts,
        }
        return tables

    # --- what identifies the measurement ---

    def identity(self) -> dict[str, Any]:
        """Return everything that processes must share to measure into one folder."""
        return identity_of_measurement(
            self.model, self.documents, self.settings, self.fixed_targets
        )
