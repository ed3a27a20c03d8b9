"""Use a model in memory: alone, in evaluation mode, known to be the one it was, and restored.

Place in the flow: around everything that runs a model. Every public call enters `in_use`, and what
it calls enters it again, which costs nothing. Hooks of ours act in their own thread only, so other
threads may generate with the model meanwhile.
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
from olmo_sparsity.models.identity import State, read_state, refuse_hooks

P = ParamSpec("P")
R = TypeVar("R")

_lock = threading.RLock()
_users: list[nn.Module] = []
"""Wrappers and models in use by the thread that holds the lock."""

_states: WeakKeyDictionary[nn.Module, State] = WeakKeyDictionary()
"""What each model was at its last use, by the object that wrappers of one model share."""


# --- a process that is forked ---------------------------------------------------------------------

_has_threads = False
"""Whether this process had other threads when it was forked, or the one that it was forked from."""


def _count_threads() -> None:
    global _has_threads
    with suppress(OSError):  # without /proc
        _has_threads = len(os.listdir("/proc/self/task")) > 1


def _go_on_without_threads() -> None:
    """Make a forked process independent of the threads of its parent, which do not exist in it."""
    global _lock
    if _lock.acquire(blocking=False):  # free, or held by the thread that forked
        _lock.release()
    else:
        # The thread that would release it is not here.
        _lock = threading.RLock()
        _users.clear()
    if _has_threads:
        # OpenMP would wait for the threads of its pool for ever; DataLoader sets its workers alike.
        torch.set_num_threads(1)


os.register_at_fork(before=_count_threads, after_in_child=_go_on_without_threads)


# --- use ------------------------------------------------------------------------------------------


@contextmanager
def in_use(*models: Any) -> Iterator[None]:
    """Inside, this thread alone uses models: others that enter wait. These are in evaluation
    mode, and afterwards as they were. A model that has changed since its last use is tried anew."""
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
                _recognize(inner)
            _fit(model, inner)
            yield
    finally:
        _users.remove(model)
        # Callers freeze weights and set them free again, but an interrupt may hit them in between.
        for weight in trained:
            if not weight.requires_grad:
                weight.requires_grad_()


def state_of(model: Any) -> State | None:
    """Return the identity of the model when it was last used; None if it is not a model of
    torch."""
    if not isinstance(model, nn.Module):
        return None
    inner = _inner(model)
    if inner not in _states:
        _states[inner] = read_state(inner)
    return _states[inner]


def forget(model: nn.Module) -> None:
    """Make the next use of the model its first."""
    _states.pop(_inner(model), None)


def refuse_changed(model: Any, state: State | None, since: str) -> None:
    """Raise if the model has changed. `state`: what it was; `since`: the call that read it, which
    is to be repeated. Called with the model in use."""
    now = state_of(model)
    if state is None or now is None:
        return
    differences = state.differences(now)
    if differences:
        raise DataError(f"the model has changed since {since} ({differences}): {since} again")


def _inner(model: nn.Module) -> nn.Module:
    """Return the object that wrappers of one model share: the model in a `HuggingFaceLM`."""
    wrapped = getattr(model, "model", None)
    if hasattr(type(model), "fit") and isinstance(wrapped, nn.Module):
        return wrapped
    return model


def _recognize(inner: nn.Module) -> None:
    """Read what the model is now, and keep its known state if it is the same."""
    refuse_hooks(inner)
    known = _states.get(inner)
    state = read_state(inner)
    if known == state:
        return
    family = type(inner).__name__
    if known is not None:
        difference = known.differences(state)
        say(f"{family} has changed since its last use ({difference}): used as it is now")
    elif state.replaced:
        first = min(state.replaced)
        say(f"{family}: {first} was replaced; results are stored as those of another model")
    _states[inner] = state


def _fit(model: nn.Module, inner: nn.Module) -> None:
    """Let a wrapper try the model again if it was last tried in another state."""
    fit: Any = getattr(model, "fit", None)
    if fit is not None and model.fitted is not _states[inner]:
        try:
            fit()
        except BaseException:
            _states.pop(inner)  # else the next use would take the model for one that fits
            raise


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode, and afterwards each module is as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward hook that leaves alone what other threads compute, except the thread in
    which PyTorch computes layers again for a backward pass on a GPU."""
    this_thread = threading.get_ident()

    def only_here(*called: Any) -> Any:
        is_backward: bool = torch._C._current_graph_task_id() != -1
        is_here = threading.get_ident() == this_thread
        return hook(*called) if is_backward or is_here else None

    return only_here
