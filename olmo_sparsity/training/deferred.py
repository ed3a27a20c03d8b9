"""Build a model without its weights, and make each of them when it is needed.

A model of many GPUs fits no process whole. Its constructor runs on the `meta` device; what it does
to a weight is noted, with the state of the random numbers, and done when the weight is looked up:
each is that of a model built as usual."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
RANDOM = {aten.uniform_.default, aten.normal_.default}


class Noted(NamedTuple):
    operation: Any
    arguments: tuple
    named: dict[str, Any]
    state: Tensor | None
    """Of the random numbers, before."""


class Deferred(Mapping[str, Tensor]):
    """The weights of `model`, by name, tied ones under the first; in main memory, in fp32."""

    def __init__(self, build: Callable[[], Any]) -> None:
        notes, truncated = _Notes(), nn.init.trunc_normal_

        def trunc_normal_(weight: Tensor, *args: Any, **named: Any) -> Tensor:
            return notes.note(truncated, weight, args, named, is_random=True)

        # PyTorch's draws nothing on `meta`: how often it draws depends on the numbers.
        patched = mock.patch.object(nn.init, "trunc_normal_", trunc_normal_)
        with patched, torch.device("meta"), notes:
            self.model: Any = build()
        self.notes = notes.of_storage
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())

    def __getitem__(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        before = torch.get_rng_state()
        for noted in self.notes[_storage(parameter)]:
            if noted.state is not None:
                torch.set_rng_state(noted.state)
            noted.operation(made, *noted.arguments, **noted.named)
        torch.set_rng_state(before)
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


class _Notes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.of_storage: dict[int, list[Noted]] = defaultdict(list)
        self.kept: list[Tensor] = []
        """So that no other tensor gets a noted address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if args and func._schema.is_mutable and getattr(args[0], "is_meta", False):
            if any(isinstance(one, Tensor) for one in args[1:]):
                raise NotImplementedError(f"{func} of two tensors")
            self.note(func, args[0], args[1:], named, func in RANDOM)
        return func(*args, **named)

    def note(
        self, function: Any, weight: Tensor, args: tuple, named: dict[str, Any], is_random: bool
    ) -> Tensor:
        if weight.numel() * weight.element_size() != weight.untyped_storage().nbytes():
            raise NotImplementedError(f"{function} of a part of a weight")
        state = torch.get_rng_state() if is_random else None
        self.of_storage[_storage(weight)].append(Noted(function, args, named, state))
        self.kept.append(weight)
        if is_random:  # draws as many numbers
            function(torch.empty(weight.shape, dtype=weight.dtype, device="cpu"), *args, **named)
        return weight


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
