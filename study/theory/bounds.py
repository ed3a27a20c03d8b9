"""Compute the paper's two bounds, and reject lengths and risks that they do not cover.

The constant in each O(·) is not public. Here it is 1: a measured risk above the value shows that it
must be larger, and a value above 1 is vacuous (the loss is at
most 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from olmo_sparsity.base.errors import ConfigError


@dataclass(frozen=True)
class Lengths:
    """The setting of both bounds: trained on L/2 … L, measured at L̄, planted within L_local."""

    train: int
    test: int
    local: int

    def __post_init__(self) -> None:
        if self.train < 1 or self.local < 1:
            raise ConfigError(f"L={self.train} and L_local={self.local} must both be at least 1")
        if self.test < self.train:
            raise ConfigError(
                f"L̄={self.test} is below L={self.train}: use the training risk itself"
            )
        if 4 * self.local > self.train:
            raise ConfigError(
                f"L_local={self.local} exceeds L/4={self.train / 4:g}: Theorem 4.3 does not apply; "
                f"train on at least {4 * self.local}, or couple positions (Proposition 4.4)"
            )


def stated_bound(lengths: Lengths, risk: float, eta_train: float, eta_test: float) -> float:
    """Theorem 4.3: η_L · η_L̄ · L · L̄² · δ, where δ is the risk averaged over the
    training lengths (Eq. 3)."""
    _check(risk)
    for name, eta in (("η_L", eta_train), ("η_L̄", eta_test)):
        if not eta >= 1 or not math.isfinite(eta):
            raise ConfigError(f"{name}={eta:g} must be finite and at least 1 (Assumption 4.2)")
    return eta_train * eta_test * lengths.train * lengths.test**2 * risk


def improved_bound(lengths: Lengths, worst_risk: float, *, uniform_placement: bool) -> float:
    """The answer to the reviewers: (L̄/L)² · δ, with δ the **worst** risk over the
    training lengths (what a minimax objective controls) and placements as in Remark C.1 (the η
    that occur are then O(1))."""
    _check(worst_risk)
    if not uniform_placement:
        raise ConfigError("the improved bound needs the placements of Remark C.1")
    return (lengths.test / lengths.train) ** 2 * worst_risk


def both_bounds(
    train: int,
    test: int,
    local: int,
    deltas: tuple[float, float],
    eta: Callable[[int], float],
    *,
    uniform_placement: bool,
) -> dict[str, Any]:
    """The fields of results.Row for both bounds and what they depend on, or for the reason why they
    do not apply. `deltas`: mean and worst risk over the training lengths; `eta`: η at a length."""
    values: dict[str, Any] = dict(zip(("delta_mean", "delta_worst"), deltas, strict=True))
    values["local_span"] = local
    if test < train:
        return values | {"refusal": "a training length"}
    try:
        lengths = Lengths(train, test, local)
        etas = eta(train), eta(test)
        values |= {"eta_train": etas[0], "eta_test": etas[1]}
        values["bound_stated"] = stated_bound(lengths, deltas[0], *etas)
        values["bound_improved"] = improved_bound(
            lengths, deltas[1], uniform_placement=uniform_placement
        )
    except ConfigError as error:
        values["refusal"] = str(error)
    return values


def _check(risk: float) -> None:
    if not 0 <= risk <= 1:
        raise ConfigError(f"risk δ={risk:g} must lie in [0, 1]: the loss is 1 − h(X)_Y")
