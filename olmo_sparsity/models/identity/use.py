"""Use a model in memory safely, and leave it as it was.

    with in_use(model):                       # every public call does this
        losses = token_losses(model, ...)     # may enter `in_use(model)` again, which costs nothing

Inside, one thread uses the model, in evaluation mode and without autocast. Afterwards the model has
its former mode, and the weights that had gradients have them again.

Users train, edit or quantize models between our calls. So whenever a model is entered that is not
in use yet, its identity is read (known_identities.py), and a wrapper tries a changed model again
(huggingface/compatibility.py). Our hooks act in their own thread only, so other threads may
generate with the model meanwhile.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from olmo_sparsity.base.errors import ConfigError, printable
from olmo_sparsity.models.identity.known_identities import (
    forget,
    is_wrapper,
    last_identity,
    unwrapped,
    update_identity,
)

P = ParamSpec("P")
R = TypeVar("R")

_lock = threading.RLock()
_models_in_use: list[nn.Module] = []
"""The models that are in use by the thread that holds the lock, wrapped or not."""


@contextmanager
def in_use(*models: Any) -> Iterator[None]:
    """Let this thread alone use models inside the block; other threads that enter wait. The models
    are in evaluation mode there, and afterwards in the mode that they had. A model that has changed
    since its last use is tried again. `torch.autocast` around the block is off inside. `models`:
    models of PyTorch; others, such as a server, are passed over."""
    with _lock, ExitStack() as stack:
        # Whenever a model is entered, as a caller may have switched it on since an outer `in_use`.
        stack.enter_context(_without_autocast())
        for model in models:
            if isinstance(model, nn.Module) and not any(model is other for other in _models_in_use):
                stack.enter_context(_one_in_use(model))
        yield


def with_model_in_use(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function whose first argument is named `scorer`, such that each call is made with
    the model of this scorer in use."""

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
    """Use one model inside the block. Called with the lock held."""
    inner = unwrapped(model)
    is_first_wrapper = not any(unwrapped(other) is inner for other in _models_in_use)
    trained_weights = [weight for weight in inner.parameters() if weight.requires_grad]
    _models_in_use.append(model)
    try:
        with _outside_inference_mode(), evaluating(model):
            if is_first_wrapper:
                update_identity(model)
            _fit_again_if_changed(model)
            yield
    finally:
        _models_in_use.remove(model)
        # A caller freezes weights and sets them free again, but an interrupt may come in between.
        for weight in trained_weights:
            if not weight.requires_grad:
                weight.requires_grad_()


def _fit_again_if_changed(model: nn.Module) -> None:
    """Let a wrapper try the model again if it was last tried with another identity."""
    if not is_wrapper(model):
        return
    wrapper: Any = model
    if wrapper.tried_identity is not last_identity(model):
        try:
            wrapper.fit()
        except BaseException:
            forget(model)  # otherwise the next use would take the model for one that fits
            raise


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Leave PyTorch's inference mode inside the block, with gradients on or off as outside."""
    is_enabled = torch.is_grad_enabled()
    # `inference_mode(False)` switches gradients on, also inside `no_grad`: a program would keep all
    # activations. So the mode that the caller has is set again after it.
    with torch.inference_mode(False), torch.set_grad_enabled(is_enabled):
        yield


_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "xla")
"""Types of devices for which a program may have switched autocast on."""


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Switch autocast off inside the block. It would compute a model of fp32 in bf16, and results
    are stored, and read back, as those of the model's own dtype."""
    with ExitStack() as stack:
        for device_type in _AUTOCAST_DEVICES:
            # Only where it is on: PyTorch warns about devices that this machine does not have.
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside the block. Afterwards each module has its former
    mode."""
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

    def act_in_this_thread(*hook_arguments: Any) -> Any:
        # PyTorch has no public function that says whether a backward pass is under way.
        is_backward: bool = torch._C._current_graph_task_id() != -1
        is_this_thread = threading.get_ident() == this_thread
        return hook(*hook_arguments) if is_backward or is_this_thread else None

    return act_in_this_thread


# --- a process that is forked ---------------------------------------------------------------------
#
# A fork, such as a worker of a DataLoader, has only the thread that forked. It inherits the lock, a
# list of models in use, and PyTorch's belief that its pool of threads exists.

_has_threads = False
"""Whether the process had other threads when it was last forked. A fork inherits the answer of its
parent."""


def _note_threads() -> None:
    """Note before a fork whether this process has other threads."""
    global _has_threads
    with suppress(OSError):  # a system without /proc
        _has_threads = len(os.listdir("/proc/self/task")) > 1


def _continue_without_threads() -> None:
    """Make a forked process independent of the threads of its parent, which do not exist in it."""
    global _lock
    if _lock.acquire(blocking=False):  # free, or held by the thread that forked
        _lock.release()
    else:
        # Another thread held it, which is not here to release it and to leave its models.
        _lock = threading.RLock()
        _models_in_use.clear()
    if _has_threads:
        # OpenMP would wait for the threads of its pool for ever. PyTorch's DataLoader does the same
        # in its workers.
        torch.set_num_threads(1)


os.register_at_fork(before=_note_threads, after_in_child=_continue_without_threads)
