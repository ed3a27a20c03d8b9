"""What a measurement will cost, from measuring a small piece of it for a few seconds.

Place in the flow: before the measurement. `olmo-sparsity measure … --dry-run`.
"""

from __future__ import annotations

import resource
import time

import numpy as np
import torch

from analysis.asking import Asker
from analysis.losses import ContextLosses, context_losses
from analysis.measure import choose_targets, documents_to_measure, share_of
from analysis.scoring import Scorer
from analysis.settings import Settings
from analysis.sources import Source
from analysis.targets import GivenTargets, TargetChooser, half_of
from olmo_sparsity.model.load import LoadedModel
from olmo_sparsity.progress import format_duration

NUM_SAMPLED = 12
"""Documents of each half whose losses are computed."""

CALIBRATION_S = 15.0
"""How long questions are asked, at least one document's."""


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
    asker = Asker(scorer, source, settings, chooser, loaded.tokenizer)
    num_asked = 0
    before, started = scorer.token_forwards, time.perf_counter()
    for number in sample:
        asker.tables(number, losses[number])
        num_asked += chosen_in[number]
        if num_asked and time.perf_counter() - started > CALIBRATION_S:
            break
    seconds_of_asking = time.perf_counter() - started
    forwards_of_asking = scorer.token_forwards - before

    def num_targets(numbers: list[int]) -> int:
        return sum(len(source.documents[number]) - settings.windows.long for number in numbers)

    ours = share_of(long_enough, *shard)
    reported = [number for number in ours if chooser.half(number) == "report"]
    # Losses grow with the targets there are, questions with the documents they are asked of.
    of_losses = num_targets(ours) / num_targets(list(losses))
    asked = sum(chosen_in.values()) * len(reported) / max(len(sample), 1)
    of_asking = asked / max(num_asked, 1)
    forwards = forwards_of_losses * of_losses + forwards_of_asking * of_asking
    seconds = seconds_of_losses * of_losses + seconds_of_asking * of_asking
    per_target = forwards_of_asking / max(num_asked, 1)
    if device.type == "cuda":
        memory = f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB of {device}"
    else:
        memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"
    skipped = source.num_too_short + len(source.documents) - len(long_enough)
    lines = [
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
