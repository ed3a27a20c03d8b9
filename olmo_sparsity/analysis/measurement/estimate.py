"""Estimate the cost of a measurement before it runs.

Cost is counted in token-forwards, and a time follows from the speed of the model:

    losses     counted exactly, from the lengths of documents and windows
    targets    how many there will be: extrapolated from losses of a few blocks (`_Trial`)
    recovery   token-forwards of a target: counted in a few documents (`_Prices`) by running the
               real selectors with a model that computes nothing, so that any selector is counted

`estimate` is the entry point of a dry run. `estimate_untrained` prices a model that has no weights
yet.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.plan import Plan, ReusedLosses
from olmo_sparsity.analysis.measurement.targets import places_of
from olmo_sparsity.analysis.options import ALL_DOCUMENTS, Shard
from olmo_sparsity.analysis.results.summary import describe_induction
from olmo_sparsity.analysis.results.tables import Columns, join_documents
from olmo_sparsity.analysis.results.target_rows import KEYS, PARTS, half_of
from olmo_sparsity.analysis.results.view import num_of
from olmo_sparsity.analysis.scoring.cost import Cost, counting
from olmo_sparsity.analysis.scoring.document_losses import context_losses
from olmo_sparsity.analysis.scoring.induction import passages_of, repetition_drop
from olmo_sparsity.base.devices import known_gpu, peak_memory_gib
from olmo_sparsity.base.progress import format_duration
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.loaded import using
from olmo_sparsity.models.use import in_use
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.windows import Block

TRIED_S = 4.0
"""For about how many seconds a trial computes losses. It computes those of a block of two documents
at least, unless a block takes longer than this and more than `TRIED_FORWARDS` token-forwards."""

TRIED_FORWARDS = 1024
"""So many token-forwards a trial computes even if the model takes long for them."""

TRIED_TOKENS = 512
"""How many tokens of a document get losses in a trial, at most."""

TRIED_DOCUMENTS = 3
"""Documents in which the cost of targets is counted."""

TRIED_TARGETS = 6
"""The most targets of each of these."""

NUM_PASSAGES = 2
"""Passages that the induction check of a trial repeats."""

PASSAGE_LENGTH = 64
"""Tokens of such a passage, at most."""

FEW_TARGETS = 10
"""With fewer chosen targets in the trial, the estimate says that it is uncertain."""

PLACEBO_RATE = 0.5
"""Assumed number of placebo targets for each own target, where a trial computes no losses."""


@dataclass(frozen=True)
class _Counts:
    """The estimated cost of the documents of one shard."""

    num_losses: int
    """Targets whose losses are computed."""

    num_evaluated: float
    """Targets for which units are ranked, those of the placebo included."""

    num_own: float
    """Those among them that are in the documents' own distant context."""

    losses: float
    """Token-forwards of the losses, with those of the induction check."""

    recovery: float
    """Token-forwards of the evaluated targets."""

    seconds: float

    @property
    def forwards(self) -> float:
        """Return all token-forwards."""
        return self.losses + self.recovery


WIDTHS = {"recovery": 0.67, "net excess": 1.36}
"""Half the width of a 95% interval, times the root of the number of targets: the median of 175
stored measurements with at most five targets a document. In a tenth of these it is 1.13 and 1.91 or
more (study/results/summary.parquet)."""

LONG_S = 300
"""Seconds from which a dry run says how to measure less."""

USED_SHARE_OF_PEAK = 0.4
"""The share of its stated peak that a GPU is assumed to reach; never timed on a large one."""


def estimate(plan: Plan, shard: tuple[int, int] = ALL_DOCUMENTS, speed: str | None = None) -> Cost:
    """Estimate what a measurement, or one shard of it, costs. This runs the model for seconds.
    `speed`: another machine to give a time for: a GPU, or token-forwards a second."""
    shard = Shard(*shard)
    price = _price(plan.model.num_parameters, speed)
    with using(plan.model):
        trial = _Trial.of(plan)
        counts = trial.cost(plan, shard)
    num_parameters = plan.model.num_parameters
    details = "\n".join(_describe(plan, trial, counts, shard, price))
    return Cost(round(counts.forwards), num_parameters, details)


def _describe(
    plan: Plan, trial: _Trial, counts: _Counts, shard: Shard, price: _Price | None
) -> list[str]:
    """Return the lines that a dry run prints."""
    model = plan.model
    documents = plan.documents
    device = plan.scorer.device
    num_measured = len(shard.of(plan.measured))
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
        f"intervals       {_describe_intervals(counts.num_own * shard.num_shards)}",
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
    """Say how wide the intervals over so many own targets will be."""
    if not num_own:
        return "none, as no target of the sample passes"
    widths = [f"±{width / num_own**0.5:.2f} of {name}" for name, width in WIDTHS.items()]
    return f"about {' and '.join(widths)} (by stored measurements)"


@dataclass(frozen=True)
class _Price:
    """How fast another machine computes."""

    forwards_per_s: float
    origin: str
    """Where the number comes from, for readers."""

    def hours(self, token_forwards: float) -> float:
        return token_forwards / self.forwards_per_s / 3600


def _price(num_parameters: int, speed: str | None) -> _Price | None:
    """Return the price for `speed`, which is the name of a GPU or a number of token-forwards a
    second; None without it."""
    if speed is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?(e\d+)?", speed) and float(speed):
        return _Price(float(speed), "given")
    gpu = known_gpu(speed, "--speed", or_else="token-forwards a second above 0, or ")
    flops = USED_SHARE_OF_PEAK * gpu.tflops * 1e12
    origin = f"predicted: {USED_SHARE_OF_PEAK:.0%} of {gpu.tflops:,.0f} TFLOP/s, without attention"
    return _Price(flops / (2 * num_parameters), origin)


def _losses_of_beginning(plan: Plan, number: int, num_tokens: int) -> Columns:
    """Compute the losses of the first tokens of a document, in all blocks."""
    document = plan.documents[number]
    # Other documents keep their lengths, as they serve as unrelated texts.
    items = list(plan.documents.items)
    items[number] = replace(document, tokens=document.tokens[:num_tokens])
    documents = replace(plan.documents, items=items)
    plan_of_beginning = replace(plan, documents=documents, reused_losses=ReusedLosses())
    return _with_sample(plan_of_beginning, 1.0).losses(number)["losses"]


def _with_sample(plan: Plan, sample: float) -> Plan:
    """Return the plan with another share of blocks."""
    return replace(plan, settings=replace(plan.settings, sample=sample))


def losses_forwards(plan: Plan, number: int, blocks: Sequence[Block]) -> int:
    """Return the token-forwards of the losses of these blocks of a document. There are three losses
    of each target: with the local window, with the long one, and with the long one of the
    placebo."""
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
    last_block = blocks[-1]
    num_document = len(last_block.tokens) - 1
    num_unrelated = num_prefix + last_block.num_distant + num_local
    return num_local + num_prefixes + num_document + num_unrelated


@dataclass
class _Trial:
    """The result of running the model for a few seconds: its speed, and the share of all targets
    that is chosen."""

    induction: dict[str, Any]
    """The result of the induction check on a few passages."""

    speed: float
    """Token-forwards a second while losses are computed."""

    losses: pd.DataFrame | None
    """Losses of a few blocks; None if computing them would take too long."""

    num_chosen: int = 0
    """How many targets are chosen by these losses."""

    speed_of_targets: float | None = None
    """Token-forwards a second while targets are evaluated; None before it is tried."""

    prices: _Prices | None = None
    """Kept for other samples of the same plan, which have the same prices."""

    @staticmethod
    def of(plan: Plan) -> _Trial:
        """Run the model of a plan on a few passages and blocks."""
        scorer = plan.scorer
        length = max(1, min(PASSAGE_LENGTH, plan.settings.windows.first_target // 2))
        documents = [plan.documents[number] for number in plan.measured]
        # The first forward is slower, so the second run is the one that counts.
        for num_passages in (1, NUM_PASSAGES):
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
        forwards_before = scorer.token_forwards
        began = time.perf_counter()
        max_forwards = max(TRIED_S * self.speed, TRIED_FORWARDS)
        for number in sorted(plan.measured):  # neighbours are of different halves
            document = plan.documents[number]
            blocks = list(windows.blocks(document.tokens[: windows.first_target + TRIED_TOKENS]))
            # About what the first block costs, the first two, and so on.
            num_forwards = losses_forwards(plan, number, blocks)
            forwards_of_blocks = num_forwards * np.arange(1, len(blocks) + 1) / len(blocks)
            if not tables and forwards_of_blocks[0] > max_forwards:
                return  # even one block takes too long
            forwards_of_document = max_forwards / TRIED_DOCUMENTS
            num_affordable = int(np.searchsorted(forwards_of_blocks, forwards_of_document, "right"))
            num_blocks = max(1, num_affordable)

            num_tokens = blocks[num_blocks - 1].start + windows.stride
            tables[number] = _losses_of_beginning(plan, number, num_tokens)
            is_long = time.perf_counter() - began > TRIED_S
            if is_long and set(map(half_of, tables)) == {"threshold", "report"}:
                break
        # Forwards of several rows, as in the measurement, say more about speed than passages.
        seconds = time.perf_counter() - began
        self.speed = (scorer.token_forwards - forwards_before) / seconds
        self.losses = join_documents(tables)

    # --- the cost of a plan, of this model and text ---

    def cost(self, plan: Plan, shard: Shard = ALL_DOCUMENTS) -> _Counts:
        """Estimate the cost of a plan, or of a shard of its documents."""
        numbers = shard.of(plan.measured)
        blocks = {number: plan.blocks(plan.documents[number]) for number in numbers}
        num_losses = {
            number: sum(block.num_targets for block in blocks[number]) for number in numbers
        }
        losses = 0.0
        for number in numbers:
            if number not in plan.reused_losses.by_document:
                losses += losses_forwards(plan, number, blocks[number])
        for passage in passages_of(*plan.induction_texts()):
            losses += 2 * len(passage)  # the passage and its repetition

        # `places`: where targets may be. `expected`: how many of them are evaluated.
        if plan.fits_threshold:
            num_reported = {n: num for n, num in num_losses.items() if half_of(n) == "report"}
            expected = self._expected_targets(plan, num_reported)
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
        """Return the token-forwards a second of evaluating a target, tried in a document of median
        length. If that would take too long, return the speed of losses."""
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

    def _expected_targets(
        self, plan: Plan, num_losses: dict[int, int]
    ) -> dict[int, dict[str, float]]:
        """Return how many targets are expected to be evaluated: document → kind of distant context
        → number. `num_losses`: document → number of its targets with losses."""
        if self.losses is None:
            return _expected_by_share(plan, num_losses)
        without_limit = replace(_with_sample(plan, 1.0).settings, max_targets="all")
        chosen = replace(plan, settings=without_limit).targets(self.losses)
        self.num_chosen = len(chosen.drop_duplicates([*KEYS, "distant_part"]))

        # A target that is in several sets is evaluated once.
        share_distinct = chosen.groupby("distant_part").apply(
            lambda rows: len(rows.drop_duplicates(KEYS)) / len(rows)
        )
        # Each set is assumed to be as dense in all documents as in those that were tried.
        num_tried = max(int((self.losses.document.map(half_of) == "report").sum()), 1)
        density = chosen.groupby(["distant_part", "target_set"]).size() / num_tried
        max_targets = plan.settings.max_targets_of_set

        def num_expected(part: str, num_losses_of_document: int) -> float:
            if part not in share_distinct.index:
                return 0.0
            num_by_set = (density[part] * num_losses_of_document).clip(upper=max_targets)
            return share_distinct[part] * float(num_by_set.sum())

        return {
            number: {part: num_expected(part, num) for part in PARTS}
            for number, num in num_losses.items()
            if num
        }


def _expected_by_share(plan: Plan, num_losses: dict[int, int]) -> dict[int, dict[str, float]]:
    """Return what `_Trial._expected_targets` returns, without any losses: as many targets as
    `share` and `max_targets` allow."""
    settings = plan.settings
    expected = {}
    for number, num in num_losses.items():
        num_own = len(settings.sets) * min(settings.share * num, settings.max_targets_of_set)
        if num_own:
            expected[number] = {"document": num_own, "placebo": PLACEBO_RATE * num_own}
    return expected


def _fixed_places(plan: Plan, numbers: Sequence[int]) -> dict[int, np.ndarray]:
    """Return the places of targets that are fixed before the measurement, by document."""
    targets = plan.targets(pd.DataFrame()).drop_duplicates([*KEYS, "distant_part"])
    by_document = targets[targets.document.isin(numbers)].groupby("document").target
    return {int(number): places.to_numpy() for number, places in by_document}


class _Amounts(NamedTuple):
    """Three amounts that the token-forwards of a document are proportional to; each has its price
    in `_Prices`, in this order."""

    num_tokens: float
    own_size: float
    placebo_size: float


@dataclass(frozen=True)
class _Prices:
    """The cost of evaluating the targets of a document, in token-forwards: a price for each token
    of the document, whose states are computed, and a price for each target (see `_size`)."""

    token: float
    own: float
    """For each target in the document's own distant context."""

    placebo: float
    """For each target of the placebo."""

    @staticmethod
    def of(plan: Plan, places: dict[int, np.ndarray]) -> _Prices:
        """Count the token-forwards of a few sets of targets, and fit the prices to the counts by
        least squares."""
        numbers = sorted(places, key=lambda number: len(plan.documents[number].tokens))
        # The shortest document, the longest, and others between.
        spread = np.linspace(0, len(numbers) - 1, TRIED_DOCUMENTS).round().astype(int)
        amounts: list[_Amounts] = []
        num_forwards: list[float] = []
        for number in [numbers[index] for index in np.unique(spread)]:
            drawn = stream(0, "trial", number).permutation(places[number])[:TRIED_TARGETS]
            num_third = -(-len(drawn) // 3)  # rounded up
            # Own targets, a third of them, and as many of the placebo: so that the number of
            # targets differs at an equal number of tokens, and the prices can be told apart.
            parts = [("document", drawn), ("document", drawn[:num_third])]
            if plan.fits_threshold:
                parts.append(("placebo", drawn))
            num_tokens = len(plan.documents[number].tokens)
            for part, chosen in parts:
                targets = {"document": number, "target": np.sort(chosen), "distant_part": part}
                size = _size(plan, chosen)
                own_size = size if part == "document" else 0.0
                placebo_size = size if part == "placebo" else 0.0
                amounts.append(_Amounts(num_tokens, own_size, placebo_size))
                num_forwards.append(_spent(_counting(plan), number, targets))

        amount_N3 = np.array(amounts, dtype=float)
        forwards_N = np.array(num_forwards, dtype=float)
        token, own, placebo = np.linalg.lstsq(amount_N3, forwards_N, rcond=None)[0]
        if token < 0:
            # Targets share so much that fewer of them cost more each.
            token = 0.0
            own, placebo = np.linalg.lstsq(amount_N3[:, 1:], forwards_N, rcond=None)[0]
        return _Prices(float(token), float(own), float(placebo))

    def total(
        self, plan: Plan, expected: dict[int, dict[str, float]], places: dict[int, np.ndarray]
    ) -> float:
        """Return the token-forwards of the targets that are expected in each document. `places`:
        where in the document they may be."""
        total = 0.0
        for number, num_by_part in expected.items():
            num_own = num_by_part.get("document", 0.0)
            num_placebo = num_by_part.get("placebo", 0.0)
            cost_of_texts = self.token * len(plan.documents[number].tokens)
            size = _size(plan, places[number]) / len(places[number])
            cost_of_targets = size * (num_own * self.own + num_placebo * self.placebo)
            # The texts of a document are read only if it has a target. Where less than one target
            # is expected, that number is about the chance that there is one.
            chance_of_target = min(num_own + num_placebo, 1.0)
            total += chance_of_target * cost_of_texts + cost_of_targets
        return total


def _size(plan: Plan, targets: np.ndarray) -> float:
    """Return the size of targets in proportion to their cost: their number, or, where a whole
    prompt is computed for each, the tokens before them."""
    replaces = plan.settings.interpretation.replaces
    return float(targets.sum()) if replaces else float(len(targets))


def _spent(plan: Plan, number: int, targets: dict[str, Any]) -> int:
    """Return the token-forwards of targets of one document. They are evaluated, or, if the scorer
    of the plan is one that counts, only counted."""
    forwards_before = plan.scorer.token_forwards
    with in_use(plan.scorer.model):
        plan.recovery(number, pd.DataFrame(targets))
    return plan.scorer.token_forwards - forwards_before


def _counting(plan: Plan) -> Plan:
    """Return the plan with a scorer that counts, and computes nothing."""
    return replace(plan, scorer=counting(plan.scorer))


# --- a model that is not trained yet --------------------------------------------------------------


@dataclass(frozen=True)
class Untrained:
    """What measuring a model that is not trained yet will cost."""

    num_targets: float
    """Targets for which units are ranked, those of the placebo included."""

    forwards: float
    """Token-forwards of the whole measurement."""

    gpu_hours: float | None
    """None without the name of a GPU."""


def estimate_untrained(plan: Plan, speed: str | None = None) -> Untrained:
    """Estimate a measurement without running its model, which may have no weights. It assumes as
    many targets as `share` and `max_targets` allow, and half as many of the placebo. `speed`: a
    GPU, or token-forwards a second."""
    price = _price(plan.model.num_parameters, speed)
    trial = _Trial({}, speed=1.0, losses=None, speed_of_targets=1.0)
    cost = trial.cost(plan)
    hours = None if price is None else price.hours(cost.forwards)
    return Untrained(cost.num_evaluated, cost.forwards, hours)
