"""Reuse another measurement: its losses, its targets, or the settings of its choices.

    reusable_losses            the losses, if model, text and windows are the same
    locate_targets             the targets of a measurement of the same text; on request also its
                               ranked units
    with_settings_of_targets   settings under which targets keep their placebo
    settings_of_choices        the settings under which units were ranked

If the other model has another tokenizer, matching.py finds its targets and units by the characters
of the text. choices.py holds the ranked units.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.matching import (
    Matched,
    is_other_tokenizer,
    match_choices,
    match_targets,
)
from olmo_sparsity.analysis.measurement.targets import given_targets
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.results import Results, read_results
from olmo_sparsity.analysis.results.tables import to_json_value
from olmo_sparsity.analysis.selectors.influence import find_selector
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.streams import VERSION
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.documents import Documents

WINDOW_SETTINGS = ("long", "short", "stride")
"""Settings that the other measurement determines if both have one tokenizer."""

SHARED_WITH_TARGETS = (*WINDOW_SETTINGS, "draws", "seed")
"""Settings that `targets` takes from the other measurement where the user passed none, besides the
prefix: with others, there are no placebo targets."""

FREE_SETTINGS = {*WINDOW_SETTINGS, "prefix_ids", "ks", "sample", "blocks"}
"""Settings that may be passed with `choices`. The other measurement determines all others."""


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


def with_settings_of_targets(
    other: Results, settings: Settings, typed: Collection[str], prefix: str
) -> Settings:
    """Return settings with the windows, stride, draws and seed of the measurement whose targets are
    evaluated, so that its placebo targets are evaluated, too. Tell the user which are taken.

    Args:
        other: The measurement whose targets are evaluated.
        settings: The settings of this call.
        typed: Names of the settings that the user passed, which stay as they are.
        prefix: The option `prefix`. Unless it is `auto`, the other's prefix is not taken.
    """
    stored = other.meta.windows | other.meta.controls | {"seed": other.meta.seed}
    options = dict(settings.changed_options)
    taken = []
    for name in SHARED_WITH_TARGETS:
        if name in typed or stored.get(name) is None:
            continue
        # Also where the value is equal, as `quick` would change it.
        options[name] = stored[name]
        if stored[name] != getattr(settings, name):
            taken.append(f"{name}={stored[name]}")
    if "prefix_ids" not in typed and prefix == "auto":
        options["prefix_ids"] = tuple(stored.get("prefix", ()))
    if taken:
        say(f"targets: {', '.join(taken)}, as in the other measurement")
    shared = Settings(**options)
    shared.check()
    return shared


def _differing_settings(other: Results, settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which the other measurement differs from this one: name → the value
    here, and the other's. Only settings count that decide which targets have losses and which text
    is the placebo's."""
    current = to_json_value(settings.windows.as_stored()) | {
        "seed": settings.seed,
        "draws": settings.draws,
        "sample": settings.sample,
        "random_streams": VERSION,
    }
    meta = other.meta
    stored = {"seed": meta.seed} | meta.windows | meta.controls
    stored["random_streams"] = meta.identity["random_streams"]
    return {
        name: (value, stored.get(name))
        for name, value in current.items()
        if stored.get(name) != value
    }


def _is_same_data(other: Results, documents: Documents) -> bool:
    """Return whether the other measurement has read the same documents in the same tokens."""
    return bool(other.meta.data.get("fingerprint") == documents.fingerprint)


def with_blocks_of(other: Results, documents: Documents, settings: Settings) -> Settings:
    """Return settings with the sample of the other measurement, so that the blocks of its targets
    have losses here. Return the settings as they are if something else differs that decides on
    blocks: its blocks are not blocks here, then."""
    with_same_sample = replace(settings, sample=other.meta.windows["sample"])
    if not _is_same_data(other, documents) or _differing_settings(other, with_same_sample):
        return settings
    return with_same_sample


def reusable_losses(
    other: Results, model: LoadedModel, documents: Documents, settings: Settings
) -> dict[int, pd.DataFrame]:
    """Return the losses of another measurement: number of a document → its rows. DataError if this
    measurement would compute other losses, as model, text or windows differ."""
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
    by_document = other.losses.groupby("document", sort=False)
    return {int(number): rows.drop(columns="document") for number, rows in by_document}


def locate_targets(
    other: Results, documents: Documents, settings: Settings, with_units: bool = False
) -> Matched:
    """Return the targets of another measurement of the same text, as places in these documents, and
    tell the user which are left out.

    Args:
        with_units: Whether the units that it ranked are evaluated, so that they must be found in
            these documents, too.
    """
    windows = settings.windows
    num_ranked = other.influence["rank"].max()
    if with_units and max(settings.ks) > num_ranked:
        raise ConfigError(
            f"ks: {max(settings.ks)} is more than the {num_ranked} units that the other "
            "measurement ranked; pass smaller ks"
        )

    if _is_same_data(other, documents):
        if with_units:
            # `settings_of_choices` has taken the other's settings, so all its targets are targets
            # here.
            targets = other.targets[other.targets.distant_part == "document"]
            return Matched(targets, other.influence)
        differing = _differing_settings(other, settings)
        targets = given_targets(other.targets, windows, not differing)
        # Another sample leaves out blocks, but the placebo of the remaining ones is the same.
        differences = [
            f"{name}={value} (the other has {other_value})"
            for name, (value, other_value) in differing.items()
            if name != "sample"
        ]
        if differences:
            say(f"no placebo targets, so no net excess, because of {', '.join(differences)}")
        return Matched(targets, other.influence, has_other_windows=bool(differing))

    if not is_other_tokenizer(other, documents):
        text = f"{other.meta.data.get('source')}, which differs from {documents.name}"
        raise DataError(f"the targets were chosen in {text}; pass the same text and its options")
    if with_units:
        matched = match_choices(other, documents, settings)
    else:
        matched = match_targets(other, documents, windows)
    if not len(matched.targets):
        raise DataError(f"no target of the other measurement remains: {matched.counts}")
    say(str(matched.counts))
    return matched


def settings_of_choices(
    results: Results, passed: dict[str, Any], has_other_tokenizer: bool
) -> Settings:
    """Return the settings under which another measurement ranked its units, so that windows,
    targets and unrelated texts agree.

    Args:
        results: The other measurement.
        passed: The settings that the user passed; ConfigError if the other measurement determines
            one of them.
        has_other_tokenizer: Whether its windows are counted in other tokens. The windows are then
            those of this call.
    """
    meta = results.meta
    free_settings = FREE_SETTINGS
    if not has_other_tokenizer:
        free_settings = FREE_SETTINGS - {*WINDOW_SETTINGS}
    determined = [name for name in passed if name not in free_settings]
    if determined:
        names = ", ".join(sorted(determined))
        raise ConfigError(f"{names}: `choices` takes this from the other measurement; omit it")
    if meta.identity["random_streams"] != VERSION and not has_other_tokenizer:
        raise DataError("choices: their unrelated texts differ from today's; measure again")

    windows = meta.windows
    if has_other_tokenizer:
        names_of_windows = {*WINDOW_SETTINGS, "prefix_ids"}
        window_settings = {
            name: value for name, value in passed.items() if name in names_of_windows
        }
    else:
        window_settings = {name: windows[name] for name in WINDOW_SETTINGS}
        window_settings["prefix_ids"] = tuple(windows["prefix"])
        window_settings["sample"] = windows["sample"]
    rules = [name for name in meta.selectors if find_selector(name).draws == 1]
    if not rules:
        raise DataError(
            f"choices: the other measurement drew its units at random ({', '.join(meta.selectors)})"
            "; measure it with a selector that ranks them, such as add_one_screened"
        )
    settings = Settings(
        **window_settings,
        distant_states=windows["distant_states"],
        replacements=windows.get("replacements"),
        units=tuple(meta.units),
        selectors=tuple(rules),
        ks=tuple(np.atleast_1d(passed.get("ks", meta.ks)).tolist()),
        control=meta.controls["control"],
        draws=1,
        halves=0,
        seed=meta.seed,
    )
    settings.check()
    return settings
