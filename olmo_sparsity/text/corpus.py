"""Read a corpus: a stream of records in a fixed order, of which the good ones are documents.

    config = CorpusConfig("files", path="my_texts")
    for document in read_documents(config):  # the good ones
        side = "held out" if is_heldout(document, 0.05) else "trained on"

A record is a `TextRecord`, which is a document, a `BadRecord` or a `LeftOut` (records.py). All are
yielded, so that all can be counted (tally.py). corpus_readers.py reads them, from one of six inputs
(`config.source`).

Whether a document is held out follows from its group alone (`is_heldout`): equal documents are on
the same side, in any order and on any machine, and no document need be remembered.

`data/prepare.py` turns the documents into token shards, and inputs.py into the documents of a
measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from olmo_sparsity.base.errors import DataError, printable
from olmo_sparsity.config.text import CorpusConfig
from olmo_sparsity.text.corpus_readers import read_input
from olmo_sparsity.text.input_files import list_files
from olmo_sparsity.text.python_sources import list_python_files
from olmo_sparsity.text.records import BadRecord, Record, TextRecord
from olmo_sparsity.text.tally import CHECK_EVERY_RECORDS, Tally


def read_documents(config: CorpusConfig) -> Iterator[TextRecord]:
    """Yield the good documents of a corpus."""
    return good_documents(read_records(config), Tally(), config)


def read_records(config: CorpusConfig, skip: int = 0) -> Iterator[Record]:
    """Yield all records after the first `skip`, until `config.max_documents` of them are good."""
    num_documents = 0
    if config.max_documents == 0:
        return  # before a hub or a file is opened
    for record in read_input(config, skip):
        yield record
        if isinstance(record, TextRecord):
            num_documents += 1
            if num_documents == config.max_documents:
                return


def good_documents(
    records: Iterable[Record], tally: Tally, config: CorpusConfig
) -> Iterator[TextRecord]:
    """Yield the documents among records, and count the others in `tally`. Raise DataError if too
    many records are bad, or if the first lacks a field, as all will."""
    for record in records:
        is_first = tally.num_records == 0
        if is_first and isinstance(record, BadRecord) and record.fields:
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


def is_heldout(document: TextRecord, heldout_share: float) -> bool:
    """Return whether a document is held out. It depends on the document's group alone, without case
    and white space, so it is the same in any order and on any machine."""
    # A hash of 64 bits is uniform, so this fraction of the groups is below the bound.
    return document.group_hash < heldout_share * 2**64


def list_inputs(config: CorpusConfig) -> list[Path]:
    """Return the files that a corpus is read from, in this order. It is empty for the hub, and for
    text that is installed with a dependency."""
    if config.source in ("c4_files", "files", "text"):
        return list_files(config)
    if config.source == "python":
        return [file.path for file in list_python_files()]
    return []
