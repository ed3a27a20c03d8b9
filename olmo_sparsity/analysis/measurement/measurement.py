"""Run a measurement: losses of all documents, then recovery of chosen targets, then the summary.

What is finished is written, so a killed measurement resumes, and processes share a folder. The
process that finds all documents finished writes the results.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.measurement.parts import Parts, results_folder
from olmo_sparsity.analysis.measurement.plan import (
    MeasureRequest,
    Plan,
    plan,
    share_of,
    targets_meta,
)
from olmo_sparsity.analysis.measurement.targets import check_all_evaluated
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.results import (
    FILES,
    Results,
    complete_summary,
    read_results,
)
from olmo_sparsity.analysis.results.statistics import (
    RELIABILITY,
    STUDENT,
    half_of,
    longppl,
    mean_lds,
    summarize,
    with_ends,
)
from olmo_sparsity.analysis.results.summary import describe_induction, describe_sink
from olmo_sparsity.base.devices import device_name
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.launch import Launch, read_launch
from olmo_sparsity.base.locks import locked
from olmo_sparsity.base.manifest import MANIFEST, find_damage
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.base.provenance import provenance
from olmo_sparsity.models.loaded import using

PATIENCE_S = 60.0
"""Without progress of another process for so long, its documents are measured here."""


def measure(request: MeasureRequest) -> Results | None:
    """Answer a request. Return None if documents are left to other processes."""
    out = request.out
    num_processes = read_launch().world_size
    if out is None and num_processes > 1:
        raise ConfigError(
            f"out=None: {num_processes} processes need a folder to share; pass out=FOLDER"
        )
    if out is not None:
        results_folder(out).check_no_other_work()
    planned = plan(request)
    folder_of_results = tempfile.TemporaryDirectory() if out is None else nullcontext(out)
    with folder_of_results as folder:
        return run(planned, Path(folder), request.shard, request.command)


def wait_for_results(out: str | Path) -> Results:
    """Wait for the results that another process of the launch writes, and return them."""
    say(f"{out}: waiting for the results, which another process writes")
    while not (Path(out) / MANIFEST).exists():
        time.sleep(0.5)
    return read_results(out)


def run(
    plan: Plan, out: Path, shard: tuple[int, int] = (0, 1), command: Sequence[str] = ()
) -> Results | None:
    """Measure what is planned. Return None if documents are left to other processes."""
    with using(plan.model):
        plan.refuse_changed_model()
        return _Measuring(plan, out, shard, read_launch()).run(command)


class _Measuring:
    """One process of a measurement: the documents that it measures, and the targets that are chosen
    so far."""

    def __init__(self, plan: Plan, out: Path, shard: tuple[int, int], launch: Launch) -> None:
        self.plan = plan
        self.out = out
        self.shard = shard
        self.launch = launch
        self.started = time.perf_counter()
        self.provenance = provenance(device_name(plan.scorer.device))
        self.measured = plan.measured
        self.parts = Parts(out, plan.identity())
        # The processes of a shard share what `share_of(measured, *shard)` gives it.
        shard_index, num_shards = shard
        index = shard_index + num_shards * launch.rank
        self.mine = share_of(self.measured, index, num_shards * launch.world_size)
        self.chosen = pd.DataFrame()

    def run(self, command: Sequence[str]) -> Results | None:
        """Return the results if this process finds all documents finished, and else None."""
        is_first = self.launch.rank == 0
        is_damaged = False
        if (self.out / MANIFEST).exists():
            try:
                return read_results(self.out) if is_first else None
            except DataError as error:
                # They are written again from the parts.
                say(str(error))
                is_damaged = True
        induction = self.plan.induction() if is_first else {}
        sink = self.plan.sink() if is_first else {}
        if induction:
            shown = describe_induction(induction, self.plan.settings.interpretation)
            print(shown, file=sys.stderr)
        warning = describe_sink(sink)
        if warning:
            say(warning)
        if not self._evaluate():
            return None
        meta = self.provenance | {
            "command": list(command),
            "induction": induction,
            "sink": sink,
            "seconds_of_last_start": time.perf_counter() - self.started,
            "token_forwards_of_last_start": self.plan.scorer.token_forwards,
        }
        with locked(self.out, waits=True):  # another launch may be at the same point
            if is_damaged or find_damage(self.out, FILES) is not None:
                targets = self.chosen.reset_index(drop=True)
                _sum_up(self.plan, self.parts, targets, meta, self.out)
            return read_results(self.out)

    def _evaluate(self) -> bool:
        """Run both phases. Return whether this process finds all documents finished."""
        plan = self.plan
        parts = self.parts
        shown = self.launch.rank == 0
        slowest = _work("losses", parts, self.mine, self._losses, shown)
        if plan.fits_threshold:
            half = [number for number in self.measured if half_of(number) == "threshold"]
            _wait_for("losses", parts, half, self._losses, slowest)
        # Read first: other processes may finish theirs while targets are chosen.
        has_all_losses = parts.finished("losses").issuperset(self.measured)
        self._choose()
        if has_all_losses:
            _check_any_target(plan, self.chosen, parts)  # before hours are spent on the placebo's
        mine = sorted(set(self.mine) & set(self.chosen.document))
        slowest = _work("recovery", parts, mine, self._recovery, shown)
        if self.launch.rank > 0:
            return False
        if self.launch.world_size > 1:  # the other processes of this launch
            ours = share_of(self.measured, *self.shard)
            _wait_for("losses", parts, ours, self._losses, slowest)
            self._choose()
            ours = sorted(set(ours) & set(self.chosen.document))
            _wait_for("recovery", parts, ours, self._recovery, slowest)
        missing = set(self.measured) - parts.finished("losses")
        if not missing:
            self._choose()
            _check_any_target(plan, self.chosen, parts)
            missing = set(self.chosen.document) - parts.finished("recovery")
        if missing:
            index, num_shards = self.shard
            print(
                f"shard {index}/{num_shards} is done; {len(missing)} documents are left to the "
                "others",
                file=sys.stderr,
            )
        return not missing

    def _losses(self, number: int) -> None:
        """Compute and store the losses of one document."""
        self.parts.write("losses", number, self.plan.losses(number))

    def _recovery(self, number: int) -> None:
        """Evaluate the targets of one document, and store their rows."""
        tables = self.plan.recovery(number, self.chosen, self.parts)
        self.parts.write("recovery", number, tables)

    def _choose(self) -> None:
        """Choose the targets of the documents that have losses so far."""
        self.parts.flush()
        targets = self.plan.targets(self.parts.read("losses"))
        self.chosen = targets[targets.document.isin(self.parts.finished("losses"))]


def sum_up_partial(plan: Plan, out: Path, command: Sequence[str] = ()) -> Results:
    """Write results of the documents finished so far to `out/partial`; runs no model."""
    if not results_folder(out).identity.exists():
        raise DataError(f"{out} holds no finished documents yet; run without --partial first")
    parts = Parts(out, plan.identity())
    targets, left = _finished_part(plan, parts, out)
    meta = provenance(device_name(plan.scorer.device)) | {"command": list(command)}
    (out / "partial").mkdir(exist_ok=True)
    with locked(out / "partial", waits=True):
        _sum_up(plan, parts, targets, meta, out / "partial", num_unfinished=left)
        return read_results(out / "partial")


def _finished_part(plan: Plan, parts: Parts, out: Path) -> tuple[pd.DataFrame, int]:
    """Return the targets of the documents finished so far, and how many documents are not."""
    finished = parts.finished("recovery")
    missing = set(plan.measured) - parts.finished("losses")
    nothing_yet = DataError(
        f"{out} holds the losses of {len(plan.measured) - len(missing)} of {len(plan.measured)} "
        "documents, and no target was evaluated yet; run without --partial first"
    )
    if missing and not finished:
        raise nothing_yet
    targets = plan.targets(parts.read("losses"))
    left = set(targets.document) - finished | missing
    if finished:
        targets = targets[targets.document.isin(finished)]
    _check_any_target(plan, targets, parts)
    if not finished:
        raise nothing_yet
    return targets.reset_index(drop=True), len(left)


def _check_any_target(plan: Plan, targets: pd.DataFrame, parts: Parts) -> None:
    """Raise DataError if there is no target, or none of those chosen by their gap."""
    target_sets = set(targets.target_set[targets.distant_part == "document"])
    chosen_by_gap = plan.fits_threshold and "gap" in plan.settings.sets
    if "gap" in target_sets or (target_sets and not chosen_by_gap):
        return
    if plan.fixed_targets is not None:
        raise DataError("targets: none has a full long window before it; lower long")
    losses = parts.read("losses")
    gaps = (losses.loss_short - losses.loss_long)[losses.document.map(half_of) == "report"]
    sizes = f"the largest is {gaps.max():.2f} nats, the threshold {plan.threshold(losses):.2f}"
    raise DataError(f"no target has a gap large enough: {sizes}; pass more text, or lower min_gap")


def _work(
    phase: str, parts: Parts, numbers: list[int], do: Callable[[int], None], is_shown: bool
) -> float:
    """Run `do` on the documents that are not finished. Return the seconds of the slowest.
    `is_shown`: whether progress is."""
    finished = parts.finished(phase)
    slowest = 0.0
    unfinished = [number for number in numbers if number not in finished]
    num_finished = len(numbers) - len(unfinished)
    with Progress(phase, len(numbers), "documents", enabled=is_shown) as progress:
        progress.resume_at(num_finished)
        try:
            for number in unfinished:
                began = time.monotonic()
                do(number)
                slowest = max(slowest, time.monotonic() - began)
                num_finished += 1
                progress.update(num_finished)
        finally:
            # Also after Ctrl-C, so that no finished document is lost.
            parts.flush()
    return slowest


def _wait_for(
    phase: str, parts: Parts, numbers: list[int], do: Callable[[int], None], slowest: float
) -> None:
    """Wait for documents of other processes. Without progress for a while, these have died or not
    begun, and their documents are measured here."""
    # A document may take as long there as the slowest did here; tests set the patience to 0.
    patience_s = max(PATIENCE_S, 4 * slowest) if PATIENCE_S else 0.0
    num_missing = -1
    since = time.monotonic()
    while True:
        missing = sorted(set(numbers) - parts.finished(phase))
        if not missing:
            return
        if num_missing != len(missing):
            num_missing = len(missing)
            since = time.monotonic()
        elif time.monotonic() - since < patience_s:
            time.sleep(0.5)
        else:
            # The last one, as a process that has just begun measures the first.
            do(missing[-1])
            parts.flush()
            # Patience has ended: the next one is measured at once.
            num_missing = len(missing) - 1


def _sum_up(
    plan: Plan,
    parts: Parts,
    targets: pd.DataFrame,
    meta: dict[str, Any],
    out: Path,
    *,
    num_unfinished: int = 0,
) -> None:
    """Write summary and final tables to `out`. `meta`: the keys of meta.json that differ between
    two runs of one measurement. `num_unfinished`: documents that are left out."""
    losses = parts.read("losses")
    recovery = parts.read("recovery")
    check_all_evaluated(parts.folder, targets, recovery)
    summary = summarize(losses, targets, recovery)
    costs = parts.read("costs").groupby(["units", "selector"]).sum(numeric_only=True)
    per_target = (costs.token_forwards / costs.num_targets).rename("token_forwards_per_target")
    summary = summary.merge(per_target.reset_index(), how="left", on=["units", "selector"])
    lds = mean_lds(targets, parts.read("lds"))
    summary = summary.merge(lds, how="left", on=["target_set", "units", "selector"])
    meta = meta | {
        "reliability": lds[lds.selector == RELIABILITY].to_dict("records"),
        "intervals": STUDENT,
    }
    described = _meta(plan, losses, num_unfinished, meta)
    tables = {
        "losses": losses,
        "targets": targets,
        "recovery": recovery,
        "influence": parts.read("influence"),
    }
    summary = complete_summary(summary, tables, described)
    parts.finish({"targets": with_ends(targets), "summary": summary}, described, out)


def _meta(plan: Plan, losses: pd.DataFrame, num_unfinished: int, of_run: dict[str, Any]) -> Meta:
    """Return meta.json. `of_run`: the keys that differ between two runs of one measurement."""
    settings = plan.settings
    model = plan.model
    documents = plan.documents
    data: dict[str, Any] = {"source": documents.name, "fingerprint": documents.fingerprint}
    if documents.groups:
        data["groups"] = documents.groups
    if documents.parts:
        data["parts"] = documents.parts
    if plan.reused_losses:
        data["losses_from"] = plan.reused_from
    windows = asdict(settings.windows)
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
        targets=targets_meta(plan, plan.threshold(losses)),
        longppl=longppl(losses),
        counts={
            "documents_measured": len(plan.measured) - num_unfinished,
            "documents_left": num_unfinished,
            "documents_too_short": documents.num_too_short + len(documents) - len(plan.measured),
            "documents_trained_on": documents.num_training,
        },
        **of_run,
    )
