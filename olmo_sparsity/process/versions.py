"""Record which command, commit and package versions made a result. Never imports torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = [
    "olmo-sparsity",
    "ai2-olmo",
    "torch",
    "numpy",
    "transformers",
    "datasets",
    "tokenizers",
    "deepspeed",
    "accelerate",
]


def typed_command() -> list[str]:
    """The command line, without the installation path of this program."""
    program = Path(sys.argv[0])
    ours = program.name in ("olmo-sparsity", "__main__.py")
    return ["olmo-sparsity" if ours else sys.argv[0], *sys.argv[1:]]


def provenance(device: str) -> dict[str, Any]:
    """Commit, package versions and machine; `device`: what it ran on."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {device}"
    return {"commit": code_version(), "versions": versions(), "machine": machine}


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def code_version(folder: Path = Path(__file__).parents[2]) -> str | None:
    """The commit of the running code, marked -dirty if it has uncommitted changes outside docs/,
    which results are written to; None if the folder is no clone: a repository around it is another.
    """

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        if not folder.samefile(git("rev-parse", "--show-toplevel")):
            return None
        commit = git("describe", "--always", "--abbrev=40")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}-dirty" if changed else commit


def _version(name: str) -> str | None:
    if name == "torch" and name in sys.modules:
        return str(sys.modules[name].__version__)  # names the CUDA it was built for, too
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
