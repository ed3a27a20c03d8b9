"""Write and verify `manifest.json`, which lists size and SHA-256 of a folder's files. No torch.

Place in the flow: beneath checkpoints, parts of measurements and finished results.
{"files": {name: {"sha256": hex, "bytes": count}}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from olmo_sparsity.disk.files import sha256_of, stays_inside, write_atomically, writing
from olmo_sparsity.disk.json_files import read_json
from olmo_sparsity.errors import DataError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Listed:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, Listed]


@contextmanager
def writing_folder(final: Path) -> Iterator[Path]:
    """Yield a folder to write into, then add a manifest and rename it to `final`."""
    with writing(final) as partial:
        partial.mkdir()
        yield partial
        write_manifest(partial)


def write_manifest(folder: Path, names: Collection[str] | None = None) -> None:
    """List all files below the folder, or those named; written after them."""
    paths = folder.rglob("*") if names is None else (folder / name for name in names)
    listed = {
        path.relative_to(folder).as_posix(): Listed(sha256_of(path), path.stat().st_size)
        for path in sorted(paths)
        if path.is_file() and path.name != MANIFEST
    }
    text = json.dumps(asdict(_Manifest(listed)), indent=1)
    write_atomically(folder / MANIFEST, text + "\n")


def verify_manifest(folder: str | Path, only: Collection[str] | None = None) -> str | None:
    """A description of what is wrong with a folder; None if it is intact.

    `only`: the files to verify. Analysis needs no optimizer state, which is most of the bytes.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        files = read_json(folder / MANIFEST, _Manifest, "").files
    except DataError:
        return f"{MANIFEST} is not a readable list of files"
    names = sorted(only if only is not None else files)
    for name in names:
        if name not in files:
            return f"{MANIFEST} does not list {name}"
        if not stays_inside(name):
            return f"{MANIFEST} names '{name}', which is outside of the folder"
    return verify_files(folder, {name: files[name] for name in names})


def verify_files(
    folder: Path, files: Mapping[str, Listed], hashes: Callable[[str], bool] = lambda name: True
) -> str | None:
    """What is wrong with the size of a file, or with the content of one that `hashes` chooses."""

    def problem_of(name: str) -> str | None:
        path, listed = folder / name, files[name]
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != listed.bytes:
                size = f"{path.stat().st_size:,} bytes, {MANIFEST} says {listed.bytes:,}"
                return f"{name} has {size}: truncated or overwritten"
            if hashes(name) and sha256_of(path) != listed.sha256:
                return f"{name} does not have the SHA-256 that {MANIFEST} gives"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a core hashes 0.5 to 2 GB/s
        return next(filter(None, pool.map(problem_of, files)), None)
