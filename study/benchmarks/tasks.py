"""Synthetic tasks: does training keep up with a bare loop, does the cache pay, is drawing free?

    python -m study.benchmarks.tasks [--rounds 5] [--steps 20]

One thread, in its own CPU seconds, which other programs on the machine hardly blur; in every round
the contestants take turns, and only their ratios are claimed.

1. Training: `study.tasks` (samples drawn, IDs drawn, IDs embedded, joint loss) on a tiny
   GPT-NeoX, against a bare PyTorch loop on the same transformers model over batches drawn before.
2. Generation of n tokens and IDs with the KV cache, against recomputing everything for each token.
3. Drawing the samples of each task, in tokens/s, against consuming them in training.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import nn

from olmo_sparsity.model.build import build_model
from study.coupling import PositionCoupling
from study.tasks.samples import Task
from study.tasks.scratchpad_parity import ScratchpadParity
from study.tasks.settings import TASKS, ExperimentSettings
from study.tasks.trial import Bench, Trial, train

BATCH, LENGTH, NUM_IDS, WARM_UP_STEPS = 128, 20, 256, 3


def settings_of(scheme: str, num_steps: int) -> ExperimentSettings:
    """Two layers of width 64, as GPT-NeoX is: a quarter of each head rotated."""
    settings = ExperimentSettings(task={"name": "scratchpad_parity"})
    settings.schemes, settings.seeds = [scheme], [0]
    settings.train_lengths, settings.test_lengths = [LENGTH, LENGTH], [LENGTH]
    settings.positions.num_ids = NUM_IDS
    model = settings.model
    model.architecture, model.rotary_fraction = "gpt_neox", 0.25
    model.d_model, model.n_heads, model.n_layers = 64, 4, 2
    settings.training.batch_size, settings.training.num_steps = BATCH, num_steps
    return settings


def ours(scheme: str, num_steps: int) -> float:
    """tokens/s of the experiment's own training function."""
    marks: list[float] = []
    settings, trial = settings_of(scheme, WARM_UP_STEPS + num_steps), Trial(scheme, None, seed=0)
    bench = Bench(settings, trial, torch.device("cpu"))
    train(bench, lambda step, loss: marks.append(time.process_time()))
    return BATCH * (2 * LENGTH + 1) * num_steps / (marks[-1] - marks[WARM_UP_STEPS - 1])


def bare_loop(num_steps: int) -> float:
    """The same task with transformers alone: no coupling, contiguous IDs, batches ready."""
    from transformers import GPTNeoXForCausalLM

    from olmo_sparsity.model.build import gpt_neox_config

    config = settings_of("rope", 1).model
    config.vocab_size = len(ScratchpadParity.vocabulary)
    model = GPTNeoXForCausalLM(gpt_neox_config(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    generator = np.random.default_rng(0)
    batches = [ScratchpadParity().sample(generator, BATCH, LENGTH) for _ in range(4)]
    tokens_of = [torch.tensor(np.concatenate([s.prompt_BP, s.response_BR], 1)) for s in batches]
    positions_BL = torch.arange(2 * LENGTH + 1).expand(BATCH, -1)
    started = 0.0
    for step, tokens_BL in zip(range(WARM_UP_STEPS + num_steps), cycle(tokens_of), strict=False):
        if step == WARM_UP_STEPS:
            started = time.process_time()
        logits = model(
            input_ids=tokens_BL[:, :-1],
            position_ids=positions_BL[:, :-1],
            attention_mask=torch.ones_like(tokens_BL[:, :-1]),
            use_cache=False,
        ).logits[:, LENGTH:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BL[:, -LENGTH:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return BATCH * (2 * LENGTH + 1) * num_steps / (time.process_time() - started)


@torch.no_grad()
def recompute(coupling: PositionCoupling, tokens_BL: Any, ids_BL: Any, num_new: int) -> None:
    """Generation without a cache, unembedding the last place only."""
    assert coupling.id_head is not None
    for _ in range(num_new):
        hidden_BD = coupling._hidden(tokens_BL, ids_BL)[:, -1:]
        tokens_BL = torch.cat([tokens_BL, coupling.model.unembed(hidden_BD).argmax(-1)], dim=1)
        ids_BL = torch.cat([ids_BL, coupling.id_head(hidden_BD).argmax(-1)], dim=1)


def seconds(action: Callable[..., Any], *arguments: Any) -> float:
    started = time.process_time()
    action(*arguments)
    return time.process_time() - started


def drawn_tokens_per_s(name: str, num_batches: int = 20) -> float:
    task: Task = TASKS[name]()
    generator = np.random.default_rng(0)

    def draw() -> int:
        samples = task.sample(generator, BATCH, LENGTH)
        return samples.prompt_BP.size + samples.response_BR.size

    draw()
    started = time.process_time()
    return sum(draw() for _ in range(num_batches)) / (time.process_time() - started)


def rounds(num_rounds: int, *contestants: Callable[[], float]) -> list[list[float]]:
    """For each contestant its values, one per round; they take turns within a round."""
    by_round = [[measure() for measure in contestants] for _ in range(num_rounds)]
    return [list(values) for values in zip(*by_round, strict=True)]


def ratio(ours: list[float], theirs: list[float]) -> str:
    found = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(found):.2f} (from {min(found):.2f} to {max(found):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, 1 thread, torch {torch.__version__}\n")

    plain, ppc, bare = rounds(
        options.rounds,
        partial(ours, "rope", options.steps),
        partial(ours, "ppc", options.steps),
        partial(bare_loop, options.steps),
    )
    print("training a tiny GPT-NeoX, tokens/s")
    for name, rates in (("ours, rope", plain), ("ours, ppc", ppc), ("bare loop", bare)):
        print(
            f"  {name:<11}{statistics.median(rates):>9,.0f}  of the bare loop: {ratio(rates, bare)}"
        )

    print("\ngenerating tokens and IDs of 16 samples: recomputing / with the cache")
    for architecture in ("olmo", "gpt_neox"):
        model = settings_of("ppc", 1).model
        model.architecture, model.vocab_size = architecture, len(ScratchpadParity.vocabulary)
        coupling = PositionCoupling(build_model(model), NUM_IDS)
        for n in (20, 100):
            prompt = ScratchpadParity().sample(np.random.default_rng(0), 16, n)
            tokens_BP = torch.tensor(prompt.prompt_BP)
            ids_BP = torch.tensor(prompt.prompt_ids_BP)
            cached, recomputed = rounds(
                options.rounds,
                partial(seconds, coupling.generate, tokens_BP, ids_BP, n),
                partial(seconds, recompute, coupling, tokens_BP, ids_BP, n),
            )
            print(f"  {architecture:<9} n = {n:<4}{ratio(recomputed, cached)}")

    print("\ndrawing samples, tokens/s, over those of training (ppc)")
    drawn = rounds(options.rounds, *(partial(drawn_tokens_per_s, name) for name in TASKS))
    for name, rates in zip(TASKS, drawn, strict=True):
        print(f"  {name:<20}{statistics.median(rates):>12,.0f}  {ratio(rates, ppc)}")


if __name__ == "__main__":
    main()
