"""Compute the rows of one document: its losses, its targets, and their recovery.

Place in the flow: model + documents + settings → **plan** → measurement, which runs over documents.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from analysis.documents import Controls, Documents
from analysis.influence import HeadWeights, check_can_run, fit_head_weights
from analysis.recovery import recover
from analysis.results import Results
from analysis.scoring import Scorer, context_losses, repetition_drop
from analysis.settings import Settings
from analysis.statistics import half_of
from analysis.tables import Columns, plain
from analysis.targets import (
    At,
    Thresholds,
    choose_targets,
    fit_thresholds,
    given_targets,
    named_targets,
    of_document,
    planted_targets,
    targets_fingerprint,
)
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.model.load import LoadedModel

MAX_FITTED = 64
"""Targets that `attention_learned` is fitted to."""


@dataclass
class Plan:
    """Model, documents and settings of a measurement, and the rows they give."""

    model: LoadedModel
    documents: Documents
    settings: Settings
    scorer: Scorer
    controls: Controls
    given: pd.DataFrame | None = None
    """Targets of another measurement, or named ones; None: they are chosen here."""

    @staticmethod
    def of(
        model: LoadedModel,
        documents: Documents,
        settings: Settings,
        given: Results | At | None = None,
        batch_tokens: int | None = None,
    ) -> Plan:
        settings.check()
        model.check_positions(settings.windows.num_positions())
        scorer = Scorer(model.model, far_states=settings.far_states, batch_tokens=batch_tokens)
        controls = Controls(
            documents, settings.windows, settings.foreign, settings.num_foreign, settings.seed
        )
        chooses = given is None and not documents.are_planted
        check_can_run(settings.selectors, model.model, fits_heads=chooses)
        of_chosen = ["sets", "max_targets"]
        if not isinstance(given, Results):  # which stand in the place of a share
            of_chosen.append("target_share")
        changed = [n for n in of_chosen if getattr(settings, n) != getattr(Settings, n)]
        if changed and not chooses:
            raise ConfigError(
                f"{', '.join(changed)}: for chosen targets, and these are given; leave it out"
            )
        plan = Plan(model, documents, settings, scorer, controls)
        if given is None:
            return plan
        if not isinstance(given, Results):
            plan.given = named_targets(documents, given, settings.windows)
            return plan
        if given.meta.data.get("fingerprint") != documents.fingerprint:
            raise DataError(
                f"the targets were chosen in {given.meta.data.get('source')}, which differs from "
                f"{documents.name} in text or tokenizer; give the same text and number of "
                "documents, and a model with the same tokenizer"
            )
        ours = plain(asdict(settings.windows)) | {
            "seed": settings.seed,
            "num_foreign": settings.num_foreign,
        }
        theirs = {"prefix": [], "seed": given.meta.seed} | given.meta.windows | given.meta.controls
        same_settings = all(theirs.get(name) == value for name, value in ours.items())
        plan.given = given_targets(given.targets, settings.windows, same_settings)
        return plan

    @cached_property
    def measured(self) -> list[int]:
        """Numbers of the documents that are longer than the long window."""
        long = self.settings.windows.first_target
        if len(self.documents) == 1:
            raise DataError(
                f"{self.documents.name} is one document, and measuring needs two or more: "
                "give more, or cut plain text at its blank lines (split_at=blank-lines)"
            )
        numbers = [d.number for d in self.documents if len(d.tokens) > long]
        if {half_of(number) for number in numbers} != {"threshold", "report"}:
            raise DataError(
                f"{self.documents.name}: {len(numbers)} of {len(self.documents)} documents are "
                f"longer than long={long}; one at an even and one at an odd place are needed, "
                "since half of them only fix the threshold. Give more documents (a text file is "
                "one), or lower long"
            )
        needed = self.settings.num_foreign + 2  # itself, the foreign ones, and the placebo
        if self.controls.num_candidates < needed:
            raise DataError(
                f"{self.documents.name}: {self.controls.num_candidates} documents can stand in for "
                f"each other, and the controls need {needed}, one document each; give more "
                "documents, or fewer draws of the foreign control"
            )
        return numbers

    @property
    def fits_thresholds(self) -> bool:
        return self.given is None and not self.documents.are_planted

    def induction(self) -> dict[str, Any]:
        documents = [self.documents[number] for number in self.measured]
        return repetition_drop(self.scorer, documents, self.settings.windows.first_target // 2)

    def losses(self, number: int) -> dict[str, Columns]:
        """The rows of one document in the tables of the first phase."""
        document, windows = self.documents[number], self.settings.windows
        return {
            "documents": {"name": [document.name]},
            "losses": dict(context_losses(self.scorer, document, windows, self.controls)),
        }

    def thresholds(self, losses: pd.DataFrame) -> Thresholds:
        if not self.fits_thresholds:
            return Thresholds(None, None)
        half = losses[losses.document.map(half_of) == "threshold"]
        return fit_thresholds(half, self.settings.target_share, self.settings.min_gap)

    def targets(self, losses: pd.DataFrame) -> pd.DataFrame:
        """Targets of the documents in `losses`, which must include the threshold half."""
        if self.documents.are_planted:
            return planted_targets(self.documents)
        if self.given is not None:
            return self.given
        settings = self.settings
        return choose_targets(
            losses, self.thresholds(losses), settings.target_share, settings.seed, settings.sets,
            settings.max_targets,
        )  # fmt: skip

    def fit_heads(self, losses: pd.DataFrame, max_targets: int = MAX_FITTED) -> HeadWeights | None:
        """Where `attention_learned` is measured, fit it to targets of large gap in the half of the
        documents that fixes the threshold."""
        if "attention_learned" not in self.settings.selectors:
            return None
        half = losses[losses.document.map(half_of) == "threshold"]
        gap = half.loss_short - half.loss_long
        large = half[gap >= gap.quantile(1 - self.settings.target_share)]
        fitted = large.sample(min(len(large), max_targets), random_state=self.settings.seed)
        targets = [(self.documents[row.document].tokens, row.target) for row in fitted.itertuples()]
        heads = fit_head_weights(self.scorer, self.settings.windows, targets)
        self.scorer.head_weights = np.array(heads.weights)
        return heads

    def recovery(self, number: int, targets: pd.DataFrame) -> dict[str, Columns]:
        """The rows of one document in the tables of the second phase."""
        document, settings = self.documents[number], self.settings
        recovered = recover(
            self.scorer, document, settings.windows, of_document(targets, document),
            units=settings.units, selectors=settings.selectors, ks=settings.ks,
            controls=self.controls, num_halves=settings.num_halves, seed=settings.seed,
        )  # fmt: skip
        tables: dict[str, Columns] = {name: dict(rows) for name, rows in recovered.items()}
        tables["tokens"] = {
            "place": np.arange(len(document.tokens)),
            "token_id": document.tokens,
            "text": document.texts,
        }
        if document.truth is not None:
            tables["planted"] = {"place": document.truth}
        return tables

    def identity(self) -> dict[str, Any]:
        """Processes that measure into one folder must agree in all of this."""
        return {
            "model": self.model.fingerprint,
            "dtype": self.dtype,
            "data": self.documents.fingerprint,
            "num_documents": len(self.documents),
            "settings": asdict(self.settings),
            "targets": None if self.given is None else targets_fingerprint(self.given),
        }

    @property
    def dtype(self) -> str:
        return str(next(self.model.model.parameters()).dtype).removeprefix("torch.")


def share_of(numbers: list[int], index: int, of: int) -> list[int]:
    """Every of-th pair, so that each share has documents of both halves."""
    return [number for number in numbers if number // 2 % of == index]


def targets_meta(plan: Plan, thresholds: Thresholds) -> dict[str, Any]:
    """The section `targets` of meta.json."""
    if plan.given is not None:
        return {"given": targets_fingerprint(plan.given)}
    return {
        "share": plan.settings.target_share,
        "min_gap": plan.settings.min_gap,
        "max_targets": plan.settings.max_targets,
        "threshold": thresholds.gap,
        "kl_threshold": thresholds.kl,
    }
