"""GPUs of shapes without numbers: how many bytes a model of any size takes there, and sends.

Tensors on `cuda:0` are PyTorch's fake tensors; what would be copied back to the host is zero, and
what it asks of them is answered so that work goes on. Tensors on the host are real.

Imported only in a process of its own (process.py).
"""

from __future__ import annotations

# ruff: noqa: I001 — what PyTorch is to find must be loaded before it
import importlib
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from tests.gpu import pretend

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from olmo_sparsity.analysis.models import identity, use
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training.choose_engine import build_engine
from olmo_sparsity.training.distributed import Processes
from tests.support.alike import alike, given

aten = torch.ops.aten


class Memory(TorchDispatchMode):
    """Counts the bytes on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode()
        self.now = self.peak = 0
        self._counted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        where = torch.device(kwargs.get("device") or "cpu").type
        of_gpu = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        if not of_gpu and where == "cpu":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self.answer(args[0])
        args, kwargs = pretend.each((args, kwargs), self.without_numbers)
        made = func(*args, **kwargs)
        if func is aten._to_copy.default and where == "cpu" and kwargs.get("device"):
            with unset_fake_temporarily():
                return torch.zeros(made.shape, dtype=made.dtype)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                self.count(leaf.untyped_storage())
        return made

    def without_numbers(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        fake = x if isinstance(x, FakeTensor) else self.fake.from_tensor(x)
        fake.constant = None
        return fake

    def answer(self, asked: Tensor) -> Any:
        """No number is too large, and whatever is counted is one."""
        return 1 if asked.dtype == torch.int64 else 0.0 if asked.dtype.is_floating_point else False

    def count(self, storage: Any) -> None:
        if storage._cdata in self._counted:
            return
        size = -(-storage.nbytes() // 512) * 512  # as PyTorch's allocator rounds
        self._counted.add(storage._cdata)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.now -= size


class Stream:
    """On which nothing is ever late; an event, too."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __getattr__(self, name: str) -> Any:
        return lambda *_: self


def _apply(self: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
    """nn.Module's cannot exchange the fake tensors in its parameters."""
    with torch.no_grad():
        for weight in self.parameters():
            weight.data = function(weight.data)
    return self


def nothing() -> Any:
    """A function that does nothing, for one place: the compiler wants each name to be its own."""
    return lambda *_, **__: None


@contextmanager
def shapes() -> Iterator[Memory]:
    memory = Memory()
    machine: Any = pretend.Machine(1)
    torch._C._set_only_lift_cpu_tensors(True)
    with ExitStack() as stack:

        def exchange(target: Any, **attributes: Any) -> None:
            stack.enter_context(mock.patch.multiple(target, **attributes))

        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        exchange(torch.cuda, **pretend._torch_cuda(machine))
        exchange(torch.cuda, Stream=Stream, Event=Stream, stream=lambda _: nullcontext())
        exchange(torch.cuda, current_stream=Stream, default_stream=Stream, manual_seed=nothing())
        exchange(torch.cuda, reset_peak_memory_stats=nothing())
        exchange(torch.cuda.nvtx, range_push=nothing(), range_pop=nothing())
        exchange(torch.nn.Module, _apply=_apply)
        for module in (identity, use):  # a fake tensor has no address
            exchange(module, version_of=lambda weight: (id(weight), weight._version))
        exchange(Tensor, pin_memory=lambda tensor: tensor, record_stream=nothing())
        stack.enter_context(memory.fake)
        stack.enter_context(memory)
        yield memory


# --- a step of training ---------------------------------------------------------------------------


@dataclass
class Step:
    """Of one process of many. Bytes that each kind of collective is called on."""

    memory: int
    given: dict[str, int]


def import_deepspeed() -> None:
    """It chooses its device, a GPU; and PyTorch's compiler, as the start of an optimizer does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        with mock.patch.multiple(torch.cuda, **pretend._torch_cuda(pretend.Machine(1))):
            importlib.import_module("deepspeed")
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def training_step(config: RunConfig, world_size: int, num_micro_batches: int) -> Step:
    """The second one, of so many micro-batches; each process gets as many."""
    training = config.training
    micro = training.micro_batch_size or 1
    batch_size = micro * num_micro_batches * world_size
    training = replace(training, batch_size=batch_size, compile=False, device="cuda:0")
    config = replace(config, training=training)
    tokens_BL = torch.ones(micro * num_micro_batches, training.length, dtype=torch.long)
    batch = Batch(tokens_BL, torch.arange(training.length).expand_as(tokens_BL), tokens_BL)
    import_deepspeed()
    with warnings.catch_warnings(), shapes() as memory, ExitStack() as stack:
        warnings.simplefilter("ignore")  # DeepSpeed's, of what it imports
        processes = Processes() if world_size == 1 else stack.enter_context(alike(world_size))
        # What all processes must have alike, they have.
        alike_are = mock.patch.multiple(Processes, gather=lambda self, x: [x] * self.world_size)
        stack.enter_context(alike_are)
        stack.enter_context(mock.patch.multiple(dist, _verify_params_across_processes=nothing()))
        rebuilt = mock.patch.multiple(dist.Reducer, _rebuild_buckets=lambda _: False)
        stack.enter_context(rebuilt)
        stack.enter_context(mock.patch.multiple(dist.Logger, set_runtime_stats_and_log=nothing()))
        of_zero = mock.patch.multiple(
            "deepspeed.runtime.zero.utils",
            assert_lst_len_same_as_other_ranks=nothing(),
            get_lst_from_rank0=lambda numbers: numbers,
        )
        stack.enter_context(of_zero)
        with torch.device("cuda:0"):
            model = build_model(config.model)
        importlib.reload(importlib.import_module("deepspeed.utils.groups"))  # of an earlier step
        importlib.import_module("deepspeed.comm.comm").cdb = None
        engine = build_engine(model, config.engine, config.training, config.optimizer, processes)
        engine.step(batch, 1e-3)
        memory.peak = 0
        given.clear()
        engine.step(batch, 1e-3)
        del engine
    return Step(memory.peak, {kind: size for kind, size in given.items() if size > 2**10})
