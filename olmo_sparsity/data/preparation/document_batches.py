"""Group the documents of a corpus into batches for the tokenizer, and decide where shards end.

A shard ends with the document that fills it, a batch with any piece of one. So a shard has many
batches, and a long document may be in several of them:

    records     │ doc 1 │ doc 2          │ doc 3 │ bad │ doc 4 │ …
    pieces      │ doc 1 │ doc 2a │ doc 2b │ doc 3 │     │ doc 4 │ …      (`cut_into_pieces`)
    batches     │ batch 1        │ batch 2               │ batch 3 …
    shards      │ shard 0                                │ shard 1 …     (batch 2 ends shard 0)

Place in the flow: text/corpus.py → **`read_batches`** → encode_shards.py.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from olmo_sparsity.data.tokenizer import cut_into_pieces
from olmo_sparsity.text.corpus import is_heldout, read_records
from olmo_sparsity.text.records import Record, TextRecord
from olmo_sparsity.text.tally import CHECK_EVERY_RECORDS, Tally
from olmo_sparsity.text.vocabulary import BATCH_CHARACTERS

if TYPE_CHECKING:
    from olmo_sparsity.config.text import DataConfig

SHARD_CHARACTERS = 2**28
"""The number of characters of a shard's text, which ends with the record that reaches it: about 60M
tokens, or one or two minutes of two cores. A kill loses no more."""

ENCODING_CHARACTERS = 64
"""The memory of an encoding beside its tokens, in characters. It matters for tiny documents."""


class TextPiece(NamedTuple):
    """A document, or a piece of a long one, before it is tokenized."""

    text: str
    is_heldout: bool
    """Whether the document belongs to the held-out split."""

    group: int | None
    """The hash of the document's group if the document ends here, else None."""


@dataclass
class DocumentBatch:
    """Pieces of consecutive documents, all of one shard, which are tokenized together."""

    pieces: list[TextPiece] = field(default_factory=list)
    num_characters: int = 0
    """The memory that the batch takes, in characters (`ENCODING_CHARACTERS` is part of it)."""

    tally: Tally = field(default_factory=Tally)
    """Counts of the records in this batch, also of those that are left out."""

    ends_shard: bool = False
    ends_corpus: bool = False
    """Whether no batch follows. The last one ends a shard, too, and may be empty."""

    def add(self, piece: TextPiece) -> None:
        """Append a piece."""
        self.pieces.append(piece)
        self.num_characters += len(piece.text) + ENCODING_CHARACTERS

    @property
    def is_full_of_text(self) -> bool:
        return self.num_characters >= BATCH_CHARACTERS

    @property
    def is_full_of_records(self) -> bool:
        # Records that are left out have no characters, so they alone would never fill a batch, and
        # a corpus of nothing else would be read to its end before its tally is checked.
        return self.tally.num_records >= CHECK_EVERY_RECORDS


class _ShardBoundaries:
    """Decides between which records a shard ends.

    Only the text decides, and neither time nor the sizes of batches, so that a run that is resumed
    after any shard writes the same ones.
    """

    def __init__(self, are_at_files: bool) -> None:
        """Begin the first shard. With `are_at_files`, a shard also ends with the file that its
        records are in."""
        self._are_at_files = are_at_files
        self._num_characters = 0  # of the shard so far
        self._file: str | None = None  # of the record before

    def is_before(self, record: Record) -> bool:
        """Return whether the shard ends before this record, the next one of the corpus."""
        if not self._are_at_files:
            return False
        previous_file = self._file
        self._file = _file_of(record)
        is_first_record = previous_file is None
        if is_first_record or previous_file == self._file:
            return False
        self._num_characters = 0
        return True

    def is_after(self, record: Record) -> bool:
        """Return whether the shard ends with this record."""
        if isinstance(record, TextRecord):
            self._num_characters += len(record.text)
        if self._num_characters < SHARD_CHARACTERS:
            return False
        self._num_characters = 0
        return True


def _file_of(record: Record) -> str:
    """Return the file that a record is in, from its name FILE:LINE."""
    file_and_line = record.name if isinstance(record, TextRecord) else record.where
    return file_and_line.rpartition(":")[0] or file_and_line


def read_batches(
    data: DataConfig, num_skipped: int, max_documents: int | None
) -> Generator[DocumentBatch, None, None]:
    """Yield the records of a corpus in batches. The last batch says that it ends the corpus.

    Args:
        num_skipped: The number of records at the start that are skipped, as finished shards hold
            them.
        max_documents: The largest number of documents after them; None: all.
    """
    # C4's files are prepared by several processes that share them. A shard that ends with its file
    # is the same whether one process reads all files or each reads some of them.
    boundaries = _ShardBoundaries(are_at_files=data.corpus.source == "c4_files")
    corpus = replace(data.corpus, max_documents=max_documents)
    batch = DocumentBatch()
    for record in read_records(corpus, num_skipped):
        if boundaries.is_before(record):
            batch.ends_shard = True
            yield batch
            batch = DocumentBatch()

        batch.tally.add(record)
        if isinstance(record, TextRecord):
            for piece in _pieces_of(record, data.heldout_share):
                # Checked before each piece, so a document that fills a batch goes on in the next.
                if batch.is_full_of_text:
                    yield batch
                    batch = DocumentBatch()
                batch.add(piece)

        batch.ends_shard = boundaries.is_after(record)
        if batch.ends_shard or batch.is_full_of_records:
            yield batch
            batch = DocumentBatch()

    batch.ends_shard = True
    batch.ends_corpus = True
    yield batch


def _pieces_of(record: TextRecord, heldout_share: float) -> list[TextPiece]:
    """Return the pieces of a document. The last one carries the document's group."""
    goes_to_heldout = is_heldout(record, heldout_share)
    *first_texts, last_text = cut_into_pieces(record.text)
    pieces = [TextPiece(text, goes_to_heldout, group=None) for text in first_texts]
    pieces.append(TextPiece(last_text, goes_to_heldout, record.group_hash))
    return pieces
