"""Read, write and verify weights and checkpoint folders (`step000300/`, with `manifest.json`, which
lists the SHA-256 of the other files). PyTorch is imported where a weight is touched."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from olmo_sparsity.errors import DataError, unreadable
from olmo_sparsity.folders import differences
from olmo_sparsity.io import verify_manifest, write_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHTS = "model.safetensors"

# --- weights ------------------------------------------------------------------------------------


def unique_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A tensor with several names (tied weights) is kept only under the first."""
    named: dict[tuple, tuple[str, Tensor]] = {}
    for name, tensor in state.items():
        named.setdefault((tensor.data_ptr(), tensor.shape), (name, tensor))
    return {name: tensor.detach() for name, tensor in named.values()}


def save_weights(model: nn.Module | Mapping[str, Tensor], path: str | Path) -> None:
    """Save a model, or a state dict gathered in sharded training, as one safetensors file."""
    from torch import nn

    state = model.state_dict() if isinstance(model, nn.Module) else model
    weights = {name: t.cpu().contiguous() for name, t in unique_weights(state).items()}
    write_tensors(Path(path), weights, {"format": "pt"})


def read_weights(path: str | Path) -> dict[str, Tensor]:
    path = Path(path)
    if not path.is_file():
        raise DataError(f"'{path}' does not exist; a checkpoint folder holds its weights there")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    except (SafetensorError, OSError, ValueError) as error:
        raise unreadable(path, error) from None


def load_weights(model: nn.Module, path: str | Path) -> None:
    fill(model, read_weights(path), str(path))


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
    """Folders `checkpoints/step*`, newest first; unfinished ones end in .tmp and do not count."""
    numbered = [
        (int(match[1]), path)
        for path in (Path(run_folder) / "checkpoints").glob("step*")
        if path.is_dir() and (match := re.fullmatch(r"step(\d+)", path.name))
    ]
    return [path for _, path in sorted(numbered, reverse=True)]


def verified_checkpoints(
    run_folder: str | Path, only: Collection[str] | None = None
) -> Iterator[tuple[Path, str | None]]:
    """Newest first, each with what its manifest shows to be wrong; None if it is intact."""
    for folder in list_checkpoints(run_folder):
        yield folder, verify_manifest(folder, only)


def refuse_other_run(run_folder: Path, checkpoint: Path) -> None:
    """A whole checkpoint that was copied from elsewhere."""
    if not (run_folder / "config.yaml").is_file():
        return
    from olmo_sparsity.config.run import flatten, load_saved_config

    theirs, ours = (flatten(load_saved_config(f / "config.yaml")) for f in (checkpoint, run_folder))
    fixed = [key for key in {*ours, *theirs} if key == "seed" or key.startswith("model.")]
    if changed := differences(*({key: of.get(key) for key in fixed} for of in (theirs, ours))):
        raise DataError(
            f"'{checkpoint}' is of another run than '{run_folder}' ({', '.join(changed)}); move it"
        )
