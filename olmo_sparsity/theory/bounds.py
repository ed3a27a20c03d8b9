"""Compute the paper's two bounds, and refuse lengths and risks that they do not cover.

Place in the flow: last of the arithmetic; experiment.py compares risks with them.

The constant in each O(·) is not public. It is an argument here, 1 by default: a measured risk above
the value shows that the constant must be larger, and a value above 1 is vacuous (the loss is at
most 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from olmo_sparsity.errors import ConfigError


@dataclass(frozen=True)
class Bound:
    value: float
    statement: str

    @property
    def vacuous(self) -> bool:
        return self.value >= 1


@dataclass(frozen=True)
class Lengths:
    """The setting of both bounds: trained on L/2 … L, measured at L̄, planted within L_local."""

    train: int
    test: int
    local: int

    def check(self) -> None:
        if self.train < 1 or self.local < 1:
            raise ConfigError(f"L={self.train} and L_local={self.local} must both be at least 1")
        if self.test < self.train:
            raise ConfigError(
                f"L̄={self.test} is below L={self.train}: the bounds are about longer strings; at a "
                "training length use the training risk itself"
            )
        if 4 * self.local > self.train:
            raise ConfigError(
                f"L_local={self.local} exceeds L/4={self.train / 4:g}: Theorem 4.3 does not apply; "
                f"train on lengths up to at least {4 * self.local}, or couple the positions "
                "(Proposition 4.4)"
            )


def stated_bound(
    lengths: Lengths, risk: float, eta_train: float, eta_test: float, *, constant: float = 1.0
) -> Bound:
    """Theorem 4.3: constant · η_L · η_L̄ · L · L̄² · δ, where δ is the risk averaged over the
    training lengths (Eq. 3)."""
    lengths.check()
    _check_risk(risk)
    _check_constant(constant)
    for name, eta in (("η_L", eta_train), ("η_L̄", eta_test)):
        if not eta >= 1 or not math.isfinite(eta):
            raise ConfigError(
                f"{name}={eta:g} must be finite and at least 1 (Assumption 4.2): some length never "
                "uses a placement that another does, so training does not cover it"
            )
    value = constant * eta_train * eta_test * lengths.train * lengths.test**2 * risk
    return Bound(value, f"{constant:g} · η_L η_L̄ L L̄² δ")


def improved_bound(
    lengths: Lengths, worst_risk: float, *, uniform_placement: bool, constant: float = 1.0
) -> Bound:
    """The answer to the reviewers: constant · (L̄/L)² · δ, with δ the **worst** risk over the
    training lengths (what a minimax objective controls) and placements as in Remark C.1 (the η
    that occur are then O(1))."""
    lengths.check()
    _check_risk(worst_risk)
    _check_constant(constant)
    if not uniform_placement:
        raise ConfigError(
            "the improved bound needs the placements of Remark C.1 (every shape uniformly wherever "
            "it fits); use stated_bound with the η of this position law"
        )
    return Bound(improved_rate(lengths.train, lengths.test) * constant * worst_risk, "C (L̄/L)² δ")


def improved_rate(train_length: int, test_length: int) -> float:
    """(L̄/L)² alone."""
    return (test_length / train_length) ** 2


def steps_between(
    lengths: Lengths, mean_risk: float, worst_risk: float, eta_train: float, eta_test: float
) -> dict[str, float]:
    """The steps from the first bound to the second, one improvement at a time (constants 1)."""
    lengths.check()
    L, L_bar, L_local = lengths.train, lengths.test, lengths.local
    etas = eta_train * eta_test
    return {
        "stated: η η L L̄² δ": etas * L * L_bar**2 * mean_risk,
        "minimax: η η L̄² δ": etas * L_bar**2 * worst_risk,
        "chunks: η η (L̄/L_local)² δ": etas * (L_bar / L_local) ** 2 * worst_risk,
        "Remark C.1: (L̄/L)² δ": improved_rate(L, L_bar) * worst_risk,
    }


def _check_risk(risk: float) -> None:
    if not 0 <= risk <= 1:
        raise ConfigError(f"risk δ={risk:g} must lie in [0, 1]: the loss is 1 − h(X)_Y")


def _check_constant(constant: float) -> None:
    if not constant > 0 or not math.isfinite(constant):
        raise ConfigError(
            f"the constant of the bound must be positive and finite, not {constant:g}"
        )
