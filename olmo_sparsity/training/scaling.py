"""Compute, from formulas, the memory and communication of a run on many GPUs.

Place in the flow: before a run, beside training/estimate.py. Run as a module it prints the tables
of docs/scaling.md, and a test compares them. Tests also compare `state_bytes` and
`collective_bytes` with measurements of DeepSpeed and PyTorch at small size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from olmo_sparsity.config import RunConfig
from olmo_sparsity.config_file import load_config
from olmo_sparsity.data.tokenizer import count_vocabulary, load_tokenizer
from olmo_sparsity.model.load import build_model
from olmo_sparsity.training.estimate import activation_bytes, count_parameters, flops_per_token
from olmo_sparsity.training.loop import take_vocabulary

SIZES = ("20m", "60m", "150m", "300m", "1b")
ENGINES = ("ddp", "zero1", "zero2", "zero3")
WORLD_SIZES = (1, 2, 8, 64, 512, 1024)

# Assumptions, not measurements: FLOP/s as in the configs' headers, NVLink inside a machine of
# eight, one 200 Gbit/s adapter per GPU between machines.
FLOPS_PER_S = 350e12
GPU_BYTES = 80 * 2**30
MACHINE_GPUS = 8
NEAR_BYTES_PER_S, FAR_BYTES_PER_S = 300e9, 25e9


# --- formulas -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """Bytes on one process."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def state_bytes(engine: str, parameters: int, world_size: int, precision: str) -> State:
    """In bf16 DDP keeps fp32 weights and casts a copy of them at each step; DeepSpeed keeps bf16
    weights, and fp32 ones with the moments."""
    part = parameters / world_size
    if engine in ("single", "ddp"):
        cast = 2 if precision == "bf16" else 0
        return State((4 + cast) * parameters, 4 * parameters, 8 * parameters)
    size = 2 if precision == "bf16" else 4
    return State(
        weights=size * (part if engine == "zero3" else parameters),
        gradients=size * (parameters if engine == "zero1" else part),
        optimizer=12 * part,
    )


def collective_bytes(
    engine: str, parameters: int, precision: str, num_micro_batches: int
) -> dict[str, float]:
    """Bytes that each kind of collective is called on in one optimizer step."""
    size = parameters * (2 if precision == "bf16" and engine != "ddp" else 4)
    if engine == "single":
        return {}
    if engine == "ddp":
        return {"all_reduce": size}
    if engine == "zero1":  # gradients once per step, then the updated weights
        return {"all_reduce": size, "all_gather": size}
    if engine == "zero2":  # gradients after each micro-batch
        return {"all_reduce": size * num_micro_batches, "all_gather": size}
    # Weights for the forward and again for the backward pass.
    return {"all_gather": 2 * size * num_micro_batches, "reduce_scatter": size * num_micro_batches}


def sent_bytes(
    engine: str, parameters: int, world_size: int, precision: str, num_micro_batches: int
) -> float:
    """Bytes sent by one process per step, with rings: (N − 1)/N of the size, twice for an
    all-reduce."""
    sizes = collective_bytes(engine, parameters, precision, num_micro_batches)
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    return sum(rounds[kind] * size for kind, size in sizes.items()) * (1 - 1 / world_size)


# --- a config on so many GPUs -------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One step of a config on `world_size` GPUs."""

    engine: str
    memory: float
    sent: float
    compute_s: float
    sending_s: float

    @property
    def fits(self) -> bool:
        return self.memory <= GPU_BYTES

    @property
    def efficiency(self) -> float:
        """Share of the time spent computing without overlap with sending: a lower bound."""
        return self.compute_s / (self.compute_s + self.sending_s)


@dataclass(frozen=True)
class Size:
    parameters: int
    flops_per_token: float

    @staticmethod
    def of(config: RunConfig) -> Size:
        with torch.device("meta"):
            model = build_model(replace(config.model))
        return Size(count_parameters(model), flops_per_token(model, config))


def plan(config: RunConfig, size: Size, engine: str, world_size: int) -> Plan:
    parameters, training = size.parameters, config.training
    batch_size = max(training.batch_size, world_size)  # at least a sequence for each
    share = batch_size // world_size
    micro = min(training.micro_batch_size or share, share)
    state = state_bytes(engine, parameters, world_size, training.precision)
    sent = sent_bytes(engine, parameters, world_size, training.precision, share // micro)
    flops = size.flops_per_token * share * training.length
    rate = NEAR_BYTES_PER_S if world_size <= MACHINE_GPUS else FAR_BYTES_PER_S
    return Plan(
        engine,
        memory=state.total + activation_bytes(config, micro, "cuda"),
        sent=sent,
        compute_s=flops / FLOPS_PER_S,
        sending_s=sent / rate,
    )


def choose(plans: list[Plan]) -> Plan:
    """The simplest engine that fits with an efficiency close to the best."""
    fitting = [plan for plan in plans if plan.fits]
    best = max(plan.efficiency for plan in fitting)
    return next(plan for plan in fitting if plan.efficiency >= best - 0.02)


# --- docs/scaling.md ----------------------------------------------------------------------------


def render_tables(configs: Path) -> str:
    loaded = {size: read(configs / f"c4_{size}_pose.yaml") for size in SIZES}

    sizes = {size: Size.of(config) for size, config in loaded.items()}

    def planned(size: str, engine: str, world_size: int) -> Plan:
        return plan(loaded[size], sizes[size], engine, world_size)

    def table(title: str, show: str, scale: float, digits: int) -> list[str]:
        lines = ["", f"### {title}", ""]
        lines.append("| config | engine | " + " | ".join(f"{n:,}" for n in WORLD_SIZES) + " |")
        lines.append("|---|---|" + "---:|" * len(WORLD_SIZES))
        for size in SIZES:
            for engine in ENGINES:
                cells = [
                    f"{getattr(planned(size, engine, n), show) * scale:,.{digits}f}"
                    for n in WORLD_SIZES
                ]
                lines.append(f"| c4_{size} | {engine} | " + " | ".join(cells) + " |")
        return lines

    lines = table("Memory on each GPU, GiB", "memory", 2**-30, 1)
    lines += table("Sent by each GPU in one step, GB", "sent", 1e-9, 2)
    lines += table("Share of the time spent computing, at least, percent", "efficiency", 100, 0)
    lines += ["", "### Which engine to take", ""]
    lines.append(
        "| config | " + " | ".join(f"{n:,} GPU{'s' * (n > 1)}" for n in WORLD_SIZES) + " |"
    )
    lines.append("|---|" + "---|" * len(WORLD_SIZES))
    for size in SIZES:
        cells = []
        for n in WORLD_SIZES:
            best = choose([planned(size, engine, n) for engine in ENGINES])
            name = "single" if n == 1 and best.engine == "ddp" else best.engine
            hours = loaded[size].training.num_steps * (best.compute_s + best.sending_s) / 3600
            cells.append(f"{name}, {hours:,.1f} h ({best.efficiency:.0%})")
        lines.append(f"| c4_{size} | " + " | ".join(cells) + " |")
    return "\n".join(lines).strip() + "\n"


def read(path: Path) -> RunConfig:
    config = load_config(path)
    assert config.data.tokenizer.name is not None
    take_vocabulary(config, count_vocabulary(load_tokenizer(config.data.tokenizer.name)))
    return config


if __name__ == "__main__":
    print(render_tables(Path(__file__).parents[2] / "configs"), end="")
