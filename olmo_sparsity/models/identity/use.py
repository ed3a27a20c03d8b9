"""Use a model in memory safely: by one thread at a time, in evaluation mode, and recognized if it
has changed since its last use. Afterwards it is as it was before.

    with in_use(model):                       # every public call does this
        losses = token_losses(model, ...)     # what it calls may enter again, which costs nothing

Users train, edit or quantize models between our calls. So each first use reads the model's identity
(model_identity.py), and a wrapper tries a changed model again (huggingface/compatibility.py). Hooks
of ours act in their own thread only, so other threads may generate with the model meanwhile.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from olmo_sparsity.base.errors import ConfigError, DataError, printable
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.identity.model_identity import ModelIdentity, check_hooks, read_identity

P = ParamSpec("P")
R = TypeVar("R")

_lock = threading.RLock()
_users: list[nn.Module] = []
"""The wrappers and models that the thread that holds the lock has in use."""

_identities: WeakKeyDictionary[nn.Module, ModelIdentity] = WeakKeyDictionary()
"""The identity of each model at its last use. A key is the object that all wrappers of one model
share (`_inner`)."""


# --- a process that is forked ---------------------------------------------------------------------

_has_threads = False
"""Whether the process had other threads when it was last forked. A fork inherits the answer of its
parent."""


def _note_threads() -> None:
    """Note before a fork whether this process has other threads."""
    global _has_threads
    with suppress(OSError):  # without /proc
        _has_threads = len(os.listdir("/proc/self/task")) > 1


def _continue_without_threads() -> None:
    """Make a forked process independent of the threads of its parent, which do not exist in it."""
    global _lock
    if _lock.acquire(blocking=False):  # free, or held by the thread that forked
        _lock.release()
    else:
        # The thread that would release it is not here.
        _lock = threading.RLock()
        _users.clear()
    if _has_threads:
        # OpenMP would wait for the threads of its pool for ever. PyTorch's DataLoader does the same
        # in its workers.
        torch.set_num_threads(1)


os.register_at_fork(before=_note_threads, after_in_child=_continue_without_threads)


# --- use ------------------------------------------------------------------------------------------


@contextmanager
def in_use(*models: Any) -> Iterator[None]:
    """Inside, this thread alone uses models; other threads that enter wait. The given models are in
    evaluation mode, and afterwards in the mode that they had. A model that has changed since its
    last use is tried again."""
    with _lock, ExitStack() as stack:
        for model in models:
            if isinstance(model, nn.Module) and not any(model is user for user in _users):
                stack.enter_context(_one_in_use(model))
        yield


def with_model_in_use(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose calls use the model of their first argument, `scorer`."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        scorer: Any = args[0] if args else kwargs["scorer"]
        if not hasattr(scorer, "model"):
            shown = printable(repr(scorer))[:60]
            raise ConfigError(f"scorer={shown} must be a Scorer, such as Scorer(model)")
        with in_use(scorer.model):
            return function(*args, **kwargs)

    return called


@contextmanager
def _one_in_use(model: nn.Module) -> Iterator[None]:
    """Inside, this model is in use. Called with the lock held."""
    inner = _inner(model)
    is_first = not any(_inner(user) is inner for user in _users)
    trained = [weight for weight in inner.parameters() if weight.requires_grad]
    # Leaving inference mode switches gradients on, also inside `no_grad`: a program would keep all
    # activations.
    gradients = torch.set_grad_enabled(torch.is_grad_enabled())
    _users.append(model)
    try:
        with torch.inference_mode(False), gradients, evaluating(model):
            if is_first:
                _update_identity(inner)
            _fit_again_if_changed(model, inner)
            yield
    finally:
        _users.remove(model)
        # Callers freeze weights and set them free again, but an interrupt may hit them in between.
        for weight in trained:
            if not weight.requires_grad:
                weight.requires_grad_()


def last_identity(model: Any) -> ModelIdentity | None:
    """Return the identity that a model had at its last use. Return None if it is not a model of
    PyTorch, but such as a server."""
    if not isinstance(model, nn.Module):
        return None
    inner = _inner(model)
    if inner not in _identities:
        _identities[inner] = read_identity(inner)
    return _identities[inner]


def forget(model: nn.Module) -> None:
    """Forget the identity of a model, so that its next use counts as its first."""
    _identities.pop(_inner(model), None)


def check_unchanged(model: Any, identity: ModelIdentity | None, since: str) -> None:
    """Raise DataError if a model has changed since an earlier call. Called with the model in use.

    identity: Its identity at that call.
    since: The name of that call, which the message asks to repeat.
    """
    current_identity = last_identity(model)
    if identity is None or current_identity is None:
        return
    differences = identity.differences(current_identity)
    if differences:
        raise DataError(f"the model has changed since {since} ({differences}): {since} again")


def _inner(model: nn.Module) -> nn.Module:
    """Return the object that all wrappers of one model share: the model in a `HuggingFaceLM`, or a
    model of this project itself."""
    wrapped = getattr(model, "model", None)
    if hasattr(type(model), "fit") and isinstance(wrapped, nn.Module):
        return wrapped
    return model


def _update_identity(inner: nn.Module) -> None:
    """Read the identity of the model, and say so if it has changed since its last use."""
    check_hooks(inner)
    known = _identities.get(inner)
    identity = read_identity(inner)
    if known == identity:
        return  # the known object stays, as others compare identities with `is`
    family = type(inner).__name__
    if known is not None:
        difference = known.differences(identity)
        say(f"{family} has changed since its last use ({difference}): used as it is now")
    elif identity.replaced:
        first = min(identity.replaced)
        say(f"{family}: {first} was replaced; results are stored as those of another model")
    _identities[inner] = identity


def _fit_again_if_changed(model: nn.Module, inner: nn.Module) -> None:
    """Let a wrapper try the model again if it was last tried with another identity."""
    fit: Any = getattr(model, "fit", None)
    if fit is not None and model.tried_identity is not _identities[inner]:
        try:
            fit()
        except BaseException:
            _identities.pop(inner)  # otherwise the next use would take the model for one that fits
            raise


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode. Afterwards each module has its former mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward hook that acts in this thread only, and does not change what other threads
    compute with the model. It also acts in backward passes, which may compute layers again: on a
    GPU these run in a thread of PyTorch."""
    this_thread = threading.get_ident()

    def only_here(*called: Any) -> Any:
        is_backward: bool = torch._C._current_graph_task_id() != -1
        is_here = threading.get_ident() == this_thread
        return hook(*called) if is_backward or is_here else None

    return only_here
