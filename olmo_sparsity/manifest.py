"""Folders whose `manifest.json` vouches for every byte of their files. No torch here.

Place in the flow: the ground under checkpoints, parts of measurements and finished results.
{"files": {name: {"sha256": hex, "bytes": count}}}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from olmo_sparsity.errors import DataError
from olmo_sparsity.files import sha256_of, stays_inside, write_atomically, writing
from olmo_sparsity.json_files import read_json

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class _File:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, _File]


@contextmanager
def writing_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, beside `final`, which it becomes, with a manifest."""
    with writing(final) as partial:
        partial.mkdir()
        yield partial
        write_manifest(partial)


def write_manifest(folder: Path, names: Collection[str] | None = None) -> None:
    """Of every file beneath the folder, or of those named; written last, to vouch for them."""
    paths = folder.rglob("*") if names is None else (folder / name for name in names)
    listed = {
        path.relative_to(folder).as_posix(): _File(sha256_of(path), path.stat().st_size)
        for path in sorted(paths)
        if path.is_file() and path.name != MANIFEST
    }
    text = json.dumps(asdict(_Manifest(listed)), indent=1)
    write_atomically(folder / MANIFEST, text + "\n")


def verify_manifest(folder: str | Path, only: Collection[str] | None = None) -> str | None:
    """What is wrong with a folder, in words; None when nothing is.

    `only`: the files that matter to the caller. Analysis needs no optimizer state, which is most of
    what there is to hash.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        files = read_json(folder / MANIFEST, _Manifest, "").files
    except DataError:
        return f"{MANIFEST} is not a readable list of files"
    for name in sorted(only if only is not None else files):
        if name not in files:
            return f"{MANIFEST} does not list {name}"
        if not stays_inside(name):
            return f"{MANIFEST} names '{name}', which is outside of the folder"
        path, said = folder / name, files[name]
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != said.bytes:
                return f"{name} has {path.stat().st_size} bytes, {MANIFEST} says {said.bytes}"
            if sha256_of(path) != said.sha256:
                return f"{name} does not have the SHA-256 that {MANIFEST} gives"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None
