"""Turn the text or the fields of a record into a document, or say why it cannot be one.

    parse_row({"text": "It opened in 1921."}, "a.jsonl:1", config)   # TextRecord
    parse_row({"text": ""}, "a.jsonl:2", config)                     # LeftOut, "empty document"
    parse_row({"title": "x"}, "a.jsonl:3", config)                   # BadRecord, "no text field"

Every text, line or row becomes a `TextRecord`, a `BadRecord` or a `LeftOut`, so that all are
counted (tally.py).

Place in the flow: files (record_files.py) and rows in memory (forms.py) → **records** → documents.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import cached_property
from typing import Any

from olmo_sparsity.config.text import CorpusConfig

LARGEST_DOCUMENT = 2**25
"""The largest number of bytes of a document, which bounds memory. The longest novels have 5 MB;
larger texts are many documents without line breaks."""

_WHITE_SPACE = b" \t\n\r\v\f"


@dataclass(frozen=True)
class TextRecord:
    """A document as text."""

    text: str
    group: str
    """What documents of one group have in common: the value of the group field, the title of an
    article, a package, or the text itself. All of them are trained on, or all are held out."""

    name: str = dataclass_field(default="", compare=False)
    """The record's file and number, or its title."""

    target: int | None = dataclass_field(default=None, compare=False)
    """The index of the target's first character, in a record with a prompt and a target."""

    @property
    def content_hash(self) -> bytes:
        """Return a hash of the text, in which white space does not count, and of where its target
        begins."""
        prompt = self.text[: self.target or 0].encode().translate(None, _WHITE_SPACE)
        content = self.text.encode().translate(None, _WHITE_SPACE)
        has_target = b"" if self.target is None else str(len(prompt)).encode()
        return hashlib.blake2b(has_target + b":" + content, digest_size=16).digest()

    @cached_property
    def group_hash(self) -> int:
        """Return a hash of the group of 64 bits, in which case and white space do not count."""
        key = self.group.casefold().encode().translate(None, _WHITE_SPACE)
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class BadRecord:
    """A record that is malformed, wrongly encoded, too long or without its text."""

    kind: str
    where: str
    """File and line, or the number of the record in a stream."""

    fields: tuple[str, ...] = dataclass_field(default=(), compare=False)
    """The fields of the record, if a requested one is missing."""


@dataclass(frozen=True)
class LeftOut:
    """A valid record that is not read, such as an empty document. It does not count as bad."""

    kind: str
    where: str


Record = TextRecord | BadRecord | LeftOut

TOO_LONG = BadRecord(f"longer than {LARGEST_DOCUMENT:,} bytes", "")
"""A record that is too long. `read_file` adds where it is."""


# --- values ---------------------------------------------------------------------------------------


def parse_row(row: Any, where: str, config: CorpusConfig) -> Record:
    """Return the record of an object with fields.

    Args:
        where: Its file and line, or the number of the record, which become its name.
        config: Says which fields hold the text, the prompt and the group.
    """
    if not isinstance(row, dict):
        return BadRecord("malformed line", where)
    values = {name: _value(row, name) for name in config.fields}
    for name, value in values.items():
        if value is _MISSING:
            return BadRecord(f"no {name} field", where, fields=tuple(map(str, row)))
    record = parse_text(values[config.field], where, config.field)
    if config.prompt_field is not None and isinstance(record, TextRecord):
        prompt = parse_text(values[config.prompt_field], where, config.prompt_field)
        if not isinstance(prompt, TextRecord):
            return prompt
        # The same answer to two prompts makes two documents, so both texts are the group.
        text = prompt.text + record.text
        record = replace(record, text=text, group=text, target=len(prompt.text))
    if config.group_field is not None and isinstance(record, TextRecord):
        record = replace(record, group=_group(values[config.group_field]) or record.group)
    return record


_MISSING = object()
"""The result of `_value` for a field that is missing. (None is a value in JSON.)"""


def _value(row: Any, name: str) -> Any:
    """Return the value of a field, or `_MISSING`. The name a.b means the field b of the field a,
    unless a field has the name a.b itself."""
    if not isinstance(row, dict):
        return _MISSING
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    if not dot or outer not in row:
        return _MISSING
    return None if row[outer] is None else _value(row[outer], inner)


def _group(value: Any) -> str:
    """Return the group that a value of the group field names. For a URL this is its host, so that
    pages of one site are together. Without a value it is empty: the document stays a group of its
    own."""
    if value is None or not str(value).strip():
        return ""
    name = str(value).encode(errors="replace").decode()  # JSON can spell half of a character
    host = re.match(r"https?://([^/?#]+)", name)
    return host[1] if host else name


def parse_text(text: Any, where: str, field: str = "text") -> Record:
    """Return the record of a text, in bytes or decoded.

    Args:
        where: Its file and line, for the record's name and for a bad record.
        field: The field that the text is in, for a bad record.
    """
    if isinstance(text, bytes | str) and len(text) > LARGEST_DOCUMENT:
        return replace(TOO_LONG, where=where)
    if text is None:
        text = ""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")  # drops the byte order mark that some editors write
        if not isinstance(text, str):
            return BadRecord(f"{field} field that is not text", where)
        text.encode()  # JSON can spell half of a surrogate pair, which is not a character
    except UnicodeDecodeError as error:
        return BadRecord("wrong encoding", f"{where}, byte {error.start + 1:,}")
    except UnicodeEncodeError as error:
        return BadRecord("half of a surrogate pair", f"{where}, character {error.start + 1:,}")
    if not text or text.isspace():
        return LeftOut("empty document", where)
    if "\0" in text[:200]:  # UTF-16, or a file that is not text
        return BadRecord("wrong encoding", where)
    return TextRecord(text, group=text, name=where)
