"""Check the files of a Hugging Face folder before transformers reads them: they may come from
anybody.

    model.safetensors               one file with all weights, or
    model.safetensors.index.json    the names of several, which must be safetensors in this folder
    *.bin                           pickles, which may run any code when they are read: never read
    config.json, tokenizer*, …      read whole, so their size is bounded

`checked_weight_files` returns the files with a model's weights, `checked_adapter_file` that of a
PEFT adapter.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from olmo_sparsity.base.errors import DataError, unreadable
from olmo_sparsity.base.files import check_bounded, read_json
from olmo_sparsity.base.manifest import stays_inside

REMEDY = "write or download it again"
"""What to do about a damaged file, for messages."""

_READ_WHOLE = ("*config.json", "*token*", "vocab*", "merges.txt", "*.jinja", "*.model")
"""Patterns of the files that transformers reads whole, so that a huge one would fill the memory."""

_MAX_BYTES = 2**28
"""The largest accepted size of such a file, in bytes."""


def checked_adapter_file(folder: Path) -> Path:
    """Return the file of an adapter's weights, after checking its header."""
    # The only file that PEFT reads without unpickling.
    if not (folder / "adapter_model.safetensors").is_file():
        raise _no_weights(folder, "adapter_model.safetensors")
    (file,) = checked_weight_files(folder, "adapter_model")
    return file


def checked_weight_files(folder: Path, stem: str = "model") -> list[Path]:
    """Return the safetensors files that are loaded, after checking their names and headers. Raise
    DataError for a file that is damaged, missing or outside of the folder, and OSError for one that
    is too large to be read whole. `stem`: what their names begin with."""
    for pattern in _READ_WHOLE:
        for path in folder.glob(pattern):
            check_bounded(path, _MAX_BYTES)

    # In the order in which transformers looks for them.
    single_file = folder / f"{stem}.safetensors"
    index = folder / f"{stem}.safetensors.index.json"
    if single_file.is_file():
        files = [single_file]
    elif index.is_file():
        files = _named_by_index(folder, index)
    else:
        raise _no_weights(folder, f"{stem}*.safetensors")

    for path in files:
        _check_header(path)
    return files


def _check_header(path: Path) -> None:
    """Raise DataError if a safetensors file is cut off, or is none."""
    try:
        with safe_open(path, framework="pt"):
            pass  # it is checked on opening, without reading the weights
    except (SafetensorError, OSError, ValueError) as error:
        raise unreadable(path, error) from None


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
    file_of_weight = read_json(index, dict, REMEDY).get("weight_map")
    if not isinstance(file_of_weight, dict) or not file_of_weight:
        raise DataError(f"{index}: has no weight_map; {REMEDY}")
    for name in file_of_weight.values():
        if not stays_inside(name):
            raise DataError(f"'{index}' names '{name}', which is outside of its folder; {REMEDY}")
        if not name.endswith(".safetensors"):
            raise DataError(f"'{index}' names '{name}', which is not a safetensors file; {REMEDY}")
    return sorted({folder / name for name in file_of_weight.values()})
