"""Identify a model in memory, so that a change of its numbers is noticed between two calls.

Users train, edit, merge or quantize a model between our calls, and stored results may be continued
only by the same model. `read_identity` reads what determines its logits:

    weights and buffers        → a checksum of each            tensors
    plain attributes, config   → their repr                    settings
    methods that were replaced → their bytecode, as text       replaced    (replaced_code.py)

`in_use` (use.py) compares this `ModelIdentity` between uses, and `LoadedModel.fingerprint` is made
from it. A hook of an unknown package has no such identity, and is rejected (`check_hooks`). Files
are identified by file_fingerprint.py.

The hash is stored with results, so it must stay the same from release to release: the texts below
are hashed as they are, in their form and order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.identity.checksums import checksum, is_plain
from olmo_sparsity.models.identity.replaced_code import TRUSTED, qualified_name, replaced_code


@dataclass(frozen=True)
class ModelIdentity:
    """What determines a model's logits at one moment. It holds checksums, not weights, so that an
    old one can be kept and compared."""

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
        hashed = [sorted(self.settings.items()), sorted(self.tensors.items())]
        # Earlier releases did not know replaced code. So the hash of other models leaves it out.
        if self.replaced:
            hashed.append(sorted(self.replaced.items()))
        return hashlib.sha256(repr(tuple(hashed)).encode()).hexdigest()

    def differences(self, other: ModelIdentity) -> str:
        """Return the most important difference, for a message; empty if there is none."""
        names = _names_that_differ(self.tensors, other.tensors)
        if names:
            return f"{len(names)} of {len(self.tensors)} tensors, such as {names[0]}"
        names = _names_that_differ(self.settings, other.settings)
        if names:
            # PyTorch's name of the outermost module is empty.
            return f"settings of {names[0] or 'the model'}"
        names = _names_that_differ(self.replaced, other.replaced)
        return f"the code of {names[0]}" if names else ""


def _names_that_differ(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, or which only one mapping has."""
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


def read_identity(model: nn.Module) -> ModelIdentity:
    """Return the identity of a model as it is now. It reads all weights, in about twice the time
    that reading their memory takes."""
    settings = {name: repr(_settings(module)) for name, module in model.named_modules()}
    settings["config"] = repr(_config(model))
    tensors = dict(_tensors(model))
    if any(tensor.is_meta for tensor in tensors.values()):
        # accelerate keeps weights that it has offloaded in main memory or in files; in the model
        # itself they are on the meta device, without values.
        check_weights_exist(model)
        from accelerate.utils.modeling import get_state_dict_offloaded_model

        tensors |= get_state_dict_offloaded_model(model)
    checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
    return ModelIdentity(settings, checksums, replaced_code(model))


def check_weights_exist(model: nn.Module) -> None:
    """Raise ConfigError if weights are on the meta device, where they have no values. Those that
    accelerate has offloaded are accepted: its hooks know where they are."""
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            continue
        for parameter, tensor in module._parameters.items():
            if tensor is not None and tensor.is_meta:
                weight_name = f"{name}.{parameter}" if name else parameter
                raise ConfigError(
                    f"{type(model).__name__} has no weights: {weight_name} is on the meta device; "
                    "load them with from_pretrained, or with model.to_empty(device='cpu') and "
                    "load_state_dict"
                )


def check_hooks(model: nn.Module) -> None:
    """Raise ConfigError for a hook of a package that is not trusted. It may change what a module
    returns, and an identity cannot tell what it computes."""
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            _check_hook(hook, name or "the model")
    # PyTorch also has hooks of all modules of the process.
    for registry in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        for hook in getattr(torch_module, registry).values():
            _check_hook(hook, "all modules")


def _check_hook(hook: Any, owner: str) -> None:
    """Raise ConfigError if a hook is not of a trusted package. `owner`: the module that it is on,
    for the message."""
    package, _, _ = qualified_name(hook).partition(".")
    if package.removeprefix("_") not in TRUSTED:
        raise ConfigError(
            f"model: the hook {qualified_name(hook)} on {owner} changes it; remove the hook"
        )


# --- settings -------------------------------------------------------------------------------------

_ATTRIBUTES_WITHOUT_EFFECT = {
    # where a model is from
    "name_or_path",
    # how it runs
    "training",
    "hf_device_map",
    "generation_config",
    "all_tied_weights_keys",
    "fused_dims",
    "warnings_issued",
    "token_forwards",
    # what is computed from logits
    "loss_type",
}
"""Attributes of modules that change no logits."""

_WORDS_WITHOUT_EFFECT = ("checkpoint", "cache")
"""Words in the names of attributes that change no logits: activations that are computed again, and
keys and values that are kept."""

_ADAPTER_ATTRIBUTES = ("_disable_adapters", "_active_adapter")
"""The only private attributes that change logits: which of PEFT's adapters are applied."""

_CONFIG_ENTRIES_WITHOUT_EFFECT = {
    # where a model is from
    "name_or_path",
    "transformers_version",
    "architectures",
    "model_type",
    # how it runs, and what it returns besides logits
    "use_cache",
    "chunk_size_feed_forward",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    # the task, and the tokens around a text
    "problem_type",
    "id2label",
    "label2id",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    # what the tensors themselves show
    "dtype",
    "quantization_config",
}
"""Entries of transformers' configurations that change no logits."""


def _settings(module: nn.Module) -> Any:
    """Return the class of a module, its plain attributes, and the dtypes and shapes of its own
    tensors. The repr of this tuple is hashed."""
    class_name = f"{type(module).__module__}.{type(module).__qualname__}"
    attributes = {key: value for key, value in vars(module).items() if _changes_logits(key, value)}
    shapes = {}
    for key, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is not None:
            shapes[key] = (tensor.dtype, tuple(tensor.shape))
    return class_name, sorted(attributes.items()), shapes


def _changes_logits(key: str, value: Any) -> bool:
    """Return whether an attribute of a module may change logits, as far as its name tells."""
    if key in _ADAPTER_ATTRIBUTES:
        return True
    if key in _ATTRIBUTES_WITHOUT_EFFECT or key.startswith("_"):
        return False
    if any(word in key for word in _WORDS_WITHOUT_EFFECT):
        return False
    # Other values are modules and tensors, which have entries of their own, or caches of objects.
    return is_plain(value)


def _config(model: nn.Module) -> Any:
    """Return the entries of a model's configuration; None if it has none."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):  # of transformers
        return _config_entries(config)
    is_ours = is_dataclass(config) and not isinstance(config, type)
    return asdict(config) if is_ours else None


def _config_entries(value: Any) -> Any:
    """Return the entries of one of transformers' configurations, and of those in it, such as that
    of the text model in a model of images and text."""
    if hasattr(value, "to_dict"):
        entries = {}
        for key, entry in vars(value).items():
            if not key.startswith("_") and key not in _CONFIG_ENTRIES_WITHOUT_EFFECT:
                entries[key] = entry
        value = entries
    if not isinstance(value, Mapping):
        return value
    return sorted((str(key), repr(_config_entries(inner))) for key, inner in value.items())


# --- tensors --------------------------------------------------------------------------------------


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of parameters and buffers, each once. Tied weights are one."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        module_name, _, _ = name.rpartition(".")
        if not _is_rewritten(name, model.get_submodule(module_name)):
            yield name, buffer


def _is_rewritten(name: str, module: nn.Module) -> bool:
    """Return whether a module changes its buffer with this name while it runs: the frequencies of
    LongRoPE and of dynamic RoPE depend on the length of the last text. The original ones stay."""
    rope_type = repr(getattr(module, "rope_type", ""))  # a text, or one for each kind of layer
    is_adapted = "dynamic" in rope_type or "longrope" in rope_type
    return is_adapted and "original" not in name
