"""Identify a model in memory by everything that decides its logits, as it is now.

Place in the flow: beneath `in_use` and `LoadedModel.fingerprint`.

A model in memory is trained on, edited, hooked and patched. `read_state` reads, in about the time
in which its weights can be read once:

- parameters and buffers, including buffers that no state dict holds (RoPE frequencies);
- plain attributes of all modules (norm epsilons, scales, active adapters) and the configuration;
- code that is not the libraries' own: hooks, replaced forwards, another attention function. Of a
  hook this is its code with the values that it closes over, so it has no identity beyond that.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from olmo_sparsity.analysis.kernels.attention import OWN_ATTENTION

BLOCK = 509
"""Words of 8 bytes that one sum covers. It divides no usual width, so that an exchange of columns
changes the sums, too."""

WHOLE_B = 2**16
"""Bytes of a tensor that is hashed instead of summed."""

TRUSTED = frozenset({
    "torch", "transformers", "accelerate", "peft", "bitsandbytes", "torchao", "olmo",
    "olmo_sparsity", "builtins", "functools", "kernels",
})  # fmt: skip
"""Packages with code that counts as part of a model's class; their versions are recorded."""


@dataclasses.dataclass(eq=False)
class State:
    """The identity of a model at one moment. It holds no weights."""

    structure: dict[str, str]
    """Attributes and configuration of each module, and foreign code."""

    tensors: dict[str, bytes]
    """A checksum of each parameter and buffer."""

    versions: list[tuple[int, int]]
    """Address and number of changes in place, of each tensor."""

    foreign: tuple[str, ...]
    """Hooks, replaced forwards and functions that come from no library."""

    sha256: str | None = None
    """Of all bytes; computed on demand by `fingerprint_weights`."""

    def differences(self, other: State) -> str:
        """Return what differs, for a message; empty if the two are one model."""
        found = []
        changed = _changed(self.tensors, other.tensors)
        if changed:
            found.append(f"{_some(changed)} of {len(self.tensors)} tensors")
        code = sorted(set(self.foreign) ^ set(other.foreign))
        if code:
            found.append(_some(code))
        elif structure := _changed(self.structure, other.structure):
            found.append(f"settings of {_some(structure)}")
        return ", ".join(found)


def _changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def read_state(model: nn.Module) -> State:
    reading = _Reading()
    reading.read_module(model, "")
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        for hook in getattr(torch_module, name, {}).values():
            reading.read_hook("all modules", hook)
    reading.read_patches(model)
    return State(
        reading.structure,
        {name: _checksum(tensor) for name, tensor in reading.tensors.items()},
        [version_of(tensor) for tensor in reading.tensors.values()],
        tuple(reading.foreign),
    )


def fingerprint_weights(model: nn.Module, state: State | None = None) -> str:
    """The SHA-256 of what `read_state` reads, with the bytes of all weights. It is the same in
    another process, and differs from that of files."""
    reading = _Reading()
    reading.read_module(model, "")
    state = state or read_state(model)
    digest = hashlib.sha256(repr(sorted(state.structure.items())).encode())
    offloaded: Mapping[str, Any] = {}
    if any(tensor.is_meta for tensor in reading.tensors.values()):
        from accelerate.utils.modeling import get_state_dict_offloaded_model

        offloaded = get_state_dict_offloaded_model(model)
    for name, tensor in sorted(reading.tensors.items()):
        digest.update(name.encode())
        for part in _plain_parts(offloaded.get(name, tensor)):
            digest.update(_bytes(part))
    return digest.hexdigest()


# --- attributes, configurations, code -------------------------------------------------------------

_OF_EACH_MODULE = frozenset(vars(nn.Module())) | {
    *("forward", "_hf_hook", "_old_forward", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"),
}
_WITHOUT_EFFECT = ("cache", "checkpoint", "_is_hf_initialized", "flops", "peft_config", "hf_quant",
                   "compiled_call")  # fmt: skip
"""Parts of names of attributes that decide no logits: running state, where a model came from."""

_OF_A_PRETRAINED_MODEL = {"generation_config", "name_or_path", "warnings_issued", "hf_device_map",
                          "loss_type", "kernel_config", "all_tied_weights_keys"}  # fmt: skip
_OF_A_CONFIG = {"name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype",
                "model_type", "use_cache", "output_attentions", "output_hidden_states",
                "return_dict", "id2label", "label2id", "problem_type", "pad_token_id",
                "bos_token_id", "eos_token_id", "chunk_size_feed_forward",
                "quantization_config"}  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_RUNNING_ROPE = ("dynamic", "longrope")
"""These write the frequencies of the last text into their buffers."""

_DEPTH = 6


class _Reading:
    """One walk through a model."""

    def __init__(self) -> None:
        self.structure: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.foreign: list[str] = []
        self._seen: dict[int, str] = {}
        self._classes: dict[type, str] = {}
        self._configs: dict[int, str] = {}

    def read_module(self, model: nn.Module, prefix: str) -> None:
        new = [
            (name, module)
            for name, module in model.named_modules(prefix=prefix)
            if id(module) not in self._seen
        ]
        self._seen |= {id(module): name for name, module in new}
        for name, module in new:
            self._read_one(name, module)
        for name, module in new:  # last, as their values may hold the model
            self._read_code(name, module)

    def _read_one(self, name: str, module: nn.Module) -> None:
        dot = f"{name}." if name else ""
        pretrained = hasattr(type(module), "_from_config")
        parts: list[Any] = [self._class(type(module))]
        for key, value in vars(module).items():
            if key in _OF_EACH_MODULE or any(word in key for word in _WITHOUT_EFFECT):
                continue
            if pretrained and (key[0] == "_" or key in _OF_A_PRETRAINED_MODEL):
                continue
            parts.append((key, self._plain(value, dot + key)))
        rope_type = repr(getattr(module, "rope_type", ""))
        running = any(kind in rope_type for kind in _RUNNING_ROPE)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or (running and key.endswith("inv_freq") and "original" not in key):
                continue
            parts.append((key, self._tensor(tensor, dot + key)))
        self.structure[name] = repr(parts)

    def _read_code(self, name: str, module: nn.Module) -> None:
        of = name or "the model"
        for hooks in _HOOKS:
            for hook in (getattr(module, hooks, None) or {}).values():
                self.read_hook(of, hook)
        forward = vars(module).get("forward")
        if forward is not None and "_hf_hook" not in vars(module) and _is_foreign(forward):
            self._add_code(f"another forward of {of}", forward)

    def read_hook(self, of: str, hook: Any) -> None:
        if _is_foreign(hook):
            self._add_code(f"the hook {_name(hook)} on {of}", hook)

    def read_patches(self, model: nn.Module) -> None:
        """Functions that someone has put into the modules of transformers, or registered there."""
        names = {kind.__module__ for kind in self._classes}
        for name in sorted(name for name in names if name.startswith("transformers.")):
            for key, value in sorted(vars(sys.modules[name]).items()):
                if isinstance(value, FunctionType) and _is_foreign(value):
                    self._add_code(f"another {key} in {name}", value)
        kernel: Any = getattr(getattr(model, "config", None), "_attn_implementation", None)
        modeling = sys.modules.get("transformers.modeling_utils")
        if isinstance(kernel, str) and modeling is not None:
            kernel = "sdpa" if kernel == OWN_ATTENTION else kernel
            if kernel not in ("sdpa", "eager"):  # which differ by rounding
                self.structure["attention"] = kernel
            attend = modeling.ALL_ATTENTION_FUNCTIONS.get(kernel)
            if attend is not None and _is_foreign(attend):
                self._add_code(f"the attention function {_name(attend)} for {kernel}", attend)

    def _add_code(self, said: str, function: Any) -> None:
        self.foreign.append(said)
        self.structure[f"{len(self.foreign)}: {said}"] = repr(self._code(function, 0))

    def _class(self, kind: type) -> str:
        if kind not in self._classes:
            self._classes[kind] = f"{kind.__module__}.{kind.__qualname__}"
            forward = getattr(kind, "forward", None)
            if forward is not None and _is_foreign(forward):
                roots = {of.__module__.partition(".")[0] for of in kind.__mro__}
                if not {_root(f) for f in _chain(forward)} <= roots:
                    self.foreign.append(f"another forward of all {kind.__name__}")
                self._classes[kind] += repr(self._code(forward, 0))
        return self._classes[kind]

    def _tensor(self, tensor: Tensor, name: str) -> str:
        """A tensor with several names is read under the first."""
        first = self._seen.setdefault(id(tensor), name)
        if first == name:
            self.tensors[name] = tensor
        return f"tensor {first} {tensor.dtype} {tuple(tensor.shape)}"

    def _plain(self, value: Any, name: str, depth: int = 0) -> Any:
        kind = type(value)
        if kind in (int, float, str, bool, bytes) or value is None or depth > _DEPTH:
            return value if depth <= _DEPTH else kind.__name__
        if kind in (tuple, list):
            inner = enumerate(value)
            return kind.__name__, [self._plain(v, f"{name}.{i}", depth + 1) for i, v in inner]
        if isinstance(value, set | frozenset):
            return "set", sorted(map(repr, value))
        if isinstance(value, Mapping):
            items = sorted(((repr(k), v) for k, v in value.items()), key=lambda item: item[0])
            return "dict", [(k, self._plain(v, f"{name}.{k}", depth + 1)) for k, v in items]
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if isinstance(value, torch.dtype | torch.device | Enum | type):
            return str(value)
        if isinstance(value, nn.Module):
            self.read_module(value, f"{name}*")
            return f"module {self._seen[id(value)]}"
        if hasattr(value, "to_diff_dict") or dataclasses.is_dataclass(value):
            return self._config(value, depth)
        if callable(value):
            return self._code(value, depth)
        return f"{kind.__module__}.{kind.__qualname__}"

    def _config(self, config: Any, depth: int) -> str:
        if id(config) not in self._configs:
            self._configs[id(config)] = "the same"
            values = sorted(vars(config).items())
            described = [
                (key, self._plain(value, "config", depth + 1))
                for key, value in values
                if key[0] != "_" and key not in _OF_A_CONFIG
            ]
            self._configs[id(config)] = repr((type(config).__name__, described))
            return self._configs[id(config)]
        return "the same" if depth == 0 else self._configs[id(config)]

    def _code(self, given: Any, depth: int) -> Any:
        """A function of a library by its name; others by their code and the values in it."""
        if not _is_foreign(given) and not isinstance(given, functools.partial):
            return _name(given)
        if depth > _DEPTH or id(given) in self._seen:
            return _name(given)
        self._seen[id(given)] = _name(given)
        inner, name = functools.partial(self._plain, depth=depth + 1), f"{_name(given)}*"
        if isinstance(given, functools.partial):
            return [self._code(given.func, depth + 1), inner((given.args, given.keywords), name)]
        function = getattr(given, "__func__", given)
        if not isinstance(function, FunctionType):  # an object that is called
            call = getattr(type(given), "__call__", None)  # noqa: B004 (of its class)
            code = self._code(call, depth + 1) if isinstance(call, FunctionType) else ""
            return [_name(given), code, inner(getattr(given, "__dict__", {}), name)]
        owner = getattr(given, "__self__", None)
        values = {} if owner is None or isinstance(owner, nn.Module) else vars(owner)
        closed = [_content(cell) for cell in function.__closure__ or ()]
        used = [function.__globals__.get(word) for word in _words(function.__code__)]
        return [
            _bytecode(function.__code__),
            inner((values, closed, function.__defaults__, function.__kwdefaults__, used), name),
        ]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def _words(code: CodeType) -> list[str]:
    inner = [word for const in code.co_consts if isinstance(const, CodeType)
             for word in _words(const)]  # fmt: skip
    return [*code.co_names, *inner]


def _bytecode(code: CodeType) -> Any:
    consts = [_bytecode(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_name, code.co_code, consts, code.co_names


def _name(function: Any) -> str:
    named = getattr(function, "func", function)
    named = named if hasattr(named, "__qualname__") else type(named)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def _chain(function: Any) -> Iterator[Any]:
    """A function, and what it wraps."""
    for _ in range(16):
        if isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)
        if function is None:
            return


def _root(function: Any) -> str:
    """The package in which a function was written, whatever it says of itself."""
    scope = getattr(function, "__globals__", None)
    named = function if hasattr(function, "__qualname__") else type(function)
    module = scope.get("__name__") if scope is not None else getattr(named, "__module__", None)
    return str(module or "builtins").partition(".")[0].removeprefix("_")


def _is_foreign(function: Callable[..., Any]) -> bool:
    return any(_root(f) not in TRUSTED for f in _chain(function))


# --- tensors --------------------------------------------------------------------------------------


def version_of(tensor: Tensor) -> tuple[int, int]:
    try:
        return tensor.data_ptr(), tensor._version
    except RuntimeError:  # of inference mode, or without storage
        return 0, 0


def _plain_parts(tensor: Any) -> list[Any]:
    """A tensor of another library, such as a quantized one, in plain tensors."""
    if type(tensor) in (Tensor, nn.Parameter):
        return [tensor.detach()]
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        inner = [part for name in names for part in _plain_parts(getattr(tensor, name))]
        return [*inner, repr(context).encode()]
    if isinstance(tensor, Tensor):
        return [tensor.detach().as_subclass(Tensor)]
    return [tensor]


def _bytes(part: Any) -> Any:
    if isinstance(part, bytes):
        return part
    if not isinstance(part, Tensor) or part.layout is not torch.strided:
        buffer = io.BytesIO()
        torch.save(part, buffer)
        return buffer.getvalue()
    return part.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _checksum(tensor: Tensor) -> bytes:
    """Return the SHA-256 of a small tensor, or of sums over the blocks of a large one."""
    digest = hashlib.sha256()
    for part in _plain_parts(tensor):
        if not isinstance(part, Tensor) or part.layout is not torch.strided:
            digest.update(_bytes(part))
        elif part.is_meta:
            digest.update(b"offloaded")
        elif part.numel() * part.element_size() <= WHOLE_B:
            digest.update(_bytes(part))
        else:
            words = _words_of(part)
            whole = words.numel() - words.numel() % BLOCK
            sums = words[:whole].view(-1, BLOCK).sum(1, dtype=torch.int64)
            for found in (sums, words[whole:]):
                digest.update(found.cpu().numpy().data)
    return digest.digest()


def _words_of(tensor: Tensor) -> Tensor:
    """The bytes, in the largest integers that they and their address fill."""
    flat = tensor.flatten()
    for dtype in (torch.int64, torch.int32, torch.int16):
        size = dtype.itemsize
        start = flat.storage_offset() * flat.element_size()
        if flat.numel() * flat.element_size() % size == 0 and start % size == 0:
            return flat.view(dtype)
    return flat.view(torch.uint8)
