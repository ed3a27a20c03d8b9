"""The configs that are installed with the package: found by name, listed and copied.

Place in the flow: beneath file.py. Reads no YAML, so it needs no other package.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import shorten

from olmo_sparsity.errors import ConfigError
from olmo_sparsity.io import write_atomically

CONFIGS = Path(__file__).parents[1] / "configs"


def shipped_configs() -> dict[str, Path]:
    """By name: figure2.yaml, tasks/needle_quick.yaml."""
    return {path.relative_to(CONFIGS).as_posix(): path for path in sorted(CONFIGS.rglob("*.yaml"))}


def find_config(name: str | Path, seen_from: Path | None = None) -> Path:
    """The file of this name, as seen from the folder of another one, or else the shipped config of
    this name."""
    path = Path(name) if seen_from is None else seen_from.parent / name
    if path.exists() and path != seen_from:
        return path
    return shipped_configs().get(Path(name).as_posix().removeprefix("configs/"), path)


def list_configs() -> str:
    """A line for each: its name, and the first sentence of its comment."""
    configs = shipped_configs()
    width = max(map(len, configs))
    return "\n".join(f"{name:<{width}}  {_purpose(path)}" for name, path in configs.items())


def _purpose(path: Path) -> str:
    lines = path.read_text().split("\n")
    comment = " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))
    return shorten(re.split(r"(?<=[.?])\s", comment, maxsplit=1)[0], 90, placeholder=" …")


def copy_config(name: str, out: Path | None) -> str:
    """Text of a shipped config, also written to `out`. What it builds on is named as shipped, and
    is found wherever the copy lies."""
    path = shipped_configs().get(name.removeprefix("configs/"))
    if path is None:
        raise ConfigError(f"no config '{name}' is installed; `olmo-sparsity configs` lists them")
    text = path.read_text().replace("../", "")
    if out is not None:
        if out.exists():
            raise ConfigError(f"--out={out} exists; name another file, or delete it")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, text)
    return text
