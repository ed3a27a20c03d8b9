"""Accept the names of the last release, next to those of today.

    current_words(["sweep", "file.yaml"])     # ["experiment", "file.yaml"], and a line says so
    current_keys({"far_states": "isolated"})  # {"distant_states": "isolated"}, and a line says so
    current_name("foreign_low")               # "unrelated_low"

The command line, files and Python calls accept the old names for one release, and print the new
one. Stored results are read under the new names, and nothing is printed. Delete the entries below
after that release.

    a word of a command line       current_words
    a key of a file, an argument   current_keys, accepts_old_names
    an attribute or a class        OldAttribute, getattr_with_old_names
    a stored column or key         current_name, with_current_names
    a group of entry points        entry_points_of
    an installed config            current_config

Whatever reads what a user typed, or what an earlier release stored, asks here before it looks at a
name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ParamSpec, TypeVar

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.progress import say

RENAMED = {"far_states": "distant_states", "foreign": "unrelated"}
"""Old name → today's name, of options, arguments and keys. Names of columns may have one as a part,
such as foreign_low."""

COLUMNS = {
    "far_part": "distant_part",
    "far_first": "distant_first",
    "far_end": "distant_end",
    "far_text": "distant_text",
}
"""Old name → today's name, of columns that are no options."""

COMMANDS = {"sweep": "experiment"}
"""Old name → today's name, of commands."""

EXPERIMENT_KEYS = {"configs": "models"}
"""Old key → today's key, of an experiment's file."""

CONFIG_FOLDERS = {"sweeps": "experiments"}
"""Old name → today's name, of folders of installed configs."""

ENTRY_POINT_GROUPS = {"olmo_sparsity.engines": "olmo_sparsity.prompt_models"}
"""Old name → today's name, of groups of entry points. Other packages may still declare the old
one."""

P = ParamSpec("P")
Result = TypeVar("Result")


# --- what a user types ----------------------------------------------------------------------------


def current_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with old names replaced, and print a line for each. Old
    names are those of commands, and of options (`--old`, `--old=value`)."""
    new_options = {_option_of(old): _option_of(new) for old, new in RENAMED.items()}
    current = []
    for index, word in enumerate(words):
        if index == 0 and word in COMMANDS:
            _say_new_name(word, COMMANDS[word])
            word = COMMANDS[word]
        option, equals, value = word.partition("=")
        if option in new_options:
            _say_new_name(option, new_options[option])
            option = new_options[option]
        current.append(option + equals + value)
    return current


def _option_of(name: str) -> str:
    """Return the option of the command line for an argument of Python."""
    return "--" + name.replace("_", "-")


def _say_new_name(old: str, new: str) -> None:
    say(f"{old} is called {new} now; the old name works for one release")


def current_keys(
    settings: Mapping[str, Any], renamed: Mapping[str, str] = RENAMED
) -> dict[str, Any]:
    """Return the settings of a file, or the arguments of a call, with old names replaced, and print
    a line for each. Raise ConfigError if one is there under both names."""
    current = dict(settings)
    for old, new in renamed.items():
        if old not in current:
            continue
        if new in current:
            raise ConfigError(f"{old} and {new} are one option; pass {new} alone")
        _say_new_name(old, new)
        current[new] = current.pop(old)
    return current


def accepts_old_names(function: Callable[P, Result]) -> Callable[P, Result]:
    """Return a function to which arguments may be passed under their old names, too."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        return function(*args, **current_keys(kwargs))

    return call


class OldAttribute:
    """An attribute under its old name: `num_far = OldAttribute("num_distant")` in a class. The
    first use prints the new name. Later ones do not, as a selector that is called for many targets
    would repeat it."""

    def __init__(self, new: str) -> None:
        self.new = new
        self.is_said = False

    def __set_name__(self, owner: type, old: str) -> None:
        self.old = old

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        if not self.is_said:
            _say_new_name(f"{owner.__name__}.{self.old}", self.new)
            self.is_said = True
        return getattr(instance, self.new)


def getattr_with_old_names(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module, which finds its classes under their old names.

        __getattr__ = getattr_with_old_names(__name__, {"Old": "New"})     in the module

    The first use of each old name prints the new one: Python asks twice for it in `from module
    import Old`, and the line should be printed once."""
    is_said: set[str] = set()

    def find(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        if name not in is_said:
            _say_new_name(f"{module}.{name}", renamed[name])
            is_said.add(name)
        return getattr(sys.modules[module], renamed[name])

    return find


def entry_points_of(group: str) -> list[EntryPoint]:
    """Return the entry points of a group, then those of its old name."""
    old_groups = [old for old, new in ENTRY_POINT_GROUPS.items() if new == group]
    points = list(entry_points(group=group))
    for old in old_groups:
        points += entry_points(group=old)
    return points


def current_config(name: str) -> str:
    """Return today's name of an installed config."""
    folder, slash, file = name.partition("/")
    return CONFIG_FOLDERS.get(folder, folder) + slash + file


# --- what an earlier release stored ---------------------------------------------------------------


def current_name(name: str) -> str:
    """Return today's name of a stored key, column, or value of the column `control`. Old names are
    replaced wherever they are in it: "foreign_low" becomes "unrelated_low"."""
    for old, new in (RENAMED | COLUMNS).items():
        name = name.replace(old, new)
    return name


def with_current_names(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored mapping, and the mappings in it, with today's keys."""
    return {
        current_name(key): with_current_names(value) if isinstance(value, Mapping) else value
        for key, value in stored.items()
    }
