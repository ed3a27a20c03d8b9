"""Say what produced a result: the command, the commit, the versions of packages, the machine.

Imports nothing of ours, and no package whose version it reads.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

PACKAGES = (
    "olmo-sparsity",
    "ai2-olmo",
    "torch",
    "numpy",
    "transformers",
    "datasets",
    "tokenizers",
    "deepspeed",
    "accelerate",
)
"""The packages whose versions results store."""


def typed_command() -> list[str]:
    """Return the command line, without the installation path of this program."""
    program = sys.argv[0]
    if Path(program).name in ("olmo-sparsity", "__main__.py"):
        program = "olmo-sparsity"
    return [program, *sys.argv[1:]]


def provenance(device: str) -> dict[str, Any]:
    """Return what results store of their origin: the commit, versions of packages, and the machine.
    `device`: the name of the device that computed them."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {device}"
    return {"commit": code_version(), "versions": versions(), "machine": machine}


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of `PACKAGES`, by name. A package that is not installed has
    None."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def versions_of_numbers() -> dict[str, str | None]:
    """Return the versions of the packages on which numbers depend."""
    return {name: _version(name) for name in ("olmo-sparsity", "torch", "transformers")}


def code_version(folder: Path = Path(__file__).parents[2]) -> str | None:
    """Return the commit of the running code, with `-dirty` if files outside docs/ have uncommitted
    changes. If the folder is not a clone, return the commit that its container was built from, or
    None."""

    def git(*words: str) -> str:
        """Return what git prints."""
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        # A package that is installed below another repository is no clone of ours.
        if not folder.samefile(git("rev-parse", "--show-toplevel")):
            return _image_commit()
        commit = git("describe", "--always", "--abbrev=40")
        # Results are written to docs/: the first of a series must not mark the others as dirty.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return _image_commit()
    return f"{commit}-dirty" if changed else commit


def code_hash(package: Path = Path(__file__).parents[1]) -> str:
    """Return the first digits of a hash of all Python files of this package, which also tells
    uncommitted changes and copies without git apart. It takes about 20 ms on a local disk."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        # With its length, or a line could move from one file to the next.
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def _image_commit() -> str | None:
    """Return the commit that the container was built from; None outside of a container."""
    commit = os.environ.get("OLMO_SPARSITY_COMMIT", "unknown")
    return None if commit == "unknown" else commit


def _version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    if name == "torch" and name in sys.modules:
        return str(sys.modules[name].__version__)  # names the CUDA it was built for, too
    return _installed(name)


@cache
def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
