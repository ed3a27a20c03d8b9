"""Planted tables of accuracy on sparse parity, in place of trained models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from study.parity.models import Model
from study.tasks.trial import Trial

KS = (4, 6, 8, 10, 12)
TESTED = (1, 2, 4, 6, 8, 10, 12, 14, 16)
LENGTHS = (20, 50, 100, 200, 300, 400, 500)
Right = Callable[[int, int, int], float]
"""Accuracy by K_train, k of the test and length."""


def planted_model(
    scheme: str,
    train_k: int,
    seed: int,
    accuracy: Callable[[int, int], float],
    mastered: bool = True,
    tested: Sequence[int] = TESTED,
    lengths: Sequence[int] = LENGTHS,
) -> Model:
    """Return a model with an accuracy for each k of the test and length."""
    by_length = {length: [accuracy(k, length) for k in tested] for length in lengths}
    return Model(Trial(scheme, train_k, seed), mastered, pd.DataFrame(by_length, index=tested))


def planted(
    pose: Right,
    rope: Right,
    spread: float = 0.001,
    masters: Callable[[int, int], bool] | None = None,
) -> list[Model]:
    """Five models for each scheme and K_train; `masters` says by K_train and seed which learn."""
    models = []
    for scheme, right in (("pose", pose), ("rope", rope)):
        for train_k in KS:
            for seed in range(5):

                def accuracy(k: int, length: int) -> float:
                    return right(train_k, k, length) + spread * (seed - 2)  # noqa: B023

                mastered = masters is None or masters(train_k, seed)
                models.append(planted_model(scheme, train_k, seed, accuracy, mastered))
    return models


def as_claimed(train_k: int, k: int, length: int) -> float:
    """PoSE that keeps what was trained, a little less of larger k, and loses longer k + 2."""
    kept = 0.99 - 0.03 * np.log2(k) * (length == 500)
    return kept if k <= train_k else kept - 0.3 * (length >= 200) - 0.2 * (k > train_k + 2)


def at_chance(train_k: int, k: int, length: int) -> float:
    return 0.99 if length <= 50 else 0.5
