"""Take settings from another measurement, whose targets or ranked units are evaluated.

    option      settings that the other measurement determines        function
    targets=    windows, stride, draws, seed, where none was passed   with_settings_of_targets
    choices=    nearly all: units were ranked under them              settings_of_choices

    other: long=64, draws=3    measure(…, targets=other, draws=1)  → Settings(long=64, draws=1, …)

planning.py calls them, before it makes a plan.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.selectors.influence import find_selector
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.streams import VERSION

WINDOW_SETTINGS = ("long", "short", "stride")
"""Settings that the other measurement determines if both have one tokenizer."""

SHARED_WITH_TARGETS = (*WINDOW_SETTINGS, "draws", "seed")
"""Settings that `targets` takes from the other measurement where the user passed none, besides the
prefix: with others, there are no placebo targets."""

FREE_WITH_CHOICES = {*WINDOW_SETTINGS, "prefix_ids", "ks", "sample", "blocks"}
"""Settings that may be passed with `choices`, the windows only if the other measurement counts them
in other tokens. The other measurement determines all others."""


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
    changes = []
    for name in SHARED_WITH_TARGETS:
        if name in typed or stored.get(name) is None:
            continue
        # Also where the value is equal, as `quick` would change it.
        options[name] = stored[name]
        if stored[name] != getattr(settings, name):
            changes.append(f"{name}={stored[name]}")
    if "prefix_ids" not in typed and prefix == "auto":
        options["prefix_ids"] = tuple(stored.get("prefix", ()))
    if changes:
        say(f"targets: {', '.join(changes)}, as in the other measurement")
    shared = Settings(**options)
    shared.check()
    return shared


def settings_of_choices(
    other: Results, passed: dict[str, Any], has_other_tokenizer: bool
) -> Settings:
    """Return the settings under which another measurement ranked its units, so that windows,
    targets and unrelated texts agree. Raise ConfigError if the user passed one that the other
    measurement determines.

    Args:
        other: The other measurement.
        passed: The settings that the user passed, by name.
        has_other_tokenizer: Whether its windows are counted in other tokens. The windows are then
            those of this call.
    """
    meta = other.meta
    free_settings = FREE_WITH_CHOICES
    if not has_other_tokenizer:
        free_settings = FREE_WITH_CHOICES - {*WINDOW_SETTINGS}  # those of the other are taken
    determined = [name for name in passed if name not in free_settings]
    if determined:
        names = ", ".join(sorted(determined))
        raise ConfigError(f"{names}: `choices` takes this from the other measurement; omit it")
    if meta.identity["random_streams"] != VERSION and not has_other_tokenizer:
        raise DataError("choices: their unrelated texts differ from today's; measure again")

    settings = Settings(
        **_windows_of_choices(other, passed, has_other_tokenizer),
        distant_states=meta.windows["distant_states"],
        replacements=meta.windows.get("replacements"),
        units=tuple(meta.units),
        selectors=_selectors_that_rank(other),
        ks=tuple(np.atleast_1d(passed.get("ks", meta.ks)).tolist()),
        control=meta.controls["control"],
        # Units of the first unrelated text are stored, so that one text is evaluated.
        draws=1,
        # Halves score a selector's own scores, and no selector runs here.
        halves=0,
        seed=meta.seed,
    )
    settings.check()
    return settings


def _windows_of_choices(
    other: Results, passed: dict[str, Any], has_other_tokenizer: bool
) -> dict[str, Any]:
    """Return the settings of the windows, by name: those of the other measurement, or those that
    the user passed if the other's are counted in other tokens."""
    if has_other_tokenizer:
        names = {*WINDOW_SETTINGS, "prefix_ids"}
        return {name: value for name, value in passed.items() if name in names}
    windows = other.meta.windows
    settings = {name: windows[name] for name in WINDOW_SETTINGS}
    settings["prefix_ids"] = tuple(windows["prefix"])
    settings["sample"] = windows["sample"]
    return settings


def _selectors_that_rank(other: Results) -> tuple[str, ...]:
    """Return the selectors of the other measurement, without those that draw units at random. Raise
    DataError if none remains."""
    selectors = other.meta.selectors
    rules = tuple(name for name in selectors if find_selector(name).draws == 1)
    if not rules:
        raise DataError(
            f"choices: the other measurement drew its units at random ({', '.join(selectors)})"
            "; measure it with a selector that ranks them, such as add_one_screened"
        )
    return rules
