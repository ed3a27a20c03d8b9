"""Read, write and verify weights and checkpoint folders on disk.

Place in the flow: beneath training's checkpoints and `load_model`; independent of the architecture.

A checkpoint folder `step000300/` holds `config.yaml`, `model.safetensors`, `tokenizer.json`,
`trainer.json` and `manifest.json`, which lists the others' SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from olmo_sparsity.disk.files import follow_umask, sha256_of
from olmo_sparsity.disk.manifest import verify_manifest
from olmo_sparsity.disk.nested import differences
from olmo_sparsity.errors import DataError

WEIGHTS = "model.safetensors"

_WHOLE_BYTES = 2**30  # above this a fingerprint samples the file instead of reading all of it
_BLOCK_BYTES, _NUM_BLOCKS = 2**16, 1024


# --- weights ------------------------------------------------------------------------------------


def unique_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A tensor with several names (tied weights) is kept only under the first."""
    named: dict[tuple, tuple[str, Tensor]] = {}
    for name, tensor in state.items():
        named.setdefault((tensor.data_ptr(), tensor.shape), (name, tensor))
    return {name: tensor.detach() for name, tensor in named.values()}


def save_weights(model: nn.Module | Mapping[str, Tensor], path: str | Path) -> None:
    """Save a model, or a state dict gathered in sharded training, as one safetensors file."""
    state = model.state_dict() if isinstance(model, nn.Module) else model
    weights = {name: t.cpu().contiguous() for name, t in unique_weights(state).items()}
    save_file(weights, str(path), metadata={"format": "pt"})
    follow_umask(Path(path))


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


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor], origin: str) -> None:
    """Copy weights into the model; all names and shapes must match, on both sides."""
    state = model.state_dict(keep_vars=True)
    check_fit(state, weights, origin)
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
            raise DataError(
                f"'{origin}': {name} has shape {list(tensor.shape)}, in the model it has "
                f"{list(state[name].shape)}; {remedy}"
            )


def unreadable(path: str | Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:200]
    return DataError(f"'{path}' cannot be read ({reason}); write or download it again")


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
    from olmo_sparsity.config.file import flatten, load_saved_config

    theirs, ours = (flatten(load_saved_config(f / "config.yaml")) for f in (checkpoint, run_folder))
    fixed = [key for key in {*ours, *theirs} if key == "seed" or key.startswith("model.")]
    if changed := differences(*({key: of.get(key) for key in fixed} for of in (theirs, ours))):
        raise DataError(
            f"'{checkpoint}' is of another run than '{run_folder}' ({', '.join(changed)}); move it "
            "away, or name it itself"
        )


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


def fingerprint_weights(model: nn.Module) -> str:
    """Identifies the weights of a model in memory: the SHA-256 of the names and bytes of its state
    dict, and of the scaling of PEFT adapters. It differs from that of files."""
    state = model.state_dict()
    if any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
        from accelerate.utils.modeling import get_state_dict_offloaded_model

        state = get_state_dict_offloaded_model(model)
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(
            f"{name} {getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}".encode()
        )
        if type(value) is Tensor:
            raw = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(raw.numpy().data)
        else:  # a quantized type of another library
            buffer = io.BytesIO()
            torch.save(value, buffer)
            digest.update(buffer.getvalue())
    for name, module in model.named_modules():
        if isinstance(getattr(module, "scaling", None), dict):
            used = (module.scaling, module.active_adapters, module.disable_adapters, module.merged)
            digest.update(f"{name} {used}".encode())
    return digest.hexdigest()
