"""Read files into records: JSON lines, Parquet or plain text, compressed or not.

    bytes of a file → lines, rows or whole texts, by its suffix → records (records.py)

    a.jsonl.gz    lines {"text": "One."}, {"text": "Tw       a record, then DamagedFile: cut off
    b.jsonl       a line {"text": } between two others       a record, a bad record, a record
    c.txt         two paragraphs                             one text, or two (blank-lines)

After a bad record the rest is read. A damaged file raises DamagedFile, because nobody knows how
many records it held.

Place in the flow: files (input_files.py) → **`read_file`** → corpus.py.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from olmo_sparsity.base.errors import ConfigError, DataError, one_line
from olmo_sparsity.base.files import open_standard_input
from olmo_sparsity.base.json_text import DuplicateKey, unique
from olmo_sparsity.config.text import CorpusConfig
from olmo_sparsity.text.records import (
    LARGEST_DOCUMENT,
    TOO_LONG,
    BadRecord,
    LeftOut,
    Record,
    parse_row,
    parse_text,
)

OTHER_DOCUMENTS = (
    ".pdf",
    ".doc",
    ".docx",
    ".odt",
    ".rtf",
    ".epub",
    ".ppt",
    ".pptx",
    ".xls",
    ".xlsx",
)
"""Suffixes of documents that are not plain text, although some begin like it."""

READ_BUFFER = 2**20
"""The bytes that are read at once. With Python's own number, a long line takes twice as long."""

STDIN = Path("-")
"""The name of the standard input, which is read as plain text."""


class DamagedFile(DataError):
    """A file that ends within a record or cannot be decompressed."""


# --- formats --------------------------------------------------------------------------------------


def read_file(path: Path, config: CorpusConfig) -> Iterator[Record]:
    """Yield the records of a file. Its suffix tells the format; a file that has no suffix of
    records is plain text. Raise DamagedFile where the file ends within a record."""
    file_format = _format_of(path, config)
    # Parquet cannot be read from nothing, and a writer of shards may leave an empty one.
    if path != STDIN and not path.stat().st_size:
        yield LeftOut("empty document", str(path))
        return
    # Python reads bytes of a name that are not UTF-8 as surrogates, which no table can store.
    name = str(path).encode(errors="backslashreplace").decode()
    number = 0
    try:
        for number, row in enumerate(file_format.read_rows(path, config.fields), start=1):
            where = name if file_format.has_one_row else f"{name}:{number}"
            if isinstance(row, BadRecord | LeftOut):
                yield replace(row, where=where)
            elif isinstance(row, bytes):
                yield parse_text(row, where)
            else:
                yield parse_row(row, where, config)
    # pyarrow's errors of damaged files are ValueErrors and OSErrors.
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        reason = one_line(error) or type(error).__name__
        raise DamagedFile(
            f"{path}: damaged after record {number:,} ({reason}); copy or write the file again, or "
            "set data.corpus.max_damaged_files in a config"
        ) from None


Rows = Iterator[Any]
"""Yields objects with fields, plain text as bytes, and bad or left-out records, to which
`read_file` adds where they are."""

RowReader = Callable[[Path, list[str]], Rows]
"""Reads the rows of a file, with at least these fields of each record."""


class _Format(NamedTuple):
    """How a file is read."""

    read_rows: RowReader
    has_one_row: bool
    """Whether the file is one row, so that its name alone says where the row is."""


def _format_of(path: Path, config: CorpusConfig) -> _Format:
    """Return how a file is read. Raise ConfigError for a file that is neither records nor plain
    text, and for an option that has no effect on the file."""
    suffix = suffix_of(path)
    if config.source == "files" and suffix in (".csv", ".tsv"):
        raise ConfigError(
            f"path={path} is a table of text; write it as .parquet or .jsonl, for example with "
            f"pandas.read_csv(...).to_json('{path.stem}.jsonl', orient='records', lines=True)"
        )
    if suffix in OTHER_DOCUMENTS:
        raise ConfigError(
            f"path={path} is not plain text; convert it, for example with pdftotext or pandoc"
        )
    # Of these sources every file is plain text, whatever its suffix.
    is_text_source = config.source in ("text", "python")
    if suffix in _READERS_OF_ROWS and not is_text_source:
        if config.split_at != "whole":
            raise ConfigError(
                f"split_at={config.split_at} cuts plain text, and {path} is none; leave it out"
            )
        return _Format(_READERS_OF_ROWS[suffix], has_one_row=False)

    _check_no_fields(path, config)
    if config.split_at == "whole":
        return _Format(_read_whole, has_one_row=True)
    return _Format(_read_parts, has_one_row=False)


def _check_no_fields(path: Path, config: CorpusConfig) -> None:
    """Raise ConfigError for an option that names a field, as plain text has none."""
    for name, default in (("field", "text"), ("group_field", None), ("prompt_field", None)):
        value = getattr(config, name)
        if value != default:
            raise ConfigError(f"{name}={value}: {path} is plain text, without fields; leave it out")


def _read_whole(path: Path, fields: list[str]) -> Rows:
    """Yield the text of a file as one row."""
    with _open(path) as stream:
        yield stream.read(LARGEST_DOCUMENT + 1)  # one more, by which `parse_text` sees it


def _read_parts(path: Path, fields: list[str]) -> Rows:
    """Yield the parts of plain text between blank lines."""
    lines = (line.removeprefix(codecs.BOM_UTF8) for line in _read_lines(path))
    for is_gap, lines_of_part in groupby(lines, bytes.isspace):
        if is_gap:
            continue
        content = bytearray()
        for line in lines_of_part:
            if len(content) <= LARGEST_DOCUMENT:  # the rest of a longer part is not kept
                content += line
        yield bytes(content.rstrip(b"\r\n"))


def _read_json(path: Path, fields: list[str]) -> Rows:
    """Yield one object a line."""
    for index, line in enumerate(_read_lines(path)):
        if index == 0:
            _check_is_json_lines(path, line)
        if len(line) > LARGEST_DOCUMENT:
            yield TOO_LONG
        elif not line.strip():  # as many files end
            yield LeftOut("blank line", "")
        else:
            yield _parse_line(line)


def _check_is_json_lines(path: Path, first_line: bytes) -> None:
    """Raise ConfigError for JSON of another form, each line of which would be a bad record, and say
    how to convert it. `first_line`: that of the file."""
    if first_line.lstrip().startswith(b"["):
        converted = Path(re.sub(r"\.(gz|zst)$", "", path.name)).with_suffix(".jsonl")
        raise ConfigError(
            f"path={path} is a JSON array, and one object a line is read; convert it with "
            f"jq -c '.[]' {path} > {converted}"
        )
    if first_line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(
            f"path={path} is UTF-16, and UTF-8 is read; convert it with "
            f"iconv -f UTF-16 -t UTF-8 {path}"
        )
    if first_line.removeprefix(codecs.BOM_UTF8).strip() == b"{":
        raise ConfigError(
            f"path={path} has a JSON object over several lines, and one object a line is "
            f"read; convert it with jq -c . {path}"
        )


def _parse_line(line: bytes) -> Any:
    """Return the object of a line, or a bad record. Raise ValueError if the line is cut off."""
    try:
        return json.loads(line.decode("utf-8-sig"), object_pairs_hook=unique)
    except UnicodeDecodeError:
        return BadRecord("wrong encoding", "")
    except DuplicateKey:
        return BadRecord("key that is there twice", "")
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n") and b"\r" in line.strip():
            raise ValueError("its lines end with CR alone; convert them: tr '\\r' '\\n'") from None
        if not line.endswith(b"\n"):  # more may be missing than this line
            raise ValueError(f"its last line is cut off: {error}") from None
        return BadRecord("malformed line", "")


def _read_parquet(path: Path, fields: list[str]) -> Rows:
    """Yield one object for each row. Only the columns of these fields are read."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        all_columns = file.schema_arrow.names
        # The field `a.b` is in the column `a`, unless a column has that name.
        columns = [name if name in all_columns else name.partition(".")[0] for name in fields]
        if not set(columns) <= set(all_columns):
            columns = all_columns  # so that the bad record names the fields that there are
        for batch in file.iter_batches(_ROWS_OF_BATCH, columns=columns):
            yield from batch.to_pylist()


_ROWS_OF_BATCH = 16
"""The number of rows of Parquet that are Python objects at once, as each may be a whole novel."""

_READERS_OF_ROWS: dict[str, RowReader] = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}


def suffix_of(path: Path) -> str:
    """Return the suffix that tells the format of a file, in lower case: .jsonl for A.JSONL.gz."""
    return Path(re.sub(r"\.(gz|zst)$", "", path.name.lower())).suffix


def is_records(path: Path) -> bool:
    """Return whether a file holds records, by its suffix."""
    return suffix_of(path) in _READERS_OF_ROWS


def is_text(path: Path) -> bool:
    """Return whether a file is plain text, by its suffix, or else by having no zero bytes at its
    start."""
    suffix = suffix_of(path)
    if suffix in _READERS_OF_ROWS or suffix in OTHER_DOCUMENTS:
        return False
    if suffix in (".txt", ".md"):
        return True
    if suffix in (".uint16", ".uint32", ".uint64"):  # what `prepare` wrote
        return False
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(4096)
    except OSError:
        return False


# --- bytes ----------------------------------------------------------------------------------------


def _read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, compressed or not. Of a line that is longer than the largest
    document, yield the beginning, so that no line fills the memory."""
    with _open(path) as stream:
        while True:
            line = stream.readline(LARGEST_DOCUMENT + 1)
            if not line:
                return
            yield line
            # Skip the rest of a long line.
            while len(line) > LARGEST_DOCUMENT and not line.endswith(b"\n"):
                line = stream.readline(LARGEST_DOCUMENT + 1)


def _open(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed."""
    if path == STDIN:
        return open_standard_input()
    if path.name.lower().endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.name.lower().endswith(".zst"):
        import pyarrow

        # zstandard's own reader accepts a truncated file; this one raises, and its buffer is small
        # even if a few bytes decompress to gigabytes.
        opened = pyarrow.CompressedInputStream(pyarrow.PythonFile(path.open("rb")), "zstd")
        return cast(BinaryIO, io.BufferedReader(opened, 2**17))
    return path.open("rb", READ_BUFFER)
