"""Use a model in memory: alone, in evaluation mode, known to be the one it was, and restored.

Place in the flow: around everything that runs a model. `in_use` is entered by every public call,
and again by what this calls, which costs nothing.

What other threads do with the model meanwhile, such as generating, is not disturbed: hooks of ours
act in their own thread only (`in_this_thread`), as does our attention (sharing.py).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from olmo_sparsity.analysis.models.identity import (
    State,
    fingerprint_weights,
    read_state,
    version_of,
)
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.runtime import say

P = ParamSpec("P")
R = TypeVar("R")

_SAID_AFTER_S = 2.0

_states: WeakKeyDictionary[nn.Module, State] = WeakKeyDictionary()
"""What each model was at its last use, by the object that wrappers of one model share."""

_turns: WeakKeyDictionary[nn.Module, _Turn] = WeakKeyDictionary()
_making = threading.Lock()


class _Turn:
    """Which thread uses one model of transformers, or of ours."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users: list[nn.Module] = []


@contextmanager
def in_use(*models: Any) -> Iterator[None]:
    """Inside, this thread alone uses these models: others that enter wait. They are in evaluation
    mode, and afterwards as they were. A model that has changed since its last use is checked anew;
    one that changes inside raises DataError."""
    modules = {id(_inner(m)): m for m in models if isinstance(m, nn.Module)}
    with ExitStack() as stack:
        for _, model in sorted(modules.items()):  # in one order, so that two threads do not wait
            stack.enter_context(_one_in_use(model))  # for each other
        yield


def with_model_in_use(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that has a model in its first argument, `scorer`."""

    @functools.wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> R:
        scorer: Any = given[0] if given else named["scorer"]
        with in_use(scorer.model):
            return function(*given, **named)

    return called


@contextmanager
def _one_in_use(model: nn.Module) -> Iterator[None]:
    inner = _inner(model)
    with _making:
        turn = _turns.setdefault(inner, _Turn())
    with _taken(turn.lock, inner):
        if model in turn.users:
            yield
            return
        is_first = not turn.users
        if is_first:
            _refuse_while_running(inner)
        turn.users.append(model)
        gradients = torch.set_grad_enabled(torch.is_grad_enabled())  # inference_mode enables them
        try:
            with torch.inference_mode(False), gradients, _gradients_kept(inner), evaluating(model):
                if is_first:
                    _recognize(inner)
                _fit(model, inner)
                before = _versions(inner)
                yield
                if _versions(inner) != before:
                    raise DataError(
                        f"the weights of {type(inner).__name__} were changed while they were used, "
                        "so the numbers are of no one model: train and explain in turns"
                    )
        finally:
            turn.users.remove(model)


@contextmanager
def _gradients_kept(inner: nn.Module) -> Iterator[None]:
    """Restore which weights need a gradient, also if an interrupt hits the code that froze them
    while it restores them."""
    needing = [weight for weight in inner.parameters() if weight.requires_grad]
    try:
        yield
    finally:
        for weight in needing:
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


def fingerprint_of(model: nn.Module) -> str:
    state = state_of(model)
    assert state is not None
    if state.sha256 is None:
        state.sha256 = fingerprint_weights(_inner(model), state)
    return state.sha256


def refuse_changed(model: Any, state: State | None, since: str) -> None:
    """`state`: what it was then. Called with the model in use."""
    now = state_of(model)
    if state and now and (differences := state.differences(now)):
        raise DataError(f"the model has changed since {since} ({differences}): {since} again")


def _inner(model: Any) -> nn.Module:
    """The object that wrappers of one model share."""
    own = getattr(model, "model", None)
    return own if hasattr(type(model), "fit") and isinstance(own, nn.Module) else model


def _recognize(inner: nn.Module) -> None:
    """Read what the model is now, and keep its known state if it is the same."""
    known, state = _states.get(inner), read_state(inner)
    differences = "" if known is None else known.differences(state)
    if known is not None and not differences:
        if known.versions == state.versions:
            return
        # Sums may miss what was exchanged within a block. If nobody requested the bytes before,
        # there is nothing to compare with, and no number that would be mistaken for another's.
        state.sha256 = known.sha256 and fingerprint_weights(inner, state)
        if state.sha256 == known.sha256:
            known.versions = state.versions
            return
        differences = "weights"
    if known is not None:
        changed = f"{type(inner).__name__} has changed since its last use ({differences})"
        say(f"{changed}: used as it is now")
    _states[inner] = state


def _fit(model: nn.Module, inner: nn.Module) -> None:
    """Let a wrapper try the model again if it was last tried in another state."""
    fit: Any = getattr(model, "fit", None)
    if fit is not None and model.fitted is not _states[inner]:
        try:
            fit()
        except BaseException:
            _states.pop(inner)  # of a model that does not fit
            raise


def _versions(inner: nn.Module) -> list[tuple[int, int]]:
    """Enough to notice, for nothing, that weights were changed in the usual ways."""
    return [version_of(weight) for weight in inner.parameters()]


@contextmanager
def _taken(lock: Any, inner: nn.Module) -> Iterator[None]:
    if not lock.acquire(timeout=_SAID_AFTER_S):
        say(f"waiting: another thread uses this {type(inner).__name__}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _refuse_while_running(inner: nn.Module) -> None:
    """Called back by the model's own `generate` or forward pass, in this thread."""
    frame: Any = sys._getframe(1)
    modules: set[int] = set()
    while frame is not None:
        if frame.f_code.co_name in ("generate", "_call_impl"):
            modules = modules or {id(module) for module in inner.modules()}
            if id(frame.f_locals.get("self")) in modules:
                raise ConfigError(
                    f"{type(inner).__name__} is running: this call came from inside its generate "
                    "or forward (a streamer, a hook). Call it after these return"
                )
        frame = frame.f_back


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, and as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A forward hook that leaves alone what other threads compute; but for the thread in which
    PyTorch computes layers again for a backward pass on a GPU."""
    own = threading.get_ident()

    def only_here(*given: Any) -> Any:
        is_backward: bool = torch._C._current_graph_task_id() != -1
        return hook(*given) if is_backward or threading.get_ident() == own else None

    return only_here
