"""Identify a model in memory by its weights and buffers, its plain settings, and code that somebody
has put in place of its own (replaced_code.py).

`read_state` returns a `State`, which `in_use` compares between uses, and from which
`LoadedModel.fingerprint` is made. What has no identity, such as a hook of another package, is
rejected. Files are identified by file_fingerprint.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.checksums import checksum, is_plain
from olmo_sparsity.models.replaced_code import TRUSTED, qualified_name, replaced_code


@dataclass(frozen=True)
class State:
    """The identity of a model at one moment. It holds checksums, not weights."""

    settings: Mapping[str, str]
    """The class and the plain attributes of each module, and the configuration, as text."""

    tensors: Mapping[str, bytes]
    """A checksum of each parameter and buffer."""

    replaced: Mapping[str, str] = field(default_factory=dict)
    """The code of each function that another package has put in place of a method, by the name of
    the method."""

    @property
    def sha256(self) -> str:
        """Return a hash that is the same in another process. It never equals the hash of files."""
        parts = [sorted(self.settings.items()), sorted(self.tensors.items())]
        if self.replaced:  # otherwise the hash stays as it was in earlier releases
            parts.append(sorted(self.replaced.items()))
        return hashlib.sha256(repr(tuple(parts)).encode()).hexdigest()

    def differences(self, other: State) -> str:
        """Return the most important difference, for a message; empty if there is none."""
        names = _names_that_differ(self.tensors, other.tensors)
        if names:
            return f"{len(names)} of {len(self.tensors)} tensors, such as {names[0]}"
        names = _names_that_differ(self.settings, other.settings)
        if names:
            return f"settings of {names[0] or 'the model'}"
        names = _names_that_differ(self.replaced, other.replaced)
        return f"the code of {names[0]}" if names else ""


def _names_that_differ(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, or which only one mapping has."""
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
    checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
    return State(settings, checksums, replaced_code(model))


def check_weights_exist(model: nn.Module) -> None:
    """Raise ConfigError if weights are on the meta device, where they have no values. Those that
    accelerate has offloaded are accepted: its hooks know where they are."""
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
    """Raise ConfigError for a hook of a package that is not trusted, as a state cannot tell what it
    computes."""
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            _check_hook(hook, name or "the model")
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        for hook in getattr(torch_module, name).values():
            _check_hook(hook, "all modules")


def _check_hook(hook: Any, place: str) -> None:
    """Raise ConfigError if a hook is not of a trusted package. `place`: the module that it is
    on."""
    if qualified_name(hook).partition(".")[0].removeprefix("_") not in TRUSTED:
        raise ConfigError(
            f"model: the hook {qualified_name(hook)} on {place} changes it; remove the hook"
        )


# --- settings -------------------------------------------------------------------------------------

_RUN_ATTRIBUTES = (
    *("training", "warnings_issued", "name_or_path", "loss_type", "hf_device_map"),
    *("generation_config", "all_tied_weights_keys", "fused_dims", "token_forwards"),
)
"""Attributes of modules that change no logits. They say how a model runs, and where it is from."""

_ADAPTER_ATTRIBUTES = ("_disable_adapters", "_active_adapter")
"""The only private attributes that change logits: which of PEFT's adapters are applied."""

_CONFIG_ENTRIES_WITHOUT_EFFECT = {
    *("name_or_path", "transformers_version", "architectures", "dtype", "model_type", "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id"),
    *("problem_type", "pad_token_id", "bos_token_id", "eos_token_id", "chunk_size_feed_forward"),
    "quantization_config",
}
"""Entries of transformers' configurations that change no logits. The dtype is that of each
tensor."""


def _settings(module: nn.Module) -> Any:
    """Return the class of a module, its plain attributes, and the dtypes and shapes of its own
    tensors."""
    attributes = {key: value for key, value in vars(module).items() if _changes_logits(key, value)}
    tensors = {**module._parameters, **module._buffers}
    shapes = {key: (t.dtype, tuple(t.shape)) for key, t in tensors.items() if t is not None}
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return kind, sorted(attributes.items()), shapes


def _changes_logits(key: str, value: Any) -> bool:
    """Return whether an attribute of a module may change logits, as far as its name tells."""
    if key in _ADAPTER_ATTRIBUTES:
        return True
    if key in _RUN_ATTRIBUTES or key.startswith("_") or "checkpoint" in key or "cache" in key:
        return False
    return is_plain(value)


def _config(model: nn.Module) -> Any:
    """Return the entries of a model's configuration; None if it has none."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        return _config_entries(config)
    is_ours = is_dataclass(config) and not isinstance(config, type)
    return asdict(config) if is_ours else None


def _config_entries(value: Any) -> Any:
    """Return the entries of one of transformers' configurations, and of those in it."""
    if hasattr(value, "to_dict"):
        entries = {}
        for key, entry in vars(value).items():
            if key[0] != "_" and key not in _CONFIG_ENTRIES_WITHOUT_EFFECT:
                entries[key] = entry
        value = entries
    if not isinstance(value, Mapping):
        return value
    return sorted((str(key), repr(_config_entries(inner))) for key, inner in value.items())


# --- tensors --------------------------------------------------------------------------------------


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of parameters and buffers, each once. Frequencies that RoPE writes
    while it runs (LongRoPE and dynamic RoPE) are left out."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        module = model.get_submodule(name.rpartition(".")[0])
        kind = repr(getattr(module, "rope_type", ""))
        if "original" in name or not ("dynamic" in kind or "longrope" in kind):
            yield name, buffer
