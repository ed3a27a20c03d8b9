"""What a measurement is told, and what can be known wrong from that alone.

Place in the flow: first. Two measurements with equal settings, model and text are one.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.influence import SELECTORS
from analysis.scoring import Reading
from analysis.windows import Windows
from olmo_sparsity.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    windows: Windows
    selectors: tuple[str, ...] = ("add_one", "divergence", "random", "nearest")
    ks: tuple[int, ...] = (1, 2, 4, 8, 16)
    target_share: float = 0.1
    min_gap: float = 0.1
    """Nats: a target with a smaller gap has nothing to recover, however high it ranks."""

    far_states: Reading = "contextual"
    num_foreign: int = 3
    seed: int = 0

    def check(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"--seed={self.seed} must not be negative")
        if not 0 <= self.min_gap < float("inf"):
            raise ConfigError(f"--min-gap={self.min_gap} must be a number of nats, 0 or more")
        for option, values in (("--ks", self.ks), ("--selectors", self.selectors)):
            if len(set(values)) < len(values):
                raise ConfigError(f"{option}: {', '.join(map(str, values))} names one twice")
        for name in self.selectors:
            if name not in SELECTORS:
                raise ConfigError(
                    f"--selectors: '{name}' is unknown; choose from {', '.join(SELECTORS)}"
                )
        if not self.ks or min(self.ks) < 1:
            raise ConfigError(f"--ks={','.join(map(str, self.ks))} must be numbers from 1 up")
        if max(self.ks) > self.windows.num_far:
            raise ConfigError(
                f"--ks: {max(self.ks)} is more than the {self.windows.num_far} far tokens of "
                f"--long={self.windows.long} and --short={self.windows.short}"
            )
        if self.num_foreign < 1:
            raise ConfigError(f"--foreign={self.num_foreign}: the control needs at least one draw")
