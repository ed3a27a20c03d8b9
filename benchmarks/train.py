"""Claim: training here is at least 1.15 times as fast as the Hugging Face Trainer on the same
architecture, and never slower than a bare loop on upstream's OLMo.

Same parameters (the model of configs/quick.yaml), batch, precision, optimizer and clipping for all
three, in one run, taking turns; a ratio is the median over the turns of the ratio within a turn.
The share of the machine's matmul peak is printed for each.

    python benchmarks/train.py [--rounds 5] [--steps 8]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from olmo.config import ModelConfig as UpstreamConfig
from olmo.model import OLMo
from torch import nn

from olmo_sparsity.config import IGNORED, RunConfig
from olmo_sparsity.config_file import load_config
from olmo_sparsity.data.batches import Batch, TrainingBatches
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.data.tokens import prepare
from olmo_sparsity.model.exchange import hugging_face_model
from olmo_sparsity.model.load import build_model
from olmo_sparsity.training.engine import Engine, measure_matmul_peak
from olmo_sparsity.training.estimate import count_parameters, flops_per_token
from olmo_sparsity.training.loop import resolve

ROOT = Path(__file__).parents[1]
WARM_UP_STEPS = 2


def tokens_per_s(step: Callable[[], Any], tokens: int, num_steps: int) -> float:
    for _ in range(WARM_UP_STEPS):
        step()
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    return tokens * num_steps / (time.perf_counter() - started)


def ours(config: RunConfig, batches: Iterator[Batch]) -> Callable[[], Any]:
    engine = Engine(build_model(config.model), config)
    return lambda: engine.step(next(batches), 1e-4)


def bare_upstream(config: RunConfig, batches: Iterator[Batch]) -> Callable[[], Any]:
    """What one would write with ai2-olmo alone. Contiguous positions: it knows no others."""
    fields = {name: getattr(config.model, name) for name in UpstreamConfig.__dataclass_fields__}
    model = OLMo(UpstreamConfig(**fields))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    bf16 = config.training.precision == "bf16"

    def step() -> None:
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(batch.tokens_BL).logits
        loss = nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch.labels_BL.flatten(), ignore_index=IGNORED
        )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def hugging_face_trainer(config: RunConfig, batches: Iterator[Batch], num_steps: int) -> float:
    """tokens/s of Trainer.train() on the same model in transformers, by its step callbacks."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        marks: list[float]

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.marks = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.marks.append(time.perf_counter())

    rows = []
    while len(rows) < config.training.batch_size * (num_steps + WARM_UP_STEPS + 1):
        batch = next(batches)
        # Trainer shifts the labels itself.
        rows += [
            {"input_ids": tokens, "labels": tokens, "position_ids": positions}
            for tokens, positions in zip(batch.tokens_BL, batch.positions_BL, strict=True)
        ]
    model = hugging_face_model(config.model, build_model(config.model).state_dict(), "benchmark")
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=config.training.batch_size,
            max_steps=num_steps + WARM_UP_STEPS,
            learning_rate=1e-4,
            weight_decay=0.1,
            max_grad_norm=1.0,
            bf16=config.training.precision == "bf16",
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=rows, callbacks=[clock]).train()
    took = clock.marks[-1] - clock.marks[WARM_UP_STEPS - 1]
    return config.training.batch_size * config.training.length * num_steps / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
          f"torch {torch.__version__}")  # fmt: skip
    for precision in ("fp32", "bf16"):
        config = load_config(
            ROOT / "configs/quick.yaml",
            [f"--training.precision={precision}", "--training.device=cpu"],
        )
        prepare(config.data)
        shards = open_shards(config.data, "train")
        resolve(config, shards, torch.device("cpu"))
        batches = TrainingBatches(
            shards,
            config.positions,
            length=config.training.length,
            batch_size=config.training.batch_size,
            seed=0,
        ).from_step(0)
        model = build_model(config.model)
        peak = measure_matmul_peak(torch.device("cpu"), precision)
        flops = flops_per_token(model, config)
        tokens = config.training.batch_size * config.training.length
        found: dict[str, list[float]] = {"ours": [], "bare upstream": [], "Trainer": []}
        for _ in range(options.rounds):
            found["ours"].append(tokens_per_s(ours(config, batches), tokens, options.steps))
            found["bare upstream"].append(
                tokens_per_s(bare_upstream(config, batches), tokens, options.steps)
            )
            found["Trainer"].append(hugging_face_trainer(config, batches, options.steps))
        print(f"\n{precision}: {count_parameters(model):,} parameters, batch {tokens:,} tokens, "
              f"matmul peak {peak / 1e9:.0f} GFLOP/s, {options.rounds} rounds")  # fmt: skip
        for name, rates in found.items():
            ratios = [mine / other for mine, other in zip(found["ours"], rates, strict=True)]
            rate = statistics.median(rates)
            print(
                f"  {name:<14}{rate:>8,.0f} tokens/s  {rate * flops / peak:>4.0%} of peak"
                f"  ours / this: {statistics.median(ratios):.2f}"
                f" (from {min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
