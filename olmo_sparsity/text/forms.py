"""Find the corpus that a user's `text` names: a file, a folder, a data set, the hub, or rows.

    "my_texts/*.jsonl"          CorpusConfig("files", path=…)
    "builtin:embedded"          CorpusConfig("embedded")
    "hub:allenai/c4:en:train"   CorpusConfig("c4", hub_name=…)
    ["a text", "another"]       rows in memory, with the options of a corpus

Place in the flow: **the text a user names** → records → documents.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.schema import schema_fields
from olmo_sparsity.config.text import CorpusConfig
from olmo_sparsity.text.corpus import read_records
from olmo_sparsity.text.record_files import STDIN, is_records, read_file
from olmo_sparsity.text.records import Record, parse_row

Rows = Iterable[str | Mapping[str, Any]]
"""Texts in memory, or objects with fields."""

FORMS = (
    "a file or glob (.json, .jsonl, .parquet, or any plain text), a folder of plain text or of "
    "these, a prepared one, owner/name or hub:NAME:CONFIG:SPLIT on the hub, - (standard input), "
    "builtin:embedded, builtin:python, builtin:c4, c4_files:GLOB or text:PATH"
)

BUILT_IN = "builtin:"
"""The prefix of the name of an installed corpus. The bare name works where no such path exists."""

_IS_BYTES = "is bytes, and a text is read; decode it, as in text.decode('utf-8')"
"""The end of the message for bytes in place of a text."""

SHOWN_CHARACTERS = 200
"""The characters of a text that an error shows: most paths are shorter."""

_TEXT_SUFFIXES = (".txt", ".md", ".csv", ".tsv", ".gz", ".zst")
"""Suffixes by which owner/name is taken for a path: no data set on the hub has such a name."""


@dataclass(frozen=True)
class OpenedText:
    """An input that is about to be read."""

    corpus: CorpusConfig
    """The corpus that is read. For rows in memory, a corpus with the options of the user."""

    records: Iterator[Record]


def open_rows_or_corpus(text: str | Rows, name: str, options: dict[str, Any]) -> OpenedText:
    """Open what `text` is or names.

    Args:
        name: The text's name, for messages.
        options: Fields of `CorpusConfig`.
    """
    if isinstance(text, str):
        if text == str(STDIN):
            corpus = CorpusConfig("text", **options)
            return OpenedText(corpus, read_file(STDIN, corpus))
        corpus = corpus_of(text, options)
        return OpenedText(corpus, read_records(corpus))

    rows: Any = text
    if isinstance(text, pd.DataFrame):
        # NaN, pandas' missing value, would be a text that is none, and a group named nan.
        rows = text.astype(object).where(text.notna(), None).to_dict("records")
    _check_rows(rows, name)
    # Rows have fields as a data set of the hub has them, so the same options have an effect.
    corpus = CorpusConfig("c4", hub_name="", **options)
    if set(corpus.fields) <= set(getattr(rows, "column_names", None) or ()):
        rows = rows.select_columns(corpus.fields)  # decodes no images of other columns
    return OpenedText(corpus, _parse_rows(rows, name, corpus))


def _check_rows(rows: Any, name: str) -> None:
    """Raise ConfigError for what is not a list of texts or of objects with fields."""
    if isinstance(rows, bytes | bytearray):
        raise ConfigError(f"text={bytes(rows[:40])!r} {_IS_BYTES}")
    if not hasattr(rows, "__iter__") or isinstance(rows, set | frozenset):
        raise ConfigError(
            f"text={rows!r:.80} must be a path or name, or a list, Dataset or DataFrame; a set has "
            "no order, so pass sorted(text)"
        )
    if isinstance(rows, Mapping):
        keys = ", ".join(map(str, rows))[:60]
        if all(hasattr(split, "column_names") for split in rows.values()):  # a DatasetDict
            raise ConfigError(f"{name} has several splits, {keys}; pass one of them")
        raise ConfigError(f"text is a mapping of {keys}; pass its texts, list(texts.values())")


def _parse_rows(rows: Rows, name: str, corpus: CorpusConfig) -> Iterator[Record]:
    """Yield the record of each row; a string is the text itself."""
    for number, row in enumerate(rows, start=1):
        if isinstance(row, bytes | bytearray):
            raise ConfigError(f"{name}:{number}: {bytes(row[:40])!r} {_IS_BYTES}")
        if isinstance(row, os.PathLike):
            raise ConfigError(
                f"{name}:{number}: {os.fspath(row)!r} is a path, and each item is the text itself; "
                "pass what path.read_text() returns, or one folder or glob of files"
            )
        fields_of_row = {corpus.field: row} if isinstance(row, str) else row
        yield parse_row(fields_of_row, f"{name}:{number}", corpus)


def corpus_of(text: str, options: dict[str, Any]) -> CorpusConfig:
    """Return the corpus that a string names. An installed corpus comes first, then a kind of input
    with its path, then what exists as a file, then a data set on the hub."""
    kind, _, path = text.partition(":")
    installed_name = text.removeprefix(BUILT_IN)
    has_prefix = installed_name != text
    # mypy does not narrow a string to the literals it is compared with.
    if installed_name in ("embedded", "python", "c4") and (has_prefix or not os.path.exists(text)):
        return CorpusConfig(installed_name, **options)  # type: ignore[arg-type]
    if kind in ("c4_files", "text") and path:
        return CorpusConfig(kind, path=path, **options)  # type: ignore[arg-type]
    is_file = os.path.exists(text) or glob.has_magic(text) or is_records(Path(text))
    if is_file and "\n" not in text:  # with a line break it is a text: `*` may be in Markdown
        return CorpusConfig("files", path=text, **options)
    return _corpus_on_hub(text, options)


def _corpus_on_hub(text: str, options: dict[str, Any]) -> CorpusConfig:
    """Return the data set on the hub that a string names. Raise ConfigError if it names none, or is
    more likely a path."""
    on_hub = re.fullmatch(r"hub:([^:]+)(?::([^:]*))?(?::([^:]+))?|\w[\w.-]*/[\w.-]+", text)
    if on_hub is None:
        shown = " ".join(text[:SHOWN_CHARACTERS].split())
        if len(text) > SHOWN_CHARACTERS:
            shown += "…"
        raise ConfigError(
            f"text={shown} is not {FORMS}; check that it exists, or pass a list of strings to "
            "measure the string itself"
        )
    hub_name, hub_config, hub_split = on_hub.groups()
    # `owner/name` may also be a path that the user has mistyped.
    if hub_name is None and (Path(text).suffix in _TEXT_SUFFIXES or Path(text).parent.is_dir()):
        raise ConfigError(
            f"text={text} does not exist, and is taken for a path: {_reason_of_path(text)}; check "
            f"the name, or pass hub:{text} for a data set on the hub"
        )
    return CorpusConfig(
        "c4",
        hub_name=hub_name or text,
        hub_config=hub_config or None,
        hub_split=hub_split or "train",
        **options,
    )


def _reason_of_path(text: str) -> str:
    """Return why a text that does not exist is taken for a path, for the message."""
    folder = Path(text).parent
    if folder.is_dir():
        return f"there is a folder {folder}"
    return f"it ends in {Path(text).suffix}"


def check_options_are_used(corpus: CorpusConfig, name: str) -> None:
    """Raise ConfigError for an option that has no effect on this kind of input, as the config of a
    run does. `name`: the name of the input, for the message."""
    for item in schema_fields(type(corpus)).values():
        value = getattr(corpus, item.name)
        if not item.applies(corpus) and value != item.default:
            raise ConfigError(f"{item.name}={value} means nothing to {name}; leave it out")
