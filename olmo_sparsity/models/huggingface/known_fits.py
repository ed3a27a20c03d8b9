"""Remember what the last trial of each model has shown, so that each is tried once.

A model in memory is wrapped anew in each public call. `HuggingFaceLM.fit` tries it in the first
one, stores the `Fit` here, and finds it in the next ones:

    remember_fit(model, identity, device, fit)
    known_fit(model, identity, device)            # the same Fit
    known_fit(model, other_identity, device)      # None: the model has changed, so try it again
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from olmo_sparsity.models.huggingface.compatibility import Fit
from olmo_sparsity.models.identity.model_identity import ModelIdentity


@dataclass(frozen=True)
class _Trial:
    """The outcome of trying a model, and for which model and device it holds."""

    identity: ModelIdentity | None
    """The identity that the model had. A model that has changed since may no longer fit."""

    device: torch.device
    """Kernels of another device round differently, and `Fit.batch_noise` depends on rounding."""

    fit: Fit


_trials: WeakKeyDictionary[nn.Module, _Trial] = WeakKeyDictionary()
"""The last trial of each model, by the model as the user has passed it."""


def known_fit(model: nn.Module, identity: ModelIdentity | None, device: torch.device) -> Fit | None:
    """Return what the last trial of a model has shown; None if it was tried with another identity
    or on another device, or never."""
    trial = _trials.get(model)
    # By `is`: `in_use` makes a new identity only if it differs from the last one.
    if trial is None or trial.identity is not identity or trial.device != device:
        return None
    return trial.fit


def remember_fit(
    model: nn.Module, identity: ModelIdentity | None, device: torch.device, fit: Fit
) -> None:
    """Store what a trial of a model has shown, in place of its last trial."""
    _trials[model] = _Trial(identity, device, fit)
