"""List the Python files that this interpreter can import, and detect repeats among them.

    list_python_files()            [PythonFile("json", 0, ("json", "decoder"), Path(…)), …]
    repeats = Repeats()
    repeats.find(text)             None: new
    repeats.find(text)             "exact repeat"
    repeats.find(text + "x = 1")   "near repeat"

corpus.py makes documents of them. Code is on every user's disk, and repeats its names often, which
teaches a small model to copy.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

from olmo_sparsity.base.errors import DataError

SHORTEST_FILE = 800
"""The smallest number of characters of a file that is read. Shorter files are package markers and
lists of imports."""

LONGEST_FILE = 400_000
"""The largest number of characters of a file that is read. Longer files are mostly tables."""

SHORTEST_LINE = 12
"""The smallest number of characters of a line by which repeats are found, without white space
around it. Shorter lines, such as `else:`, are in all files."""

TABLE_BITS = 28
"""A line is remembered as one bit of a table with 2**28 bits, 32 MiB for any amount of text. The
15,000 files of one environment set 1% of the bits, so 1% of new lines count as known by mistake; a
near repeat has half of its lines known."""

_OURS = ("olmo_sparsity", "analysis", "__editable__")
"""This project is left out, so that the text does not depend on whether it is installed."""


class PythonFile(NamedTuple):
    """A file that this interpreter can import."""

    package: str
    """The first part of its name: `json` for the standard library's json/decoder.py."""

    root_number: int
    """The index, in the result of `find_roots`, of the folder that it is below."""

    name_parts: tuple[str, ...]
    """Its path below that folder, without the suffix."""

    path: Path


def list_python_files() -> list[PythonFile]:
    """Return all Python files, sorted by package, then by name. So they have the same order
    wherever they are installed."""
    files = []
    for root_number, root in enumerate(find_roots()):
        for path in _walk(root):
            parts = path.relative_to(root).with_suffix("").parts
            package = parts[0]
            if not package.startswith(_OURS):
                files.append(PythonFile(package, root_number, parts, path))
    if not files:
        raise DataError(
            "data.corpus.source=python: this interpreter's library holds no .py file; use another "
            "source, such as files"
        )
    return sorted(files)


def find_roots() -> list[Path]:
    """Return the folders of the standard library and of site-packages, each once."""
    paths = sysconfig.get_paths()
    roots = [Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib")]
    return [root for root in dict.fromkeys(roots) if root.is_dir()]


def _walk(root: Path) -> list[Path]:
    """Return all Python files below a folder."""

    def fail(error: OSError) -> None:
        # By default os.walk skips a folder that it cannot read: documents would be missing.
        raise DataError(f"{error.filename}: {error.strerror}; make it readable") from None

    paths = []
    for folder, folders_inside, names in os.walk(root, onerror=fail):
        # A site-packages inside the standard library's folder is a root itself, or, in a virtual
        # environment the base interpreter's, which cannot be imported. os.walk enters the folders
        # that are left in its list.
        folders_inside[:] = [
            name for name in folders_inside if name not in ("site-packages", "dist-packages")
        ]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return [path for path in paths if path.is_file()]  # excludes broken links


class Repeats:
    """The files that have been read, as hashes, by which repeats of them are found."""

    def __init__(self) -> None:
        self.hashes_of_texts: set[bytes] = set()
        # Bit n is set if a line with the hash n was there: a Bloom filter with one hash function.
        self.table = bytearray(2**TABLE_BITS // 8)

    def find(self, text: str) -> str | None:
        """Return "exact repeat" or "near repeat", or None for a new text, which is remembered.

        More than half of the distinct lines of a near repeat are known. Only earlier files count: a
        short file that is part of a later long one stays, and so does the long one if it is mostly
        new."""
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest in self.hashes_of_texts:
            return "exact repeat"
        lines = {line.strip() for line in text.splitlines()}
        bits = [
            zlib.crc32(line.encode()) % 2**TABLE_BITS
            for line in lines
            if len(line) >= SHORTEST_LINE
        ]
        num_known = sum(self.table[bit >> 3] >> (bit & 7) & 1 for bit in bits)
        if 2 * num_known > len(bits):
            return "near repeat"
        self.hashes_of_texts.add(digest)
        for bit in bits:
            self.table[bit >> 3] |= 1 << (bit & 7)
        return None
