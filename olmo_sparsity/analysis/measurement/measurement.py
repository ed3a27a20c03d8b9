"""Run a measurement: losses of all documents, then recovery of chosen targets, then the summary.

    phase "losses"      L_short and L_long of every token of each document
    choice of targets   from the losses of the threshold half of the documents
    phase "recovery"    ranked units, and L_k, of the chosen targets of each document
    summary             tables over all documents, written by the process that finds all finished

Each process measures its share of the documents, and writes what is finished to a folder that all
share (parts.py). So a killed measurement resumes, and a process that waits too long for others does
their work itself. `measure` is the main entry.
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
from olmo_sparsity.analysis.measurement.plan import Plan, targets_meta
from olmo_sparsity.analysis.measurement.planning import plan
from olmo_sparsity.analysis.measurement.request import MeasureRequest
from olmo_sparsity.analysis.measurement.targets import check_all_evaluated
from olmo_sparsity.analysis.options import ALL_DOCUMENTS, Shard
from olmo_sparsity.analysis.results.loss_statistics import longppl
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.notes import describe_induction, describe_sink
from olmo_sparsity.analysis.results.reported import STUDENT
from olmo_sparsity.analysis.results.results import (
    FILES,
    Results,
    complete_summary,
    read_results,
)
from olmo_sparsity.analysis.results.statistics import RELIABILITY, mean_lds, summarize
from olmo_sparsity.analysis.results.target_rows import half_of, with_ends
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
    """Answer a request: plan it, run it, and return the results. Return None if documents are left
    to other processes."""
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
    plan: Plan, out: Path, shard: tuple[int, int] = ALL_DOCUMENTS, command: Sequence[str] = ()
) -> Results | None:
    """Measure what is planned, into the folder `out`. Return None if documents are left to other
    processes."""
    with using(plan.model):
        plan.check_model_unchanged()
        return _Process(plan, out, Shard(*shard), read_launch()).run(command)


class _Process:
    """One process of a measurement.

    A shard may have several processes: those of one launch, the first of which waits for the
    others. Shards are started apart, and may run one after the other. So a shard waits for another
    one only for losses that the threshold depends on, and not for ever.
    """

    def __init__(self, plan: Plan, out: Path, shard: Shard, launch: Launch) -> None:
        self.plan = plan
        self.out = out
        self.shard = shard
        self.launch = launch
        self.started = time.perf_counter()
        self.slowest_s = 0.0
        """Seconds that the slowest document took here, by which the patience with others is set."""

        self.provenance = provenance(device_name(plan.scorer.device))
        self.measured = plan.measured
        self.parts = Parts(out, plan.identity())
        self.documents_of_shard = shard.of(self.measured)
        self.documents_of_process = shard.part(launch.rank, launch.world_size).of(self.measured)
        self.targets = pd.DataFrame()
        """The targets of the documents that have losses so far."""

    def run(self, command: Sequence[str]) -> Results | None:
        """Return the results if this process finds all documents finished, and else None."""
        is_first = self.launch.rank == 0
        is_damaged = False
        if (self.out / MANIFEST).exists():
            try:
                return read_results(self.out) if is_first else None
            except DataError as error:
                # The results are written again from the parts.
                say(str(error))
                is_damaged = True

        checks = self._check_model() if is_first else {}
        if not self._evaluate():
            return None
        meta = self.provenance | {
            "command": list(command),
            "induction": checks.get("induction", {}),
            "sink": checks.get("sink", {}),
            "seconds_of_last_start": time.perf_counter() - self.started,
            "token_forwards_of_last_start": self.plan.scorer.token_forwards,
        }
        with locked(self.out, waits=True):  # another launch may be at the same point
            if is_damaged or find_damage(self.out, FILES) is not None:
                targets = self.targets.reset_index(drop=True)
                _sum_up(self.plan, self.parts, targets, meta, self.out)
            return read_results(self.out)

    def _check_model(self) -> dict[str, dict[str, Any]]:
        """Run the induction and the sink check, print what they found, and return it for
        meta.json."""
        induction = self.plan.induction()
        sink = self.plan.sink()
        if induction:
            text = describe_induction(induction, self.plan.settings.interpretation)
            print(text, file=sys.stderr)
        warning = describe_sink(sink)
        if warning:
            say(warning)
        return {"induction": induction, "sink": sink}

    def _evaluate(self) -> bool:
        """Run both phases. Return whether this process finds all documents finished."""
        self._evaluate_documents_of_process()
        if self.launch.rank > 0:
            return False
        if self.launch.world_size > 1:
            self._wait_for_launch()
        num_missing = self._count_unfinished()
        if num_missing:
            print(
                f"shard {self.shard.number}/{self.shard.num_shards} is done; {num_missing} "
                "documents are left to the others",
                file=sys.stderr,
            )
        return num_missing == 0

    def _evaluate_documents_of_process(self) -> None:
        """Compute losses, choose targets, and evaluate them, in the documents of this process."""
        is_first = self.launch.rank == 0
        slowest_s = _work("losses", self.parts, self.documents_of_process, self._losses, is_first)
        if self.plan.fits_threshold:
            # The threshold depends on all documents of one half, also on those of other processes.
            half = [number for number in self.measured if half_of(number) == "threshold"]
            _wait_for("losses", self.parts, half, self._losses, slowest_s)
        # Read before targets are chosen, as other processes may finish their losses meanwhile.
        has_all_losses = self.parts.finished("losses").issuperset(self.measured)
        self._choose_targets()
        if has_all_losses:
            # Before hours are spent on the targets of the placebo alone.
            _check_any_target(self.plan, self.targets, self.parts)
        with_targets = self._with_targets(self.documents_of_process)
        self.slowest_s = _work("recovery", self.parts, with_targets, self._recovery, is_first)

    def _wait_for_launch(self) -> None:
        """Wait for the documents of the other processes of this launch."""
        _wait_for("losses", self.parts, self.documents_of_shard, self._losses, self.slowest_s)
        self._choose_targets()
        with_targets = self._with_targets(self.documents_of_shard)
        _wait_for("recovery", self.parts, with_targets, self._recovery, self.slowest_s)

    def _count_unfinished(self) -> int:
        """Return how many documents, of all shards, are not finished."""
        without_losses = set(self.measured) - self.parts.finished("losses")
        if without_losses:
            return len(without_losses)
        self._choose_targets()
        _check_any_target(self.plan, self.targets, self.parts)
        return len(set(self.targets.document) - self.parts.finished("recovery"))

    def _with_targets(self, numbers: Sequence[int]) -> list[int]:
        """Return those of the documents that have a target."""
        return sorted(set(numbers) & set(self.targets.document))

    def _losses(self, number: int) -> None:
        """Compute and store the losses of one document."""
        self.parts.write("losses", number, self.plan.losses(number))

    def _recovery(self, number: int) -> None:
        """Evaluate the targets of one document, and store their rows."""
        tables = self.plan.recovery(number, self.targets, self.parts)
        self.parts.write("recovery", number, tables)

    def _choose_targets(self) -> None:
        """Choose the targets of the documents that have losses so far."""
        self.parts.flush()
        targets = self.plan.targets(self.parts.read("losses"))
        self.targets = targets[targets.document.isin(self.parts.finished("losses"))]


def sum_up_partial(plan: Plan, out: Path, command: Sequence[str] = ()) -> Results:
    """Write results of the documents finished so far to `out/partial`; runs no model."""
    if not results_folder(out).identity.exists():
        raise DataError(f"{out} holds no finished documents yet; run without --partial first")
    parts = Parts(out, plan.identity())
    targets, num_unfinished = _finished_part(plan, parts, out)
    meta = provenance(device_name(plan.scorer.device)) | {"command": list(command)}
    (out / "partial").mkdir(exist_ok=True)
    with locked(out / "partial", waits=True):
        _sum_up(plan, parts, targets, meta, out / "partial", num_unfinished=num_unfinished)
        return read_results(out / "partial")


def _finished_part(plan: Plan, parts: Parts, out: Path) -> tuple[pd.DataFrame, int]:
    """Return the targets of the documents that are finished, and the number of those that are
    not."""
    finished = parts.finished("recovery")
    without_losses = set(plan.measured) - parts.finished("losses")
    num_with_losses = len(plan.measured) - len(without_losses)
    nothing_evaluated = DataError(
        f"{out} holds the losses of {num_with_losses} of {len(plan.measured)} "
        "documents, and no target was evaluated yet; run without --partial first"
    )
    if without_losses and not finished:
        raise nothing_evaluated

    targets = plan.targets(parts.read("losses"))
    unfinished = without_losses | (set(targets.document) - finished)
    if finished:
        targets = targets[targets.document.isin(finished)]
    # If there is no target at all, that is the better message.
    _check_any_target(plan, targets, parts)
    if not finished:
        raise nothing_evaluated
    return targets.reset_index(drop=True), len(unfinished)


def _check_any_target(plan: Plan, targets: pd.DataFrame, parts: Parts) -> None:
    """Raise DataError if there is no target, or none of those chosen by their gap."""
    target_sets = set(targets.target_set[targets.distant_part == "document"])
    chosen_by_gap = plan.fits_threshold and "gap" in plan.settings.sets
    if "gap" in target_sets or (target_sets and not chosen_by_gap):
        return
    if plan.fixed is not None:
        raise DataError("targets: none has a full long window before it; lower long")
    losses = parts.read("losses")
    gaps = (losses.loss_short - losses.loss_long)[losses.document.map(half_of) == "report"]
    sizes = f"the largest is {gaps.max():.2f} nats, the threshold {plan.threshold(losses):.2f}"
    raise DataError(f"no target has a gap large enough: {sizes}; pass more text, or lower min_gap")


def _work(
    phase: str, parts: Parts, numbers: list[int], do: Callable[[int], None], is_shown: bool
) -> float:
    """Run `do` on the documents that are not finished. Return how many seconds the slowest one
    took. `is_shown`: whether to show progress."""
    finished = parts.finished(phase)
    slowest_s = 0.0
    unfinished = [number for number in numbers if number not in finished]
    num_finished = len(numbers) - len(unfinished)
    with Progress(phase, len(numbers), "documents", enabled=is_shown) as progress:
        progress.resume_at(num_finished)
        try:
            for number in unfinished:
                began = time.monotonic()
                do(number)
                slowest_s = max(slowest_s, time.monotonic() - began)
                num_finished += 1
                progress.update(num_finished)
        finally:
            # Also after Ctrl-C, so that no finished document is lost.
            parts.flush()
    return slowest_s


def _wait_for(
    phase: str, parts: Parts, numbers: list[int], do: Callable[[int], None], slowest_s: float
) -> None:
    """Wait until other processes have finished these documents. After a while without progress,
    take it that they have died or not begun, and measure their documents here. `slowest_s`: how
    long the slowest document took here."""
    # A document may take as long there as the slowest did here. Tests set the patience to 0.
    patience_s = max(PATIENCE_S, 4 * slowest_s) if PATIENCE_S else 0.0
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
    two runs of one measurement. `num_unfinished`: the number of documents that are left out."""
    losses = parts.read("losses")
    recovery = parts.read("recovery")
    check_all_evaluated(parts.folder, targets, recovery)

    split_parts = plan.documents.parts
    summary = summarize(losses, targets, recovery, split_parts)
    costs = parts.read("costs").groupby(["units", "selector"]).sum(numeric_only=True)
    per_target = (costs.token_forwards / costs.num_targets).rename("token_forwards_per_target")
    summary = summary.merge(per_target.reset_index(), how="left", on=["units", "selector"])
    lds = mean_lds(targets, parts.read("lds"), split_parts)
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
    """Return the content of meta.json. `of_run`: the keys that differ between two runs of one
    measurement."""
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
