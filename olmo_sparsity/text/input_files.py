"""List the files that the path of a corpus names: a file, those of a folder, or those of a glob.

    path=my.jsonl          my.jsonl
    path="texts/*.txt"     the files that match, sorted by name
    path=texts             a folder, which may hold much that is not text:

    in the folder                          list_files
    a.jsonl, b.jsonl, README.md, .git/…    a.jsonl, b.jsonl: the records
    a.txt, b.md, c.pdf                     a.txt, b.md: all plain text; a line names c.pdf
    a.jsonl, notes.txt                     an error: which of the two is the text?

corpus.py reads the files with record_files.py.
"""

from __future__ import annotations

import glob
import os
from functools import cache
from pathlib import Path
from typing import NoReturn

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.text import CorpusConfig
from olmo_sparsity.text.record_files import OTHER_DOCUMENTS, is_records, is_text, suffix_of


def list_files(config: CorpusConfig) -> list[Path]:
    """Return the files that the path of a corpus names: one file, those of a folder, or those that
    match a pattern. Raise DataError if there are none."""
    assert config.path is not None
    path = Path(config.path)
    if path.is_dir() and config.source != "c4_files":
        return _list_folder(path, with_records=config.source == "files")
    # A name with brackets is no pattern if the file exists, and `text` takes no pattern.
    if path.is_file() or config.source == "text":
        matches = [path]
    else:
        matches = sorted(map(Path, glob.glob(config.path, recursive=True)))
    files = [match for match in matches if match.is_file()]
    if not files:
        _raise_no_file(config.path)
    if config.source == "c4_files":
        _check_c4_files(config.path, files)
    return files


def _raise_no_file(path: str) -> NoReturn:
    """Raise DataError for a path that names no file, or something that is no file."""
    if os.path.exists(path):
        raise DataError(
            f"{path} is a pipe or a device, and text is read several times; write it to a "
            "file, or pass - and give it as standard input"
        )
    raise DataError(f"{path} matches no file; check the path, and that its disk is mounted")


def _check_c4_files(pattern: str, files: list[Path]) -> None:
    """Raise DataError unless all files have the names of C4's. A mirror may hold other files, too,
    each line of which would be a bad record."""
    for file in files:
        if suffix_of(file) not in (".json", ".jsonl"):
            raise DataError(
                f"c4_files:{pattern}: {file} is no .json or .jsonl file; name other files, "
                f"or read it as plain text (text:{file})"
            )


def _list_folder(folder: Path, with_records: bool) -> list[Path]:
    """Return the files of records in a folder, without those about the data, or else its files of
    plain text. `with_records`: whether records are accepted."""
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if not _is_hidden(file.relative_to(folder))
        if file.is_file()
    ]
    _report_skipped_files(folder, files)
    texts = [file for file in files if is_text(file)]
    tables = [file for file in files if is_records(file)] if with_records else []
    if tables:
        _check_one_kind(folder, tables, texts)
        # If all are about data, as in a folder of dataset_info.jsonl alone, they are the data.
        return [file for file in tables if not _is_about_data(file)] or tables
    if texts:
        return texts
    kinds = "text files or records" if with_records else "text files"
    raise DataError(
        f"{folder} holds no {kinds}; pass other files as a glob, such as '{folder}/*.jsonl'"
    )


def _report_skipped_files(folder: Path, files: list[Path]) -> None:
    """Print the names of some files that a user may take for text, and that are not read."""
    skipped = [file for file in files if file.suffix.lower() in OTHER_DOCUMENTS]
    if skipped:
        names = ", ".join(str(file.relative_to(folder)) for file in skipped[:5])
        _say_once(
            f"{folder}: skipped {len(skipped)} files that are not plain text, such as {names}; "
            "convert them, for example with pdftotext or pandoc"
        )


@cache
def _say_once(message: str) -> None:
    """Print a message the first time only, as a folder is listed several times."""
    say(message)


def _check_one_kind(folder: Path, tables: list[Path], texts: list[Path]) -> None:
    """Raise DataError for a folder of records that also has plain text, other than a README."""
    stray_texts = [file for file in texts if not _is_about_data(file)]
    if stray_texts:
        table = tables[0].relative_to(folder)
        text = stray_texts[0].relative_to(folder)
        raise DataError(
            f"{folder} holds records and plain text ({table} and {text}); pass a glob of one of "
            f"them, such as '{folder}/*{table.suffix}'"
        )


def _is_hidden(path: Path) -> bool:
    """Return whether a file, or a folder that it is in, was written by a program for itself."""
    return any(part.startswith((".", "__pycache__")) for part in path.parts)


def _is_about_data(path: Path) -> bool:
    """Return whether a file's name says that it describes the data next to it."""
    return path.name.lower().startswith(("readme", "license", "_", "dataset_info"))
