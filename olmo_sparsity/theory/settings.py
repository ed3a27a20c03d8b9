"""What a theory run is told: dataclasses, read from YAML plus `--key.sub=value` overrides.

Place in the flow: first; experiment.py receives the result. What cannot be right is refused before
anything is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from omegaconf import MISSING

from olmo_sparsity.config_file import fill_in, read_given
from olmo_sparsity.errors import ConfigError


@dataclass
class LearningConfig:
    num_steps: int = 300
    batch_per_length: int = 32
    learning_rate: float = 0.15
    """Of Adam, on log keys and on value logits; falls linearly to zero."""

    minimax_sharpness: float = 20.0
    """The minimax weights of the lengths are softmax(sharpness · risk / mean risk): 0 is the
    mixture, infinity the maximum."""

    risk_memory: float = 0.9
    """Per-step decay of the running risks in those weights."""


@dataclass
class CaseConfig:
    """One line of the figure: a planted distribution and a hypothesis class."""

    setting: str = MISSING
    """A name in experiment.SETTINGS: local, nonlocal, coupled …"""

    num_places: int = MISSING
    """k of the data."""

    attention_places: int | None = None
    """k of the attention class; None: that of the data."""

    objective: Literal["mixture", "minimax"] = "mixture"
    """Eq. (3), or the largest risk over the training lengths."""

    marker_rate: float = 0.01
    """How often a background place carries a token that could have been planted."""

    train_length: int | None = None
    """L of this case; None: that of the run."""

    background: list[float] | None = None
    """The whole background distribution over (blank, marker, marker), instead of marker_rate."""


@dataclass
class BridgeConfig:
    """A small transformer on the same data (bridge.py)."""

    num_steps: int = 1500
    batch_size: int = 64
    learning_rate: float = 2e-3
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    rotary_fraction: float = 0.5
    """Share of each head that RoPE rotates. 1.0 is OLMo's; less helped every synthetic task."""

    num_chunks: int = 4
    """Of PoSE."""

    num_strings: int = 512
    """Measured per length."""

    seeds: list[int] = field(default_factory=lambda: [0])
    schemes: list[str] = field(default_factory=lambda: ["rope", "pose"])
    """rope: position IDs as they are; pose: spread in training up to those of the longest test."""

    cases: list[CaseConfig] = field(default_factory=list)
    """Empty: no bridge."""


@dataclass
class WorstCaseConfig:
    """The search for the hypothesis whose risk grows fastest (worst_case.py): pairs within L/4."""

    seeds: list[int] = field(default_factory=list)
    """Of the starting points. Empty: no search."""

    train_length: int = 8
    marker_rate: float = 0.0
    num_steps: int = 40
    learning_rate: float = 0.25


@dataclass
class TheoryConfig:
    output: str = "runs/theory"
    """Folder for table.parquet, meta.json and config.yaml."""

    figure: str = "docs/figures/theory"
    """Figure and summary go to this name with .svg, .png, .csv and .meta.json."""

    train_length: int = 16
    """L: training mixes all lengths from L/2 to L."""

    test_multiples: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """L̄ as multiples of L."""

    local_span: int = 4
    """L_local: places that a planted set of the local settings may cover, ends included."""

    coupled_window: int = 1
    """Position IDs that a key function of the coupled settings may span."""

    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    num_strings: int = 2000
    """Sampled per length and seed, where a risk has no exact value."""

    bound_constant: float = 1.0
    """Stands for the unknown constant in each O(·)."""

    learning: LearningConfig = field(default_factory=LearningConfig)
    cases: list[CaseConfig] = field(default_factory=list)
    worst_case: WorstCaseConfig = field(default_factory=WorstCaseConfig)
    bridge: BridgeConfig = field(default_factory=BridgeConfig)


def load_theory_config(path: str | Path, overrides: list[str]) -> TheoryConfig:
    config = fill_in(TheoryConfig, read_given(path, overrides), str(path))
    _check(config, str(path))
    return config


def _check(config: TheoryConfig, origin: str) -> None:
    def require(holds: bool, message: str) -> None:
        if not holds:
            raise ConfigError(f"{origin}: {message}")

    require(min(config.seeds, default=0) >= 0, f"seeds={config.seeds} must not be negative")
    require(config.num_strings <= 10**7, f"num_strings={config.num_strings} is beyond 10,000,000")
    require(config.train_length <= 10**5, f"train_length={config.train_length} is beyond 100,000")

    for section, names in (
        (config, ("train_length", "local_span", "coupled_window", "num_strings")),
        (config.learning, ("num_steps", "batch_per_length")),
        (config.bridge, ("num_steps", "batch_size", "num_layers", "num_chunks", "num_strings")),
    ):
        for name in names:
            value = getattr(section, name)
            require(value >= 1, f"{name}={value} must be at least 1")
    schemes = config.bridge.schemes
    require(
        bool(schemes) and set(schemes) <= {"rope", "pose"},
        f"bridge.schemes={schemes} must be among rope, pose",
    )
    worst = config.worst_case
    require(
        worst.train_length >= 8,
        f"worst_case.train_length={worst.train_length} must be at least 8: pairs need "
        "L_local = L/4 of at least 2",
    )
    require(worst.num_steps >= 1, f"worst_case.num_steps={worst.num_steps} must be at least 1")
    require(bool(config.cases), "cases is empty; list at least one {setting, num_places}")
    require(bool(config.seeds), "seeds is empty; an interval needs at least two")
    require(
        len(set(config.seeds)) == len(config.seeds), f"seeds={config.seeds} holds one seed twice"
    )
    require(
        bool(config.test_multiples) and min(config.test_multiples) >= 1,
        f"test_multiples={config.test_multiples} must be whole numbers of at least 1",
    )
    for index, case in enumerate([*config.cases, *config.bridge.cases]):
        longest = case.train_length if case.train_length is not None else config.train_length
        require(longest >= 1, f"cases[{index}].train_length={longest} must be at least 1")
        shortest = (longest + 1) // 2
        for name in ("num_places", "attention_places"):
            k = getattr(case, name)
            require(
                k is None or 1 <= k <= shortest,
                f"cases[{index}].{name}={k} must lie between 1 and the shortest training length "
                f"L/2={shortest}; raise train_length or lower it",
            )
