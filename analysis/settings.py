"""The settings of a measurement, and checks of their values.

Place in the flow: first. Two processes with equal settings, model and text share a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.documents import FOREIGN_TEXTS, ForeignText
from analysis.influence import SELECTORS
from analysis.recovery import KS
from analysis.scoring import Reading
from analysis.targets import CHOSEN_SETS
from analysis.windows import Windows, span_width
from olmo_sparsity.errors import ConfigError

MIN_HALVES = 4


@dataclass(frozen=True)
class Settings:
    windows: Windows
    units: tuple[str, ...] = ("tokens",)
    selectors: tuple[str, ...] = ("add_one", "divergence", "random", "nearest")
    ks: tuple[int, ...] = KS
    target_share: float = 0.1
    min_gap: float = 0.1
    """Nats: targets with a smaller gap are never chosen by their gap."""

    sets: tuple[str, ...] = CHOSEN_SETS
    max_targets: int | None = None
    """Per set and document, drawn at random. None: all."""

    far_states: Reading = "contextual"
    foreign: ForeignText = "unrelated"
    num_foreign: int = 3
    num_halves: int = 16
    """Random halves of the far units that LDS is computed from."""

    seed: int = 0

    def check(self) -> None:
        if self.windows.long == "all":
            raise ConfigError("long=all is for explain; a measurement compares equal windows")
        self.windows.check()
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be negative")
        if not 0 < self.target_share <= 1:
            raise ConfigError(f"targets: a share of {self.target_share} must be in (0, 1]")
        if self.max_targets is not None and self.max_targets < 1:
            raise ConfigError(f"max_targets={self.max_targets} of a document must be at least 1")
        if not 0 <= self.min_gap < float("inf"):
            raise ConfigError(f"min_gap={self.min_gap} must be a number of nats, 0 or more")
        for name in ("ks", "selectors", "units", "sets"):
            values = getattr(self, name)
            if not values:
                raise ConfigError(f"{name} names none; name at least one")
            if len(set(values)) < len(values):
                raise ConfigError(f"{name}: {', '.join(map(str, values))} names one twice")
        for name in self.selectors:
            if name not in SELECTORS:
                raise ConfigError(
                    f"selectors: '{name}' is unknown; choose from {', '.join(SELECTORS)}"
                )
        if "gap" not in self.sets or not {*self.sets} <= {*CHOSEN_SETS}:
            raise ConfigError(
                f"sets={','.join(self.sets)} must be gap, and any of {', '.join(CHOSEN_SETS[1:])}"
            )
        if not all(isinstance(k, int | np.integer) and k >= 1 for k in self.ks):
            raise ConfigError(f"ks={','.join(map(str, self.ks))} must be numbers from 1 up")
        if self.foreign not in FOREIGN_TEXTS:
            raise ConfigError(
                f"foreign={self.foreign} (--foreign-text) is none of {', '.join(FOREIGN_TEXTS)}"
            )
        if self.num_foreign < 1:
            raise ConfigError(
                f"num_foreign={self.num_foreign} (--foreign): the control needs at least one draw"
            )
        if self.num_halves != 0 and self.num_halves < MIN_HALVES:
            raise ConfigError(
                f"num_halves={self.num_halves} (--halves): a rank correlation needs at least "
                f"{MIN_HALVES}; 0 for none"
            )
        for units in self.units:
            width = span_width(units)
            num_units = self.windows.num_far if width is None else self.windows.num_far - width + 1
            if max(self.ks) > num_units:
                raise ConfigError(
                    f"ks: {max(self.ks)} is more than the {max(num_units, 0)} far units ({units}) "
                    f"of long={self.windows.long} and short={self.windows.short}"
                )
