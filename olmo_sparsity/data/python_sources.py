"""The Python files that this interpreter can import, and which of them hold little that is new.

Place in the flow: `corpus` makes documents of them. Code is a text that every user has on disk and
that repeats its names all the time, which is what a small model learns to copy from.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

from olmo_sparsity.errors import DataError

SHORTEST_FILE, LONGEST_FILE = 800, 400_000
"""Characters. Below: package markers and lists of imports; above: mostly tables."""

SHORTEST_LINE = 12
"""Characters of a line, stripped. `else:` and `return` are in every file and tell nothing."""

TABLE_BITS = 28
"""Lines are remembered as one bit each, in a table of 32 MiB however much text there is. The 15,000
files of one environment set 1% of the bits, so a line in a hundred is taken for one seen before;
half of a file's lines must be."""

_OWN = ("olmo_sparsity", "analysis", "__editable__")
"""This project must not be trained on when it is installed and not trained on when it is not."""


class PythonFile(NamedTuple):
    package: str
    """The first part of its name: `json` for the standard library's json/decoder.py."""

    path: Path


def list_python_files() -> list[PythonFile]:
    """By package, then by name within it: the same order wherever they are installed."""
    found = []
    for number, root in enumerate(find_roots()):
        for path in _walk(root):
            parts = path.relative_to(root).with_suffix("").parts
            if not parts[0].startswith(_OWN):
                found.append((parts[0], number, parts, path))
    if not found:
        raise DataError(
            "data.corpus.source=python, but this interpreter's library holds no .py file"
        )
    return [PythonFile(package, path) for package, _, _, path in sorted(found)]


def find_roots() -> list[Path]:
    """The standard library and site-packages; in many environments two names mean one folder."""
    paths = sysconfig.get_paths()
    roots = [Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib")]
    return [root for root in dict.fromkeys(roots) if root.is_dir()]


def _walk(root: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}") from None

    found = []
    for folder, inner, names in os.walk(root, onerror=refuse):
        # Outside a virtual environment site-packages lies in the standard library's folder, and is
        # a root itself; inside one it is the bare interpreter's, which cannot be imported.
        inner[:] = [name for name in inner if name not in ("site-packages", "dist-packages")]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return [path for path in found if path.is_file()]  # A link may lead nowhere.


class Repeats:
    """Files that say again what the files kept before them said, in whatever package."""

    def __init__(self) -> None:
        self.texts: set[bytes] = set()
        self.table = bytearray(2**TABLE_BITS // 8)

    def find(self, text: str) -> str | None:
        """What kind of repeat this text is; None: keep it, and later ones will be held to it.

        It is one when more than half of its distinct lines are known. Linear in time, and the same
        files in the same order always give the same answer. It looks back only: a short file that
        stands whole in a long one after it stays, if the long one is mostly new.
        """
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest in self.texts:
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
        self.texts.add(digest)
        for bit in bits:
            self.table[bit >> 3] |= 1 << (bit & 7)
        return None
