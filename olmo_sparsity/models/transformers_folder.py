"""Load a Hugging Face folder as a transformers model, without trusting its files: nothing is
unpickled, and no code of the folder runs.

`check_weight_files` checks names and headers of the files. `read_hugging_face` then loads the
model, and `add_adapter` puts a PEFT adapter around it. Missing or unexpected weights are rejected,
where transformers only warns.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from olmo_sparsity.base.devices import multiplies
from olmo_sparsity.base.errors import DataError, naming_extras, unreadable
from olmo_sparsity.base.files import check_bounded, read_json
from olmo_sparsity.base.manifest import stays_inside
from olmo_sparsity.base.model_cache import cache_folder
from olmo_sparsity.base.progress import say

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

NO_CODE: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
"""Arguments for all loading by transformers. Without them, `auto_map` in a config.json makes it
prompt on the terminal whether to run the folder's code."""

ADAPTER = "adapter_config.json"
"""The file by which a folder with a PEFT adapter is recognized."""

_REMEDY = "write or download it again"


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder holds a model of transformers, or a PEFT adapter."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER))


def base_of_adapter(folder: Path) -> str:
    """Return the folder or hub name of the model that a PEFT adapter changes."""
    config = read_json(folder / ADAPTER, dict, _REMEDY)
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str):
        raise DataError(f"{folder / ADAPTER}: base_model_name_or_path={name}; {_REMEDY}")
    return name


def add_adapter(model: PreTrainedModel, folder: Path, weight_file: Path, device: str) -> PeftModel:
    """Return a base model with the PEFT adapter of a folder.

    weight_file: The file with the adapter's weights, as `check_adapter_file` returns it.
    """
    with naming_extras():
        from peft import PeftModel, get_peft_model_state_dict
    with warnings.catch_warnings():  # `_check_keys` raises for what PEFT only warns of
        warnings.filterwarnings("ignore", "Found missing adapter keys")
        adapted = PeftModel.from_pretrained(model, folder, torch_device=device)
    with safe_open(weight_file, framework="pt") as file:
        stored = set(file.keys())
    needed = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    # The adapter's folder may hold a whole embedding.
    allowed = needed | set(get_peft_model_state_dict(adapted, save_embedding_layers=True))
    _check_keys(folder, "its adapter", missing=needed - stored, unexpected=stored - allowed)
    return adapted


def read_hugging_face(
    folder: Path, dtype: torch.dtype | None, device: str, device_map: str | None
) -> PreTrainedModel:
    """Return the model of a Hugging Face folder. Raise DataError if its files lack weights, or have
    others.

    dtype: The dtype of the weights. None: that of the checkpoint, or fp32 on a CPU that cannot
        multiply in it.
    device_map: As in transformers, in place of `device`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    read_json(folder / "config.json", dict, _REMEDY)  # rejects deep nesting too
    config = AutoConfig.from_pretrained(folder, **NO_CODE)
    # The folder may name a kernel that is not installed, or one on the hub.
    config._attn_implementation_internal = None
    # Or another file of weights, which is not checked and not part of the fingerprint.
    config.transformers_weights = None
    model: PreTrainedModel
    info: dict[str, Any]
    # Warnings would print names of tensors from the file as they are; see _check_keys.
    with without_warnings():
        # Typed as returning a model; with output_loading_info it returns a pair.
        model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            folder,
            config=config,
            dtype=dtype or "auto",
            device_map=device_map,
            use_safetensors=True,
            output_loading_info=True,
            **NO_CODE,
        )
    _check_keys(folder, type(model).__name__, info["missing_keys"], info["unexpected_keys"])
    if device_map is not None:
        return model  # accelerate has put the weights on their devices
    # Not `model.to`, which transformers refuses for some quantized models.
    nn.Module.to(model, device)
    is_quantized = getattr(model, "hf_quantizer", None) is not None
    is_free_to_choose = dtype is None and not is_quantized and model.device.type == "cpu"
    if is_free_to_choose and not multiplies(model.device, model.dtype):
        say(f"{folder}: weights in fp32, as this CPU computes slowly in {model.dtype}")
        nn.Module.float(model)
    return model


@contextmanager
def without_warnings() -> Iterator[None]:
    """Inside, transformers and DeepSpeed, which it imports, print no bars and no warnings."""
    from transformers.utils import logging as theirs

    disabled_before = logging.root.manager.disable
    shows_progress = theirs.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(disabled_before)
        if shows_progress:
            theirs.enable_progress_bar()


def _check_keys(folder: Path, model: str, missing: set[str], unexpected: set[str]) -> None:
    """Raise DataError for missing weights, which would be random, and for unexpected ones, which
    would not be used. `model`: what has them, for the message."""
    if missing:
        raise DataError(
            f"'{folder}': its files lack {len(missing)} weights of {model}, such as "
            f"{min(missing)}; correct its config"
        )
    if unexpected:
        raise DataError(
            f"'{folder}': its files hold {len(unexpected)} more weights than {model}, such as "
            f"{min(unexpected)}; correct its config"
        )


_READ_WHOLE = ("*config.json", "*token*", "vocab*", "merges.txt", "*.jinja", "*.model")
"""Patterns of the files that transformers reads whole, so that a huge one would fill the memory."""

_MAX_BYTES = 2**28
"""The largest accepted size of such a file, in bytes."""


def check_adapter_file(folder: Path) -> Path:
    """Return the file of an adapter's weights, after checking its header. It must be the one that
    PEFT reads without unpickling."""
    if not (folder / "adapter_model.safetensors").is_file():
        raise _no_weights(folder, "adapter_model.safetensors")
    return check_weight_files(folder, "adapter_model")[0]


def check_weight_files(folder: Path, name: str = "model") -> list[Path]:
    """Return the safetensors files that are loaded, after checking their names and headers."""
    for pattern in _READ_WHOLE:
        for path in folder.glob(pattern):
            check_bounded(path, _MAX_BYTES)
    single = folder / f"{name}.safetensors"
    index = folder / f"{name}.safetensors.index.json"
    if single.is_file():
        files = [single]
    elif index.is_file():
        files = _named_by_index(folder, index)
    else:
        raise _no_weights(folder, f"{name}*.safetensors")
    for path in files:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError, ValueError) as error:
            raise unreadable(path, error) from None
    return files


def _no_weights(folder: Path, wanted: str) -> DataError:
    """Return the error of a folder without safetensors, which often holds pickles instead."""
    pickles = sorted(folder.glob("*.bin"))
    if not pickles:
        return DataError(f"'{folder}' has no {wanted}; download it again")
    return DataError(
        f"'{pickles[0]}' is a pickle, which is never read here; save it as safetensors with "
        "transformers' save_pretrained"
    )


def _named_by_index(folder: Path, index: Path) -> list[Path]:
    """Return the files that an index names. Raise DataError if one is outside of its folder, or is
    not a safetensors file."""
    file_of_weight = read_json(index, dict, _REMEDY).get("weight_map")
    if not isinstance(file_of_weight, dict) or not file_of_weight:
        raise DataError(f"{index}: has no weight_map; {_REMEDY}")
    for name in file_of_weight.values():
        if not stays_inside(name):
            raise DataError(f"'{index}' names '{name}', which is outside of its folder; {_REMEDY}")
        if not name.endswith(".safetensors"):
            raise DataError(f"'{index}' names '{name}', which is not a safetensors file; {_REMEDY}")
    return sorted({folder / name for name in file_of_weight.values()})


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model. Tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


# --- folders that were converted ------------------------------------------------------------------


ORIGIN = "gguf.json"
"""The file in a converted folder that says from which GGUF file it was converted."""


@dataclass(frozen=True)
class Origin:
    """The GGUF file that a folder of the cache was converted from."""

    sha256: str
    quantization: str
    """The type of most of its weights, such as Q4_1."""


def find_origin(folder: Path) -> Origin | None:
    """Return the GGUF file that a folder of the cache was converted from. None for any other
    folder, as a copy outside of the cache may have other weights by now."""
    if not folder.is_relative_to(cache_folder()) or not (folder / ORIGIN).is_file():
        return None
    return Origin(**read_json(folder / ORIGIN, dict, "delete the folder"))
