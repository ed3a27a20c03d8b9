"""Read, write and verify files of weights, and checkpoint folders.

    RUN/checkpoints/step000300/
        model.safetensors, or parts of it with model.safetensors.index.json
        config.yaml, tokenizer.json, state of the optimizer (training/checkpoints/writer.py)
        manifest.json    written last: the SHA-256 of the other files

PyTorch is imported in functions that touch a weight, so that commands that only list checkpoints
start fast.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from olmo_sparsity.base.differences import differences
from olmo_sparsity.base.errors import DataError, unreadable
from olmo_sparsity.base.files import check_readable_now, read_json, write_json, write_tensors
from olmo_sparsity.base.manifest import find_damage

if TYPE_CHECKING:
    from torch import Tensor, nn

    from olmo_sparsity.config.sections import RunConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# --- weights ------------------------------------------------------------------------------------


def unique_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a state dict, each once. A tensor with several names (tied weights) has
    its first name in the result, because safetensors rejects memory that two names share."""
    weights: dict[str, Tensor] = {}
    seen_memory = set[tuple]()
    for name, tensor in state.items():
        # Of the same shape, as a view of a part begins where the whole does.
        memory = (tensor.data_ptr(), tensor.shape)
        if memory not in seen_memory:
            seen_memory.add(memory)
            weights[name] = tensor.detach()
    return weights


def save_weights(model: nn.Module | Mapping[str, Tensor], path: str | Path) -> Path:
    """Save a model or a state dict as one safetensors file."""
    from torch import nn

    state = model.state_dict() if isinstance(model, nn.Module) else model
    weights = {name: t.cpu().contiguous() for name, t in unique_weights(state).items()}
    write_tensors(Path(path), weights, {"format": "pt"})
    return Path(path)


def part_name(part_index: int, num_parts: int) -> str:
    """Return the file name of one of several parts of the weights, as transformers names it: the
    first of two is model-00001-of-00002.safetensors. The index of the first is 0."""
    if num_parts == 1:
        return WEIGHTS
    return f"model-{part_index + 1:05d}-of-{num_parts:05d}.safetensors"


def write_index(folder: Path, part_of: Mapping[str, int], num_parts: int) -> None:
    """Write the index of weights in several files, as transformers does.

    Args:
        part_of: The index of the file that each weight is in, by the weight's name.
        num_parts: The number of files. If there are more files than weights, some hold none.
    """
    weight_map = {name: part_name(part_index, num_parts) for name, part_index in part_of.items()}
    write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})


def weight_files(path: str | Path) -> list[Path]:
    """Return the files of weights: `path`, or the files that the index next to it names."""
    path = Path(path)
    index = path.with_name(INDEX)
    if path.is_file() or not index.is_file():
        return [path]
    weight_map = read_json(index, dict, "restore it").get("weight_map", {})
    return [path.with_name(Path(name).name) for name in sorted(set(weight_map.values()))]


class StoredWeights(Mapping[str, "Tensor"]):
    """The weights of one or several files, by name. Each is read when it is looked up, as a view of
    the file, which stays mapped into memory as long as the tensor lives."""

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
    """Copy the weights of one or several files into a model."""
    fill(model, StoredWeights(path), str(path))


def fill(model: nn.Module, weights: Mapping[str, Tensor], origin: str) -> None:
    """Copy weights into a model. Raise DataError if names or shapes differ. `origin`: where the
    weights are from, for messages."""
    import torch

    state = model.state_dict(keep_vars=True)
    check_fit(state, weights, origin)
    with torch.no_grad():
        for name, tensor in weights.items():
            state[name].copy_(tensor)


def check_fit(state: Mapping[str, Tensor], weights: Mapping[str, Tensor], origin: str) -> None:
    """Raise DataError for weights whose names or shapes are not those of a model. `state`: what
    `state_dict(keep_vars=True)` of the model returns. With `keep_vars` it shows which weights are
    tied: of these, one name is enough."""
    filled = {id(state[name]) for name in weights if name in state}
    missing = [name for name, tensor in state.items() if id(tensor) not in filled]
    if missing:
        problem = f"lacks weights the model has: {_first_and_count(missing)}"
        raise DataError(f"'{origin}' {problem}; {_OTHER_CONFIG}")
    unexpected = [name for name in weights if name not in state]
    if unexpected:
        problem = f"holds weights the model has no place for: {_first_and_count(unexpected)}"
        raise DataError(f"'{origin}' {problem}; {_OTHER_CONFIG}")
    for name, tensor in weights.items():
        if tensor.shape != state[name].shape:
            raise DataError(
                f"'{origin}': {name} has shape {list(tensor.shape)}, in the model it has "
                f"{list(state[name].shape)}; {_OTHER_CONFIG}"
            )


_OTHER_CONFIG = "its config.yaml must be the one it was trained with"


def _first_and_count(names: list[str]) -> str:
    """Return the first name and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


# --- checkpoint folders -------------------------------------------------------------------------


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    """Return the folder of a run in which the checkpoint of a step is, or would be."""
    return run_folder / "checkpoints" / f"step{step:06d}"


def find_step(folder: Path) -> int | None:
    """Return the step of a checkpoint folder, such as 300 of `step000300`. Return None for a folder
    with another name: an unfinished checkpoint, or one that was copied elsewhere."""
    match = re.fullmatch(r"step(\d+)", folder.name)
    return int(match[1]) if match else None


def step_of(checkpoint: Path) -> int:
    """Return the step of a folder that `list_checkpoints` or `checkpoint_folder` has returned."""
    step = find_step(checkpoint)
    assert step is not None, f"{checkpoint} is not named by a step"
    return step


def list_checkpoints(run_folder: str | Path) -> list[Path]:
    """Return the folders `checkpoints/step*` of a run, the newest first. Unfinished ones, whose
    names end in .tmp, are left out. Raise UnreadableNowError if the folder cannot be listed, such
    as while a network disk is away; `glob` would return nothing."""
    folder = Path(run_folder) / "checkpoints"
    checkpoints: list[Path] = []
    try:
        for name in os.listdir(folder):
            path = folder / name
            if find_step(path) is not None and path.is_dir():
                checkpoints.append(path)
    except OSError as error:
        check_readable_now(folder, error)
        return []
    # The path decides between step100 and step000100, so that the order is always the same.
    return sorted(checkpoints, key=lambda path: (step_of(path), path), reverse=True)


class VerifiedCheckpoint(NamedTuple):
    """A checkpoint whose files were compared with its manifest."""

    folder: Path
    damage: str | None
    """The first damage that the manifest shows; None if it is intact."""


def verified_checkpoints(run_folder: str | Path, skip: str = "") -> Iterator[VerifiedCheckpoint]:
    """Yield the checkpoints of a run, the newest first. Each is verified when it is yielded, which
    reads its files. `skip`: the beginning of the names of files that are not verified."""
    for folder in list_checkpoints(run_folder):
        yield VerifiedCheckpoint(folder, find_damage(folder, skip=skip))


def load_checkpoint_config(folder: Path) -> RunConfig:
    """Return the config of a checkpoint of ours. Its `model` and `positions` are those of the stage
    in which the checkpoint was saved."""
    from olmo_sparsity.config.run import load_saved_config

    config = load_saved_config(folder / "config.yaml")
    if not config.training.lengths:
        return config
    state = read_json(folder / "trainer.json", dict[str, Any], "use another checkpoint")
    return config.at(int(state["step"]))


def check_of_same_run(run_folder: Path, checkpoint: Path) -> None:
    """Raise DataError for a checkpoint that was copied from another run. Its manifest shows no
    damage, so its settings are compared with those of the run."""
    if not (run_folder / "config.yaml").is_file():
        return
    from olmo_sparsity.config.run import flatten, load_saved_config

    checkpoint_settings = flatten(load_saved_config(checkpoint / "config.yaml"))
    run_settings = flatten(load_saved_config(run_folder / "config.yaml"))
    keys = {*run_settings, *checkpoint_settings}
    # Other keys may change between two starts of one run.
    fixed = [key for key in keys if key == "seed" or key.startswith("model.")]
    changed = differences(
        {key: checkpoint_settings.get(key) for key in fixed},
        {key: run_settings.get(key) for key in fixed},
    )
    if changed:
        raise DataError(f"'{checkpoint}' is of another run ({', '.join(changed)}); move it")
