"""Reuse parts of another measurement: its losses, its targets, or the units that its model ranked.

Ranked units come from another model. A unit that lowers a loss of one model by chance lowers that
of another no more than any other unit does, so their recovery needs no placebo.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.inputs.documents import Documents
from olmo_sparsity.analysis.inputs.windows import Units
from olmo_sparsity.analysis.measurement.matching import (
    Matched,
    is_other_tokenizer,
    match_choices,
    match_targets,
)
from olmo_sparsity.analysis.measurement.targets import given_targets
from olmo_sparsity.analysis.models.load import LoadedModel
from olmo_sparsity.analysis.results.results import Results, read_results
from olmo_sparsity.analysis.results.tables import plain
from olmo_sparsity.analysis.selectors.selector import Choice, find_selector
from olmo_sparsity.analysis.settings import Settings
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.runtime import say
from olmo_sparsity.streams import VERSION

KEYS = ["document", "units", "selector", "control", "target"]
OF_WINDOWS = ("long", "short", "stride")
"""Settings that the other measurement determines if both have one tokenizer."""

FREE = {*OF_WINDOWS, "prefix_ids", "ks", "sample", "blocks", "budget"}
"""It always determines all others."""


def read_other(name: str, given: Any) -> Results | None:
    """`name`: the option that names the other measurement."""
    if isinstance(given, str | Path):
        return read_results(given)
    if given is not None and not isinstance(given, Results):
        raise ConfigError(f"{name}={given} must be another measurement or its folder")
    return given


def _differences(given: Results, settings: Settings) -> list[str]:
    """Settings that decide which targets have losses and which text is the placebo's."""
    ours = plain(asdict(settings.windows)) | {"seed": settings.seed, "draws": settings.draws}
    ours |= {"sample": settings.sample, "random_streams": VERSION}
    meta = given.meta
    theirs = {"seed": meta.seed} | meta.windows | meta.controls
    theirs["random_streams"] = meta.identity["random_streams"]
    return [name for name, value in ours.items() if theirs.get(name) != value]


def losses_of(
    given: Results, model: LoadedModel, documents: Documents, settings: Settings
) -> dict[int, pd.DataFrame]:
    """The losses of each document there, which must be what would be computed here."""
    meta = given.meta
    if meta.targets.get("only_named"):
        raise DataError("losses: only the blocks of named targets have them; measure without `at`")
    differ = _differences(given, settings)
    if meta.data.get("fingerprint") != documents.fingerprint:
        differ.insert(0, "text")
    if meta.model.get("fingerprint") != model.fingerprint:
        differ.insert(0, "model")
    elif meta.dtype != model.dtype:
        differ.insert(0, "dtype")
    if differ:
        raise DataError(f"losses: they are of another {', '.join(differ)}; pass matching ones")
    by_document = given.losses.groupby("document", sort=False)
    return {int(number): rows.drop(columns="document") for number, rows in by_document}


def targets_of(
    given: Results, documents: Documents, settings: Settings, with_units: bool = False
) -> Matched:
    """The targets of another measurement of the same text; `with_units`: and what it ranked."""
    windows = settings.windows
    most = given.influence["rank"].max()
    if with_units and max(settings.ks) > most:
        raise ConfigError(f"ks: the other measurement ranked {most} units")
    if given.meta.data.get("fingerprint") == documents.fingerprint:
        targets = given.targets[given.targets.far_part == "document"]
        if not with_units:
            targets = given_targets(given.targets, windows, not _differences(given, settings))
        return Matched(targets, given.influence)
    if not is_other_tokenizer(given, documents):
        raise DataError(
            f"the targets were chosen in {given.meta.data.get('source')}, which differs from "
            f"{documents.name} in text or tokens; pass the same documents"
        )
    matched = (
        match_choices(given, documents, settings)
        if with_units
        else match_targets(given, documents, windows)
    )
    if not len(matched.targets):
        raise DataError(f"no target of the other measurement remains: {matched}")
    say(str(matched))
    return matched


@dataclass(frozen=True)
class Choices:
    """The ranked units of each target, in the document and in an unrelated text."""

    ranked: dict[tuple[Any, ...], np.ndarray]
    """`KEYS` → (first, end, influence) by rank."""

    fingerprint: str
    model: dict[str, Any]
    """Name and fingerprint of the model that chose."""

    has_unrelated: bool
    """Whether units of unrelated texts were ranked, too."""

    @staticmethod
    def of(results: Results, matched: Matched) -> Choices:
        """Keep units of documents' own distant context, and of the first unrelated text."""
        own = matched.influence[matched.influence.far_part == "document"]
        if not len(own):
            raise DataError("the other measurement has no ranked units; measure it again")
        columns = ["far_first", "far_end", "influence"]
        rows = own.sort_values([*KEYS, "rank"])
        is_first = ~rows.duplicated(KEYS).to_numpy()  # of the ranks of a target
        keys = rows.loc[is_first, KEYS].itertuples(index=False, name=None)
        groups = np.split(rows[columns].to_numpy(float), np.flatnonzero(is_first)[1:])
        ranked = dict(zip(keys, groups, strict=True))
        digest = hashlib.sha256(rows[[*KEYS, *columns[:2]]].to_csv(index=False).encode())
        model = {name: results.meta.model.get(name) for name in ("name", "fingerprint")}
        has_unrelated = bool((own.control == "foreign").any())
        return Choices(ranked, digest.hexdigest(), model, has_unrelated)

    def pick(
        self, document: int, about: dict[str, Any], starts: Sequence[int], units: Units, offset: int
    ) -> Choice:
        """`starts`: places of the targets; `offset`: place of the first distant token."""
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


def settings_of(results: Results, given: dict[str, Any], is_other: bool) -> Settings:
    """Take the other measurement's settings, so that windows, targets and unrelated texts agree.
    `is_other`: windows are in tokens of another tokenizer, and those given here hold."""
    meta = results.meta
    if wrong := [n for n in given if n not in FREE or (n in OF_WINDOWS and not is_other)]:
        names = ", ".join(sorted(wrong))
        raise ConfigError(f"{names}: `choices` takes this from the other measurement; omit it")
    if meta.identity["random_streams"] != VERSION and not is_other:
        raise DataError("choices: their unrelated texts differ from today's; measure again")
    windows = meta.windows
    of_windows = {name: windows[name] for name in OF_WINDOWS}
    of_windows |= {"prefix_ids": tuple(windows["prefix"]), "sample": windows["sample"]}
    if is_other:
        of_windows = {n: given[n] for n in (*OF_WINDOWS, "prefix_ids") if n in given}
    settings = Settings(
        **of_windows,
        far_states=windows["far_states"],
        units=tuple(meta.units),
        selectors=tuple(name for name in meta.selectors if find_selector(name).draws == 1),
        ks=tuple(np.atleast_1d(given.get("ks", meta.ks)).tolist()),
        control=meta.controls["control"],
        draws=1,
        halves=0,
        seed=meta.seed,
    )
    settings.check()
    return settings
