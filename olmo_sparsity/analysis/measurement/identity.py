"""Tell whether two calls of `measure` are one measurement, whose folder both may fill.

    identity_of_measurement(model, documents, settings, fixed=None)
        → {"model": …, "data": …, "settings": {"long": 64, …}, "targets": None, …}

plan.py returns this identity, and parts.py stores it in the folder as identity.json. A call with
another identity must take another folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from olmo_sparsity.analysis.measurement.fixed_targets import FixedTargets
from olmo_sparsity.analysis.measurement.target_tables import targets_fingerprint
from olmo_sparsity.analysis.options import MIN_GAP, Settings
from olmo_sparsity.base.extend import fingerprint_of_files
from olmo_sparsity.base.renamed import with_current_names
from olmo_sparsity.base.streams import VERSION
from olmo_sparsity.models.loaded import LoadedModel, identity_of
from olmo_sparsity.text.documents import Documents


def identity_of_measurement(
    model: LoadedModel, documents: Documents, settings: Settings, fixed: FixedTargets | None
) -> dict[str, Any]:
    """Return everything that processes must share to measure into one folder.

    Args:
        fixed: The targets, if they are fixed before any loss. None if losses choose them.
    """
    stored_settings = asdict(settings)
    if fixed is not None or not settings.uses_min_gap:
        stored_settings = _without_idle_min_gap(stored_settings)
    identity: dict[str, Any] = {
        **identity_of(model),
        "data": documents.fingerprint,
        "num_documents": len(documents),
        "random_streams": VERSION,
        "settings": stored_settings,
    }
    # Earlier versions did not write `files` and `only_named`. They are left out where they say
    # nothing, so that folders of earlier versions can be resumed.
    files = fingerprint_of_files((*settings.selectors, *settings.units))
    if files:
        identity["files"] = files
    if fixed is not None and fixed.only_their_blocks:
        identity["only_named"] = True
    choices = None if fixed is None else fixed.choices
    identity["targets"] = None if fixed is None else targets_fingerprint(fixed.table)
    identity["choices"] = None if choices is None else choices.fingerprint
    return identity


def complete_identity(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the identity that an earlier version stored, as today's version would write it."""
    identity = with_current_names(stored)
    settings = identity.get("settings")
    if isinstance(settings, dict) and "min_gap" in settings:
        # Earlier versions accepted `min_gap` also where it chooses nothing.
        uses_min_gap = "gap" in settings.get("sets", ()) and settings.get("share") != 1
        if identity.get("targets") is not None or not uses_min_gap:
            identity["settings"] = _without_idle_min_gap(settings)
    return identity


def _without_idle_min_gap(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an identity with the default of `min_gap`, where it has no effect."""
    return {**settings, "min_gap": MIN_GAP}
