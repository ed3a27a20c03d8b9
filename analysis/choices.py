"""What another measurement ranked, to be evaluated by this model: choice and effect by two models.

Place in the flow: results of one model → **its targets and units** → recovery of another model.

A unit that lowers a loss of one model by chance lowers that of another model no more than any other
unit does. So what is recovered needs no placebo.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.influence import Choice
from olmo_sparsity.analysis.results import Results
from olmo_sparsity.analysis.settings import Settings
from olmo_sparsity.analysis.windows import Units
from olmo_sparsity.errors import ConfigError, DataError

KEYS = ["document", "units", "selector", "control", "target"]
TAKEN = ("units", "selectors", "share", "sets", "max_targets", "far_states", "control", "draws",
         "halves", "seed", "min_gap")  # fmt: skip
"""Settings that are those of the other measurement."""


@dataclass(frozen=True)
class Choices:
    """The ranked units of each target, in the document and in a foreign text."""

    ranked: dict[tuple[Any, ...], np.ndarray]
    """`KEYS` → (first, end, influence) by rank."""

    targets: pd.DataFrame
    most: int
    """The number of ranks."""

    fingerprint: str
    model: dict[str, Any]
    """Name and fingerprint of the model that chose."""

    @staticmethod
    def of(results: Results) -> Choices:
        """Those of documents' own far parts, and of the first draw of the foreign text."""
        own = results.influence[results.influence.far_part == "document"]
        if not len(own):
            raise DataError("the other measurement has no ranked units; measure it again")
        columns = ["far_first", "far_end", "influence"]
        rows = own.sort_values([*KEYS, "rank"])
        ranked = {key: group[columns].to_numpy(float) for key, group in rows.groupby(KEYS)}
        targets = results.targets[results.targets.far_part == "document"]
        digest = hashlib.sha256(rows[[*KEYS, *columns[:2]]].to_csv(index=False).encode())
        model = {name: results.meta.model.get(name) for name in ("name", "fingerprint")}
        return Choices(ranked, targets, int(own["rank"].max()), digest.hexdigest(), model)

    def pick(
        self, document: int, about: dict[str, Any], starts: Sequence[int], units: Units, offset: int
    ) -> Choice:
        """`starts`: places of the targets; `offset`: that of the first far token."""
        numbers = {pair: i for i, pair in enumerate(zip(units.first, units.end, strict=True))}
        unit_TK, influence_TK = [], []
        for start in starts:
            key = (document, about["units"], about["selector"], about["control"], start)
            first_K, end_K, influence_K = self.ranked[key].T
            bounds = zip(first_K.astype(int) - offset, end_K.astype(int) - offset, strict=True)
            unit_TK.append([numbers[pair] for pair in bounds])
            influence_TK.append(influence_K)
        chosen_TK = np.array(unit_TK)
        score_TU = np.zeros((len(chosen_TK), len(units)))
        np.put_along_axis(score_TU, chosen_TK, np.array(influence_TK), axis=1)
        return Choice(chosen_TK, np.array(influence_TK), score_TU)


def settings_of(results: Results, given: dict[str, Any]) -> Settings:
    """Those of the other measurement, so that windows, targets and foreign texts are the same."""
    meta = results.meta
    if wrong := [name for name in given if name in TAKEN or name in ("long", "short", "stride")]:
        raise ConfigError(
            f"{', '.join(sorted(wrong))}: with `choices` those of the other measurement; leave it "
            "out"
        )
    windows = meta.windows
    settings = Settings(
        long=windows["long"], short=windows["short"], stride=windows["stride"],
        prefix_ids=tuple(windows["prefix"]), far_states=windows["far_states"],
        units=tuple(meta.units),
        selectors=tuple(name for name in meta.selectors if name != "random"),  # of several draws
        ks=tuple(meta.ks), control=meta.controls["control"], draws=1, halves=0, seed=meta.seed,
    )  # fmt: skip
    ks = given.get("ks")
    return settings if ks is None else replace(settings, ks=tuple(np.atleast_1d(ks).tolist()))
