"""Read trained models of sparse parity, and measure what one model knows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from study.pages.stored import RESULTS
from study.tasks.experiment import Trained, read_trials
from study.tasks.trial import Trial

STORED = RESULTS / "parity"
"""A folder of trained models for each experiment."""

NAMES = {"pose": "RoPE + PoSE", "rope": "RoPE alone", "nope": "NoPE", "alibi": "ALiBi"}


@dataclass(frozen=True)
class Model:
    """A trained model, and how accurate it is on each tested k and length."""

    trial: Trial
    mastered: bool
    """Whether each k up to K_train passed a check in training."""

    accuracy: pd.DataFrame
    """Index: k of the test; columns: lengths."""

    num_samples: int = 2000
    """Number of samples behind each accuracy."""

    @property
    def train_k(self) -> int:
        """The paper's K_train: the largest k of training."""
        assert self.trial.train_k is not None
        return self.trial.train_k


def read_models(folder: Path) -> list[Model]:
    """Return the finished models of a folder, by K_train and seed."""
    return [model_of(trial, trained) for trial, trained in read_trials(folder)]


def model_of(trial: Trial, trained: Trained) -> Model:
    """Return a finished trial as a model."""
    rows = pd.DataFrame([vars(row) for row in trained.rows])
    accuracy = rows.pivot(index="test_k", columns="length", values="exact_match")
    return Model(trial, trained.mastered is not None, accuracy, trained.rows[0].num_samples)


def select(models: list[Model], scheme: str, train_k: int) -> list[Model]:
    """Return the models of one position scheme and one K_train."""
    return [model for model in models if (model.trial.scheme, model.train_k) == (scheme, train_k)]


# --- measures of one model ------------------------------------------------------------------------


def known_at(model: Model, length: int) -> float:
    """Return the mean accuracy over the tested k up to K_train."""
    return float(model.accuracy.loc[: model.train_k, length].mean())


def degradation(model: Model) -> float:
    """Return what is known at 500 tokens minus the mean accuracy over the tested k > K_train."""
    beyond = model.accuracy.loc[model.train_k + 1 :, 500]
    return known_at(model, 500) - float(beyond.mean())


def degradation_though_known(model: Model) -> float | None:
    """Return how much more k = K_train + 2 loses from 50 to 500 tokens than k = K_train does.

    None: k = K_train + 2 is not known at 50 tokens, so the model does not count.
    """
    next_k = model.train_k + 2
    if model.accuracy.loc[next_k, 50] < 0.9:
        return None
    lost = model.accuracy[50] - model.accuracy[500]
    return float(lost[next_k] - lost[model.train_k])


def slope_at_500(model: Model) -> float:
    """Return the change of accuracy at 500 tokens a doubling of k, over the tested k ≤ K_train."""
    accuracy = model.accuracy.loc[: model.train_k, 500]
    doublings = np.log2(accuracy.index.astype(float))
    return float(np.polyfit(doublings, accuracy, deg=1)[0])


def fall(model: Model, k: int) -> float:
    """Return the accuracy at 50 tokens minus that at 200."""
    return float(model.accuracy.loc[k, 50] - model.accuracy.loc[k, 200])
