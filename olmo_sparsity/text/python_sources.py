"""List the Python files that this interpreter can import, and detect repeats among them.

Place in the flow: `corpus` makes documents of them. Code is on every user's disk, and repeats its
names often, which teaches a small model to copy.
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
"""Characters. Shorter files are package markers and lists of imports."""

LONGEST_FILE = 400_000
"""Characters. Longer files are mostly tables."""

SHORTEST_LINE = 12
"""Characters of a stripped line. Shorter ones, as `else:`, are in all files and show no repeat."""

TABLE_BITS = 28
"""Lines are remembered as one bit each, in a table of 32 MiB for any amount of text. The 15,000
files of one environment set 1% of the bits, so 1% of new lines count as known; a near repeat has
half of its lines known."""

_OURS = ("olmo_sparsity", "analysis", "__editable__")
"""This project is left out, so that the text does not depend on whether it is installed."""


class PythonFile(NamedTuple):
    """A file that this interpreter can import."""

    package: str
    """The first part of its name: `json` for the standard library's json/decoder.py."""

    root_number: int
    """Place of the folder that it is below, in `find_roots`."""

    name_parts: tuple[str, ...]
    """Its path below that folder, without the suffix."""

    path: Path


def list_python_files() -> list[PythonFile]:
    """Return all files, sorted by package, then by name: the same order wherever they are
    installed."""
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
    """Detect files that repeat earlier ones, of any package."""

    def __init__(self) -> None:
        self.hashes_of_texts: set[bytes] = set()
        # Bit n is set if a line with the hash n was there: a Bloom filter with one hash function.
        self.table = bytearray(2**TABLE_BITS // 8)

    def find(self, text: str) -> str | None:
        """Return the kind of repeat; None if the text is new. A new text is remembered.

        A near repeat has more than half of its distinct lines known. The answer is a function of
        the files and their order, in linear time. Only earlier files count: a short file inside a
        later long one stays, and so does the long one if it is mostly new."""
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
