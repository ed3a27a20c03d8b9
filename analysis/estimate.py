"""What a measurement will cost, from measuring a small piece of it for a few seconds.

Place in the flow: before the measurement. `olmo-sparsity measure … --dry-run`.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from analysis.asking import Asker
from analysis.losses import ContextLosses, context_losses
from analysis.measure import ask_gate, choose_targets, documents_to_measure, share_of
from analysis.scoring import Scorer
from analysis.settings import Settings
from analysis.sources import Source
from analysis.summary import describe_gate
from analysis.targets import GivenTargets, Half, TargetChooser, half_of
from analysis.windows import Windows
from olmo_sparsity.model.load import LoadedModel
from olmo_sparsity.progress import format_duration

NUM_SAMPLED = 12
"""Documents of each half whose losses are computed."""

CALIBRATION_S = 15.0
"""How long questions are asked, at least those of a few targets."""

SOME_TARGETS, FEW_TARGETS = 256, 8
"""Of one document: whose losses are computed, and that are asked about. It may have thousands."""


def estimate(
    loaded: LoadedModel,
    source: Source,
    settings: Settings,
    *,
    targets: GivenTargets | None = None,
    shard: tuple[int, int] = (0, 1),
    batch_tokens: int | None = None,
) -> str:
    settings.windows.check(loaded.max_positions)
    settings.check()
    device = next(loaded.model.parameters()).device
    scorer = Scorer(loaded.model, device, far_states=settings.far_states, batch_tokens=batch_tokens)
    long_enough = documents_to_measure(source, settings)
    halves = {
        half: [number for number in long_enough if half_of(number) == half]
        for half in ("threshold", "report")
    }
    sample = sorted(halves["threshold"][:NUM_SAMPLED] + halves["report"][:NUM_SAMPLED])
    whole = source
    if source.planted is None and targets is None:
        size = settings.windows.long + max(SOME_TARGETS, settings.windows.stride)
        source = replace(whole, documents=[document[:size] for document in whole.documents])
    context_losses(scorer, source.documents[sample[0]], settings.windows)  # warm
    before, started = scorer.token_forwards, time.perf_counter()
    losses = {
        number: context_losses(scorer, source.documents[number], settings.windows)
        for number in sample
    }
    seconds_of_losses = time.perf_counter() - started
    forwards_of_losses = scorer.token_forwards - before
    chooser = choose_targets(scorer, source, settings, sample, losses, targets)

    sample = [number for number in sample if chooser.half(number) == "report"]
    chosen_in = {number: _num_chosen(chooser, number, losses[number], source, settings)
                 for number in sample}  # fmt: skip
    few = FewTargets(chooser)
    asker = Asker(scorer, source, settings, few, loaded.tokenizer)
    num_asked = 0
    before, started = scorer.token_forwards, time.perf_counter()
    for number in sample:
        asker.tables(number, losses[number])
        num_asked += _num_chosen(few, number, losses[number], source, settings)
        if num_asked and time.perf_counter() - started > CALIBRATION_S:
            break
    seconds_of_asking = time.perf_counter() - started
    forwards_of_asking = scorer.token_forwards - before

    def num_targets(numbers: Iterable[int], of: Source = whole) -> int:
        return sum(len(of.documents[number]) - settings.windows.long for number in numbers)

    ours = share_of(long_enough, *shard)
    reported = [number for number in ours if chooser.half(number) == "report"]
    of_losses = num_targets(ours) / num_targets(losses, source)
    asked = sum(chosen_in.values()) * num_targets(reported) / max(num_targets(sample, source), 1)
    of_asking = asked / max(num_asked, 1)
    forwards = forwards_of_losses * of_losses + forwards_of_asking * of_asking
    seconds = seconds_of_losses * of_losses + seconds_of_asking * of_asking
    per_target = forwards_of_asking / max(num_asked, 1)
    if device.type == "cuda":
        memory = f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB of {device}"
    else:
        memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"
    skipped = source.num_too_short + len(source.documents) - len(long_enough)
    gate = ask_gate(scorer, source, settings, long_enough)
    lines = [
        describe_gate(gate, settings.far_states, source.planted is not None),
        f"model           {loaded.name}, {loaded.num_parameters:,} parameters, on {device}",
        f"documents       {len(ours):,} to measure, {skipped:,} too short for the long window",
        f"targets         {num_targets(ours):,} with both losses, about {asked:,.0f} asked about",
        f"token-forwards  about {forwards:.2e}, {per_target:,.0f} for each target asked about",
        f"FLOPs           about {forwards * 2 * loaded.num_parameters:.2e} (2 per parameter)",
        f"memory          {memory} at its peak in a short trial",
        f"time            about {format_duration(seconds)} in one process, from a trial of "
        f"{seconds_of_losses + seconds_of_asking:.0f} s",
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class FewTargets:
    """Those of a document's first blocks, as many as it takes: targets of a block share costs."""

    chooser: TargetChooser

    def half(self, number: int) -> Half:
        return self.chooser.half(number)

    def choose(
        self,
        number: int,
        document: np.ndarray,
        losses: ContextLosses,
        windows: Windows,
        generator: np.random.Generator,
    ) -> dict[str, np.ndarray]:
        chosen = self.chooser.choose(number, document, losses, windows, generator)
        places = np.unique(np.concatenate(list(chosen.values())))
        if len(places) <= FEW_TARGETS:
            return chosen
        end = (int(places[FEW_TARGETS - 1]) // windows.stride + 1) * windows.stride
        return {name: targets[targets < end] for name, targets in chosen.items()}


def _num_chosen(
    chooser: TargetChooser,
    number: int,
    losses: ContextLosses,
    source: Source,
    settings: Settings,
) -> int:
    draw = np.random.default_rng(0)
    sets = chooser.choose(number, source.documents[number], losses, settings.windows, draw)
    return len(set(np.concatenate(list(sets.values())).tolist())) if sets else 0
