"""Find the folder of a model's files by what a user typed: a folder, a run, a file, or a hub name.

Place in the flow: first, for `load_model`, `export` and `init_from`. Formats that need a conversion
are found by name, as entry points of the group `olmo_sparsity.formats`, so that training imports
none of them.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

import torch

from olmo_sparsity.base.errors import DataError, one_line
from olmo_sparsity.models.transformers_folder import is_hugging_face
from olmo_sparsity.text.runs import run_loaders

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

DEMO = Path(__file__).parents[1] / "demo"
"""A small model that is installed with the package; its name is `demo`."""

ACCEPTED = (
    "a run, a checkpoint of ours (manifest.json), a folder with config.json (Hugging Face), a "
    ".gguf file, a hub name (owner/name), smollm2 or demo"
)


class ModelFormat(Protocol):
    """A format of model files that is read by converting it to a folder of transformers."""

    def find(self, path_or_name: str) -> Path | None:
        """Return the converted folder, or None if this is not of the format."""


@cache
def model_formats() -> tuple[ModelFormat, ...]:
    return tuple(point.load()() for point in entry_points(group="olmo_sparsity.formats"))


def find_folder(path_or_hub_name: str) -> Path:
    """Return the folder of a model's files: a run's latest checkpoint, or a hub name's download."""
    path = Path(path_or_hub_name)
    if not path.exists():
        if path_or_hub_name == "demo":
            return DEMO / "model"
        for model_format in model_formats():
            folder = model_format.find(path_or_hub_name)
            if folder is not None:
                return folder
        if path_or_hub_name.startswith("runs/"):  # the folder of configs/, so no hub name
            raise DataError(f"{path_or_hub_name} does not exist; train it first, or check the path")
        named = re.fullmatch(r"(\w[\w.-]*(?:/[\w.-]+)?)(?:@(\w[\w./-]*))?", path_or_hub_name)
        if named and path.suffix != ".gguf":
            return _download(named[1], revision=named[2])
        raise DataError(f"model: '{path_or_hub_name}' does not exist; pass {ACCEPTED}")
    if is_hugging_face(path):
        return path
    for model_format in model_formats():
        folder = model_format.find(path_or_hub_name)
        if folder is not None:
            return folder
    for loader in run_loaders():
        folder = loader.find(path)
        if folder is not None:
            return folder
    raise DataError(f"'{path}' is not a model folder; pass {ACCEPTED}")


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Not *.safetensors: some repositories have the weights in their own format as well.
        patterns = ["*.json", "*.txt", "*.model", "*.jinja"]
        patterns += ["model*.safetensors", "adapter_model*.safetensors"]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = f"revision {revision or 'main'}: {one_line(error) or repr(error)}"
        remedy = "check the spelling, the network and HF_HUB_OFFLINE"
        raise DataError(
            f"'{name}' is neither a folder nor on the hub ({reason}); {remedy}"
        ) from None
