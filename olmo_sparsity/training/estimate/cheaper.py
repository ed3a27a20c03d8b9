"""Find settings with which a run would take less time than with its own.

    find_cheaper(config, hardware, time)
    # Cheaper(["--training.activation_checkpointing=false", "--training.micro_batch_size=auto"],
    #         micro_batch_size=16, time=…)

Only settings of memory and communication are tried: they change losses by rounding alone. These are
4 combinations, and 16 with `fsdp` on several nodes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.training.estimate.cost import RunTime, cost_of_run
from olmo_sparsity.training.estimate.hardware import Hardware

MIN_SAVING = 0.1
"""The share of the hours that other settings must save to be named. Smaller differences are within
the error of the estimate."""


class Cheaper(NamedTuple):
    """Settings that take less time, and the time that the run then takes."""

    options: list[str]
    """The settings as words of the command line."""

    micro_batch_size: int
    time: RunTime


def find_cheaper(config: RunConfig, hardware: Hardware, time: RunTime) -> Cheaper | None:
    """Return the settings with which a run takes the fewest hours; None if they save too little.
    Engines are compared elsewhere: the dry run has a line for each of them.

    Args:
        time: The time of the run as it is configured.
    """
    best: Cheaper | None = None
    for options, changed_config in _variants(config, hardware):
        cost = cost_of_run(changed_config, hardware)
        assert cost.time is not None  # the same GPUs as those of `time`
        limit = (1 - MIN_SAVING) * time.hours
        if best is not None:
            # Variants come with fewest changes first: one that saves hardly more is not better.
            limit = 0.99 * best.time.hours
        if cost.fits and cost.time.hours < limit:
            best = Cheaper(options, cost.micro_batch_size, cost.time)
    return best


class _Variant(NamedTuple):
    """A run with some settings changed."""

    options: list[str]
    """The changes as words of the command line."""

    config: RunConfig


def _variants(config: RunConfig, hardware: Hardware) -> list[_Variant]:
    """Return the run with each combination of settings, those of fewest changes first."""
    choices = _choices(config, hardware)
    variants = []
    for values in product(*choices.values()):
        changed_config = config
        options = []
        for key, value in zip(choices, values, strict=True):
            section_name, _, name = key.partition(".")
            section = getattr(changed_config, section_name)
            if getattr(section, name) != value:
                changed_section = replace(section, **{name: value})
                changed_config = replace(changed_config, **{section_name: changed_section})
                options.append(f"--{key}={_spell_value(name, value)}")
        variants.append(_Variant(options, changed_config))
    return sorted(variants, key=lambda variant: len(variant.options))


def _choices(config: RunConfig, hardware: Hardware) -> dict[str, list[object]]:
    """Return the values that are tried for each setting, by its dotted key. Settings that exclude
    each other, or have no effect, are left out."""
    training = config.training
    choices: dict[str, list[object]] = {}
    if training.activation_memory_budget is None:
        choices["training.activation_checkpointing"] = [False, True]
    if training.micro_batch_size != 0:
        choices["training.micro_batch_size"] = [training.micro_batch_size, 0]
    if config.engine.name == "fsdp":
        choices["engine.reduce_every_micro_batch"] = [False, True]
        if hardware.num_nodes > 1:
            choices["engine.shard_over"] = ["all", "node"]
    return choices


def _spell_value(name: str, value: object) -> str:
    """Return a value as a user writes it."""
    if name == "micro_batch_size":
        return "auto"  # it is stored as 0, and the other value is the configured one, no change
    return str(value).lower()
