"""Find what users add: a selector, a kind of units or a task of their own.

    find_added("mine.py:my_selector", "olmo_sparsity.selectors", "selectors")   # in a file
    find_added("theirs", "olmo_sparsity.selectors", "selectors")                # in a package

`file.py:name` names an object in a file; any other name is an entry point of an installed package.
The registry of selectors, the kinds of units and the transforms of training text ask here for names
that are not their own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from olmo_sparsity.base.errors import ConfigError


def is_in_file(name: str) -> bool:
    """Return whether a name has the form `file.py:name`."""
    return ".py:" in name


def read_object(name: str, key: str) -> Any:
    """Return the object that `file.py:name` names, and raise ConfigError if there is none. `key`:
    the setting with that name, for messages."""
    path, _, object_name = name.rpartition(":")
    if not Path(path).is_file():
        raise ConfigError(f"{key}={name}: '{path}' does not exist; correct the path")
    # Each content is loaded once, under a name that replaces no other module: two files may have
    # one name, and the same file may have been changed in a running notebook.
    module_name = f"olmo_sparsity_added_{_sha256(path)}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{key}={name}: '{path}' is not a Python file; name one (.py)")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses look up types there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    if not hasattr(module, object_name):
        raise ConfigError(
            f"{key}={name}: '{path}' defines no {object_name}; correct the name behind the colon"
        )
    return getattr(module, object_name)


def find_added(name: str, group: str, key: str) -> Any | None:
    """Return the object that a name means: an object in a file, or else an entry point of a group.
    Return None if no entry point has the name. `key`: the setting with that name, for messages."""
    if is_in_file(name):
        return read_object(name, key)
    for entry in entry_points(group=group):
        if entry.name == name:
            return entry.load()
    return None


def fingerprint_of_files(names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the file of each `file.py:name`, by its path. Results store them,
    because a selector whose code has changed makes another measurement."""
    files = {name.rpartition(":")[0] for name in names if is_in_file(name)}
    return {file: _sha256(file) for file in sorted(files)}


def _sha256(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
