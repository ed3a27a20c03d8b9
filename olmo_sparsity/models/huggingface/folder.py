"""Load a Hugging Face folder as a transformers model, without trusting its files: nothing is
unpickled, and no code of the folder runs.

    checked_weight_files (weight_files.py) ─> read_hugging_face ─> add_adapter, if there is one
    names and headers of the files          the model            the model in a PEFT adapter

Missing weights would be random numbers, and unexpected ones would not be used. transformers only
warns of both; here they are rejected.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from olmo_sparsity.base.devices import multiplies
from olmo_sparsity.base.errors import DataError, naming_extras
from olmo_sparsity.base.files import read_json
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.huggingface.weight_files import REMEDY

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

NO_CODE: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
"""Arguments for all loading by transformers. Without them, `auto_map` in a config.json makes it
prompt on the terminal whether to run the folder's code."""

ADAPTER = "adapter_config.json"
"""The file by which a folder with a PEFT adapter is recognized."""


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder holds a model of transformers, or a PEFT adapter."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER))


def base_of_adapter(folder: Path) -> str:
    """Return the folder or hub name of the model that a PEFT adapter changes."""
    config = read_json(folder / ADAPTER, dict, REMEDY)
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str):
        raise DataError(f"{folder / ADAPTER}: base_model_name_or_path={name}; {REMEDY}")
    return name


def add_adapter(model: PreTrainedModel, folder: Path, weight_file: Path, device: str) -> PeftModel:
    """Return a base model with the PEFT adapter of a folder. `weight_file`: the file with the
    adapter's weights, as `checked_adapter_file` returns it."""
    with naming_extras():
        from peft import PeftModel, get_peft_model_state_dict
    with warnings.catch_warnings():  # `_check_names` raises for what PEFT only warns of
        warnings.filterwarnings("ignore", "Found missing adapter keys")
        adapted = PeftModel.from_pretrained(model, folder, torch_device=device)

    with safe_open(weight_file, framework="pt") as file:
        stored_names = set(file.keys())
    needed_names = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    # PEFT may have saved the whole embedding as well, such as after tokens were added.
    allowed_names = set(get_peft_model_state_dict(adapted, save_embedding_layers=True))
    allowed_names |= needed_names
    _check_names(
        folder,
        owner="its adapter",
        missing=needed_names - stored_names,
        unexpected=stored_names - allowed_names,
    )
    return adapted


def read_hugging_face(
    folder: Path, dtype: torch.dtype | None, device: str, device_map: str | None
) -> PreTrainedModel:
    """Return the model of a Hugging Face folder. Raise DataError if its files lack weights, or have
    others.

    Args:
        dtype: The dtype of the weights. None means that of the checkpoint, or fp32 on a CPU that
            cannot multiply in it.
        device_map: As in transformers, in place of `device`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    # Read here first, as `read_json` rejects a damaged file, or deep nesting, with a message.
    read_json(folder / "config.json", dict, REMEDY)
    config = AutoConfig.from_pretrained(folder, **NO_CODE)
    # The config may name a kernel that is not installed, or one on the hub, which would run.
    config._attn_implementation_internal = None
    # It may name another file of weights, which is not checked and not part of the fingerprint.
    config.transformers_weights = None

    model: PreTrainedModel
    info: dict[str, Any]
    # Warnings would print names of tensors from the file as they are, with any control characters.
    # What they warn of is an error here (`_check_names`).
    with without_warnings():
        model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc] # a pair, here
            folder,
            config=config,
            dtype=dtype or "auto",
            device_map=device_map,
            use_safetensors=True,
            output_loading_info=True,
            **NO_CODE,
        )
    _check_names(
        folder,
        owner=type(model).__name__,
        missing=info["missing_keys"],
        unexpected=info["unexpected_keys"],
    )

    # With a device map, accelerate has put the weights on their devices.
    if device_map is None:
        # Not `model.to`, which transformers refuses for some quantized models.
        nn.Module.to(model, device)
        if dtype is None:
            _leave_slow_dtype(model, folder)
    return model


def _leave_slow_dtype(model: PreTrainedModel, folder: Path) -> None:
    """Turn the weights of a model on a CPU into fp32 if it has no fast product of their dtype, such
    as bf16. `folder`: where they are from, for the message."""
    is_quantized = getattr(model, "hf_quantizer", None) is not None
    if is_quantized or model.device.type != "cpu" or multiplies(model.device, model.dtype):
        return
    say(f"{folder}: weights in fp32, as this CPU computes slowly in {model.dtype}")
    nn.Module.float(model)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep transformers, and DeepSpeed, which it imports, from printing bars and warnings inside
    the block."""
    from transformers.utils import logging as transformers_logging

    # Of the whole process, as the two have a logger for each of their modules.
    disabled_before = logging.root.manager.disable
    shows_progress = transformers_logging.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(disabled_before)
        if shows_progress:
            transformers_logging.enable_progress_bar()


def _check_names(folder: Path, *, owner: str, missing: set[str], unexpected: set[str]) -> None:
    """Raise DataError for weights that a folder lacks, or has too many. `owner`: the model or
    adapter whose weights they are, for the message."""
    if missing:
        raise DataError(
            f"'{folder}': its files lack {len(missing)} weights of {owner}, such as "
            f"{min(missing)}; correct its config"
        )
    if unexpected:
        raise DataError(
            f"'{folder}': its files hold {len(unexpected)} more weights than {owner}, such as "
            f"{min(unexpected)}; correct its config"
        )


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model. Tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
