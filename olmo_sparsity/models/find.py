"""Find the folder of a model's files by what a user typed: a folder, a run, a file, or a hub name.

`find_folder` is the first step of `load_model`, `export` and `init_from`. It asks, in this order:
a folder of transformers? a format that is converted (`ModelFormat`)? a run (text/runs.py)? a hub
name? Formats are found by name, as entry points of the group `olmo_sparsity.formats`, so that
training imports none of them.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

import torch

from olmo_sparsity.base.errors import DataError, one_line
from olmo_sparsity.models.huggingface.folder import is_hugging_face
from olmo_sparsity.text.runs import run_loaders

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of weights by the names that a user types."""

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
    """Return the formats that are installed, in this package or in others."""
    return tuple(point.load()() for point in entry_points(group="olmo_sparsity.formats"))


def find_folder(path_or_hub_name: str) -> Path:
    """Return the folder with the files of a model. For a run it is the latest checkpoint, and for a
    hub name the download. Raise DataError if nothing is found."""
    path = Path(path_or_hub_name)
    if not path.exists():
        return _find_by_name(path_or_hub_name)
    # Before other formats, as a folder of transformers may hold GGUF files, too.
    if is_hugging_face(path):
        return path
    folder = _find_converted(path_or_hub_name)
    if folder is not None:
        return folder
    for loader in run_loaders():
        folder = loader.find(path)
        if folder is not None:
            return folder
    raise DataError(f"'{path}' is not a model folder; pass {ACCEPTED}")


def _find_converted(path_or_name: str) -> Path | None:
    """Return the folder to which an installed format converts this; None if it is of no such
    format."""
    for model_format in model_formats():
        folder = model_format.find(path_or_name)
        if folder is not None:
            return folder
    return None


_HUB_NAME = re.compile(r"(\w[\w.-]*(?:/[\w.-]+)?)(?:@(\w[\w./-]*))?")
"""`owner/name` or `name`, and after an @ a branch, tag or commit."""


def _find_by_name(name: str) -> Path:
    """Return the folder of a model by a name that is not a path: `demo`, a name that a format knows
    (`smollm2`), or a hub name."""
    if name == "demo":
        return DEMO / "model"
    folder = _find_converted(name)
    if folder is not None:
        return folder
    if name.startswith("runs/"):  # the folder of runs in configs/, not an owner on the hub
        raise DataError(f"{name} does not exist; train it first, or check the path")
    match = _HUB_NAME.fullmatch(name)
    if match and Path(name).suffix != ".gguf":
        return _download(match[1], revision=match[2])
    raise DataError(f"model: '{name}' does not exist; pass {ACCEPTED}")


def _download(name: str, revision: str | None) -> Path:
    """Return the folder of a model of the hub, downloaded to the cache of huggingface_hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Not *.safetensors: some repositories have the weights in their own format as well.
        patterns = ["*.json", "*.txt", "*.model", "*.jinja"]
        patterns += ["model*.safetensors", "adapter_model*.safetensors"]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"'{name}' is neither a folder nor on the hub (revision {revision or 'main'}: "
            f"{one_line(error) or repr(error)}); check the spelling, the network and HF_HUB_OFFLINE"
        ) from None
