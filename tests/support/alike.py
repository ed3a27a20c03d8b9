"""Any number of processes in one: all others compute what this one does.

So a sum over them is so many times what is given, and what is gathered are copies. Collectives are
counted by kind, as the bytes that they are called on. Tensors may be on any device.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from olmo_sparsity.training.distributed import Processes

given: Counter[str] = Counter()
"""Bytes, by kind of collective; of all processes where they are gathered or scattered."""


class _Alike(dist.ProcessGroup):
    """Methods are those that PyTorch's collectives call, by their names there."""

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        if options is None or options.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self.size())
        return self._done("all_reduce", tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _: Any = None) -> Any:
        for gathered, own in zip(outputs, inputs, strict=True):
            for output in gathered:
                output.copy_(own)
        return self._done("all_gather", [output for gathered in outputs for output in gathered])

    def all_gather_single(self, output: Tensor, own: Tensor, _: Any = None) -> Any:
        if output.untyped_storage()._cdata != own.untyped_storage()._cdata:  # else it is in place
            output.view(self.size(), -1).copy_(own.reshape(1, -1))
        return self._done("all_gather", [output])

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, _: Any = None) -> Any:
        part = whole.view(self.size(), -1)[self.rank()]
        output.copy_(part.view_as(output)).mul_(self.size())
        return self._done("reduce_scatter", [whole], [output])

    def reduce_scatter(
        self, outputs: list[Tensor], parts: list[list[Tensor]], _: Any = None
    ) -> Any:
        for output, whole in zip(outputs, parts, strict=True):
            output.copy_(whole[self.rank()]).mul_(self.size())
        return self._done("reduce_scatter", [part for whole in parts for part in whole], outputs)

    def broadcast(self, tensors: list[Tensor], _: Any = None) -> Any:
        return self._done("broadcast", tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self._done("barrier", [])

    def _done(self, kind: str, tensors: list[Tensor], result: Any = None) -> Any:
        given[kind] += sum(tensor.nbytes for tensor in tensors)
        future: Future = Future()
        future.set_result(tensors if result is None else result)
        return _create_work_from_future(future)

    def getBackendName(self) -> str:  # PyTorch's name
        return "alike"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]


dist.Backend.register_backend(
    "alike", lambda _, rank, size, __: _Alike(rank, size), devices=["cpu", "cuda"]
)


@contextlib.contextmanager
def alike(world_size: int, rank: int = 0) -> Iterator[Processes]:
    dist.init_process_group("alike", store=dist.HashStore(), rank=rank, world_size=world_size)
    given.clear()
    try:
        local = (rank % 8, min(world_size, 8))
        yield Processes(rank, world_size, *local, group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
