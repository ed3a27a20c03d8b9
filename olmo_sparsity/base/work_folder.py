"""Fill one folder over several starts of a command, with the results of one work.

A run or measurement may be killed at any time, and the same command goes on with the files that are
there. `WorkFolder` makes sure that these belong to the same work: a file in the folder, the
identity, holds the settings of the work, and a start with other settings is an error that names
them. While it is open, the folder is locked.

    work = WorkFolder(Path("results/mine"), setting="out")
    with work.opened("parts"):  # creates results/mine/parts, removes what killed processes left
        work.identify({"seed": 3, "long": 1024})
        pieces = Pieces(work.path / "parts")  # what is finished, a file each
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_sparsity.base.differences import differences
from olmo_sparsity.base.errors import ConfigError, DataError, check_encodable
from olmo_sparsity.base.files import (
    is_partial,
    paths_inside,
    read_json,
    remove_partial,
    sha256_of,
    unwritable,
    write_atomically,
    write_json,
)
from olmo_sparsity.base.json_text import with_crc
from olmo_sparsity.base.locks import CLAIM, LOCK, locked
from olmo_sparsity.base.path_options import check_output_path, path_of
from olmo_sparsity.base.progress import say

SUFFIXES_OF_LOGS = (".log", ".out", ".err")
"""A shell or SLURM writes these into the folder before the command begins."""


@dataclass(frozen=True)
class WorkFolder:
    """A folder that holds one work. A file in it, the identity, has the settings of the work."""

    path: Path
    setting: str
    """The option that names the folder, for messages, such as run_folder or out."""

    identity_name: str = "settings.json"
    """The name of the identity file."""

    own_key: str | None = None
    """A key that every identity of this kind of work has, and those of other commands lack. None:
    no other command's identity has the same file name."""

    @property
    def identity(self) -> Path:
        """Return the path of the identity file."""
        return self.path / self.identity_name

    def check_no_other_work(self) -> None:
        """Raise ConfigError if the folder has files of other work, which this one would spoil, or
        if there can be no folder of this name."""
        path_of(self.setting, self.path)
        if self.path.is_file():
            raise ConfigError(f"{self.setting}={self.path} is a file; pass a folder")
        others = [path.name for path in sorted(self.path.glob("[!.]*")) if not _may_precede(path)]
        # Looked for last, as another process may begin just now.
        if others and not self.identity.exists():
            # Without an identity these files are of something else, which must not be overwritten.
            names = f"other files ({', '.join(others[:3])}) and no {self.identity_name}"
            raise ConfigError(f"{self.setting}={self.path} holds {names}; name a new folder")

    def create(self, *inner_folders: str) -> None:
        """Create the folder and those inside it, and remove what killed processes left there."""
        check_output_path(self.setting, str(self.path))
        check_encodable(str(self.path), self.setting)  # Parquet's library needs UTF-8
        self.check_no_other_work()
        if self.path.is_symlink() and not self.path.exists():
            raise ConfigError(
                f"{self.setting}={self.path} is a link to {self.path.readlink()}, which is not "
                "there; create that folder, or remove the link"
            )
        for folder in (self.path, *(self.path / name for name in inner_folders)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                place = f"{self.setting}={self.path}"
                raise unwritable(place, error.errno) from None
            remove_partial(folder)

    @contextmanager
    def opened(self, *inner_folders: str) -> Iterator[None]:
        """Create the folder and those inside it, and lock it."""
        self.create(*inner_folders)
        with locked(self.path):
            yield

    def identify(
        self,
        settings: Mapping[str, Any],
        complete: Callable[[dict[str, Any]], dict[str, Any]] = lambda stored: stored,
        versions: Mapping[str, str | None] | None = None,
    ) -> str:
        """Store the settings in the identity file at the first start, and raise ConfigError at a
        later one if they differ. Return the SHA-256 of that file, which results store, so that a
        result copied from another folder is noticed.

        Args:
            complete: Brings stored settings of earlier versions to today's keys.
            versions: Versions of packages, which are stored, too. A line names those that differ.
        """
        if not self.identity.exists():
            identity = dict(settings)
            if versions:
                identity["versions"] = dict(versions)
            write_json(self.identity, with_crc(identity))

        # Read in any case: another process may have written it just now.
        stored = read_json(self.identity, dict, "restore it, or name a new folder")
        if self.own_key in settings and self.own_key not in stored:
            place = f"{self.setting}={self.path}"
            raise ConfigError(f"{place} holds the results of another command; name a new folder")
        stored_versions = stored.pop("versions", None)
        if versions and stored_versions:
            changed_versions = differences(stored_versions, dict(versions))
            if changed_versions:
                say(
                    f"{self.path} was begun with {', '.join(changed_versions)}: numbers of two "
                    "versions may differ by rounding"
                )
        changed_settings = differences(complete(stored), dict(settings))
        check_unchanged(f"{self.setting}={self.path}", changed_settings)
        return sha256_of(self.identity)


def _may_precede(path: Path) -> bool:
    """Return whether a file or folder may be in a folder without an identity: a lock, a log, empty
    folders, or a file that a killed process was writing."""
    if path.is_dir():
        return is_partial(path) or all(inner.is_dir() for inner in paths_inside(path))
    is_lock = path.name in (LOCK, CLAIM)
    return is_lock or is_partial(path) or path.suffix in SUFFIXES_OF_LOGS


def check_unchanged(folder: str, changed_settings: Sequence[str]) -> None:
    """Raise ConfigError if settings differ from those of the work in a folder.

    Args:
        folder: The folder with the option that names it, such as out=results/mine.
        changed_settings: What differs, as `differences` returns it.
    """
    if changed_settings:
        changes = ", ".join(changed_settings)
        raise ConfigError(f"{folder} holds work with {changes}; name a new folder")


@dataclass(frozen=True)
class Pieces:
    """The results of a long task, each in a JSON file.

    A piece stores the identity of the input that it was made from, as `source_id`. So the next
    start computes only the pieces that are missing, damaged, or made from another input."""

    folder: Path

    def read(self, name: int | str, source_id: str) -> dict[str, Any] | None:
        """Return the content of a piece; None if it is missing, damaged, or made from another input
        than `source_id` identifies, so that it must be computed."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            content: dict[str, Any] = read_json(path, dict, "")
        except DataError as error:
            say(f"{error.problem}; it is computed again")
            return None
        stored_id = content.pop("of", None)
        return content if stored_id == source_id else None

    def write(self, name: int | str, source_id: str, content: Mapping[str, Any]) -> None:
        """Store a piece that was made from the input that `source_id` identifies."""
        text = json.dumps(with_crc({"of": source_id, **content}), allow_nan=False)
        write_atomically(self._path(name), text)

    def _path(self, name: int | str) -> Path:
        # Numbers are padded, so that names are sorted as numbers are.
        return self.folder / f"{name:0>7}.json"
