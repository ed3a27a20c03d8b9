"""A folder that one command fills over several starts, perhaps by several processes. No torch.

Place in the flow: beneath train, prepare, measure, task and theory.

One file in it, the identity, says whose work it is. A folder with files and without an identity is
refused, and so is a start with other settings. What killed processes left is removed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_sparsity.disk.files import is_partial, remove_partial, sha256_of, write_atomically
from olmo_sparsity.disk.json_files import read_json, with_crc
from olmo_sparsity.disk.lock import LOCK, locked
from olmo_sparsity.disk.nested import differences
from olmo_sparsity.errors import ConfigError, UserError


@dataclass(frozen=True)
class WorkFolder:
    path: Path
    setting: str
    """What names it: run_folder, out, …"""

    identity_name: str = "settings.json"

    @property
    def identity(self) -> Path:
        return self.path / self.identity_name

    def refuse_others(self) -> None:
        """Refuse a folder with files of other work, which this one would spoil."""
        if self.path.is_file():
            raise ConfigError(f"{self.setting}={self.path} is a file; name a folder")
        others = [path.name for path in sorted(self.path.glob("[!.]*")) if not _may_precede(path)]
        # Looked for last, as another process may begin just now.
        if others and not self.identity.exists():
            raise ConfigError(
                f"{self.setting}={self.path} holds other files ({', '.join(others[:3])}) and no "
                f"{self.identity_name}; name a new folder"
            )

    def create(self, *inner: str) -> None:
        """Create the folder and those inside it, without what killed processes left."""
        self.refuse_others()
        for folder in (self.path, *(self.path / name for name in inner)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                where = f"{self.setting}={self.path} cannot be written"
                raise UserError(f"{where}: {error.strerror}") from None
            remove_partial(folder)

    @contextmanager
    def opened(self, *inner: str) -> Iterator[None]:
        """Create it, and hold it alone."""
        self.create(*inner)
        with locked(self.path):
            yield

    def identify(
        self,
        settings: Mapping[str, Any],
        complete: Callable[[dict[str, Any]], dict[str, Any]] = lambda stored: stored,
    ) -> str:
        """Write the identity, or refuse other settings than it states, which `complete` completes.
        Returns its SHA-256: files that state it are of this work, and not copied from another."""
        if not self.identity.exists():
            text = json.dumps(with_crc(dict(settings)), ensure_ascii=False, indent=2)
            write_atomically(self.identity, text + "\n")
        # Read in any case: another process may have written it just now.
        stored = read_json(self.identity, dict, "restore it, or name a new folder")
        changed = differences(complete(stored), dict(settings))
        refuse_changes(f"{self.setting}={self.path}", changed)
        return sha256_of(self.identity)


def _may_precede(path: Path) -> bool:
    """Whether it may stand in a folder before its identity: a log, or what a start leaves that is
    killed at once."""
    if path.is_dir():
        return is_partial(path) or all(inner.is_dir() for inner in path.rglob("*"))
    return is_partial(path) or path.name == LOCK or path.suffix in (".log", ".out", ".err")


def refuse_changes(folder: str, changed: Sequence[str]) -> None:
    if changed:
        raise ConfigError(
            f"{folder} holds work with {', '.join(changed)}; name a new folder, or delete that one "
            "to start over"
        )
