"""List the Python files that this interpreter can import, and detect repeats among them.

Place in the flow: `corpus` makes documents of them.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from pathlib import Path

from olmo_sparsity.errors import DataError

SHORTEST_FILE, LONGEST_FILE = 800, 400_000
"""Characters. Below: package markers and lists of imports; above: mostly tables."""

SHORTEST_LINE = 12
"""Characters of a stripped line. Shorter ones, as `else:`, are in all files and show no repeat."""

TABLE_BITS = 28
"""Lines are remembered as one bit each, in 32 MiB for any amount of text. The 15,000 files of one
environment set 1% of the bits."""

_OWN = ("olmo_sparsity", "analysis", "__editable__")
"""This project is left out, so that the text does not depend on whether it is installed."""


def list_python_files() -> list[tuple[str, Path]]:
    """Each file with its package, the first part of its name: `json` for the standard library's
    json/decoder.py. Sorted by package, then by name: the same order wherever they are installed."""
    files = []
    for number, root in enumerate(find_roots()):
        for path in _walk(root):
            parts = path.relative_to(root).with_suffix("").parts
            if not parts[0].startswith(_OWN):
                files.append((parts[0], number, parts, path))
    if not files:
        raise DataError("data.corpus.source=python: this interpreter's library holds no .py file")
    return [(package, path) for package, _, _, path in sorted(files)]


def find_roots() -> list[Path]:
    """The standard library and site-packages, each once."""
    paths = sysconfig.get_paths()
    roots = [Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib")]
    return [root for root in dict.fromkeys(roots) if root.is_dir()]


def _walk(root: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}") from None

    paths = []
    for folder, inner, names in os.walk(root, onerror=refuse):
        # A site-packages inside the standard library's folder is a root itself, or, in a virtual
        # environment the base interpreter's, which cannot be imported.
        inner[:] = [name for name in inner if name not in ("site-packages", "dist-packages")]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return [path for path in paths if path.is_file()]  # excludes broken links


class Repeats:
    """Detects files that repeat earlier ones, of any package."""

    def __init__(self) -> None:
        self.texts: set[bytes] = set()
        self.table = bytearray(2**TABLE_BITS // 8)

    def find(self, text: str) -> str | None:
        """The kind of repeat; None: the text is new, and remembered. A near repeat has more than
        half of its distinct lines known from earlier files."""
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
