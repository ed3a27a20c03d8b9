"""Read, write and verify weights and checkpoint folders (`step000300/`, with `manifest.json`, which
lists the SHA-256 of the other files). PyTorch is imported where a weight is touched."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from olmo_sparsity.base.errors import DataError, unreadable
from olmo_sparsity.base.files import (
    read_json,
    refuse_unreadable,
    verify_manifest,
    write_json,
    write_tensors,
)
from olmo_sparsity.base.folders import differences

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# --- weights ------------------------------------------------------------------------------------


def unique_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A tensor with several names (tied weights) is kept only under the first."""
    named: dict[tuple, tuple[str, Tensor]] = {}
    for name, tensor in state.items():
        named.setdefault((tensor.data_ptr(), tensor.shape), (name, tensor))
    return {name: tensor.detach() for name, tensor in named.values()}


def save_weights(model: nn.Module | Mapping[str, Tensor], path: str | Path) -> Path:
    """Save a model or a state dict as one safetensors file."""
    from torch import nn

    state = model.state_dict() if isinstance(model, nn.Module) else model
    weights = {name: t.cpu().contiguous() for name, t in unique_weights(state).items()}
    write_tensors(Path(path), weights, {"format": "pt"})
    return Path(path)


def part_name(number: int, count: int) -> str:
    """The file of a part of the weights, as transformers names it; `number` from 0."""
    return WEIGHTS if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, part_of: Mapping[str, int]) -> None:
    """List the part of each weight, as transformers does."""
    count = max(part_of.values()) + 1
    weight_map = {name: part_name(part, count) for name, part in part_of.items()}
    write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})


def weight_files(path: str | Path) -> list[Path]:
    """The file, or where it is in parts, these."""
    path, index = Path(path), Path(path).with_name(INDEX)
    if path.is_file() or not index.is_file():
        return [path]
    weight_map = read_json(index, dict, "restore it").get("weight_map", {})
    return [path.with_name(Path(name).name) for name in sorted(set(weight_map.values()))]


class StoredWeights(Mapping[str, "Tensor"]):
    """The weights of a file, or of its parts; each is read when it is looked up, and its part of
    the file is mapped into memory as long as it lives."""

    def __init__(self, path: str | Path) -> None:
        self.files: dict[str, Path] = {}
        for part in weight_files(path):
            if not part.is_file():
                raise DataError(f"'{part}' does not exist; a checkpoint folder holds its weights")
            try:
                with safe_open(part, framework="pt") as file:
                    self.files |= dict.fromkeys(file.keys(), part)
            except (SafetensorError, OSError, ValueError) as error:
                raise unreadable(part, error) from None

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def load_weights(model: nn.Module, path: str | Path) -> None:
    fill(model, StoredWeights(path), str(path))


def fill(model: nn.Module, weights: Mapping[str, Tensor], origin: str) -> None:
    """Copy weights into the model; all names and shapes must match, on both sides."""
    import torch

    state = model.state_dict(keep_vars=True)
    check_fit(state, weights, origin)
    with torch.no_grad():
        for name, tensor in weights.items():
            state[name].copy_(tensor)


def check_fit(state: Mapping[str, Tensor], weights: Mapping[str, Tensor], origin: str) -> None:
    """`state` must come from keep_vars=True, which shows which weights are tied."""
    remedy = "its config.yaml must be the one it was trained with"
    filled = {id(state[name]) for name in weights if name in state}
    missing = [name for name, tensor in state.items() if id(tensor) not in filled]
    unexpected = [name for name in weights if name not in state]
    for names, problem in (
        (missing, "lacks weights the model has"),
        (unexpected, "holds weights the model has no place for"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise DataError(f"'{origin}' {problem}: {names[0]}{more}; {remedy}")
    for name, tensor in weights.items():
        if tensor.shape != state[name].shape:
            shapes = f"{list(tensor.shape)}, in the model it has {list(state[name].shape)}"
            raise DataError(f"'{origin}': {name} has shape {shapes}; {remedy}")


# --- checkpoint folders -------------------------------------------------------------------------


def list_checkpoints(run_folder: str | Path) -> list[Path]:
    """Return the folders `checkpoints/step*`, newest first; unfinished ones end in .tmp and do not
    count. Raise UnreadableNowError where they cannot be listed, which `glob` shows as none."""
    folder = Path(run_folder) / "checkpoints"
    try:
        numbered = [
            (int(match[1]), folder / name)
            for name in os.listdir(folder)
            if (match := re.fullmatch(r"step(\d+)", name)) and (folder / name).is_dir()
        ]
    except OSError as error:
        refuse_unreadable(folder, error)
        return []
    return [path for _, path in sorted(numbered, reverse=True)]


def verified_checkpoints(
    run_folder: str | Path, skip: str = ""
) -> Iterator[tuple[Path, str | None]]:
    """Newest first, each with what its manifest shows to be wrong; None if it is intact. `skip`:
    the beginning of names that are not verified."""
    for folder in list_checkpoints(run_folder):
        yield folder, verify_manifest(folder, skip=skip)


def refuse_other_run(run_folder: Path, checkpoint: Path) -> None:
    """A whole checkpoint that was copied from elsewhere."""
    if not (run_folder / "config.yaml").is_file():
        return
    from olmo_sparsity.config.run import flatten, load_saved_config

    theirs, ours = (flatten(load_saved_config(f / "config.yaml")) for f in (checkpoint, run_folder))
    fixed = [key for key in {*ours, *theirs} if key == "seed" or key.startswith("model.")]
    if changed := differences(*({key: of.get(key) for key in fixed} for of in (theirs, ours))):
        raise DataError(f"'{checkpoint}' is of another run ({', '.join(changed)}); move it")
