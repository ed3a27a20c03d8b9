"""GPUs that are pretended: tensors that say `cuda:N` and compute on the CPU.

PyTorch's rules for devices hold, every wait of the host for the GPU is counted with the line that
caused it, and attention takes the kernel of choice. So code for a GPU is tested
where there is none.

    with pretend(num_gpus=2) as gpus:
        model.to("cuda:0")
        ...
    assert not gpus.waits

Imported only in a process of its own (process.py).
"""

from __future__ import annotations

# ruff: noqa: E402 — what PyTorch is to find must be loaded before it
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.gpu.process import ROOT, library

library()

import torch
import torch.nn.attention.varlen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing


def each(found: Any, function: Callable[[Any], Any]) -> Any:
    """As PyTorch's tree_map, in a third of the time: arguments of operations hold no other
    containers."""
    if isinstance(found, tuple | list):
        return type(found)([each(x, function) for x in found])
    if isinstance(found, dict):
        return {key: each(x, function) for key, x in found.items()}
    return function(found)


KERNELS = {"best": 0, "flash": 1, "memory-efficient": 2, "cudnn": 3}
aten = torch.ops.aten


class OnGPU(torch.Tensor):
    """Says that it is on a GPU; `inner` holds its numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> OnGPU:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
            requires_grad=inner.requires_grad,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _machine.run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"OnGPU({tuple(self.shape)}, {self.dtype}, {self.device})"

    # These two let nn.Module.to replace a parameter by one on another device.
    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["inner"], self.device

    @staticmethod
    def __tensor_unflatten__(inner: Any, device: torch.device, *_: Any) -> OnGPU:
        return OnGPU(inner["inner"], device)


# --- what every operation does --------------------------------------------------------------------

INDEXING = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
COPIES = {aten.copy_.default, aten._to_copy.default}
ANSWERS = {aten._local_scalar_dense.default, aten.equal.default}
"""Their result is a Python number, which the host waits for."""

SIZED_BY_NUMBERS = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
}


class Machine(TorchDispatchMode):
    """The GPUs of a process and what was asked of them."""

    def __init__(self, num_gpus: int) -> None:
        super().__init__()
        self.num_gpus = num_gpus
        self.waits: Counter[str] = Counter()
        """Operation and line of each wait of the host for a GPU."""

        self.uploads: Counter[str] = Counter()
        """Copies from memory that is not pinned, which the host waits for, but not for the GPU."""

        self.kernels: Counter[str] = Counter()
        """Attention that ran through a fused kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors: list[Tensor] = []
        each((args, kwargs), lambda x: tensors.append(x) if isinstance(x, Tensor) else None)
        ours = [tensor for tensor in tensors if isinstance(tensor, OnGPU)]
        target = kwargs.get("device") or (ours[0].device if ours else None)
        target = torch.device("cpu" if target is None else target)
        if not ours and target.type != "cuda":
            pins = kwargs.pop("pin_memory", None)
            made = func(*args, **kwargs)
            if pins:
                made.is_pinned_here = True
            return made
        if target.type == "cuda":
            target = torch.device("cuda", target.index or 0)
            assert target.index < self.num_gpus, f"{target} of {self.num_gpus} GPUs"
        if func in COPIES:
            return self.copy(func, args, kwargs, target)
        self.check(func, args, tensors, ours)
        if func is aten._conj.default:  # a view that bears a mark, which an OnGPU does not carry
            return self.wrap(torch.conj_physical(args[0].inner), target)
        if func in ANSWERS or func in SIZED_BY_NUMBERS:
            self.waits[f"{func} at {line()}"] += 1
        inner_args, inner_kwargs = each((args, kwargs), self.unwrap)
        if inner_kwargs.get("device") is not None and target.type == "cuda":
            inner_kwargs["device"] = torch.device("cpu")
        inner_kwargs.pop("pin_memory", None)
        made = self.compute(func, inner_args, inner_kwargs)
        if func in ANSWERS or target.type != "cuda":
            return made
        wrapped = each(made, lambda x: self.wrap(x, target))
        return return_and_correct_aliasing(func, args, kwargs, wrapped)

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in ATTENTION:
            name, kernel = ATTENTION[func]
            if "backward" not in str(func):
                self.kernels[name] += 1
            return kernel(*args, **kwargs)
        if func is aten.histc.default:  # CUDA has it for integers
            return torch.histc(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        return func(*args, **kwargs)

    def unwrap(self, x: Any) -> Any:
        return x.inner if isinstance(x, OnGPU) else x

    def wrap(self, x: Any, device: torch.device) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, OnGPU):
            return x
        return OnGPU(x, device)

    def copy(self, func: Any, args: Any, kwargs: dict[str, Any], target: torch.device) -> Any:
        """Between devices, or to another dtype or layout."""
        in_place = func is aten.copy_.default
        source, where = (args[1], args[0].device) if in_place else (args[0], target)
        non_blocking = kwargs.get("non_blocking") or (in_place and any(args[2:]))
        pinned = non_blocking and any(getattr(x, "is_pinned_here", False) for x in args)
        if isinstance(source, OnGPU) and where.type == "cpu" and not pinned:
            self.waits[f"copy to the host at {line()}"] += 1
        uploads = where.type == "cuda" and not isinstance(source, OnGPU) and not pinned
        if uploads and source.dim() and source.numel():
            self.uploads[line()] += 1
        numbers = source.inner if isinstance(source, OnGPU) else source
        if in_place:
            inner = args[0].inner if isinstance(args[0], OnGPU) else args[0]
            inner.copy_(numbers)
            return args[0]
        kwargs = {key: x for key, x in kwargs.items() if key not in ("device", "non_blocking")}
        kwargs.pop("pin_memory", None)
        made = aten._to_copy.default(numbers, **kwargs, device=torch.device("cpu"))
        return self.wrap(made, where) if where.type == "cuda" else made

    def check(self, func: Any, args: Any, tensors: list[Tensor], ours: list[OnGPU]) -> None:
        """PyTorch's rules: one device for all, but for single numbers and indices of the host."""
        if func in INDEXING and ours:
            indices = [index for index in args[1] if isinstance(index, Tensor)]
            by_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
            # A single number fills a mask.
            if by_mask and (func is aten.index.Tensor or args[2].numel() != 1):
                self.waits[f"{func} by a mask at {line()}"] += 1
            for index in indices:
                if index.device.type == "cpu" and args[0].device.type == "cuda":
                    self.uploads[line()] += 1
            tensors = [t for t in tensors if all(t is not index for index in indices)] + [
                index for index in indices if index.device.type != "cpu"
            ]
        devices = {tensor.device for tensor in tensors if tensor.dim()}
        if len(devices) > 1 or (not devices and len({t.device for t in ours}) > 1):
            found = ", ".join(f"{t.device} {tuple(t.shape)}" for t in tensors)
            raise RuntimeError(f"{func} needs tensors on one device; found {found}, at {line()}")


def line() -> str:
    """The innermost line of this project that is being run; none in a backward pass."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parts[: len(ROOT.parts)] == ROOT.parts and {"tests", ".venv"}.isdisjoint(
            path.parts
        ):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "no line of the project"


# --- kernels of attention -------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q.float() @ k.float().mT) * scale
    if causal:
        scores = scores + torch.full_like(scores[0, 0], float("-inf")).triu(1)
    return scores if bias is None else scores + bias.float()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    powers_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of each query; a kernel keeps no scores. `powers_of_two`: the
    kernel multiplies scores by log2(e), so that the lowest numbers become -inf, and a query that
    sees nothing else gets NaN."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = _scores(q, k, bias, causal, scale)
    if powers_of_two:
        scores = scores * math.log2(math.e) * math.log(2)
    mixed = (scores.softmax(-1) @ v.float()).to(q.dtype)
    return mixed.transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp(-1)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mixed: Tensor,
    log_sum: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    shares = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(shares, 1).float() for x in (k, v))
    weights = (_scores(q, wide_k, bias, causal, scale) - log_sum[..., None]).exp()
    grad = grad.float()
    inside = grad @ wide_v.mT - (grad * mixed.float()).sum(-1, keepdim=True)
    of_scores = weights * inside
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    of_k = (of_scores.mT @ q.float() * factor).unflatten(1, (-1, shares)).sum(2)
    of_v = (weights.mT @ grad).unflatten(1, (-1, shares)).sum(2)
    of_bias = Tensor() if bias is None else of_scores.to(bias.dtype)
    return (of_scores @ wide_k * factor).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_bias


def _number(q: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.long, device=q.device)


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """With the sizes and strides that CUDA's kernel asks for."""
    assert q.dtype == k.dtype == v.dtype, f"dtypes {q.dtype}, {k.dtype}, {v.dtype}"
    assert q.shape[1] == k.shape[1] == v.shape[1], f"heads of {q.shape}, {k.shape}"
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "strides"
    if bias is not None:
        assert bias.dtype == q.dtype, f"a bias of {bias.dtype} for {q.dtype}"
        assert bias.shape == (*q.shape[:3], k.shape[2]), f"a bias of {bias.shape}"
        aligned = 16 // bias.element_size()
        steps = [s for s, size in zip(bias.stride(), bias.shape, strict=True) if size > 1]
        assert all(step % aligned == 0 for step in steps[:-1]), f"strides {bias.stride()}"
    mixed, log_sum = _forward(q, k, v, bias, is_causal, scale, powers_of_two=True)
    log_sum = torch.nn.functional.pad(log_sum, (0, -q.shape[2] % 32), value=float("inf"))
    if not compute_log_sumexp:  # the real one is left as it was in memory
        log_sum = log_sum[..., :0]
    return mixed, log_sum, _number(q), _number(q)


def efficient_backward(*given: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    grad, q, k, v, bias, mixed, log_sum, _, _, _, _, *is_causal = given
    assert log_sum.shape[-1] >= q.shape[2], "the backward pass reads what nothing has written"
    log_sum = log_sum[..., : q.shape[2]]
    return _backward(grad, q, k, v, bias, mixed, log_sum, any(is_causal), scale)


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    assert q.dtype in (torch.bfloat16, torch.float16), f"flash attention in {q.dtype}"
    mixed, log_sum = _forward(q, k, v, None, is_causal, scale)
    one = _number(q)
    return mixed, log_sum, None, None, q.shape[2], k.shape[2], one, one, None


def flash_backward(*given: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    grad, q, k, v, mixed, log_sum, _, _, _, _, _, is_causal, _, _ = given
    return _backward(grad, q, k, v, None, mixed, log_sum, is_causal, scale)[:3]


def cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    mixed, log_sum = _forward(q, k, v, bias, is_causal, scale)
    one = _number(q)
    return mixed, log_sum[..., None], None, None, q.shape[2], k.shape[2], one, one, None


def cudnn_backward(*given: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    grad, q, k, v, mixed, log_sum, _, _, bias, _, _, _, _, _, is_causal = given
    return _backward(grad, q, k, v, bias, mixed, log_sum[..., 0], is_causal, scale)[:3]


def _each_document(x: Tensor, cum: Tensor) -> list[Tensor]:
    """(N, H, K) → (1, H, n, K) of each."""
    return [part.transpose(0, 1)[None] for part in x.split(cum.diff().tolist())]


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_q: Tensor,
    cum_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window: Any = None,
    enable_gqa: bool = False,
    *_: Any,
) -> tuple[Tensor, ...]:
    assert q.dtype == k.dtype == v.dtype, f"dtypes {q.dtype}, {k.dtype}, {v.dtype}"
    assert q.dtype in (torch.bfloat16, torch.float16), f"flash attention in {q.dtype}"
    assert is_causal
    assert cum_q.dtype == cum_k.dtype == torch.int32
    assert type(max_q) is type(max_k) is int  # not asked of the GPU
    assert (cum_q[0], cum_q[-1]) == (0, len(q))
    assert cum_q.diff().max() <= max_q
    assert enable_gqa or q.shape[1] == k.shape[1], f"heads of {q.shape}, {k.shape}"
    parts = zip(*(_each_document(x, cum_q) for x in (q, k, v)), strict=True)
    found = [_forward(*part, None, True, scale) for part in parts]
    mixed = torch.cat([out[0].transpose(0, 1) for out, _ in found]).contiguous()
    return mixed, torch.cat([log_sum[0] for _, log_sum in found], 1), _number(q)


def packed_backward(*given: Any) -> tuple[Tensor, ...]:
    grad, q, k, v, mixed, log_sum, cum_q, _, _, _, _, _, *others = given
    parts = zip(*(_each_document(x, cum_q) for x in (grad, q, k, v, mixed)), strict=True)
    sums = [part[..., 0] for part in _each_document(log_sum.mT[..., None], cum_q)]
    found = [
        _backward(g, *own, None, out, log_sum, True, others[0] if others else None)[:3]
        for (g, *own, out), log_sum in zip(parts, sums, strict=True)
    ]
    return tuple(
        torch.cat([x[0].transpose(0, 1) for x in of]).contiguous()
        for of in zip(*found, strict=True)
    )


ATTENTION = {
    torch.ops.torch_attn._varlen_attn.default: ("packed", packed),
    torch.ops.torch_attn._varlen_attn_backward.default: ("", packed_backward),
    aten._scaled_dot_product_efficient_attention.default: ("memory-efficient", efficient),
    aten._scaled_dot_product_efficient_attention_backward.default: ("", efficient_backward),
    aten._scaled_dot_product_flash_attention.default: ("flash", flash),
    aten._scaled_dot_product_flash_attention_backward.default: ("", flash_backward),
    aten._scaled_dot_product_cudnn_attention.default: ("cudnn", cudnn),
    aten._scaled_dot_product_cudnn_attention_backward.default: ("", cudnn_backward),
}

# --- torch.cuda -----------------------------------------------------------------------------------

_machine: Any = None  # of the tensors that are computed with now
_GIB = 2**30


def _torch_cuda(machine: Machine) -> dict[str, Any]:
    now = [0]

    def index_of(device: Any = None) -> int:
        if device is None:
            return now[0]
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return now[0] if device.index is None else device.index

    def set_device(device: Any) -> None:
        given = device if isinstance(device, int) else torch.device(device).index
        if given is None:  # as the real one
            raise ValueError(f"Expected a torch.device with a specified index, but got:{device}")
        now[0] = given

    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        total_memory=80 * _GIB,
        major=9,
        minor=0,
        uuid="GPU-0",
        multi_processor_count=132,
    )

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: machine.num_gpus,
        "current_device": lambda: now[0],
        "set_device": set_device,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "max_memory_allocated": lambda device=None: 0,
        "mem_get_info": lambda device=None: (80 * _GIB, 80 * _GIB),
        "synchronize": lambda device=None: machine.waits.update([f"synchronize at {line()}"]),
        "empty_cache": lambda: None,
        "manual_seed_all": lambda seed: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
    }


def _pin(self: Tensor, *_: Any) -> Tensor:
    pinned: Any = self.clone()
    pinned.is_pinned_here = True
    return pinned


@contextmanager
def pretend(num_gpus: int = 1, *, kernel: str = "best") -> Iterator[Machine]:
    """`kernel`: of attention, where it is switched on: flash, memory-efficient or cudnn."""
    global _machine
    force_kernel = library().force_kernel
    machine = _machine = Machine(num_gpus)
    move = torch.nn.Module.to

    def without_gradients(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        for parameter in self.parameters():
            parameter.grad = None  # which cannot change its type beside the parameter
        return move(self, *args, **kwargs)

    torch._C._set_only_lift_cpu_tensors(True)
    force_kernel(KERNELS[kernel])
    with ExitStack() as stack:
        stack.callback(force_kernel, 0)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(mock.patch.multiple(torch.cuda, **_torch_cuda(machine)))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", _pin))
        stack.enter_context(mock.patch.object(torch.nn.Module, "to", without_gradients))
        stack.enter_context(machine)
        yield machine
