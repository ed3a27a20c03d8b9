"""Choose the folder of downloaded and converted models, and create folders in it."""

from __future__ import annotations

import os
from pathlib import Path

from olmo_sparsity.base.errors import UserError


def cache_folder() -> Path:
    """Return `OLMO_SPARSITY_CACHE`, or `olmo-sparsity` in `XDG_CACHE_HOME` or ~/.cache."""
    chosen_by_user = os.environ.get("OLMO_SPARSITY_CACHE")
    if chosen_by_user:
        return Path(chosen_by_user)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "olmo-sparsity"


def make_cache_folder(folder: Path) -> None:
    """Create a folder of the cache; the error says how to choose another one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "set OLMO_SPARSITY_CACHE to a folder for models"
        raise UserError(f"{folder} cannot be written ({error.strerror}); {remedy}") from None
