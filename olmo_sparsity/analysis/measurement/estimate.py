"""Estimate the cost of a measurement before it runs.

Targets of a few documents run with a model that computes nothing, so that any selector is counted
as it runs. The real model computes a few losses: for its speed, and for how many targets are
chosen.
"""

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
from olmo_sparsity.analysis.results.tables import Columns, join_documents
from olmo_sparsity.analysis.results.view import num_of
from olmo_sparsity.analysis.scoring.cost import Cost, counting
from olmo_sparsity.analysis.scoring.induction import passages_of, repetition_drop
from olmo_sparsity.analysis.scoring.scorer import context_losses
from olmo_sparsity.base.devices import known_gpu, peak_memory_gib
from olmo_sparsity.base.progress import format_duration
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.loaded import using
from olmo_sparsity.models.use import in_use
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.windows import Block

TRIED_S = 4.0
"""Seconds of losses that a trial computes: at least of a block of two documents, unless a block
takes longer than that and more token-forwards than `TRIED_FORWARDS`."""

TRIED_FORWARDS = 1024

TRIED_TOKENS = 512
"""How many tokens of a document get losses in a trial, at most."""

TRIED_DOCUMENTS = 3
"""Documents in which the cost of targets is counted."""

TRIED_TARGETS = 6
"""The most targets of each of these."""

PASSAGES = 2  # of the induction check in a trial
PASSAGE = 64  # tokens of each of them, at most
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
        counts = trial.cost(plan, shard)
    num_parameters = plan.model.num_parameters
    details = "\n".join(_describe(plan, trial, counts, shard, price))
    return Cost(round(counts.forwards), num_parameters, details)


def _describe(
    plan: Plan, trial: _Trial, counts: _Counts, shard: tuple[int, int], price: _Price | None
) -> list[str]:
    """Return the lines of an estimate."""
    model = plan.model
    documents = plan.documents
    device = plan.scorer.device
    num_measured = len(share_of(plan.measured, *shard))
    num_skipped = documents.num_too_short + len(documents) - len(plan.measured)
    per_target = counts.recovery / max(counts.num_evaluated, 1e-9)
    chosen = f"about {counts.num_evaluated:,.0f} evaluated"
    if plan.fits_threshold and trial.num_chosen < FEW_TARGETS:
        chosen += f" (uncertain: {trial.num_chosen} in the sample)"
    lines = [
        _describe_induction_of_trial(plan, trial.induction),
        f"model           {model.name}, {model.num_parameters:,} parameters, on {device}",
        f"documents       {num_measured:,} to measure, {num_skipped:,} too short for the long "
        f"window{_describe_parts(documents)}",
        f"targets         {counts.num_losses:,} with both losses, {chosen}",
        # All shards together determine the intervals.
        f"intervals       {_describe_intervals(counts.num_own * shard[1])}",
        f"token-forwards  about {counts.forwards:.2e}, {per_target:,.0f} for each evaluated target",
        f"FLOPs           about {counts.forwards * 2 * model.num_parameters:.2e} (2 per parameter)",
        f"memory          {peak_memory_gib(device):.1f} GiB of {device} at the peak of a trial",
        f"time            about {format_duration(counts.seconds)} in one process "
        f"({counts.forwards / counts.seconds:,.0f} token-forwards a second, tried here)",
    ]
    if round(counts.num_evaluated) == 0:
        lines.append(f"warning         {_describe_nothing_evaluated(plan)}")
    if counts.seconds > LONG_S:
        lines.append(
            "to shrink       --quick, or fewer: --max-documents, --max-targets, --blocks, --ks"
        )
    if price is not None:
        lines.append(
            f"GPU-hours       about {price.hours(counts.forwards):.2g} "
            f"({price.forwards_per_s:,.0f} a second, {price.origin})"
        )
    return lines


def _describe_nothing_evaluated(plan: Plan) -> str:
    """Return that a measurement would evaluate no target, why, and what to change."""
    nothing = "this measurement would evaluate nothing: "
    if not plan.fits_threshold:
        return nothing + (
            "no given target lies in a measured document behind a whole long window; give targets "
            "further back, longer documents, or a smaller --long"
        )
    settings = plan.settings
    return nothing + (
        f"hardly a token that was tried is in the {settings.share:.0%} of largest gap (--share) "
        f"and gains {settings.min_gap:g} nats (--min-gap) from distant text. Pass more or longer "
        "documents, lower --min-gap or --short, or draw targets evenly: --sets every"
    )


def _describe_induction_of_trial(plan: Plan, tried: dict[str, Any]) -> str:
    """Describe the induction check of a trial, and what the measurement itself reads for it."""
    passages = passages_of(*plan.induction_texts())
    is_same = tried["num_passages"] == len(passages) and (
        not passages or tried["passage_length"] == len(passages[0])
    )
    if is_same:
        return describe_induction(tried, plan.settings.interpretation)
    # A verdict on other passages than the measurement reads could differ from its own.
    loss_line = describe_induction(tried, plan.settings.interpretation).splitlines()[0]
    return (
        f"{loss_line}\n  tried on {num_of(tried['num_passages'], 'passage')} of "
        f"{num_of(tried['passage_length'], 'token')}; the measurement reads {len(passages)} of "
        f"{len(passages[0]) if passages else 0} and may find another drop"
    )


def _describe_parts(documents: Documents) -> str:
    """Say of how many documents these are parts; empty if none was split."""
    if not documents.parts:
        return ""
    return f"; {len(documents):,} parts of {len(documents.parts):,} documents"


def _describe_intervals(num_own: float) -> str:
    if not num_own:
        return "none, as no target of the sample passes"
    widths = [f"±{width / num_own**0.5:.2f} of {name}" for name, width in WIDTHS.items()]
    return f"about {' and '.join(widths)} (by stored measurements)"


@dataclass(frozen=True)
class _Price:
    """The speed of another machine."""

    forwards_per_s: float
    origin: str
    """Where the number is from."""

    def hours(self, token_forwards: float) -> float:
        return token_forwards / self.forwards_per_s / 3600


def _price(num_parameters: int, speed: str | None) -> _Price | None:
    """Return the speed that `speed` names: a GPU, or token-forwards a second."""
    if speed is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?(e\d+)?", speed) and float(speed):
        return _Price(float(speed), "given")
    gpu = known_gpu(speed, "--speed", or_else="token-forwards a second above 0, or ")
    flops = USED * gpu.tflops * 1e12
    origin = f"predicted: {USED:.0%} of {gpu.tflops:,.0f} TFLOP/s, without attention"
    return _Price(flops / (2 * num_parameters), origin)


def _with_sample(plan: Plan, sample: float) -> Plan:
    return replace(plan, settings=replace(plan.settings, sample=sample))


def losses_forwards(plan: Plan, number: int, blocks: Sequence[Block]) -> int:
    """Return the token-forwards of the losses of these blocks of a document: with the local window,
    the long one, and the long one of the placebo."""
    if not blocks:
        return 0
    if plan.settings.interpretation.replaces:
        document = plan.documents[number]
        scorer = counting(plan.scorer).of_document(document, plan.controls)
        context_losses(scorer, document, plan.settings.windows, plan.controls, blocks)
        return scorer.token_forwards
    short = plan.settings.short
    num_prefix = len(plan.settings.prefix_ids)
    num_local = sum(short + block.num_targets - 1 for block in blocks)
    num_prefixes = num_prefix * len(blocks)
    if not plan.settings.windows.has_all:
        num_long = sum(len(block.tokens) - 1 for block in blocks)
        return num_local + num_prefixes + 2 * num_long
    # One pass over the document predicts all its targets. An unrelated text takes one pass, too,
    # and then the local windows of all blocks behind it.
    last = blocks[-1]
    num_document = len(last.tokens) - 1
    num_unrelated = num_prefix + last.num_distant + num_local
    return num_local + num_prefixes + num_document + num_unrelated


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
        # If it takes seconds, the check of the measurement itself.
        passages = passages_of(*plan.induction_texts())
        if sum(2 * len(passage) for passage in passages) <= TRIED_S * speed:
            induction = repetition_drop(scorer, *plan.induction_texts())
        trial = _Trial(induction, speed, None)
        if plan.fits_threshold:
            trial._try_losses(plan)
        return trial

    def _try_losses(self, plan: Plan) -> None:
        """Compute losses of the first blocks of several documents, of both halves."""
        windows = plan.settings.windows
        scorer = plan.scorer
        tables: dict[int, Columns] = {}
        before = scorer.token_forwards
        began = time.perf_counter()
        most = max(TRIED_S * self.speed, TRIED_FORWARDS)
        for number in sorted(plan.measured):  # neighbours are of different halves
            document = plan.documents[number]
            blocks = list(windows.blocks(document.tokens[: windows.first_target + TRIED_TOKENS]))
            total = losses_forwards(plan, number, blocks)
            # About what the first block costs, the first two, …
            costs = [total * num / len(blocks) for num in range(1, len(blocks) + 1)]
            if not tables and costs[0] > most:
                return
            num_blocks = max(1, int(np.searchsorted(costs, most / TRIED_DOCUMENTS, "right")))
            size = blocks[num_blocks - 1].start + windows.stride
            # The others stay as long as they are, to serve as unrelated texts.
            items = list(plan.documents.items)
            items[number] = replace(document, tokens=document.tokens[:size])
            documents = replace(plan.documents, items=items)
            with_cut = replace(plan, documents=documents, reused_losses={})
            tables[number] = _with_sample(with_cut, 1.0).losses(number)["losses"]
            is_long = time.perf_counter() - began > TRIED_S
            if is_long and set(map(half_of, tables)) == {"threshold", "report"}:
                break
        # Forwards of several rows, as in the measurement, say more than passages.
        self.speed = (scorer.token_forwards - before) / (time.perf_counter() - began)
        self.losses = join_documents(tables)

    # --- the cost of a plan, of this model and text ---

    def cost(self, plan: Plan, shard: tuple[int, int] = (0, 1)) -> _Counts:
        """Estimate the cost of a plan, or of a share of its documents."""
        numbers = share_of(plan.measured, *shard)
        blocks = {number: plan.blocks(plan.documents[number]) for number in numbers}
        num_losses = {
            number: sum(block.num_targets for block in blocks[number]) for number in numbers
        }
        losses = 0.0
        for number in numbers:
            if number not in plan.reused_losses:
                losses += losses_forwards(plan, number, blocks[number])
        for passage in passages_of(*plan.induction_texts()):
            losses += 2 * len(passage)
        if plan.fits_threshold:
            reported = {n: size for n, size in num_losses.items() if half_of(n) == "report"}
            expected = self._expected(plan, reported)
            places = {number: places_of(blocks[number]) for number in expected}
        else:
            places = _fixed_places(plan, numbers)
            expected = {
                number: {"document": float(len(places_T))} for number, places_T in places.items()
            }
        recovery = 0.0
        if expected:
            if self.prices is None:
                self.prices = _Prices.of(plan, places)
            recovery = self.prices.total(plan, expected, places)
        if self.speed_of_targets is None:
            self.speed_of_targets = self._try_target(plan, places)
        return _Counts(
            num_losses=sum(num_losses.values()),
            num_evaluated=sum(sum(by_part.values()) for by_part in expected.values()),
            num_own=sum(by_part["document"] for by_part in expected.values()),
            losses=losses,
            recovery=recovery,
            seconds=losses / self.speed + recovery / self.speed_of_targets,
        )

    def _try_target(self, plan: Plan, places: dict[int, np.ndarray]) -> float:
        """Evaluate a target of a document of median length, if it takes seconds."""
        numbers = [number for number in places if len(places[number])]
        numbers.sort(key=lambda number: len(plan.documents[number].tokens))
        if not numbers:
            return self.speed
        number = numbers[len(numbers) // 2]
        target = {"document": number, "target": places[number][-1:], "distant_part": "document"}
        if _spent(_counting(plan), number, target) > TRIED_S * self.speed:
            return self.speed
        began = time.perf_counter()
        return _spent(plan, number, target) / (time.perf_counter() - began)

    def _expected(self, plan: Plan, sizes: dict[int, int]) -> dict[int, dict[str, float]]:
        """Return document → kind of distant context → the number of its targets that are evaluated.
        Each set is assumed to have the same density in all documents, and has at most `max_targets`
        of each. `sizes`: the number of targets with losses of each document."""
        settings = plan.settings
        most = settings.most_targets
        if self.losses is None:
            expected_without_losses = {}
            for number, size in sizes.items():
                num_own = len(settings.sets) * min(settings.share * size, most)
                if num_own:
                    by_part = {"document": num_own, "placebo": PLACEBO_RATE * num_own}
                    expected_without_losses[number] = by_part
            return expected_without_losses
        unlimited = replace(_with_sample(plan, 1.0).settings, max_targets="all")
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

        return {
            number: {part: expected(part, size) for part in PARTS}
            for number, size in sizes.items()
            if size
        }


def _fixed_places(plan: Plan, numbers: Sequence[int]) -> dict[int, np.ndarray]:
    """Return the places of the targets that are not chosen here, by document."""
    targets = plan.targets(pd.DataFrame()).drop_duplicates([*KEYS, "distant_part"])
    by_document = targets[targets.document.isin(numbers)].groupby("document").target
    return {int(number): places.to_numpy() for number, places in by_document}


@dataclass(frozen=True)
class _Prices:
    """Token-forwards of a document's targets: for the states of each token, and for each target,
    or each token before one (see `_size`)."""

    token: float
    own: float
    placebo: float

    @staticmethod
    def of(plan: Plan, places: dict[int, np.ndarray]) -> _Prices:
        """Count own targets of a few documents, a third of them, and as many of the placebo, and
        fit the prices to the counts."""
        numbers = sorted(places, key=lambda number: len(plan.documents[number].tokens))
        # The shortest document, the longest, and others between.
        spread = np.linspace(0, len(numbers) - 1, TRIED_DOCUMENTS).round().astype(int)
        sizes: list[tuple[float, float, float]] = []  # tokens, own targets, placebo targets
        spent: list[float] = []
        for number in [numbers[index] for index in np.unique(spread)]:
            drawn = stream(0, "trial", number).permutation(places[number])[:TRIED_TARGETS]
            num_third = -(-len(drawn) // 3)  # rounded up
            parts = [("document", drawn), ("document", drawn[:num_third])]
            if plan.fits_threshold:
                parts.append(("placebo", drawn))
            num_tokens = len(plan.documents[number].tokens)
            for part, chosen in parts:
                targets = {"document": number, "target": np.sort(chosen), "distant_part": part}
                size = _size(plan, chosen)
                own_size = size if part == "document" else 0.0
                placebo_size = size if part == "placebo" else 0.0
                sizes.append((num_tokens, own_size, placebo_size))
                spent.append(_spent(_counting(plan), number, targets))
        size_N3 = np.array(sizes, dtype=float)
        spent_N = np.array(spent, dtype=float)
        token, own, placebo = np.linalg.lstsq(size_N3, spent_N, rcond=None)[0]
        if token < 0:  # targets share so much that fewer of them cost more each
            token = 0.0
            own, placebo = np.linalg.lstsq(size_N3[:, 1:], spent_N, rcond=None)[0]
        return _Prices(float(token), float(own), float(placebo))

    def total(
        self, plan: Plan, expected: dict[int, dict[str, float]], places: dict[int, np.ndarray]
    ) -> float:
        """Return the cost of all targets that are expected in each document, anywhere in
        `places`."""
        total = 0.0
        for number, num_by_part in expected.items():
            num_own = num_by_part.get("document", 0.0)
            num_placebo = num_by_part.get("placebo", 0.0)
            cost_of_texts = self.token * len(plan.documents[number].tokens)
            size = _size(plan, places[number]) / len(places[number])
            cost_of_targets = size * (num_own * self.own + num_placebo * self.placebo)
            # Texts are read only if there is a target, of which less than one may be expected.
            total += min(num_own + num_placebo, 1.0) * cost_of_texts + cost_of_targets
        return total


def _size(plan: Plan, targets: np.ndarray) -> float:
    """Return what the cost of targets grows with: their number, or the tokens of whole prompts."""
    replaces = plan.settings.interpretation.replaces
    return float(targets.sum()) if replaces else float(len(targets))


def _spent(plan: Plan, number: int, targets: dict[str, Any]) -> int:
    """Return the token-forwards of targets of one document, which are evaluated or counted."""
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
    hours = None if price is None else price.hours(cost.forwards)
    return Untrained(cost.num_evaluated, cost.forwards, hours)
