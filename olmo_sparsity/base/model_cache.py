"""Choose the folder in which downloaded and converted models are kept, and create folders in it."""

from __future__ import annotations

import os
from pathlib import Path

from olmo_sparsity.base.errors import UserError


def cache_folder() -> Path:
    """Return the folder of the cache: the one in the environment variable OLMO_SPARSITY_CACHE, or
    else `olmo-sparsity` in XDG_CACHE_HOME or ~/.cache."""
    chosen_by_user = os.environ.get("OLMO_SPARSITY_CACHE")
    if chosen_by_user:
        return Path(chosen_by_user)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "olmo-sparsity"


def make_cache_folder(folder: Path) -> None:
    """Create a folder of the cache. Raise UserError, which says how to choose another cache, if
    that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "set OLMO_SPARSITY_CACHE to a folder for models"
        raise UserError(f"{folder} cannot be written ({error.strerror}); {remedy}") from None
