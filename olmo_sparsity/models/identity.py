"""Identify a model: its files by their bytes, in memory by weights, buffers and plain settings.

Place in the flow: below `in_use` and `LoadedModel.fingerprint`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
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
"""Packages whose hooks are part of a model's class."""


@dataclass(frozen=True)
class State:
    """A model at one moment. It holds no weights."""

    settings: Mapping[str, str]
    """Class and plain attributes of each module, and the configuration."""

    tensors: Mapping[str, bytes]
    """A checksum of each parameter and buffer."""

    @property
    def sha256(self) -> str:
        """The same in another process; that of files is another."""
        found = repr((sorted(self.settings.items()), sorted(self.tensors.items())))
        return hashlib.sha256(found.encode()).hexdigest()

    def differences(self, other: State) -> str:
        """Return what differs, for a message; empty if the two are one model."""
        if changed := _changed(self.tensors, other.tensors):
            return f"{len(changed)} of {len(self.tensors)} tensors, such as {changed[0]}"
        changed = _changed(self.settings, other.settings)
        return f"settings of {changed[0] or 'the model'}" if changed else ""


def _changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def read_state(model: nn.Module) -> State:
    """Read all weights, in about twice the time that reading their memory takes."""
    settings = {name: repr(_settings(module)) for name, module in model.named_modules()}
    settings["config"] = repr(_config(model))
    tensors = dict(_tensors(model))
    if any(tensor.is_meta for tensor in tensors.values()):
        from accelerate.utils.modeling import get_state_dict_offloaded_model

        tensors |= get_state_dict_offloaded_model(model)
    return State(settings, {name: _checksum(tensor) for name, tensor in tensors.items()})


def refuse_hooks(model: nn.Module) -> None:
    """Reject hooks of other packages: what they compute has no identity."""
    places = [(f" on {name or 'the model'}", module) for name, module in model.named_modules()]
    found = [
        (hook, place)
        for place, module in places
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        found += [(hook, " on all modules") for hook in getattr(torch_module, name).values()]
    for hook, place in found:
        if _package(hook) not in TRUSTED:
            raise ConfigError(f"model: the hook {_name(hook)}{place} changes it; remove the hook")


# --- settings -------------------------------------------------------------------------------------

_RUNNING = ("training", "warnings_issued", "name_or_path", "loss_type", "hf_device_map",
            "generation_config", "all_tied_weights_keys", "fused_dims",
            "token_forwards")  # fmt: skip
_OF_ADAPTERS = ("_disable_adapters", "_active_adapter")
_OF_A_CONFIG = {"name_or_path", "transformers_version", "architectures", "dtype", "model_type",
                "use_cache", "output_attentions", "output_hidden_states", "return_dict", "id2label",
                "label2id", "problem_type", "pad_token_id", "bos_token_id", "eos_token_id",
                "chunk_size_feed_forward", "quantization_config"}  # fmt: skip


def _settings(module: nn.Module) -> Any:
    found = {
        key: value
        for key, value in vars(module).items()
        if (
            key[0] != "_"
            and "checkpoint" not in key
            and "cache" not in key
            and key not in _RUNNING
            and _is_plain(value)
        )
        or key in _OF_ADAPTERS
    }
    tensors = {**module._parameters, **module._buffers}
    shapes = {key: (t.dtype, tuple(t.shape)) for key, t in tensors.items() if t is not None}
    return f"{type(module).__module__}.{type(module).__qualname__}", sorted(found.items()), shapes


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str)


def _config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):  # of ours
        return asdict(config) if is_dataclass(config) and not isinstance(config, type) else None
    return _of_config(config)


def _of_config(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        value = {k: v for k, v in vars(value).items() if k[0] != "_" and k not in _OF_A_CONFIG}
    if not isinstance(value, Mapping):
        return value
    return sorted((str(key), repr(_of_config(inner))) for key, inner in value.items())


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _package(function: Any) -> str:
    return _name(function).partition(".")[0].removeprefix("_")


# --- tensors --------------------------------------------------------------------------------------


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each once, under its first name; not the frequencies that RoPE writes while it runs."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        module = model.get_submodule(name.rpartition(".")[0])
        kind = repr(getattr(module, "rope_type", ""))
        if "original" in name or not ("dynamic" in kind or "longrope" in kind):
            yield name, buffer


def _checksum(tensor: Any) -> bytes:
    """The SHA-256 of sums over rows and columns of a matrix of words, and of what is left over."""
    if hasattr(tensor, "__tensor_flatten__"):  # of another library, such as a quantized one
        names, context = tensor.__tensor_flatten__()
        inner = b"".join(_checksum(getattr(tensor, name)) for name in names)
        return hashlib.sha256(inner + repr(context).encode()).digest()
    digest, plain = hashlib.sha256(), tensor.detach().as_subclass(Tensor)
    bytes_N = plain.contiguous().flatten().view(torch.uint8)
    if bytes_N.storage_offset() % 8:
        bytes_N = bytes_N.clone()
    end = len(bytes_N) - len(bytes_N) % (8 * BLOCK)
    matrix = bytes_N[:end].view(torch.int64).view(-1, BLOCK)
    for found in (matrix.sum(0), matrix.sum(1), bytes_N[end:]):
        digest.update(found.cpu().numpy().data)
    return digest.digest()


# --- files ----------------------------------------------------------------------------------------

_WHOLE_BYTES = 2**30  # above this a fingerprint samples the file instead of reading all of it
_BLOCK_BYTES, _NUM_BLOCKS = 2**16, 1024


def fingerprint(paths: Collection[Path]) -> str:
    """Identifies weights: the SHA-256 of the file, or of the files' SHA-256s in order of name.

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
        for block in range(_NUM_BLOCKS):
            file.seek(block * (size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
