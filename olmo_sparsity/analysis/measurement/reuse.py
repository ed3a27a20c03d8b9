"""Reuse another measurement: its losses, its targets, or the units that it ranked.

    option of `measure`   what is reused                   function
    losses=               L_short and L_long               reusable_losses → ReusedLosses
    targets=              its targets, with their placebo  reusable_targets → ReusedTargets
    choices=              its targets and ranked units     the same, with reuse_units=True

Losses are reused from a measurement of the same model. Targets and choices mostly come from another
model that has read the same text. For example, a measurement of model A finds that token 18 of
document 1 is a target, and ranks "Anna" first for it. With `choices=` a measurement of model B
evaluates "Anna" at token 18.

planning.py and plan.py call these functions, and fixed_targets.py `reusable_targets`. If the other
model has another tokenizer, matching.py finds its targets and units by the characters of the text.
choices.py holds the units, and reused_settings.py takes the settings that targets and choices bring
with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from olmo_sparsity.analysis.measurement.matching import (
    is_other_tokenizer,
    match_choices,
    match_targets,
)
from olmo_sparsity.analysis.measurement.reused_targets import ReusedTargets
from olmo_sparsity.analysis.measurement.target_tables import with_full_window
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.json_values import to_json_value
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.stored_results import read_results
from olmo_sparsity.analysis.results.target_rows import DOCUMENT
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.streams import VERSION
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.documents import Documents


def read_other(option: str, other: Any) -> Results | None:
    """Return another measurement, passed as results or as the folder that holds them.

    Args:
        option: The name of the argument, for the error.
    """
    if isinstance(other, str | Path):
        return read_results(other)
    if other is not None and not isinstance(other, Results):
        raise ConfigError(f"{option}={other!r:.80} must be what measure returned, or its folder")
    return other


# --- its losses -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReusedLosses:
    """Losses that another measurement of the same model has computed. Empty if none are reused."""

    by_document: dict[int, pd.DataFrame] = field(default_factory=dict)
    """Number of a document → its rows of the table losses."""

    origin: dict[str, Any] = field(default_factory=dict)
    """Commit, machine and command of that measurement."""


def reusable_losses(
    other: Results, model: LoadedModel, documents: Documents, settings: Settings
) -> ReusedLosses:
    """Return the losses of another measurement. Raise DataError if this measurement would compute
    other losses, as model, text or windows differ."""
    meta = other.meta
    if meta.targets.get("only_named"):
        raise DataError("losses: only the blocks of named targets have them; measure without `at`")
    differing = list(_differing_settings(other, settings))
    if not _is_same_data(other, documents):
        differing.insert(0, "text")
    if meta.model.get("fingerprint") != model.fingerprint:
        differing.insert(0, "model")
    elif meta.dtype != model.dtype:
        differing.insert(0, "dtype")
    if differing:
        raise DataError(
            f"losses: they are of another {', '.join(differing)}; pass those of the same, "
            "or omit losses"
        )
    # As `Plan.compute_losses` returns them: without the column `document`, which is added when they
    # are stored.
    groups = other.losses.groupby("document", sort=False)
    return ReusedLosses(
        by_document={int(number): rows.drop(columns="document") for number, rows in groups},
        origin={name: getattr(meta, name) for name in ("commit", "machine", "command")},
    )


# --- its targets ----------------------------------------------------------------------------------


def with_blocks_of(other: Results, documents: Documents, settings: Settings) -> Settings:
    """Return settings with the sampled blocks of the other measurement, so that the blocks of its
    targets have losses here. Return the settings as they are if its blocks are not blocks here,
    because text, windows or seed differ."""
    with_same_sample = replace(settings, sample=other.meta.windows["sample"])
    if not _is_same_data(other, documents) or _differing_settings(other, with_same_sample):
        return settings
    return with_same_sample


def reusable_targets(
    other: Results, documents: Documents, settings: Settings, reuse_units: bool
) -> ReusedTargets:
    """Return the targets of another measurement of the same text, as places in these documents, and
    tell the user which are left out.

    Args:
        reuse_units: Whether the units that it ranked are evaluated, so that they must be found in
            these documents, too.
    """
    num_ranked = other.influence["rank"].max()
    if reuse_units and max(settings.ks) > num_ranked:
        raise ConfigError(
            f"ks: {max(settings.ks)} is more than the {num_ranked} units that the other "
            "measurement ranked; pass smaller ks"
        )
    if not _is_same_data(other, documents):
        return _targets_in_other_tokens(other, documents, settings, reuse_units)
    if reuse_units:
        # `settings_of_choices` has taken the other's settings, so all its targets are targets here.
        # Those of the placebo are left out: ranked by another model, units need none (choices.py).
        targets = other.targets[other.targets.distant_part == DOCUMENT]
        return ReusedTargets(targets, other.influence)
    return _targets_in_same_tokens(other, settings)


def _targets_in_same_tokens(other: Results, settings: Settings) -> ReusedTargets:
    """Return the targets of another measurement that has read the same tokens, perhaps with other
    windows or another placebo."""
    differing = _differing_settings(other, settings)
    keep_placebo = not differing
    targets = with_full_window(other.targets, settings.windows, keep_placebo=keep_placebo)
    # Another sample leaves out blocks, but the placebo of the remaining ones is the same.
    differences = [
        f"{name}={difference.here} (the other has {difference.other})"
        for name, difference in differing.items()
        if name != "sample"
    ]
    if differences:
        say(f"no placebo targets, so no net excess, because of {', '.join(differences)}")
    return ReusedTargets(targets, other.influence, has_other_windows=bool(differing))


def _targets_in_other_tokens(
    other: Results, documents: Documents, settings: Settings, reuse_units: bool
) -> ReusedTargets:
    """Return the targets of another measurement that has read the same text in other tokens. Raise
    DataError if the text differs, or if no target remains."""
    if not is_other_tokenizer(other, documents):
        text = f"{other.meta.data.get('source')}, which differs from {documents.name}"
        raise DataError(f"the targets were chosen in {text}; pass the same text and its options")
    if reuse_units:
        reused = match_choices(other, documents, settings)
    else:
        reused = match_targets(other, documents, settings.windows)
    if not len(reused.targets):
        raise DataError(f"no target of the other measurement remains: {reused.match_counts}")
    say(str(reused.match_counts))
    return reused


# --- what differs ---------------------------------------------------------------------------------


class _Difference(NamedTuple):
    """A setting with different values in this measurement and the other one."""

    here: Any
    other: Any


def _differing_settings(other: Results, settings: Settings) -> dict[str, _Difference]:
    """Return the settings in which the other measurement differs from this one, by name. Settings
    that decide neither which tokens have losses nor which text is the placebo's do not count."""
    here = to_json_value(settings.windows.as_stored()) | {
        "seed": settings.seed,
        "draws": settings.draws,
        "sample": settings.sample,
        "random_streams": VERSION,
    }
    meta = other.meta
    stored = {"seed": meta.seed} | meta.windows | meta.controls
    stored["random_streams"] = meta.identity["random_streams"]
    return {
        name: _Difference(here=value, other=stored.get(name))
        for name, value in here.items()
        if stored.get(name) != value
    }


def _is_same_data(other: Results, documents: Documents) -> bool:
    """Return whether the other measurement has read the same documents in the same tokens."""
    return bool(other.meta.data.get("fingerprint") == documents.fingerprint)
