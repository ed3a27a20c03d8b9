"""Find the configs that are installed with the package, and list them.

    find_config("mine.yaml")                   mine.yaml, if there is such a file here
    find_config("figure2.yaml")                the installed one, if there is no such file
    find_config("configs/figure2.yaml")        the same, as in a clone
    find_config("c4.yaml", Path("a/b.yaml"))   a/c4.yaml, the base that a/b.yaml names

A config is named by its path below `configs/`, such as experiments/c4_1b.yaml. A user's file of the
same name comes first.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from textwrap import shorten

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.renamed import current_config

CONFIGS = Path(__file__).parents[1] / "configs"
"""The folder of installed configs."""


def installed_configs() -> dict[str, Path]:
    """Return the paths of installed configs by their names, such as figure2.yaml and
    experiments/c4_ladder.yaml."""
    return {path.relative_to(CONFIGS).as_posix(): path for path in sorted(CONFIGS.rglob("*.yaml"))}


def find_config(name: str | Path, seen_from: Path | None = None) -> Path:
    """Return the file of this name, or else the installed config of this name. If there is neither,
    return the path of the missing file, so that the caller can name it.

    Args:
        seen_from: The config in which the name is written. A relative name counts from its folder.
    """
    path = Path(name) if seen_from is None else seen_from.parent / name
    # A file is not its own base: a copy of an installed config may name the original, which has the
    # same name, as its base.
    if path.exists() and path != seen_from:
        return path
    installed_name = current_config(Path(name).as_posix().removeprefix("configs/"))
    return installed_configs().get(installed_name, path)


def suggest_config(path: Path) -> str:
    """Return the end of a message about a missing config: `; did you mean 'figure2.yaml'?` for
    figure.yaml. It is empty if no name is close."""
    if path.exists():
        return ""
    names = [*map(str, path.parent.glob("*.yaml")), *installed_configs()]
    close = difflib.get_close_matches(str(path).removeprefix("configs/"), names, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def list_configs() -> str:
    """Return a line for each installed config: its name, and the first sentence of its comment."""
    configs = installed_configs()
    width = max(map(len, configs))
    return "\n".join(f"{name:<{width}}  {_purpose(path)}" for name, path in configs.items())


def _purpose(path: Path) -> str:
    """Return the first sentence of a config's comment, which says what the config is for."""
    lines = path.read_text().split("\n")
    comment = " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))
    first_sentence = re.split(r"(?<=[.?])\s", comment, maxsplit=1)[0]
    return shorten(first_sentence, 90, placeholder=" …")


def read_config(name: str) -> str:
    """Return the text of an installed config, for a copy that works in any folder."""
    path = installed_configs().get(current_config(name.removeprefix("configs/")))
    if path is None:
        raise ConfigError(f"no config '{name}' is installed; `olmo-sparsity configs` lists them")
    # `../c4.yaml` holds in the folder of installed configs alone; `c4.yaml` is found anywhere.
    return path.read_text().replace("../", "")
