"""Build a model without its weights, and make each weight when it is looked up.

    source = Deferred(lambda: build_model(config.model))
    source.model                                # on the `meta` device: shapes, and no numbers
    source["transformer.blocks.7.ff_out.weight"]    # this weight, and no other, in main memory

A model of many GPUs does not fit into one process. So its constructor runs on the `meta` device.
Each operation on a weight is recorded, with the state of the random numbers before it:

    the constructor    normal_(W₀)    normal_(W₁)    mul_(W₁, 0.5)
    recorded           state 0        state 1        –
    source["W₁"]       set state 1, normal_, mul_ by 0.5, on an empty tensor

So each weight has the numbers that it would have in a model built as usual. start.py makes the
source, and engines that shard (fsdp.py, deepspeed.py) look up one weight after the other.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

RANDOM = {torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default}
"""Operations of a constructor that draw random numbers."""


@contextlib.contextmanager
def without_drawing() -> Iterator[None]:
    """Inside, a constructor draws no random numbers, so that its weights have no defined values. It
    is for a model that is filled from a checkpoint or another model: to draw 7B numbers takes
    minutes."""
    patched = mock.patch.object(nn.init, "trunc_normal_", lambda weight, *_, **__: weight)
    with patched, _DrawsNothing():
        yield


class _DrawsNothing(TorchDispatchMode):
    """Leaves out operations that draw random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in RANDOM else func(*args, **(kwargs or {}))


class Operation(NamedTuple):
    """An operation in place on a weight, without the weight."""

    function: Any
    arguments: tuple
    keywords: dict[str, Any]
    random_state: Tensor | None
    """State of the random numbers before it; None if it draws none."""


class Deferred(Mapping[str, Tensor]):
    """The weights of `model`, by name, in fp32 in main memory. Tied ones are under their first
    name. `model` itself is on the `meta` device."""

    def __init__(self, build: Callable[[], Any]) -> None:
        recorder = _Recorder()
        torch_trunc_normal_ = nn.init.trunc_normal_

        # PyTorch's own draws again where a number is too large, so how often it draws depends on
        # the numbers, which `meta` has not. So it is recorded as one operation, not as its parts.
        def trunc_normal_(weight: Tensor, *args: Any, **keywords: Any) -> Tensor:
            return recorder.record(torch_trunc_normal_, weight, args, keywords, is_random=True)

        patched = mock.patch.object(nn.init, "trunc_normal_", trunc_normal_)
        with patched, torch.device("meta"), recorder:
            self.model: Any = build()
        self.operations = recorder.operations_of
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())

    def __getitem__(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        # On the CPU, as the numbers that a seed gives differ between devices.
        weight = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        state_before = torch.get_rng_state()
        for operation in self.operations[_storage(parameter)]:
            if operation.random_state is not None:
                torch.set_rng_state(operation.random_state)
            operation.function(weight, *operation.arguments, **operation.keywords)
        torch.set_rng_state(state_before)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


class _Recorder(TorchDispatchMode):
    """Records operations in place on tensors of the `meta` device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations_of: dict[int, list[Operation]] = defaultdict(list)
        """The operations on each weight, by the address of its storage."""

        # Keeps weights alive that a constructor replaces, so that no later one gets their address.
        self.recorded: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if args and func._schema.is_mutable and getattr(args[0], "is_meta", False):
            # The second tensor would have no numbers when the operation is repeated.
            if any(isinstance(argument, Tensor) for argument in args[1:]):
                raise NotImplementedError(f"{func} of two tensors")
            self.record(func, args[0], args[1:], keywords, func in RANDOM)
        return func(*args, **keywords)

    def record(
        self, function: Any, weight: Tensor, args: tuple, keywords: dict[str, Any], is_random: bool
    ) -> Tensor:
        """Record an operation on a whole weight, and return the weight. If it `is_random`, draw
        its random numbers."""
        if weight.numel() * weight.element_size() != weight.untyped_storage().nbytes():
            raise NotImplementedError(f"{function} of a part of a weight")
        random_state = torch.get_rng_state() if is_random else None
        operation = Operation(function, args, keywords, random_state)
        self.operations_of[_storage(weight)].append(operation)
        self.recorded.append(weight)
        if is_random:
            # Draws as many numbers as on real memory, so that later weights get theirs.
            drawn = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
            function(drawn, *args, **keywords)
        return weight


def _storage(tensor: Tensor) -> int:
    """Return what identifies the storage of a tensor, also on `meta`."""
    return tensor.untyped_storage()._cdata
