"""Remember the identity that each model in memory had at its last use.

    update_identity(model)           reads it, and says so if the model has changed
    last_identity(model)             the identity that it had then
    check_unchanged(model, identity, since="prepare")     DataError if it has changed since a call
    forget(model)                    its next use counts as its first

use.py updates it whenever a model is entered that is not in use yet. A model of this project is
remembered as itself, and one of transformers as the model inside a `HuggingFaceLM` (`unwrapped`),
because each public call wraps it anew.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.identity.model_identity import ModelIdentity, check_hooks, read_identity

_identities: WeakKeyDictionary[nn.Module, ModelIdentity] = WeakKeyDictionary()
"""The identity of each model at its last use. The keys are `unwrapped`."""


def last_identity(model: Any) -> ModelIdentity | None:
    """Return the identity that a model had at its last use, or has now if it was not used yet.
    Return None for what is not a model of PyTorch, such as a server."""
    if not isinstance(model, nn.Module):
        return None
    inner = unwrapped(model)
    if inner not in _identities:
        _identities[inner] = read_identity(inner)
    return _identities[inner]


def update_identity(model: nn.Module) -> None:
    """Read the identity of a model, and say so if it has changed since its last use."""
    inner = unwrapped(model)
    check_hooks(inner)
    known_identity = _identities.get(inner)
    identity = read_identity(inner)
    if known_identity == identity:
        return  # the known object stays, as others compare identities with `is`
    family = type(inner).__name__
    if known_identity is not None:
        difference = known_identity.differences(identity)
        say(f"{family} has changed since its last use ({difference}): used as it is now")
    elif identity.replaced:
        first_replaced = min(identity.replaced)
        say(
            f"{family}: {first_replaced} was replaced; results are stored as those of another model"
        )
    _identities[inner] = identity


def forget(model: nn.Module) -> None:
    """Forget the identity of a model, so that its next use counts as its first."""
    _identities.pop(unwrapped(model), None)


def check_unchanged(model: Any, identity: ModelIdentity | None, since: str) -> None:
    """Raise DataError if a model has changed since an earlier call. Called with the model in use.

    Args:
        model: The model.
        identity: Its identity at that call; None if it was not a model of PyTorch.
        since: The name of that call, which the message asks to repeat.
    """
    current_identity = last_identity(model)
    if identity is None or current_identity is None:
        return
    differences = identity.differences(current_identity)
    if differences:
        raise DataError(f"the model has changed since {since} ({differences}): {since} again")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the object that all wrappers of one model share: the model in a `HuggingFaceLM`, or a
    model of this project itself."""
    wrapped = getattr(model, "model", None)
    return wrapped if is_wrapper(model) and isinstance(wrapped, nn.Module) else model


def is_wrapper(model: Any) -> bool:
    """Return whether this is a `HuggingFaceLM`. Told by an attribute that no other model has, as
    the class imports this package."""
    return hasattr(model, "tried_identity")
