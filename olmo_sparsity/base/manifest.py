"""Write folders that are whole or not there, and find files in them that were damaged since.

A manifest is a file `manifest.json` with the size and the SHA-256 of each other file of a folder.
It is written last, so a folder with a manifest was finished.

    with writing_folder(Path("step000100")) as partial:
        save_file(weights, partial / "model.safetensors")

    problem = find_damage(Path("step000100"))  # None, or such as "model.safetensors is missing"

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple

from olmo_sparsity.base.files import (
    check_readable_now,
    read_bounded,
    sha256_of,
    write_json,
    writing,
)
from olmo_sparsity.base.json_text import parse_json

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileEntry:
    """The entry of a file in a manifest."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class _Manifest:
    """The content of a manifest: the entry of each file, by its path in the folder."""

    files: dict[str, FileEntry]


def make_entry(path: Path) -> FileEntry:
    """Return the entry of a file, as it is now."""
    return FileEntry(sha256_of(path), path.stat().st_size)


@contextmanager
def writing_folder(final: Path) -> Iterator[Path]:
    """Yield a new folder, into which the caller writes, then add a manifest and rename the folder
    to `final`."""
    with writing(final) as partial:
        partial.mkdir()
        yield partial
        write_manifest(partial)


def write_manifest(
    folder: Path,
    names: Collection[str] | None = None,
    known: Mapping[str, FileEntry] = MappingProxyType({}),
) -> None:
    """Write the manifest of a folder.

    Args:
        names: The files that it lists. None means all files below the folder.
        known: Entries of files that another process has hashed, which are not hashed again.
    """
    paths = folder.rglob("*") if names is None else (folder / name for name in names)
    entries = {}
    # Sorted, so that equal folders have equal manifests.
    for path in sorted(paths):
        if path.is_file() and path.name != MANIFEST:
            name = path.relative_to(folder).as_posix()
            entries[name] = known.get(name) or make_entry(path)
    write_json(folder / MANIFEST, asdict(_Manifest(entries)))


def find_damage(
    folder: str | Path, only: Collection[str] | None = None, skip: str = ""
) -> str | None:
    """Return a description of the damage in a folder; None if it is intact. Raise
    UnreadableNowError if that cannot be found out now.

    Args:
        only: The names of the files that are checked. None means all that the manifest lists.
        skip: The beginning of the names of files that are not checked, such as the state of the
            optimizer, which is most of the bytes and which analysis does not need.
    """
    folder = Path(folder)
    listed = read_entries(folder)
    if listed.problem is not None:
        return listed.problem
    if only is not None:
        names = sorted(only)
    else:
        # An empty text is the beginning of every name.
        names = sorted(name for name in listed.files if not skip or not name.startswith(skip))

    for name in names:
        if name not in listed.files:
            return f"{MANIFEST} does not list {name}"
    return find_damaged_file(folder, {name: listed.files[name] for name in names})


class ListedFiles(NamedTuple):
    """The entries of a manifest, if it is intact."""

    files: dict[str, FileEntry]
    """The entry of each file, by its name. Empty if the manifest is damaged."""

    problem: str | None
    """The damage of the manifest itself, in words. None if it is intact."""


def read_entries(folder: Path) -> ListedFiles:
    """Return the entries of a folder's manifest, or how it is damaged. Raise UnreadableNowError if
    that cannot be found out now."""
    try:
        entries = parse_json(read_bounded(folder / MANIFEST), _Manifest).files
    except (OSError, ValueError) as error:
        check_readable_now(folder / MANIFEST, error)
        return ListedFiles({}, f"{MANIFEST} is not a readable list of files")
    for name in entries:
        if not stays_inside(name):
            problem = f"{MANIFEST} names '{name}', which is outside of the folder"
            return ListedFiles({}, problem)
    return ListedFiles(entries, problem=None)


def find_damaged_file(
    folder: Path,
    entries: Mapping[str, FileEntry],
    names_to_hash: Collection[str] | None = None,
) -> str | None:
    """Return a description of the first file that is missing or differs from its entry; None if all
    are intact. `names_to_hash`: the files whose content is compared, too, and not only their size.
    None: all."""
    if names_to_hash is None:
        names_to_hash = entries.keys()

    def problem_of(name: str) -> str | None:
        """Return a description of the damage of a file; None if it is intact."""
        path = folder / name
        entry = entries[name]
        try:
            if not path.is_file():
                return f"{name} is missing"
            # Compared first, as it needs no reading: most damage is a file that was cut off.
            size = path.stat().st_size
            if size != entry.bytes:
                return (
                    f"{name} has {size:,} bytes, {MANIFEST} says {entry.bytes:,}: "
                    "truncated or overwritten"
                )
            if name in names_to_hash and sha256_of(path) != entry.sha256:
                return f"{name} does not have the SHA-256 that {MANIFEST} gives"
        except OSError as error:
            check_readable_now(path, error)
            return f"{name} cannot be read: {error.strerror}"
        return None

    # A core hashes 0.5 to 2 GB/s, and hashing releases Python's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = pool.map(problem_of, entries)
        return next(filter(None, problems), None)


def stays_inside(name: object) -> bool:
    """Return whether a name in a manifest is inside its folder.

    A manifest may be anybody's, and `../../secret` must not be read. Links are allowed: the hub's
    cache consists of them, and whoever creates one can read its target."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
