"""A real step of each C4 config, with each engine, on many GPUs of shapes without numbers: bytes
into results/scaling.json, from which docs/scaling.md has its tables once it is stored:

    python -m tests.gpu.scaling && python -m study.pages.keep_results results/scaling.json

Takes some minutes on one core. tests/gpu/test_commands.py measures some of it again.
"""

from __future__ import annotations

# ruff: noqa: I001 — what PyTorch is to find must be loaded before it
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.process import apart
from tests.gpu.shapes import training_step

import torch

from olmo_sparsity.config.run import load_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.data.tokenizer import load_tokenizer
from olmo_sparsity.analysis.inputs.vocabulary import count_vocabulary
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training.estimate import count_parameters, flops_per_token
from olmo_sparsity.training.start import with_vocabulary

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results/scaling.json"
SIZES = ("20m", "60m", "150m", "300m", "1b")
MICRO_BATCHES = {"20m": 64, "60m": 32, "150m": 16, "300m": 8, "1b": 4}
ENGINES = ("ddp", "zero1", "zero2", "zero3")
WORLD_SIZES = (8, 64, 512)


def config_of(size: str, engine: str, *settings: str) -> RunConfig:
    overrides = [f"--engine.name={engine}", "--training.compile=false", *settings]
    config = load_config(ROOT / f"configs/c4_{size}_pose.yaml", overrides)
    assert config.data.tokenizer.name is not None
    vocab_size = count_vocabulary(load_tokenizer(config.data.tokenizer.name))
    return replace(config, model=with_vocabulary(config.model, vocab_size))


def measure(size: str, engine: str, world_size: int) -> dict[str, Any]:
    """Each further micro-batch gives collectives as many bytes as the second does."""
    config = config_of(size, engine)
    share = config.training.batch_size // world_size
    micro = min(MICRO_BATCHES[size], share)
    config = replace(config, training=replace(config.training, micro_batch_size=micro))
    steps = [training_step(config, world_size, 1 + i) for i in range(min(2, share // micro))]
    first, last = steps[0].given, steps[-1].given
    more = share // micro - len(steps)
    given = {kind: last[kind] + more * (last[kind] - first[kind]) for kind in last}
    with torch.device("meta"):
        model = build_model(replace(config.model))
    return {
        "config": f"c4_{size}",
        "engine": engine,
        "world_size": world_size,
        "memory": steps[-1].memory,
        "given": given,
        "parameters": count_parameters(model),
        "flops": flops_per_token(model, config.model, config.training.length)
        * share
        * config.training.length,
        "num_steps": config.training.num_steps,
    }


def cells() -> Iterator[tuple[str, str, int]]:
    for size in SIZES:
        yield size, "single", 1
        for engine in ENGINES:
            for world_size in WORLD_SIZES:
                yield size, engine, world_size


if __name__ == "__main__":
    rows = []
    for cell in cells():
        rows.append(apart(partial(measure, *cell)))
        print(*cell, rows[-1]["memory"], rows[-1]["given"], flush=True)
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
