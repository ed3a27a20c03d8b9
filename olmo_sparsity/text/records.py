"""Parse files into records: JSON lines, Parquet or plain text, compressed or not.

A bad record is counted, and the rest is read; a damaged file raises, because nobody knows how many
records it held.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, cast

from olmo_sparsity.base.errors import ConfigError, DataError, one_line
from olmo_sparsity.config.text import CorpusConfig

LARGEST_DOCUMENT = 2**25
"""Bytes, which bounds memory. The longest novels have 5 MB."""

_BUFFER = 2**20
"""Bytes. With Python's own, a long line is read at half the speed."""

STDIN = Path("-")

_WHITE_SPACE = b" \t\n\r\v\f"


@dataclass(frozen=True)
class TextRecord:
    text: str
    group: str
    """Documents of one group are on one side of the split: the text, article title, package, or
    what the group field of the record holds."""

    name: str = dataclass_field(default="", compare=False)
    """Its file and record number, or its title."""

    target: int | None = dataclass_field(default=None, compare=False)
    """In a record of prompt and target, where in the text the target begins."""

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


@dataclass(frozen=True)
class LeftOut:
    """A valid record that is not wanted; it does not count as bad."""

    kind: str
    where: str


Record = TextRecord | BadRecord | LeftOut

TOO_LONG = BadRecord(f"longer than {LARGEST_DOCUMENT:,} bytes", "")


# --- values ---------------------------------------------------------------------------------------


def parse_row(row: Any, where: str, config: CorpusConfig) -> Record:
    if not isinstance(row, dict):
        return BadRecord("malformed line", where)
    values = {name: _value(row, name) for name in config.fields}
    for name, value in values.items():
        if value is _MISSING:
            return BadRecord(f"no {name} field", where, tuple(map(str, row)))
    record = parse_text(values[config.field], where, config.field)
    if config.prompt_field is not None and isinstance(record, TextRecord):
        prompt = parse_text(values[config.prompt_field], where, config.prompt_field)
        if not isinstance(prompt, TextRecord):
            return prompt
        text = prompt.text + record.text
        record = replace(record, text=text, group=text, target=len(prompt.text))
    if not isinstance(record, TextRecord):
        return record
    group = values.get(config.group_field or "")
    return replace(record, group=_group(group) or record.group)


_MISSING = object()


def _value(row: Any, name: str) -> Any:
    """`a.b` names the field b of the field a, where none is named `a.b` itself."""
    if isinstance(row, dict) and name in row:
        return row[name]
    first, dot, rest = name.partition(".")
    if dot and isinstance(row, dict) and first in row:
        return None if row[first] is None else _value(row[first], rest)
    return _MISSING


def _group(value: Any) -> str:
    """Of a URL its host, so that pages of one site are together. Without a value, a document is a
    group of its own."""
    name = "" if value is None or not str(value).strip() else str(value)
    name = name.encode(errors="replace").decode()  # JSON can spell half of a character
    host = re.match(r"https?://([^/?#]+)", name)
    return host[1] if host else name


def parse_text(text: Any, where: str, field: str = "text") -> Record:
    if isinstance(text, bytes | str) and len(text) > LARGEST_DOCUMENT:
        return replace(TOO_LONG, where=where)
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")  # drops the byte order mark that some editors write
        text = "" if text is None else text
        if not isinstance(text, str):
            return BadRecord(f"no {field} field", where)
        text.encode()  # JSON can spell half of a surrogate pair, which is not a character
    except UnicodeError:
        return BadRecord("wrong encoding", where)
    if not text or text.isspace():
        return LeftOut("empty document", where)
    if "\0" in text[:200]:  # UTF-16, or no text
        return BadRecord("wrong encoding", where)
    return TextRecord(text, group=text, name=where)


# --- formats --------------------------------------------------------------------------------------


def read_file(path: Path, config: CorpusConfig) -> Iterator[Record]:
    """Read a file by its suffix; what has none of records is plain text."""
    reader = None if config.source in ("text", "python") else _READERS.get(suffix_of(path))
    if config.source == "files" and suffix_of(path) in (".csv", ".tsv"):
        raise ConfigError(f"path={path} is a table of text; write it as .parquet or .jsonl")
    if reader is None and config.fields != ["text"]:
        raise ConfigError(f"fields={config.fields}: {path} is plain text, without fields")
    if reader is not None and config.split_at != "whole":
        raise ConfigError(f"split_at={config.split_at} cuts plain text, and {path} is none")
    if path != STDIN and not path.stat().st_size:  # such as a shard of no rows
        yield LeftOut("empty document", str(path))
        return
    cut, number = config.split_at == "blank-lines", 0
    read = reader or (_read_parts if cut else _read_whole)
    try:
        for number, row in enumerate(read(path, config.fields), start=1):
            where = f"{path}:{number}" if reader or cut else str(path)
            if isinstance(row, BadRecord | LeftOut):
                yield replace(row, where=where)
            elif isinstance(row, bytes):
                yield parse_text(row, where)
            else:
                yield parse_row(row, where, config)
    # pyarrow's errors of damaged files are ValueErrors and OSErrors.
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        reason = one_line(error) or type(error).__name__
        raise DataError(f"{path}: damaged after record {number:,} ({reason})") from None


Rows = Iterator[Any]
"""Objects, the text of plain text as bytes, and what is no record, without its place."""


def _read_whole(path: Path, fields: Any) -> Rows:
    with _open(path) as stream:
        yield stream.read(LARGEST_DOCUMENT + 1)


def _read_parts(path: Path, fields: Any) -> Rows:
    lines = (line.removeprefix(codecs.BOM_UTF8) for line in _read_lines(path))
    for is_gap, part in groupby(lines, bytes.isspace):
        content = bytearray()
        for line in part:
            if len(content) <= LARGEST_DOCUMENT:
                content += line
        if not is_gap:
            yield bytes(content.rstrip(b"\r\n"))


def _read_json(path: Path, fields: Any) -> Rows:
    """One object a line."""
    for line in _read_lines(path):
        if len(line) > LARGEST_DOCUMENT:
            yield TOO_LONG
        elif not line.strip():  # as many files end
            yield LeftOut("blank line", "")
        else:
            yield _parse_line(line)


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return BadRecord("wrong encoding", "")
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            raise ValueError(f"its last line is cut off: {error}") from None
        return BadRecord("malformed line", "")


def _read_parquet(path: Path, fields: list[str] | None) -> Rows:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        known = file.schema_arrow.names
        columns = [name if name in known else name.partition(".")[0] for name in fields or known]
        # With all, a record names the fields that there are.
        columns = columns if set(columns) <= set(known) else known
        for batch in file.iter_batches(16, columns=columns):
            yield from batch.to_pylist()


_READERS: dict[str, Callable[[Path, Any], Rows]] = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}


def suffix_of(path: Path) -> str:
    """Without that of a compressed file."""
    return Path(re.sub(r"\.(gz|zst)$", "", path.name)).suffix


def is_records(path: Path) -> bool:
    return suffix_of(path) in _READERS


def is_text(path: Path) -> bool:
    """Return whether a file is plain text, by its suffix, or else by having no zero bytes at its
    start."""
    suffix = suffix_of(path)
    if suffix in _READERS or suffix in (".txt", ".md"):
        return suffix not in _READERS
    if suffix in (".uint16", ".uint32", ".uint64"):  # what `prepare` wrote
        return False
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(4096)
    except OSError:
        return False


# --- bytes ----------------------------------------------------------------------------------------


def _read_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file, compressed or not; of a longer one than a document, the beginning."""
    with _open(path) as stream:
        while line := stream.readline(LARGEST_DOCUMENT + 1):
            yield line
            while len(line) > LARGEST_DOCUMENT and not line.endswith(b"\n"):
                line = stream.readline(LARGEST_DOCUMENT + 1)


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
