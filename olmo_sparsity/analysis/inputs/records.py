"""Parse files of several formats into documents.

Place in the flow: below `corpus`, which lists the files.

Every text, line or row becomes a `Document` or a `BadRecord`, so that all are counted. A damaged
file is an error, because it is unknown how many it held.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, cast

from olmo_sparsity.analysis.settings import SplitAt
from olmo_sparsity.errors import ConfigError, DataError, one_line, printable

LARGEST_DOCUMENT = 2**25
"""Bytes, which bounds memory. The longest novels have 5 MB; larger ones are files of many documents
without line breaks."""

LARGEST_AT_ONCE = 2**29
"""Bytes of what cannot be read in parts: a list in JSON, a page of Parquet, a line."""

_BUFFER = 2**20
"""Bytes. With Python's own, a long line is read at half the speed."""

STDIN = Path("-")

_WHITE_SPACE = b" \t\n\r\v\f"


@dataclass(frozen=True)
class Document:
    text: str
    group: str
    """Documents of one group are on one side of the split: the text, article title, package, or
    what the group field of the record holds."""

    name: str = dataclass_field(default="", compare=False)
    """Its file and record number, or its title."""

    target: int | None = dataclass_field(default=None, compare=False)
    """In a record of prompt and target, where in the text the target begins."""

    row: Mapping[str, Any] | None = dataclass_field(default=None, compare=False, repr=False)
    """All fields of its record, if requested."""

    @cached_property
    def group_hash(self) -> int:
        """64 bits of the group, ignoring case and white space."""
        key = self.group.casefold().encode().translate(None, _WHITE_SPACE)
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class BadRecord:
    kind: str
    where: str
    """File and line, or the number of the record in a stream."""

    fields: tuple[str, ...] = dataclass_field(default=(), compare=False)
    """The fields of the record, if a requested one is missing."""

    found: str = dataclass_field(default="", compare=False)
    """What was found instead, and the fix."""


@dataclass(frozen=True)
class LeftOut:
    """A valid record that is not wanted; it does not count as bad."""

    kind: str
    where: str


Record = Document | BadRecord | LeftOut


@dataclass(frozen=True)
class Fields:
    """The fields of a record that are read."""

    text: str = "text"
    group: str | None = None
    prompt: str | None = None
    """The text that precedes it."""

    keeps_all: bool = False
    """Whether a document keeps all fields of its record."""

    @property
    def names(self) -> list[str]:
        return [name for name in (self.prompt, self.text, self.group) if name is not None]


def check_field(where: str | Path, field: str, fields: Sequence[str]) -> None:
    if field not in fields and field.partition(".")[0] not in fields:
        names = printable(", ".join(fields)[:300])
        raise DataError(
            "pass another name (field, group_field, prompt_field or target_field): "
            f"{where} has no field '{field}'; its fields are: {names}"
        )


# --- values ---------------------------------------------------------------------------------------


def parse_line(line: bytes, path: Path, number: int, fields: Fields) -> Record:
    if len(line) > LARGEST_DOCUMENT:
        return BadRecord(f"longer than {LARGEST_DOCUMENT:,} bytes", f"{path}:{number}")
    if not line.strip():  # as many files end
        return LeftOut("blank line", f"{path}:{number}")
    try:
        row = parse_json(line)
    except UnicodeDecodeError:
        return BadRecord("wrong encoding", f"{path}:{number}", found=encoding_of(line))
    except (ValueError, RecursionError):
        return BadRecord("malformed line", f"{path}:{number}", found=what_is(line))
    return parse_row(row, f"{path}:{number}", fields)


def parse_json(line: bytes, **how: Any) -> Any:
    """Parse JSON. `how`: arguments of `json.loads`. A duplicate key raises a ValueError."""
    text = line.removeprefix(codecs.BOM_UTF8).decode()
    return json.loads(text, object_pairs_hook=_object, **how)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key '{next(k for k in keys if keys.count(k) > 1)}'")
    return found


def what_is(line: bytes) -> str:
    """Describe a line that is not a JSON object, and the fix."""
    text = line.removeprefix(codecs.BOM_UTF8).decode(errors="replace").strip()
    try:
        row = parse_json(line)
    except RecursionError:
        return "too many brackets within each other"
    except ValueError as error:
        if "\0" in text[:100]:
            return encoding_of(line)
        if text.startswith(("//", "/*", "#")):
            return "a comment, which JSON has not: delete it"
        if text.startswith("{'"):
            return "single quotes, as Python writes: write it with json.dumps"
        return printable(str(error)[:100])
    return _no_object(row)


def _no_object(row: Any) -> str:
    kind = "a JSON array" if isinstance(row, list) else f"JSON of type {type(row).__name__}"
    return f"{kind}: write one object a line"


def encoding_of(raw: bytes) -> str:
    """Guess which encoding bytes that are not UTF-8 have, and say how to convert them."""
    few, many = sorted(raw[first:200:2].count(0) for first in (0, 1))
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    if raw.startswith(marks) or many > max(2, len(raw[:200]) // 4, 8 * few):
        return "UTF-16; convert it with iconv -f UTF-16 -t UTF-8"
    if b"\0" in raw:
        return "zero bytes, so it is not a text file"
    return "not UTF-8, perhaps Latin-1; convert it with iconv -f LATIN1 -t UTF-8"


def parse_row(row: Any, where: str, fields: Fields) -> Record:
    if not isinstance(row, dict):
        return BadRecord("malformed line", where, found=_no_object(row))
    values = {name: _value(row, name) for name in fields.names}
    for name, value in values.items():
        if value is _MISSING:
            return BadRecord(f"no {name} field", where, tuple(map(str, row)))
    record = parse_text(values[fields.text], where, fields.text)
    if fields.prompt is not None and isinstance(record, Document):
        record = _after(parse_text(values[fields.prompt], where, fields.prompt), record)
    if fields.keeps_all and isinstance(record, Document):
        record = replace(record, row=row)
    return record if fields.group is None else grouped(record, values[fields.group])


_MISSING = object()


def _value(row: Any, name: str) -> Any:
    """`a.b` names the field b of the field a, where none is named `a.b` itself."""
    if isinstance(row, dict) and name in row:
        return row[name]
    first, dot, rest = name.partition(".")
    if dot and isinstance(row, dict) and first in row:
        return None if row[first] is None else _value(row[first], rest)
    return _MISSING


def _after(prompt: Record, target: Document) -> Record:
    """One document of both."""
    if not isinstance(prompt, Document):
        return prompt
    text = prompt.text + target.text
    return replace(target, text=text, group=text, target=len(prompt.text))


def grouped(record: Record, value: Any) -> Record:
    """In the group that the record's group field names: of a URL its host, so that pages of one
    site are together. Without a value, a document stays a group of its own."""
    if not isinstance(record, Document) or value is None or not str(value).strip():
        return record
    name = str(value).encode(errors="replace").decode()  # JSON can spell half of a character
    host = re.match(r"https?://([^/?#]+)", name)
    return replace(record, group=host[1] if host else name)


def parse_text(text: Any, where: str, field: str = "text") -> Record:
    if isinstance(text, bytes | str) and len(text) > LARGEST_DOCUMENT:
        return BadRecord(f"longer than {LARGEST_DOCUMENT:,} bytes", where)
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")  # drops the byte order mark that some editors write
        except UnicodeDecodeError:
            return BadRecord("wrong encoding", where, found=encoding_of(text))
    text = "" if text is None else text
    if not isinstance(text, str):
        return BadRecord(
            f"no {field} field", where, found=f"it is of type {type(text).__name__}, not a text"
        )
    if not text or text.isspace():
        return LeftOut("empty document", where)
    if "\0" in text[:200]:
        found = encoding_of(text[:200].encode(errors="replace"))
        return BadRecord("wrong encoding", where, found=found)
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which is not a character.
        return BadRecord("wrong encoding", where)
    return Document(text, group=text, name=where)


# --- formats --------------------------------------------------------------------------------------


def read_file(path: Path, fields: Fields, split_at: SplitAt = "whole") -> Iterator[Record]:
    """Read a file by its suffix; what has none of `SUFFIXES` is plain text."""
    if path != STDIN and path.exists() and not path.stat().st_size:
        yield LeftOut("empty document", str(path))  # such as a shard of no rows
        return
    reader = next((_READERS[suffix] for suffix in SUFFIXES if path.name.endswith(suffix)), None)
    named = {"field": fields.text, "group_field": fields.group, "prompt_field": fields.prompt}
    for name, value in named.items():
        if reader is None and value not in ("text", None):
            raise ConfigError(f"{name}={value}: {path} is plain text, without fields; leave it out")
    if reader is not None and split_at != "whole":
        raise ConfigError(f"split_at={split_at} cuts plain text, and {path} is none; leave it out")
    yield from read_text(path, split_at) if reader is None else reader(path, fields)


def is_records(path: Path) -> bool:
    return any(path.name.endswith(suffix) for suffix, reader in _READERS.items() if reader)


def is_text(path: Path) -> bool:
    """Return whether a file is plain text, by its suffix, or else by having no zero bytes at its
    start."""
    for suffix, reader in _READERS.items():
        if path.name.endswith(suffix):
            return reader is None
    if path.suffix in (".uint16", ".uint32", ".uint64"):  # what `prepare` wrote
        return False
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(4096)
    except OSError:
        return False


def read_text(path: Path, split_at: SplitAt = "whole") -> Iterator[Record]:
    """One document, or with "blank-lines" one for each part between blank lines."""
    cut, number = split_at == "blank-lines", 0

    def is_gap(line: bytes) -> bool:
        return cut and line.removeprefix(codecs.BOM_UTF8).isspace()

    for gap, lines in groupby(read_lines(path), is_gap):
        if gap:
            continue
        number += 1
        where, content = f"{path}:{number}" if cut else str(path), bytearray()
        for line in lines:
            if len(content) <= LARGEST_DOCUMENT:
                content += line
            if len(content) > LARGEST_DOCUMENT and not cut:
                break
        yield parse_text(bytes(content.rstrip(b"\r\n") if cut else content), where)
        if not cut:
            return  # of a file that is too long, the rest is not read
    if not number:
        yield LeftOut("empty document", str(path))


def _read_json(path: Path, fields: Fields) -> Iterator[Record]:
    """One object per line, or a file that is one object or a list of objects."""
    head = next(read_lines(path), b"").removeprefix(codecs.BOM_UTF8).strip()
    if not head.startswith(b"[") and head != b"{":
        for number, line in enumerate(read_lines(path), start=1):
            yield parse_line(line, path, number, fields)
        return
    content = bytearray()
    for line in read_lines(path):
        content += line
        if len(content) > LARGEST_AT_ONCE:
            problem = f"it is a list of more than {LARGEST_AT_ONCE:,} bytes"
            raise DataError(f"{path}: {problem}; write one JSON object per line")
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "", error, "write one JSON object per line") from None
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        yield parse_row(row, f"{path}:{number}", fields)


def _read_csv(path: Path, fields: Fields) -> Iterator[Record]:
    csv.field_size_limit(LARGEST_DOCUMENT)
    head = next(read_lines(path), b"")
    if b"\0" in head[:200]:
        raise DataError(f"{path}: {encoding_of(head)}")
    # A byte that is not UTF-8 becomes half a surrogate pair, which `parse_text` rejects.
    lines = (line.decode("utf-8-sig", "surrogateescape") for line in read_lines(path))
    delimiter = _delimiter(head.decode("utf-8-sig", "surrogateescape"), path, fields)
    # Strict: an unclosed quote is damage.
    rows, number = filter(None, csv.reader(lines, delimiter=delimiter, strict=True)), 0
    try:
        names = next(rows, fields.names)
        for name in fields.names:
            check_field(path, name, names)
        for number, row in enumerate(rows, start=1):
            if len(row) == len(names):
                of = dict(zip(reversed(names), reversed(row), strict=True))  # the first of a name
                yield parse_row(of, f"{path}:{number}", fields)
            else:
                yield BadRecord("malformed row", f"{path}:{number}")
    except csv.Error as error:
        raise _damaged(path, f" after row {number:,}", error, "write it again") from None


def _delimiter(header: str, path: Path, fields: Fields) -> str:
    """The first with which the header names the fields: a comma, or what some programs write."""
    usual = "\t" if ".tsv" in path.suffixes else ","
    header = header.split("\r")[0].rstrip("\n")
    for delimiter in (usual, ";", "\t", ","):
        if set(fields.names) <= set(next(csv.reader([header], delimiter=delimiter), ())):
            return delimiter
    return usual


def _read_parquet(path: Path, fields: Fields) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = None if fields.keeps_all else fields.names
            for name in fields.names:
                leaves = [file.schema.column(i).path for i in range(len(file.schema))]
                check_field(path, name, leaves if name in leaves else file.schema_arrow.names)
                _check_pages(path, name, file.metadata)
            for batch in file.iter_batches(batch_size=16, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield parse_row(row, f"{path}:{number}", fields)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, f" after row {number:,}", error, "copy the file again") from None


def _check_pages(path: Path, field: str, metadata: Any) -> None:
    """A page is read at once; writers give it up to 1024 rows."""
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        for column in map(group.column, range(group.num_columns)):
            mean = column.total_uncompressed_size / max(group.num_rows, 1)
            at_once = int(mean * min(group.num_rows, 1024))
            if column.path_in_schema == field and at_once > LARGEST_AT_ONCE:
                raise DataError(
                    f"{path}: its rows have {mean:,.0f} bytes on average, so that some "
                    f"{at_once:,} are read at once, above {LARGEST_AT_ONCE:,}; write fewer rows in "
                    "a row group, or one JSON object per line"
                )


_READERS = {
    f"{suffix}{packed}": reader
    for reader, suffixes, packings in (
        (None, (".txt", ".md"), ("", ".gz", ".zst")),  # plain text
        (_read_json, (".json", ".jsonl"), ("", ".gz", ".zst")),
        (_read_csv, (".csv", ".tsv"), ("", ".gz", ".zst")),
        (_read_parquet, (".parquet",), ("",)),
    )
    for suffix in suffixes
    for packed in packings
}
SUFFIXES = tuple(_READERS)


# --- bytes ----------------------------------------------------------------------------------------


def read_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file, compressed or not."""
    number = 0
    try:
        with _open(path) as stream:
            while line := stream.readline(LARGEST_DOCUMENT + 1):
                number += 1
                yield line
                size = len(line)
                while size > LARGEST_DOCUMENT and line and not line.endswith(b"\n"):
                    line = stream.readline(_BUFFER)  # the rest of a long line
                    size += len(line)
                    if size > LARGEST_AT_ONCE:
                        raise DataError(
                            f"{path}: line {number:,} has more than {LARGEST_AT_ONCE:,} bytes; is "
                            "it text? Write one document a line"
                        )
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, f" after line {number:,}", error, "copy the file again") from None


def _damaged(path: Path, where: str, error: Exception, remedy: str) -> DataError:
    return DataError(f"{path}: damaged{where} ({one_line(error)}); {remedy}")


def _open(path: Path) -> BinaryIO:
    if path == STDIN:
        return open(0, "rb", closefd=False)
    if path.name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.name.endswith(".zst"):
        import pyarrow

        # zstandard's own reader accepts a truncated file; this one raises, and its buffer is small
        # even if a few bytes decompress to gigabytes.
        opened = pyarrow.CompressedInputStream(pyarrow.PythonFile(path.open("rb")), "zstd")
        return cast(BinaryIO, io.BufferedReader(opened, 2**17))
    return path.open("rb", _BUFFER)
