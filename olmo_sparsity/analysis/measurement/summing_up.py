"""Sum up a measurement: compute its summary and meta.json, and write the final tables.

    rows of all documents (parts.py) → `sum_up` → summary.parquet, targets.parquet, …, meta.json

`sum_up_partial` does the same for the documents that are finished so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.measurement.parts import Parts, results_folder
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.targets import check_all_evaluated, targets_fingerprint
from olmo_sparsity.analysis.results.loss_statistics import longppl
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.reported import STUDENT
from olmo_sparsity.analysis.results.results import Results, complete_summary, read_results
from olmo_sparsity.analysis.results.statistics import RELIABILITY, mean_lds, summarize
from olmo_sparsity.analysis.results.target_rows import half_of, with_ends
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
    targets, num_unfinished = _targets_of_finished(plan, parts, out)
    meta = provenance(device_name(plan.scorer.device)) | {"command": list(command)}
    (out / "partial").mkdir(exist_ok=True)
    with locked(out / "partial", waits=True):
        sum_up(plan, parts, targets, meta, out / "partial", num_unfinished=num_unfinished)
        return read_results(out / "partial")


def _targets_of_finished(plan: Plan, parts: Parts, out: Path) -> tuple[pd.DataFrame, int]:
    """Return the targets of the documents that are finished, and the number of documents that are
    not. DataError if nothing is finished."""
    finished = parts.finished("recovery")
    without_losses = set(plan.measured_numbers) - parts.finished("losses")
    num_with_losses = len(plan.measured_numbers) - len(without_losses)
    nothing_evaluated = DataError(
        f"{out} holds the losses of {num_with_losses} of {len(plan.measured_numbers)} "
        "documents, and no target was evaluated yet; run without --partial first"
    )
    if without_losses and not finished:
        raise nothing_evaluated

    targets = plan.select_targets(parts.read("losses"))
    unfinished = without_losses | (set(targets.document) - finished)
    if finished:
        targets = targets[targets.document.isin(finished)]
    # This comes first, because it is the better message where there is no target at all.
    check_any_target(plan, targets, parts)
    if not finished:
        raise nothing_evaluated
    return targets.reset_index(drop=True), len(unfinished)


def check_any_target(plan: Plan, targets: pd.DataFrame, parts: Parts) -> None:
    """Raise DataError if there is no target, or if none has a large gap where targets are chosen by
    it.

    Args:
        parts: The losses that the message quotes.
    """
    target_sets = set(targets.target_set[targets.distant_part == "document"])
    chosen_by_gap = plan.chooses_by_gap and "gap" in plan.settings.sets
    if "gap" in target_sets or (target_sets and not chosen_by_gap):
        return
    if plan.fixed is not None:
        raise DataError("targets: none has a full long window before it; lower long")
    losses = parts.read("losses")
    gaps = (losses.loss_short - losses.loss_long)[losses.document.map(half_of) == "report"]
    sizes = f"the largest is {gaps.max():.2f} nats, the threshold {plan.find_threshold(losses):.2f}"
    raise DataError(f"no target has a gap large enough: {sizes}; pass more text, or lower min_gap")


def sum_up(
    plan: Plan,
    parts: Parts,
    targets: pd.DataFrame,
    meta: dict[str, Any],
    out: Path,
    *,
    num_unfinished: int = 0,
) -> None:
    """Write the summary and the final tables of a measurement.

    Args:
        plan: The measurement.
        parts: The rows of its documents.
        targets: The targets of the documents that are finished.
        meta: The keys of meta.json that differ between two runs of one measurement.
        out: The folder to write to.
        num_unfinished: Number of documents that are left out.
    """
    losses = parts.read("losses")
    recovery = parts.read("recovery")
    check_all_evaluated(parts.folder, targets, recovery)

    split_parts = plan.documents.parts
    summary = summarize(losses, targets, recovery, split_parts)
    # The cost of a target is the mean over all targets of all documents.
    costs = parts.read("costs").groupby(["units", "selector"]).sum(numeric_only=True)
    per_target = (costs.token_forwards / costs.num_targets).rename("token_forwards_per_target")
    summary = summary.merge(per_target.reset_index(), how="left", on=["units", "selector"])
    lds = mean_lds(targets, parts.read("lds"), split_parts)
    summary = summary.merge(lds, how="left", on=["target_set", "units", "selector"])

    # Rows with this selector are not about a selector, but about the unrelated texts.
    meta = meta | {
        "reliability": lds[lds.selector == RELIABILITY].to_dict("records"),
        "intervals": STUDENT,
    }
    content_of_meta = _meta(plan, losses, num_unfinished, meta)
    tables = {
        "losses": losses,
        "targets": targets,
        "recovery": recovery,
        "influence": parts.read("influence"),
    }
    summary = complete_summary(summary, tables, content_of_meta)
    parts.finish({"targets": with_ends(targets), "summary": summary}, content_of_meta, out)


def _meta(
    plan: Plan, losses: pd.DataFrame, num_unfinished: int, keys_of_run: dict[str, Any]
) -> Meta:
    """Return the content of meta.json.

    Args:
        keys_of_run: What differs between two runs of one measurement.
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
        targets=_targets_meta(plan, plan.find_threshold(losses)),
        longppl=longppl(losses),
        counts={
            "documents_measured": len(plan.measured_numbers) - num_unfinished,
            "documents_left": num_unfinished,
            "documents_too_short": documents.num_too_short
            + len(documents)
            - len(plan.measured_numbers),
            "documents_trained_on": documents.num_training,
        },
        **keys_of_run,
    )


def _targets_meta(plan: Plan, threshold: float | None) -> dict[str, Any]:
    """Return the section `targets` of meta.json: how the targets were chosen, and, for targets of
    another measurement, by which model."""
    fixed = plan.fixed
    if fixed is not None:
        section: dict[str, Any] = {"given": targets_fingerprint(fixed.targets)}
        if fixed.only_named:
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
