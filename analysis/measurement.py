"""Run a measurement: losses of all documents, then recovery of chosen targets, then the summary.

Place in the flow: model + documents → **results**.

    documents → losses → targets → recovery → summary

Each arrow is a function of the tables before it. The first and the third run the model, document by
document, and write what is finished: a killed measurement resumes where it stopped, and any number
of processes, of one launch or of several (`shard`), measure into one folder. The process that finds
all documents finished writes the results.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.dependencies import measure_dependencies
from analysis.documents import Documents, ForeignText
from analysis.influence import HeadWeights
from analysis.parts import Parts, refuse_other_folder
from analysis.plan import Plan, share_of, targets_meta
from analysis.results import FILES, Meta, Results, main_set, read_results
from analysis.scoring import Reading
from analysis.settings import Settings
from analysis.sources import open_documents
from analysis.statistics import GROUPS, half_of, hit_rates, longppl, mean_lds, summarize
from analysis.summary import describe_gate
from analysis.tables import write_json
from analysis.targets import At, check_all_evaluated, parse_share
from analysis.windows import Windows
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.json_files import read_json
from olmo_sparsity.launch import read_launch
from olmo_sparsity.lock import locked
from olmo_sparsity.manifest import MANIFEST, verify_manifest
from olmo_sparsity.model.load import LoadedModel, device_name, load_model
from olmo_sparsity.progress import Progress, say
from olmo_sparsity.versions import provenance

PATIENCE_S = 60.0
"""Without progress of another process for so long, its documents are measured here."""


def measure(
    model: LoadedModel | str | Path,
    documents: Any,
    windows: Windows,
    *,
    units: str | Sequence[str] = Settings.units,
    selectors: str | Sequence[str] = Settings.selectors,
    ks: int | Sequence[int] = Settings.ks,
    targets: float | str | Results = Settings.target_share,
    at: At | None = None,
    prefix: str = "auto",
    min_gap: float = Settings.min_gap,
    sets: Sequence[str] = Settings.sets,
    max_targets: int | None = Settings.max_targets,
    far_states: Reading = Settings.far_states,
    foreign: ForeignText = Settings.foreign,
    num_foreign: int = Settings.num_foreign,
    num_halves: int = Settings.num_halves,
    seed: int = Settings.seed,
    out: str | Path | None = None,
    shard: tuple[int, int] = (0, 1),
    batch_tokens: int | None = None,
) -> Results | None:
    """Measure the documents that are not finished yet in `out` (default: a temporary folder).
    Returns None if documents are left to other processes; the last of them gets the results.

    `model`: loaded, or what `load_model` reads; `documents`: read, or what `open_documents` reads.
    `targets`: the share of targets with the largest gaps (0.1, or "top10%"), or another measurement
    of the same text, to evaluate its targets; `at` names targets instead, as in `explain`.
    `prefix`: tokens in front of every window (`LoadedModel.prefix_ids`). `shard=(i, n)`: the i-th
    of n processes that measure into one folder.
    """
    index, of = shard if isinstance(shard, tuple) and len(shard) == 2 else (0, 0)
    if not 0 <= index < of or (out is None and of > 1):
        raise ConfigError(
            f"shard={shard} must be (i, n) with 0 <= i < n, and needs a folder, `out`"
        )
    if at is not None and isinstance(targets, Results):
        raise ConfigError("`at` names the targets; leave `targets` out")
    if not isinstance(windows, Windows):
        raise ConfigError(f"windows={windows} must be Windows(long, short, stride)")
    if windows.prefix and prefix != "auto":
        raise ConfigError(f"prefix={prefix}: the windows have a prefix of their own")
    given = targets if isinstance(targets, Results) else at
    share = parse_share(targets) if isinstance(targets, str) else targets
    settings = Settings(
        windows, _listed(units), _listed(selectors), _listed(ks),
        1.0 if isinstance(share, Results) else share, min_gap, _listed(sets), max_targets,
        far_states, foreign, num_foreign, num_halves, seed,
    )  # fmt: skip
    settings.check()
    if out is not None:
        refuse_other_folder(Path(out))
    if isinstance(model, str | Path):
        model = load_model(str(model))
    if not isinstance(model, LoadedModel):
        raise ConfigError(
            f"model is {type(model).__name__}: give a folder or name, or wrap_model(model, "
            "tokenizer) of olmo_sparsity.model.load"
        )
    if not isinstance(documents, Documents):
        documents = open_documents(documents, model)
    if not windows.prefix:
        windows = replace(windows, prefix=tuple(model.prefix_ids(prefix)))
    plan = Plan.of(model, documents, replace(settings, windows=windows), given, batch_tokens)
    if out is not None:
        return run(plan, Path(out), shard)
    with tempfile.TemporaryDirectory() as folder:
        return run(plan, Path(folder), shard)


def _listed(values: Any) -> tuple[Any, ...]:
    """One value stands for a list of it."""
    is_list = isinstance(values, Iterable) and not isinstance(values, str)
    return tuple(values) if is_list else (values,)


def run(
    plan: Plan, out: Path, shard: tuple[int, int] = (0, 1), command: Sequence[str] = ()
) -> Results | None:
    """`measure`, with a plan made before."""
    started, launch = time.perf_counter(), read_launch()
    made_by = provenance(device_name(plan.scorer.device))
    measured = plan.measured
    parts = Parts(out, plan.identity())
    damaged = ""
    if (out / MANIFEST).exists():
        try:
            return read_results(out) if launch.rank == 0 else None
        except DataError as error:  # written again from the parts
            damaged = str(error)
            say(damaged)
    gate = plan.induction() if launch.rank == 0 else {}
    if gate:
        print(describe_gate(gate, plan.settings.far_states, plan.documents.are_planted),
              file=sys.stderr)  # fmt: skip

    def write_losses(number: int) -> None:
        parts.write("losses", number, plan.losses(number))

    def targets() -> pd.DataFrame:
        parts.flush()
        return plan.targets(parts.read("losses"))

    def write_recovery(number: int) -> None:
        parts.write("recovery", number, plan.recovery(number, chosen))

    # So that the processes of a shard share what `share_of(measured, *shard)` gives it.
    index, of = shard[0] + shard[1] * launch.rank, shard[1] * launch.world_size
    mine = share_of(measured, index, of)
    shown = launch.rank == 0
    slowest = _work("losses", parts, mine, write_losses, shown)
    if plan.fits_thresholds:
        half = [number for number in measured if half_of(number) == "threshold"]
        _wait_for("losses", parts, half, write_losses, slowest)
    # Asked first: other processes may finish theirs while targets are chosen.
    all_there = parts.finished("losses").issuperset(measured)
    chosen = targets()
    if all_there:
        _check_any_target(plan, chosen, parts)  # before hours are spent on the placebo's
    _fit_heads(plan, parts)
    slowest = _work(
        "recovery", parts, sorted(set(mine) & set(chosen.document)), write_recovery, shown
    )
    if launch.rank > 0:
        return None
    if launch.world_size > 1:  # the other processes of this launch
        ours = share_of(measured, *shard)
        _wait_for("losses", parts, ours, write_losses, slowest)
        chosen = targets()
        with_targets = sorted(set(ours) & set(chosen.document))
        _wait_for("recovery", parts, with_targets, write_recovery, slowest)
    missing = set(measured) - parts.finished("losses")
    if not missing:
        chosen = targets()
        _check_any_target(plan, chosen, parts)
        missing = set(chosen.document) - parts.finished("recovery")
    if missing:
        left = f"{len(missing)} documents are left to the others"
        print(f"shard {shard[0]}/{shard[1]} is done; {left}", file=sys.stderr)
        return None
    about = made_by | {
        "command": list(command),
        "gate": gate,
        "seconds_of_last_start": time.perf_counter() - started,
        "token_forwards_of_last_start": plan.scorer.token_forwards,
    }
    with locked(out, waits=True):  # another launch may be at the same point
        if damaged or verify_manifest(out, FILES) is not None:
            _sum_up(plan, parts, chosen, about, out)
        return read_results(out)


def sum_up_partial(plan: Plan, out: Path, command: Sequence[str] = ()) -> Results:
    """Write results of the documents finished so far to `out/partial`; runs no model."""
    if not (out / "identity.json").exists():
        raise DataError(f"{out} holds no measurement yet; start it without --partial")
    parts = Parts(out, plan.identity())
    finished, missing = parts.finished("recovery"), set(plan.measured) - parts.finished("losses")
    nothing_yet = DataError(
        f"{out}: the losses of {len(plan.measured) - len(missing)} of {len(plan.measured)} "
        "documents are there, and no target was evaluated yet; run the measurement on"
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
    about = provenance(device_name(plan.scorer.device)) | {"command": list(command)}
    (out / "partial").mkdir(exist_ok=True)
    with locked(out / "partial", waits=True):
        _sum_up(plan, parts, targets, about, out / "partial", len(left))
        return read_results(out / "partial")


def _check_any_target(plan: Plan, targets: pd.DataFrame, parts: Parts) -> None:
    if main_set(targets.target_set[targets.far_part == "document"]) is not None:
        return
    if plan.given is not None:
        raise DataError("none of the given targets has a full long window; lower long")
    losses = parts.read("losses")
    gaps = (losses.loss_short - losses.loss_long)[losses.document.map(half_of) == "report"]
    raise DataError(
        f"no target has a gap large enough: the largest is {gaps.max():.2f} nats, the threshold "
        f"{plan.thresholds(losses).gap:.2f}. Give more text, a larger share of targets (targets) "
        "or a lower limit in nats (min_gap), and another folder for the results"
    )


def _fit_heads(plan: Plan, parts: Parts) -> None:
    """Fit once for a folder: all processes would get the same weights."""
    path = parts.folder / "heads.json"
    if path.exists():
        heads = read_json(path, HeadWeights, "remove it, to fit again")
        plan.scorer.head_weights = np.array(heads.weights)
    elif (fitted := plan.fit_heads(parts.read("losses"))) is not None:
        write_json(path, asdict(fitted))


def _heads(folder: Path) -> dict[str, Any] | None:
    path = folder / "heads.json"
    return asdict(read_json(path, HeadWeights, "")) if path.exists() else None


def _work(
    phase: str, parts: Parts, numbers: list[int], do: Callable[[int], None], shown: bool
) -> float:
    """Run `do` on the documents that are not finished; returns the seconds of the slowest."""
    finished, slowest = parts.finished(phase), 0.0
    todo = [number for number in numbers if number not in finished]
    with Progress(phase, len(numbers), "documents", enabled=shown) as progress:
        progress.resume_at(len(numbers) - len(todo))
        try:
            for done, number in enumerate(todo, start=len(numbers) - len(todo) + 1):
                began = time.monotonic()
                do(number)
                slowest = max(slowest, time.monotonic() - began)
                progress.update(done)
        finally:  # an interrupt included
            parts.flush()
    return slowest


def _wait_for(
    phase: str, parts: Parts, numbers: list[int], do: Callable[[int], None], slowest: float
) -> None:
    """Wait for documents of other processes. Without progress for a while, these have died or not
    begun, and their documents are measured here."""
    arrived, since = -1, time.monotonic()
    while missing := sorted(set(numbers) - parts.finished(phase)):
        if arrived != len(missing):
            arrived, since = len(missing), time.monotonic()
        elif time.monotonic() - since < max(PATIENCE_S, PATIENCE_S and 4 * slowest):
            time.sleep(0.5)
        else:
            do(missing[-1])  # the last, as a process that has just begun measures the first
            parts.flush()
            arrived = len(missing) - 1  # so that the next one is measured at once


def _sum_up(
    plan: Plan, parts: Parts, targets: pd.DataFrame, about: dict[str, Any], out: Path, left: int = 0
) -> None:
    """Write summary and final tables to `out`. `left`: number of unfinished documents."""
    settings, model, documents = plan.settings, plan.model, plan.documents
    losses, recovery = parts.read("losses"), parts.read("recovery")
    influence, planted = parts.read("influence"), parts.read("planted")
    check_all_evaluated(parts.folder, targets, recovery)
    thresholds = plan.thresholds(losses)
    summary = summarize(losses, targets, recovery)
    costs = (
        parts.read("costs").groupby(["units", "selector"])[["token_forwards", "num_targets"]].sum()
    )
    per_target = (costs.token_forwards / costs.num_targets).rename("token_forwards_per_target")
    summary = summary.merge(per_target.reset_index(), how="left", on=["units", "selector"])
    hits = hit_rates(influence, planted, settings.ks)
    summary = summary.merge(hits, how="left", on=GROUPS)
    summary = summary.merge(mean_lds(targets, parts.read("lds")), how="left", on=GROUPS[:3])
    made = {"targets": targets, "summary": summary}
    if plan.model.tokenizer is not None and "tokens" in settings.units:
        made["dependencies"] = measure_dependencies(
            parts.read("tokens"), losses, targets, influence, recovery, settings.windows
        )
    parts.finish(made, out=out, meta=Meta(
        model={"name": model.name, "fingerprint": model.fingerprint,
               "num_parameters": model.num_parameters, "trained": model.trained},
        data={"source": documents.name, "fingerprint": documents.fingerprint},
        dtype=plan.dtype,
        windows=asdict(settings.windows) | {"far_states": settings.far_states},
        units=list(settings.units),
        selectors=list(settings.selectors),
        ks=list(settings.ks),
        controls={"foreign": settings.foreign, "num_foreign": settings.num_foreign},
        seed=settings.seed,
        targets=targets_meta(plan, thresholds),
        heads=_heads(parts.folder),
        longppl=longppl(losses),
        counts={
            "documents_measured": len(plan.measured) - left,
            "documents_left": left,
            "documents_too_short": documents.num_too_short + len(documents) - len(plan.measured),
            "documents_trained_on": documents.num_training,
        },
        **about,
    ))  # fmt: skip
