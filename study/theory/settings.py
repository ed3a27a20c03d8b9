"""The settings of a theory experiment, read from YAML and `--key.sub=value` overrides, and checked.

Place in the flow: first; experiment.py receives the result. Wrong settings are rejected before
anything is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from olmo_sparsity.settings import Rules, enforce, load, option


@dataclass
class LearningConfig:
    num_steps: int = option(300, least=1)
    batch_per_length: int = option(32, least=1)
    learning_rate: float = 0.15
    """Adam's rate for log keys and value logits; it decays linearly to zero."""

    minimax_sharpness: float = 20.0
    """The minimax weights of the lengths are softmax(sharpness · risk / mean risk): 0 is the
    mixture, infinity the maximum."""

    risk_memory: float = 0.9
    """Per-step decay of the running risks in those weights."""


@dataclass
class CaseConfig:
    """One line of the figure: a planted distribution and a hypothesis class."""

    setting: str = option(None, required=True)
    """A name in cases.SETTINGS: local, nonlocal, coupled …"""

    num_places: int = option(None, required=True, least=1)
    """k of the data."""

    attention_places: int | None = option(None, least=1)
    """k of the attention class; None: the k of the data."""

    objective: Literal["mixture", "minimax"] = "mixture"
    """Eq. (3), or the largest risk over the training lengths."""

    marker_rate: float = 0.01
    """Rate of background places with a token that could have been planted."""

    train_length: int | None = option(None, least=1)
    """L of this case; None: the run's L."""


@dataclass
class BridgeConfig:
    """A small transformer on the same data (bridge.py)."""

    num_steps: int = option(1500, least=1)
    batch_size: int = option(64, least=1)
    learning_rate: float = 2e-3
    width: int = 64
    num_layers: int = option(2, least=1)
    num_heads: int = 4
    rotary_fraction: float = 0.5
    """Share of each head that RoPE rotates. 1.0 is OLMo's; less helped every synthetic task."""

    num_chunks: int = option(4, least=1)
    """Chunks of PoSE."""

    num_strings: int = option(512, least=1)
    """Strings measured per length."""

    seeds: list[int] = option([0], least=0, some=True, distinct=True)
    schemes: list[Literal["rope", "pose"]] = option(["rope", "pose"], some=True, distinct=True)
    """rope: plain position IDs; pose: spread in training up to the IDs of the longest test."""

    cases: list[CaseConfig] = option([])
    """Only setting, num_places and marker_rate apply. Empty: no bridge."""


@dataclass
class WorstCaseConfig:
    """The search for the hypothesis with the fastest growth of risk (worst_case.py), over pairs
    within L/4, which is at least 2."""

    seeds: list[int] = option([], least=0, distinct=True)
    """Seeds of the starting points. Empty: no search."""

    train_length: int = option(8, least=8, most=27)
    """Beyond, the exact risk of pairs within L/4 has too many states."""

    marker_rate: float = 0.0
    num_steps: int = option(40, least=1)
    learning_rate: float = 0.25


@dataclass
class TheoryConfig:
    output: str = "runs/theory"
    """Folder for settings.json, table.parquet and meta.json."""

    figure: str = "docs/figures/theory"
    """Path of figure and summary, without .png, .csv, .md and .meta.json."""

    train_length: int = option(16, least=1, most=10**5)
    """L: training mixes all lengths from L/2 to L."""

    test_multiples: list[int] = option([1, 2, 4, 8], least=1, some=True, distinct=True)
    """L̄ as multiples of L."""

    local_span: int = option(4, least=1)
    """L_local: the widest span of a planted set in the local settings, ends included."""

    coupled_window: int = option(1, least=1)
    """The widest span, in position IDs, of a key function in the coupled settings."""

    seeds: list[int] = option([0, 1, 2, 3, 4], least=0, some=True, distinct=True)
    num_strings: int = option(2000, least=1, most=10**7)
    """Strings sampled per length and seed, if a risk has no exact value."""

    bound_constant: float = 1.0
    """Replaces the unknown constant in each O(·)."""

    learning: LearningConfig = field(default_factory=LearningConfig)
    cases: list[CaseConfig] = option([], some=True, required=True)
    worst_case: WorstCaseConfig = field(default_factory=WorstCaseConfig)
    bridge: BridgeConfig = field(default_factory=BridgeConfig)


def load_theory_config(path: str | Path, overrides: list[str]) -> TheoryConfig:
    config = load(TheoryConfig, path, overrides)
    enforce(str(path), _rules(config))
    return config


def _rules(config: TheoryConfig) -> Rules:
    for name in ("output", "figure"):
        value = getattr(config, name)
        yield Path(value).name, f"{name}='{value}' must be a path with a name"
    for index, case in enumerate(config.bridge.cases):
        for name in ("attention_places", "objective", "train_length"):
            value = getattr(case, name)
            yield (
                value == getattr(CaseConfig, name),
                f"bridge.cases[{index}].{name}={value} has no effect on a transformer; remove it",
            )
    for where, cases in (("cases", config.cases), ("bridge.cases", config.bridge.cases)):
        known: list[CaseConfig] = []
        for index, case in enumerate(cases):
            longest = case.train_length or config.train_length
            shortest = (longest + 1) // 2
            for name in ("num_places", "attention_places"):
                k = getattr(case, name)
                yield (
                    k is None or k <= shortest,
                    f"{where}[{index}].{name}={k} must lie between 1 and the shortest training "
                    f"length L/2={shortest}; raise train_length or lower it",
                )
            places = case.attention_places or case.num_places
            known.append(replace(case, train_length=longest, attention_places=places))
            yield known[-1] not in known[:-1], f"{where}[{index}] is a duplicate; remove one"
