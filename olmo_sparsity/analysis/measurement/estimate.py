"""Estimate the cost of a measurement. Targets of a few documents run with a model that computes
nothing, so that any rule is counted as it runs; the real model computes a few losses, for its speed
and for how many targets are chosen."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.plan import Plan, share_of
from olmo_sparsity.analysis.measurement.targets import places_of
from olmo_sparsity.analysis.results.statistics import KEYS, PARTS, half_of
from olmo_sparsity.analysis.results.summary import describe_induction
from olmo_sparsity.analysis.results.tables import Columns, joined
from olmo_sparsity.analysis.scoring.cost import Cost, counting
from olmo_sparsity.analysis.scoring.induction import passages_of, repetition_drop
from olmo_sparsity.analysis.scoring.scorer import context_losses
from olmo_sparsity.base.devices import known_gpu, peak_memory_gib
from olmo_sparsity.base.progress import format_duration
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.loaded import using
from olmo_sparsity.models.use import in_use
from olmo_sparsity.text.windows import Block

TRIED_S, TRIED_FORWARDS = 4.0, 1024
"""Seconds of losses, at least a block of two documents, unless a block takes longer than that and
more token-forwards."""

TRIED_DOCUMENTS, TRIED_TARGETS, TRIED_TOKENS = 3, 6, 512
"""Documents in which targets are counted, and the most targets of each; and how many tokens of a
document get losses at most."""

PASSAGES, PASSAGE = 2, 64  # number of passages of the induction check in a dry run
FEW_TARGETS = 10  # below so many chosen targets in the trial a warning is given
PLACEBO_RATE = 0.5  # targets of the placebo for each own one, where no losses are computed


@dataclass(frozen=True)
class _Counts:
    """Estimate for the documents of one process."""

    num_losses: int  # targets with both losses
    num_evaluated: float  # targets, own and placebo, that are evaluated
    num_own: float
    losses: float  # token-forwards, with those of the induction check
    recovery: float
    seconds: float

    @property
    def forwards(self) -> float:
        return self.losses + self.recovery


WIDTHS = {"recovery": 0.67, "net excess": 1.36}
"""Half a 95% interval, times √targets: the median of 175 stored measurements with at most five
targets a document; in a tenth of them it is 1.13 and 1.91 (study/results/summary.parquet)."""

LONG_S = 300
"""Seconds from which a dry run says how to measure less."""

USED = 0.4
"""The share of its stated peak that a GPU is assumed to reach; never timed on a large one."""


def estimate(plan: Plan, shard: tuple[int, int] = (0, 1), speed: str | None = None) -> Cost:
    """Count and time a measurement; runs the model for seconds. `speed`: a GPU, or token-forwards
    a second."""
    price = _price(plan.model.num_parameters, speed)
    with using(plan.model):
        trial = _Trial.of(plan)
        cost = trial.cost(plan, shard)
    model, documents = plan.model, plan.documents
    ours = share_of(plan.measured, *shard)
    skipped = documents.num_too_short + len(documents) - len(plan.measured)
    device, per_target = plan.scorer.device, cost.recovery / max(cost.num_evaluated, 1e-9)
    chosen = f"about {cost.num_evaluated:,.0f} evaluated"
    if plan.fits_threshold and trial.num_chosen < FEW_TARGETS:
        chosen += f" (uncertain: {trial.num_chosen} in the sample)"
    num_own = cost.num_own * shard[1]
    widths = "none, as no target of the sample passes"
    if num_own:
        ends = (f"±{w / num_own**0.5:.2f} of {n}" for n, w in WIDTHS.items())
        widths = f"about {' and '.join(ends)} (by stored measurements)"
    lines = [
        describe_induction(trial.induction, plan.settings.interpretation),
        f"model           {model.name}, {model.num_parameters:,} parameters, on {device}",
        f"documents       {len(ours):,} to measure, {skipped:,} too short for the long window",
        f"targets         {cost.num_losses:,} with both losses, {chosen}",
        f"intervals       {widths}",
        f"token-forwards  about {cost.forwards:.2e}, {per_target:,.0f} for each evaluated target",
        f"FLOPs           about {cost.forwards * 2 * model.num_parameters:.2e} (2 per parameter)",
        f"memory          {peak_memory_gib(device):.1f} GiB of {device} at the peak of a trial",
        f"time            about {format_duration(cost.seconds)} in one process "
        f"({cost.forwards / cost.seconds:,.0f} token-forwards a second, tried here)",
    ]
    if cost.seconds > LONG_S:
        lines.append(
            "to shrink       --quick, or fewer: --max-documents, --max-targets, --blocks, --ks"
        )
    if price is not None:
        hours, source = cost.forwards / price[0] / 3600, price[1]
        lines.append(f"GPU-hours       about {hours:.2g} ({price[0]:,.0f} a second, {source})")
    return Cost(round(cost.forwards), model.num_parameters, "\n".join(lines))


def _price(num_parameters: int, speed: str | None) -> tuple[float, str] | None:
    """Token-forwards a second, and where that is from."""
    if speed is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?(e\d+)?", speed) and float(speed):
        return float(speed), "given"
    gpu = known_gpu(speed, "--speed", or_else="token-forwards a second above 0, or ")
    flops = USED * gpu.tflops * 1e12
    source = f"predicted: {USED:.0%} of {gpu.tflops:,.0f} TFLOP/s, without attention"
    return flops / (2 * num_parameters), source


def _sampled(plan: Plan, sample: float) -> Plan:
    return replace(plan, settings=replace(plan.settings, sample=sample))


def losses_forwards(plan: Plan, number: int, blocks: Sequence[Block]) -> int:
    """Token-forwards of the losses of these blocks of a document."""
    if not blocks:
        return 0
    if plan.settings.interpretation.replaces:
        document, windows = plan.documents[number], plan.settings.windows
        scorer = counting(plan.scorer).of_document(document, plan.controls)
        context_losses(scorer, document, windows, plan.controls, blocks)
        return scorer.token_forwards
    short, num_prefix = plan.settings.short, len(plan.settings.prefix_ids)
    local = sum(short + block.num_targets - 1 for block in blocks)
    if not plan.settings.windows.has_all:
        long = sum(len(block.tokens) - 1 for block in blocks)
        return local + num_prefix * len(blocks) + 2 * long
    last = blocks[-1]
    own, placebo = len(last.tokens) - 1, num_prefix + last.num_distant
    return local + num_prefix * len(blocks) + own + placebo + local


@dataclass
class _Trial:
    """How fast the model is, and which share of all targets is chosen."""

    induction: dict[str, Any]
    speed: float  # token-forwards of losses a second
    losses: pd.DataFrame | None  # of a few blocks; None: computing them would take too long
    num_chosen: int = 0
    speed_of_targets: float | None = None
    """Token-forwards of targets a second, which rank many units; None: not tried yet."""

    prices: _Prices | None = None  # the sample does not change them

    @staticmethod
    def of(plan: Plan) -> _Trial:
        scorer = plan.scorer
        length = max(1, min(PASSAGE, plan.settings.windows.first_target // 2))
        documents = [plan.documents[number] for number in plan.measured]
        for num_passages in (1, PASSAGES):  # the first forward is slower
            began = time.perf_counter()
            induction = repetition_drop(scorer, documents, length, num_passages)
            seconds = time.perf_counter() - began
        speed = 2 * length * max(induction["num_passages"], 1) / seconds
        trial = _Trial(induction, speed, None)
        if plan.fits_threshold:
            trial._try_losses(plan)
        return trial

    def _try_losses(self, plan: Plan) -> None:
        """Losses of the first blocks of several documents, of both halves."""
        windows, scorer, tables = plan.settings.windows, plan.scorer, dict[int, Columns]()
        before, began = scorer.token_forwards, time.perf_counter()
        numbers = sorted(plan.measured, key=lambda number: (number // 2, number % 2))
        most = max(TRIED_S * self.speed, TRIED_FORWARDS)
        for number in numbers:
            document = plan.documents[number]
            blocks = list(windows.blocks(document.tokens[: windows.first_target + TRIED_TOKENS]))
            total, num = losses_forwards(plan, number, blocks), len(blocks)
            costs = [total * (n + 1) / num for n in range(num)]
            if not tables and costs[0] > most:
                return
            num_blocks = max(1, int(np.searchsorted(costs, most / TRIED_DOCUMENTS, "right")))
            size = blocks[num_blocks - 1].start + windows.stride
            cut = replace(document, tokens=document.tokens[:size])
            items = [cut if d.number == number else d for d in plan.documents.items]
            one = replace(plan, documents=replace(plan.documents, items=items), reused_losses={})
            tables[number] = _sampled(one, 1.0).losses(number)["losses"]
            is_long = time.perf_counter() - began > TRIED_S
            if is_long and {half_of(n) for n in tables} == {"threshold", "report"}:
                break
        # Forwards of several rows, as in the measurement, say more than passages.
        self.speed = (scorer.token_forwards - before) / (time.perf_counter() - began)
        self.losses = joined(tables)

    # --- the cost of a plan, of this model and text ---

    def cost(self, plan: Plan, shard: tuple[int, int] = (0, 1)) -> _Counts:
        ours = share_of(plan.measured, *shard)
        blocks = {n: plan.blocks(plan.documents[n]) for n in ours}
        num_losses = {n: sum(b.num_targets for b in blocks[n]) for n in ours}
        losses = sum(
            losses_forwards(plan, n, blocks[n]) for n in ours if n not in plan.reused_losses
        )
        losses += sum(2 * len(passage) for passage in passages_of(*plan.induction_texts()))
        if plan.fits_threshold:
            reported = {n: size for n, size in num_losses.items() if half_of(n) == "report"}
            expected = self._expected(plan, reported)
            places = {n: places_of(blocks[n]) for n in expected}
        else:
            chosen = plan.targets(pd.DataFrame()).drop_duplicates([*KEYS, "distant_part"])
            targets = chosen[chosen.document.isin(ours)].groupby("document").target
            places = {int(n): of.to_numpy() for n, of in targets}
            expected = {n: {"document": float(len(of))} for n, of in places.items()}
        num_evaluated = sum(sum(of.values()) for of in expected.values())
        num_own = sum(of["document"] for of in expected.values())
        if expected and self.prices is None:
            self.prices = _Prices.of(plan, places)
        recovery = 0.0
        if self.prices and expected:
            recovery = self.prices.total(plan, expected, places)
        if self.speed_of_targets is None:
            self.speed_of_targets = self._try_target(plan, places)
        seconds = losses / self.speed + recovery / self.speed_of_targets
        return _Counts(sum(num_losses.values()), num_evaluated, num_own, losses, recovery, seconds)

    def _try_target(self, plan: Plan, places: dict[int, np.ndarray]) -> float:
        """Evaluate a target of a document of median length, if it takes seconds."""
        numbers = sorted(
            (number for number in places if len(places[number])),
            key=lambda number: len(plan.documents[number].tokens),
        )
        if not numbers:
            return self.speed
        number = numbers[len(numbers) // 2]
        target = {"document": number, "target": places[number][-1:], "distant_part": "document"}
        if _spent(_counting(plan), number, target) > TRIED_S * self.speed:
            return self.speed
        began = time.perf_counter()
        return _spent(plan, number, target) / (time.perf_counter() - began)

    def _expected(self, plan: Plan, sizes: dict[int, int]) -> dict[int, dict[str, float]]:
        """document → kind of distant context → the number of its targets that are evaluated. Each
        set has the same density in all documents, and at most `max_targets` of each."""
        settings = plan.settings
        most = settings.most_targets
        if self.losses is None:
            own = {n: len(settings.sets) * min(settings.share * sizes[n], most) for n in sizes}
            return {
                n: {"document": num, "placebo": PLACEBO_RATE * num} for n, num in own.items() if num
            }
        unlimited = replace(_sampled(plan, 1.0).settings, max_targets="all")
        chosen = replace(plan, settings=unlimited).targets(self.losses)
        by_part = chosen.groupby("distant_part")
        # A target that is in several sets is evaluated once.
        once = by_part.apply(lambda rows: len(rows.drop_duplicates(KEYS)) / len(rows))
        self.num_chosen = len(chosen.drop_duplicates([*KEYS, "distant_part"]))
        known = max(int((self.losses.document.map(half_of) == "report").sum()), 1)
        density = chosen.groupby(["distant_part", "target_set"]).size() / known

        def expected(part: str, size: int) -> float:
            if part not in once.index:
                return 0.0
            return once[part] * float((density[part] * size).clip(upper=most).sum())

        return {n: {p: expected(p, size) for p in PARTS} for n, size in sizes.items() if size}


@dataclass(frozen=True)
class _Prices:
    """Token-forwards of a document's targets: for the states of each token, and for each target,
    or each token before one (see `_size`)."""

    token: float
    own: float
    placebo: float

    @staticmethod
    def of(plan: Plan, places: dict[int, np.ndarray]) -> _Prices:
        """Count own targets of a few documents, a third of them, and as many of the placebo."""
        numbers = sorted(places, key=lambda number: len(plan.documents[number].tokens))
        spread = np.linspace(0, len(numbers) - 1, TRIED_DOCUMENTS).round().astype(int)
        rows = []
        for number in (numbers[index] for index in np.unique(spread)):
            drawn = stream(0, "trial", number).permutation(places[number])[:TRIED_TARGETS]
            parts = [("document", drawn), ("document", drawn[: -(-len(drawn) // 3)])]
            if plan.fits_threshold:
                parts.append(("placebo", drawn))
            for part, chosen in parts:
                targets = {"document": number, "target": np.sort(chosen), "distant_part": part}
                spent = _spent(_counting(plan), number, targets)
                num = _size(plan, chosen) * np.array([part == "document", part == "placebo"])
                rows.append((len(plan.documents[number].tokens), *num, spent))
        *counts, spent_N = np.array(rows, dtype=float).T
        token, own, placebo = np.linalg.lstsq(np.stack(counts, 1), spent_N, rcond=None)[0]
        if token < 0:  # targets that share much
            token = 0.0
            own, placebo = np.linalg.lstsq(np.stack(counts[1:], 1), spent_N, rcond=None)[0]
        return _Prices(float(token), float(own), float(placebo))

    def total(
        self, plan: Plan, expected: dict[int, dict[str, float]], places: dict[int, np.ndarray]
    ) -> float:
        """The cost of all targets that are expected in each document, anywhere in `places`."""
        spent = 0.0
        for number, of_parts in expected.items():
            own, placebo = (of_parts.get(part, 0.0) for part in PARTS)
            of_texts = self.token * len(plan.documents[number].tokens)
            size = _size(plan, places[number]) / len(places[number])
            of_targets = size * (own * self.own + placebo * self.placebo)
            spent += min(own + placebo, 1.0) * of_texts + of_targets
        return spent


def _size(plan: Plan, targets: np.ndarray) -> float:
    """What the cost of targets grows with: their number, or the tokens of whole prompts."""
    replaces = plan.settings.interpretation.replaces
    return float(targets.sum()) if replaces else float(len(targets))


def _spent(plan: Plan, number: int, targets: dict[str, Any]) -> int:
    """Token-forwards of targets of one document, which are evaluated or counted."""
    before = plan.scorer.token_forwards
    with in_use(plan.scorer.model):
        plan.recovery(number, pd.DataFrame(targets))
    return plan.scorer.token_forwards - before


def _counting(plan: Plan) -> Plan:
    return replace(plan, scorer=counting(plan.scorer))


# --- a model that is not trained yet --------------------------------------------------------------


@dataclass(frozen=True)
class Untrained:
    """What measuring a model of a given shape costs."""

    num_targets: float
    forwards: float
    gpu_hours: float | None
    """None without a GPU's name."""


def estimate_untrained(plan: Plan, speed: str | None = None) -> Untrained:
    """Count a measurement without running its model, which may have no weights: as many targets as
    `share` and `max_targets` allow, and for each half a target of the placebo. `speed`: a GPU, or
    token-forwards a second."""
    price = _price(plan.model.num_parameters, speed)
    trial = _Trial({}, speed=1.0, losses=None, speed_of_targets=1.0)
    cost = trial.cost(plan)
    hours = None if price is None else cost.forwards / price[0] / 3600
    return Untrained(cost.num_evaluated, cost.forwards, hours)
