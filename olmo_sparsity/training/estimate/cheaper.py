"""Find settings with which a run would take less time than with its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.training.estimate.cost import Cost, cost_with
from olmo_sparsity.training.estimate.hardware import Hardware

LEAST_SAVING = 0.1
"""The share of the hours that other settings must save to be named. Smaller differences are within
the error of the estimate."""


class Cheaper(NamedTuple):
    """Settings that take less time, and what the run then costs."""

    options: list[str]
    cost: Cost


def find_cheaper(config: RunConfig, hardware: Hardware, cost: Cost) -> Cheaper | None:
    """Return the settings of memory and communication with which a run takes the fewest hours; None
    if they save too little. They change no loss but by rounding. Engines are compared elsewhere:
    the dry run has a line for each of them. `cost`: that of the run as it is configured."""
    if not cost.hours:
        return None
    best: Cheaper | None = None
    for options, changed in _variants(config, hardware):
        changed_cost = cost_with(changed, hardware)
        # Variants come with fewest changes first: one that saves hardly more is not better.
        limit = (1 - LEAST_SAVING) * cost.hours if best is None else 0.99 * best.cost.hours
        if changed_cost.fits and changed_cost.hours < limit:
            best = Cheaper(options, changed_cost)
    return best


def _variants(config: RunConfig, hardware: Hardware) -> Iterator[tuple[list[str], RunConfig]]:
    """Yield the options of each variant of a run, and its config; those of fewest options first."""
    training = config.training
    engine = config.engine
    choices: dict[str, list[object]] = {}
    if training.activation_memory_budget is None:
        choices["training.activation_checkpointing"] = [False, True]
    if training.micro_batch_size != 0:
        choices["training.micro_batch_size"] = [training.micro_batch_size, 0]
    if engine.name == "fsdp":
        choices["engine.reduce_every_micro_batch"] = [False, True]
        if hardware.num_nodes > 1:
            choices["engine.shard_over"] = ["all", "node"]
    variants = []
    for values in product(*choices.values()):
        changes: dict[str, dict[str, object]] = {"training": {}, "engine": {}}
        options = []
        for key, value in zip(choices, values, strict=True):
            section, _, name = key.partition(".")
            if getattr(getattr(config, section), name) != value:
                changes[section][name] = value
                options.append(f"--{key}={_written(name, value)}")
        changed = replace(
            config,
            training=replace(training, **changes["training"]),  # type: ignore[arg-type]
            engine=replace(engine, **changes["engine"]),  # type: ignore[arg-type]
        )
        variants.append((options, changed))
    yield from sorted(variants, key=lambda variant: len(variant[0]))


def _written(name: str, value: object) -> str:
    """Return a value as a user writes it."""
    if name == "micro_batch_size":
        return "auto"
    return str(value).lower()
