"""Identify a model: its files by their bytes, in memory by weights, buffers, plain settings, and
code that somebody has put in place of its own.

Place in the flow: below `in_use` and `LoadedModel.fingerprint`.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from dis import get_instructions
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.files import sha256_of

BLOCK = 509
"""Words of 8 bytes in a row of the matrix whose sums identify a tensor."""

TRUSTED = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "torchao", "olmo",
           "olmo_sparsity", "kernels")  # fmt: skip
"""Packages whose hooks, and functions in place of methods, are part of a model's class."""


@dataclass(frozen=True)
class State:
    """A model at one moment. It holds no weights."""

    settings: Mapping[str, str]
    """Class and plain attributes of each module, and the configuration."""

    tensors: Mapping[str, bytes]
    """A checksum of each parameter and buffer."""

    replaced: Mapping[str, str] = field(default_factory=dict)
    """The code of each function that another package has put in place of a method."""

    @property
    def sha256(self) -> str:
        """Return a hash that is the same in another process. It is never that of files."""
        parts = [sorted(self.settings.items()), sorted(self.tensors.items())]
        if self.replaced:  # else a hash of an earlier release stays as it was
            parts.append(sorted(self.replaced.items()))
        return hashlib.sha256(repr(tuple(parts)).encode()).hexdigest()

    def differences(self, other: State) -> str:
        """Return what differs, for a message; empty if the two are one model."""
        names = _names_that_differ(self.tensors, other.tensors)
        if names:
            return f"{len(names)} of {len(self.tensors)} tensors, such as {names[0]}"
        names = _names_that_differ(self.settings, other.settings)
        if names:
            return f"settings of {names[0] or 'the model'}"
        names = _names_that_differ(self.replaced, other.replaced)
        return f"the code of {names[0]}" if names else ""


def _names_that_differ(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


def read_state(model: nn.Module) -> State:
    """Return the state of a model. It reads all weights, in about twice the time that reading their
    memory takes."""
    settings = {name: repr(_settings(module)) for name, module in model.named_modules()}
    settings["config"] = repr(_config(model))
    tensors = dict(_tensors(model))
    if any(tensor.is_meta for tensor in tensors.values()):
        check_weights_exist(model)
        from accelerate.utils.modeling import get_state_dict_offloaded_model

        tensors |= get_state_dict_offloaded_model(model)
    checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    return State(settings, checksums, _replaced_code(model))


def check_weights_exist(model: nn.Module) -> None:
    """Reject weights on the meta device, except those that accelerate has offloaded: its hooks
    know where these are."""
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            continue
        for parameter, tensor in module._parameters.items():
            if tensor is not None and tensor.is_meta:
                place = f"{name}.{parameter}" if name else parameter
                raise ConfigError(
                    f"{type(model).__name__} has no weights: {place} is on the meta device; load "
                    "them with from_pretrained, or with model.to_empty(device='cpu') and "
                    "load_state_dict"
                )


def check_hooks(model: nn.Module) -> None:
    """Reject hooks of packages that are not trusted: what they compute is not part of a state."""
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            _refuse_hook(hook, name or "the model")
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        for hook in getattr(torch_module, name).values():
            _refuse_hook(hook, "all modules")


def _refuse_hook(hook: Any, place: str) -> None:
    if _name(hook).partition(".")[0].removeprefix("_") not in TRUSTED:
        raise ConfigError(f"model: the hook {_name(hook)} on {place} changes it; remove the hook")


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


# --- settings -------------------------------------------------------------------------------------

_RUNNING = ("training", "warnings_issued", "name_or_path", "loss_type", "hf_device_map",
            "generation_config", "all_tied_weights_keys", "fused_dims",
            "token_forwards")  # fmt: skip
"""Attributes of modules that change no logits: how a model runs, and where it came from."""

_OF_ADAPTERS = ("_disable_adapters", "_active_adapter")
"""The only private attributes that change logits: which of PEFT's adapters are applied."""

_OF_A_CONFIG = {"name_or_path", "transformers_version", "architectures", "dtype", "model_type",
                "use_cache", "output_attentions", "output_hidden_states", "return_dict", "id2label",
                "label2id", "problem_type", "pad_token_id", "bos_token_id", "eos_token_id",
                "chunk_size_feed_forward", "quantization_config"}  # fmt: skip
"""Entries of transformers' configurations that change no logits. The dtype is that of each
tensor."""


def _settings(module: nn.Module) -> Any:
    """Return the class of a module, its plain attributes, and the shapes of its tensors."""
    attributes = {key: value for key, value in vars(module).items() if _changes_logits(key, value)}
    tensors = {**module._parameters, **module._buffers}
    shapes = {key: (t.dtype, tuple(t.shape)) for key, t in tensors.items() if t is not None}
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return kind, sorted(attributes.items()), shapes


def _changes_logits(key: str, value: Any) -> bool:
    if key in _OF_ADAPTERS:
        return True
    if key.startswith("_") or "checkpoint" in key or "cache" in key or key in _RUNNING:
        return False
    return _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str)


def _config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        return _of_config(config)
    is_ours = is_dataclass(config) and not isinstance(config, type)
    return asdict(config) if is_ours else None


def _of_config(value: Any) -> Any:
    """Return the entries of one of transformers' configurations, and of those in it."""
    if hasattr(value, "to_dict"):
        value = {k: v for k, v in vars(value).items() if k[0] != "_" and k not in _OF_A_CONFIG}
    if not isinstance(value, Mapping):
        return value
    return sorted((str(key), repr(_of_config(inner))) for key, inner in value.items())


# --- code in place of a method --------------------------------------------------------------------

_THIS_PROCESS = os.urandom(8).hex()
"""Stands for a value in such code that cannot be compared between processes, so that a model with
it continues no results of another process."""


def _replaced_code(model: nn.Module) -> dict[str, str]:
    """Return the code that somebody has put in place of methods of a module, or of its class.
    Otherwise a model with another `forward` would continue results of the model that it was."""
    names = {id(module): name or "the model" for name, module in model.named_modules()}
    replaced = dict[str, str]()
    classes = dict[type, None]()
    for name, module in model.named_modules():
        classes |= dict.fromkeys(type(module).__mro__)
        for key, value in vars(module).items():
            if _replaces_method(module, key, value):
                replaced[f"{name}.{key}" if name else key] = repr(_code(value, dict(names)))
    for kind in classes:
        own_package = _package(kind.__module__)
        for key, value in vars(kind).items():
            function = getattr(value, "__func__", value)  # of a classmethod or staticmethod
            if isinstance(function, FunctionType) and _is_foreign(function, own_package):
                replaced[f"{kind.__qualname__}.{key}"] = repr(_code(function, dict(names)))
    return replaced


def _replaces_method(module: nn.Module, key: str, value: Any) -> bool:
    """Return whether an attribute hides a method of the class. Not if a trusted package has put it
    around that method, as accelerate does to move tensors between devices."""
    original = getattr(type(module), key, None)
    if not callable(original) or not callable(value) or isinstance(value, type):
        return False
    bound = [link for link in _wrapped(value) if getattr(link, "__self__", None) is module]
    calls_original = any(link.__func__ is original for link in bound)
    return not calls_original or _is_foreign(value)


def _is_foreign(function: Any, own_package: str = "") -> bool:
    """Return whether a function, or one that it wraps, is of a package that is not trusted."""
    for link in _wrapped(function):
        # Not `__module__`, which functools.wraps copies from the function that is replaced.
        variables = getattr(link, "__globals__", None)
        name = type(link).__module__ if variables is None else variables["__name__"]
        package = _package(name)
        if package not in (*TRUSTED, own_package) and package not in sys.stdlib_module_names:
            return True
    return False


def _wrapped(function: Any) -> Iterator[Any]:
    """Yield a function, and those in it: of a partial, a bound method, a decorated function."""
    yield function
    for name in ("func", "__func__", "__wrapped__"):
        inner = getattr(function, name, None)
        if inner is not None:
            yield from _wrapped(inner)


def _package(module_name: str) -> str:
    return module_name.partition(".")[0]


def _code(value: Any, names: dict[int, str]) -> Any:
    """Return what a function computes, as far as another process can compare it: its bytecode, and
    the values that it holds or reads from its module. `names`: of modules of the model, and of
    functions that are being read, by their id."""
    if id(value) in names:
        return names[id(value)]
    if isinstance(value, FunctionType):
        if not _is_foreign(value):
            return _name(value)
        names[id(value)] = _name(value)
        return _bytecode(value.__code__), [_code(inner, names) for inner in _values_of(value)]
    if isinstance(value, partial):
        return [_code(inner, names) for inner in (value.func, value.args, value.keywords)]
    if isinstance(value, MethodType):
        return _code(value.__func__, names), _code(value.__self__, names)
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, type | BuiltinFunctionType):
        return _name(value)
    if isinstance(value, Mapping):
        return [(str(key), _code(inner, names)) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [_code(inner, names) for inner in value]
    if isinstance(value, Tensor):
        return _checksum(value).hex()
    return repr(value) if _is_plain(value) else (_name(type(value)), _THIS_PROCESS)


def _values_of(function: FunctionType) -> list[Any]:
    """Return what a function closes over, its defaults, and what it reads from its module."""
    values: list[Any] = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # of a cell that is not filled yet
            values.append(cell.cell_contents)
    variables = function.__globals__
    read = [name for name in _global_names(function.__code__) if name in variables]
    return [*values, *(variables[name] for name in read)]


def _global_names(code: CodeType) -> list[str]:
    names = [part.argval for part in get_instructions(code) if part.opname == "LOAD_GLOBAL"]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a function or comprehension in it
            names += _global_names(constant)
    return names


def _bytecode(code: CodeType) -> Any:
    constants = list[Any]()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constants.append(_bytecode(constant))
        elif isinstance(constant, frozenset):  # whose order differs between processes
            constants.append(sorted(map(repr, constant)))
        else:
            constants.append(repr(constant))
    return code.co_code.hex(), constants, code.co_names


# --- tensors --------------------------------------------------------------------------------------


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each once, under its first name; not the frequencies that RoPE writes while it runs."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        module = model.get_submodule(name.rpartition(".")[0])
        kind = repr(getattr(module, "rope_type", ""))
        if "original" in name or not ("dynamic" in kind or "longrope" in kind):
            yield name, buffer


def _checksum(tensor: Any) -> bytes:
    """Return the SHA-256 of sums over rows and columns of a matrix of words, and of what is left
    over. The sums are computed on the tensor's device: a SHA-256 of all bytes of a model on a GPU
    would copy it to the host in each call."""
    if hasattr(tensor, "__tensor_flatten__"):  # of another library, such as a quantized one
        names, context = tensor.__tensor_flatten__()
        inner = b"".join(_checksum(getattr(tensor, name)) for name in names)
        return hashlib.sha256(inner + repr(context).encode()).digest()
    digest = hashlib.sha256()
    plain = tensor.detach().as_subclass(Tensor)
    bytes_N = plain.contiguous().flatten().view(torch.uint8)
    if bytes_N.storage_offset() % 8:  # words must begin at multiples of their size
        bytes_N = bytes_N.clone()
    end = len(bytes_N) - len(bytes_N) % (8 * BLOCK)
    words = bytes_N[:end].view(torch.int64).view(-1, BLOCK)
    for sums in (words.sum(0), words.sum(1), bytes_N[end:]):
        digest.update(sums.cpu().numpy().data)
    return digest.digest()


# --- files ----------------------------------------------------------------------------------------

_WHOLE_BYTES = 2**30
"""Above this size, a fingerprint samples a file instead of reading all of it."""

_SAMPLE_BYTES = 2**16
_NUM_SAMPLES = 1024


def fingerprint(paths: Collection[Path]) -> str:
    """Return what identifies weights: the SHA-256 of the file, or of the files' SHA-256s in order
    of name.

    Of a file above 1 GiB, its size and 1024 evenly spread blocks of 64 KiB are hashed, header
    included: enough to distinguish models, in seconds instead of minutes.
    """
    digests = [_fingerprint_file(path) for path in sorted(paths, key=lambda path: path.name)]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _fingerprint_file(path: Path) -> str:
    size = path.stat().st_size
    if size <= _WHOLE_BYTES:
        return sha256_of(path)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for sample in range(_NUM_SAMPLES):
            file.seek(sample * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
