"""Sum up a measurement: compute its summary and meta.json, and write the final tables.

    rows of all documents (parts.py) → `sum_up` → summary.parquet, targets.parquet, …, meta.json

    losses and recovery of all documents                   summary
    document  target  loss_short  k  loss_set              units   selector  k  recovery
           1      18         5.0  1       3.1       →      tokens  add_one   1      0.62
           3      40         4.2  1       3.6              tokens  add_one   4      0.81

The first process of a measurement calls `sum_up` when all documents are finished (measurement.py).
`sum_up_partial` does the same for the documents that are finished so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from olmo_sparsity.analysis.measurement.parts import Parts, results_folder
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.target_tables import (
    check_all_evaluated,
    targets_fingerprint,
)
from olmo_sparsity.analysis.results.loss_statistics import longppl
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.reported import STUDENT
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.statistics import RELIABILITY, mean_lds, summarize
from olmo_sparsity.analysis.results.stored_results import complete_summary, read_results
from olmo_sparsity.analysis.results.target_rows import DOCUMENT, half_of, with_ends
from olmo_sparsity.base.devices import device_name
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.locks import locked
from olmo_sparsity.base.provenance import provenance


def sum_up_partial(plan: Plan, out: Path, command: Sequence[str] = ()) -> Results:
    """Write results of the documents that are finished so far to `out/partial`, and return them.
    The model does not run."""
    if not results_folder(out).identity.exists():
        raise DataError(f"{out} holds no finished documents yet; run without --partial first")
    parts = Parts(out, plan.identity())
    finished = _read_finished_targets(plan, parts, out)
    keys_of_run = provenance(device_name(plan.scorer.device)) | {"command": list(command)}
    folder = out / "partial"
    folder.mkdir(exist_ok=True)
    with locked(folder, waits=True):
        num_unfinished = finished.num_unfinished
        sum_up(plan, parts, finished.targets, keys_of_run, folder, num_unfinished=num_unfinished)
        return read_results(folder)


class _FinishedTargets(NamedTuple):
    """Targets of a measurement that is still running, in the documents that are finished."""

    targets: pd.DataFrame
    """The targets of the documents that are finished."""

    num_unfinished: int
    """The number of documents that are not finished."""


def _read_finished_targets(plan: Plan, parts: Parts, out: Path) -> _FinishedTargets:
    """Return the targets of the documents that are finished. Raise DataError if none is."""
    finished = parts.find_finished("recovery")
    without_losses = set(plan.measured_numbers) - parts.find_finished("losses")
    if not finished:
        if not without_losses:
            # If all losses are there, none of them may make a target, which is the better message.
            check_any_target(plan, plan.select_targets(parts.read("losses")), parts)
        num_documents = len(plan.measured_numbers)
        raise DataError(
            f"{out} holds the losses of {num_documents - len(without_losses)} of {num_documents} "
            "documents, and no target was evaluated yet; run without --partial first"
        )

    targets = plan.select_targets(parts.read("losses"))
    unfinished = without_losses | (set(targets.document) - finished)
    targets = targets[targets.document.isin(finished)]
    check_any_target(plan, targets, parts)
    return _FinishedTargets(targets.reset_index(drop=True), len(unfinished))


def check_any_target(plan: Plan, targets: pd.DataFrame, parts: Parts) -> None:
    """Raise DataError if there is no target, or if none has a large gap where targets are chosen by
    it. Targets of the placebo do not count, as they are compared with others.

    Args:
        parts: The losses that the message quotes.
    """
    sets_with_target = set(targets.target_set[targets.distant_part == DOCUMENT])
    needs_large_gap = plan.chooses_by_gap and "gap" in plan.settings.sets
    if "gap" in sets_with_target or (sets_with_target and not needs_large_gap):
        return
    if plan.fixed_targets is not None:
        raise DataError("targets: none has a full long window before it; lower long")
    losses = parts.read("losses")
    gaps = (losses.loss_short - losses.loss_long)[losses.document.map(half_of) == "report"]
    if gaps.empty:
        raise DataError(
            "no token is measured in the documents of which targets are chosen, as nearly all "
            "blocks are of another document, which is much longer; raise blocks, or cut that one"
        )
    sizes = f"the largest is {gaps.max():.2f} nats, the threshold {plan.find_threshold(losses):.2f}"
    raise DataError(f"no target has a gap large enough: {sizes}; pass more text, or lower min_gap")


def sum_up(
    plan: Plan,
    parts: Parts,
    targets: pd.DataFrame,
    keys_of_run: dict[str, Any],
    out: Path,
    *,
    num_unfinished: int = 0,
) -> None:
    """Write the summary and the final tables of a measurement.

    Args:
        plan: The measurement.
        parts: The rows of its documents.
        targets: The targets of the documents that are finished.
        keys_of_run: The keys of meta.json that differ between two runs of one measurement.
        out: The folder to write to.
        num_unfinished: Number of documents that are left out.
    """
    losses = parts.read("losses")
    recovery = parts.read("recovery")
    check_all_evaluated(parts.folder, targets, recovery)

    # The parts of one document are not independent, so intervals resample them together.
    split_documents = plan.documents.parts
    summary = summarize(losses, targets, recovery, split_documents)

    # The cost of a target is the mean over all targets of all documents.
    costs = parts.read("costs").groupby(["units", "selector"]).sum(numeric_only=True)
    per_target = (costs.token_forwards / costs.num_targets).rename("token_forwards_per_target")
    summary = summary.merge(per_target.reset_index(), how="left", on=["units", "selector"])

    lds = mean_lds(targets, parts.read("lds"), split_documents)
    summary = summary.merge(lds, how="left", on=["target_set", "units", "selector"])

    # Rows with this selector are not about a selector, but about the unrelated texts.
    reliability = lds[lds.selector == RELIABILITY].to_dict("records")
    computed_keys = {"reliability": reliability, "intervals": STUDENT}
    meta = _make_meta(plan, losses, num_unfinished, keys_of_run | computed_keys)
    tables = {
        "losses": losses,
        "targets": targets,
        "recovery": recovery,
        "influence": parts.read("influence"),
    }
    summary = complete_summary(summary, tables, meta)
    parts.write_final_tables({"targets": with_ends(targets), "summary": summary}, meta, out)


def _make_meta(
    plan: Plan, losses: pd.DataFrame, num_unfinished: int, other_keys: dict[str, Any]
) -> Meta:
    """Return the content of meta.json.

    Args:
        plan: The measurement, which determines most of it.
        losses: The losses of all documents.
        num_unfinished: Number of documents that are left out.
        other_keys: Fields of `Meta` that the plan does not determine.
    """
    settings = plan.settings
    model = plan.model
    documents = plan.documents
    data: dict[str, Any] = {"source": documents.name, "fingerprint": documents.fingerprint}
    if documents.groups:
        data["groups"] = documents.groups
    if documents.parts:
        data["parts"] = documents.parts
    if plan.reused_losses.by_document:
        data["losses_from"] = plan.reused_losses.origin
    windows = settings.windows.as_stored()
    for name in ("distant_states", "replacements", "sample"):
        windows[name] = getattr(settings, name)
    return Meta(
        model={
            "name": model.name,
            "fingerprint": model.fingerprint,
            "num_parameters": model.num_parameters,
            "batch_noise": model.batch_noise,
            "trained": model.trained,
        },
        data=data,
        dtype=model.dtype,
        windows=windows,
        units=list(settings.units),
        selectors=list(settings.selectors),
        ks=list(settings.ks),
        controls={"control": settings.control, "draws": settings.draws},
        seed=settings.seed,
        targets=_describe_targets(plan, plan.find_threshold(losses)),
        longppl=dict(longppl(losses)),
        counts={
            "documents_measured": len(plan.measured_numbers) - num_unfinished,
            "documents_left": num_unfinished,
            "documents_too_short": documents.num_too_short
            + len(documents)
            - len(plan.measured_numbers),
            "documents_trained_on": documents.num_training,
        },
        **other_keys,
    )


def _describe_targets(plan: Plan, threshold: float | None) -> dict[str, Any]:
    """Return the section `targets` of meta.json: how the targets were chosen, and, for targets of
    another measurement, by which model."""
    fixed = plan.fixed_targets
    if fixed is not None:
        section: dict[str, Any] = {"given": targets_fingerprint(fixed.table)}
        if fixed.only_their_blocks:
            section["only_named"] = True
        if fixed.match_counts:
            section["matched"] = fixed.match_counts
        if fixed.choices is not None:
            section["choices"] = fixed.choices.fingerprint
            section["chosen_by"] = fixed.choices.model
        return section
    return {
        "share": plan.settings.share,
        "min_gap": plan.settings.min_gap,
        "max_targets": plan.settings.max_targets,
        "threshold": threshold,
    }
