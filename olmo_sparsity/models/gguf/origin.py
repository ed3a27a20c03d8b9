"""Name the GGUF file that a folder of the cache was converted from.

format.py writes `gguf.json` into each folder that it converts, and models/load.py reads it: the
weights of such a folder are identified by the GGUF file, whose weights they are in another format.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from olmo_sparsity.base.files import read_json
from olmo_sparsity.base.model_cache import cache_folder

ORIGIN = "gguf.json"
"""The file in a converted folder that says from which GGUF file it was converted."""


@dataclass(frozen=True)
class Origin:
    """The GGUF file that a folder of the cache was converted from."""

    sha256: str
    quantization: str
    """The type of most of its weights, such as Q4_1."""


def find_origin(folder: Path) -> Origin | None:
    """Return the GGUF file that a folder of the cache was converted from; None for any other
    folder."""
    # A copy outside of the cache may have other weights by now.
    if not folder.is_relative_to(cache_folder()) or not (folder / ORIGIN).is_file():
        return None
    return Origin(**read_json(folder / ORIGIN, dict, "delete the folder"))
