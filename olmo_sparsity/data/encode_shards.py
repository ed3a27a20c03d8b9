"""Write the token shards of one prepared folder, and add each to the manifest when it is complete.

    read_records → _read_batches │ _encode_batches    │ _write_batch → ShardWriter of each split
    in a thread                  │ in another thread, │ in this thread
                                 │ on all cores       │

A shard exists once the manifest names it. So `write_shards` resumes after the last shard that it
names, and writes the next one from its start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Encoding, Tokenizer

from olmo_sparsity.base.errors import naming_panics
from olmo_sparsity.base.files import naming_written_file, sync
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.data.background import in_background
from olmo_sparsity.data.shard_manifest import SPLITS, Manifest
from olmo_sparsity.data.shard_writer import ShardWriter, TokenPiece
from olmo_sparsity.data.split_checks import check_not_empty
from olmo_sparsity.data.tokenizer import cut_into_pieces
from olmo_sparsity.text.corpus import is_heldout, read_records
from olmo_sparsity.text.records import Record, TextRecord
from olmo_sparsity.text.tally import CHECK_EVERY_RECORDS, Tally
from olmo_sparsity.text.vocabulary import BATCH_CHARACTERS

if TYPE_CHECKING:
    from olmo_sparsity.config.text import DataConfig

SHARD_CHARACTERS = 2**28
"""The number of characters of a shard's text, which ends with the record that reaches it: about 60M
tokens, or one or two minutes of two cores, which is the most that a kill can lose."""

ENCODING_CHARACTERS = 64
"""The memory of an encoding beside its tokens, in characters. It matters for tiny documents."""

CACHED_WORDS = 2**18
"""The number of words whose tokens the tokenizer caches, by default 10,000. More make it a tenth
faster on natural text, for some 50 MB."""


@dataclass
class _Batch:
    """Pieces of consecutive documents, all of one shard, which are tokenized together."""

    texts: list[str] = field(default_factory=list)
    are_heldout: list[bool] = field(default_factory=list)
    """Whether the document of each piece is held out."""

    groups: list[int | None] = field(default_factory=list)
    """The hash of the document's group at its last piece, and None at the pieces before. So a
    document ends where there is a group."""

    num_characters: int = 0
    tally: Tally = field(default_factory=Tally)
    """Counts of the records in this batch, also of those that are left out."""

    ends_shard: bool = False
    ends_source: bool = False

    def add(self, text: str, is_heldout: bool) -> None:
        """Append a piece of a document. The caller sets the group of the last one."""
        self.texts.append(text)
        self.are_heldout.append(is_heldout)
        self.groups.append(None)
        self.num_characters += len(text) + ENCODING_CHARACTERS


def _read_batches(
    data: DataConfig, skip: int, max_documents: int | None
) -> Generator[_Batch, None, None]:
    """Yield the records after the first `skip` in batches. The last batch ends the source. Only the
    text decides where a batch ends a shard, so that a resumed run writes the same shards."""
    batch = _Batch()
    shard_characters = 0
    file = None
    for record in read_records(replace(data.corpus, max_documents=max_documents), skip):
        # A shard is of one file, so that several processes write the same shards as one process.
        if data.corpus.source == "c4_files":
            previous_file = file
            file = _file_of(record)
            if previous_file not in (None, file):
                batch.ends_shard = True
                yield batch
                batch = _Batch()
                shard_characters = 0
        batch.tally.add(record)
        if isinstance(record, TextRecord):
            goes_to_heldout = is_heldout(record, data.heldout_share)
            for text in cut_into_pieces(record.text):
                if batch.num_characters >= BATCH_CHARACTERS:
                    yield batch
                    batch = _Batch()
                batch.add(text, goes_to_heldout)
            batch.groups[-1] = record.group_hash
            shard_characters += len(record.text)
        if shard_characters >= SHARD_CHARACTERS:
            batch.ends_shard = True
            yield batch
            batch = _Batch()
            shard_characters = 0
        # Records that are left out have no characters, and would never fill a batch.
        elif batch.tally.num_records >= CHECK_EVERY_RECORDS:
            yield batch
            batch = _Batch()
    batch.ends_shard = True
    batch.ends_source = True
    yield batch


def _file_of(record: Record) -> str:
    """Return the file that a record is in, from its name FILE:LINE."""
    file_and_line = record.name if isinstance(record, TextRecord) else record.where
    return file_and_line.rpartition(":")[0] or file_and_line


def _encode_batches(
    tokenizer: Tokenizer, batches: Generator[_Batch, None, None]
) -> Generator[tuple[_Batch, list[Encoding]], None, None]:
    """Yield each batch with the encodings of its pieces."""
    with contextlib.closing(batches):
        for batch in batches:
            with naming_panics("data.tokenizer"):
                encodings = tokenizer.encode_batch_fast(batch.texts, add_special_tokens=False)
            yield batch, encodings


def write_shards(
    data: DataConfig,
    folder: Path,
    manifest: Manifest,
    tokenizer: Tokenizer,
    progress: Progress,
    needs_both_splits: bool,
) -> None:
    """Write the shards that are not in the manifest yet, and add each to it once it is complete.

    needs_both_splits: Whether to raise DataError if the folder has no training or no held-out text.
    """
    _remove_unnamed(folder, manifest)
    num_stored = manifest.num_tokens(*SPLITS)
    progress.resume_at(num_stored)
    max_documents = data.corpus.max_documents
    if manifest.num_shards:
        progress.note(
            f"continuing after {manifest.num_shards} finished shards, {num_stored:,} tokens"
        )
        if max_documents is not None:
            max_documents -= manifest.num_documents(*SPLITS)
    if hasattr(tokenizer.model, "_resize_cache"):  # BPE has it; no token depends on it
        tokenizer.model._resize_cache(CACHED_WORDS)

    # Reading (decompress, parse, hash), tokenizing (all cores, without the interpreter lock) and
    # writing (IDs to bytes, SHA-256) overlap; the queues hold at most a few batches. Reading and
    # writing share the interpreter lock: some 40 MB/s, which a dozen cores can tokenize.
    batches = _read_batches(data, manifest.tally.num_records, max_documents)
    encoded = in_background(_encode_batches(tokenizer, in_background(batches, 2)), 1)
    writers = _new_writers(folder, manifest)
    total = deepcopy(manifest.tally)  # of the shard that is being written, too
    with (
        naming_written_file(folder),
        contextlib.closing(encoded),
        contextlib.ExitStack() as at_the_end,
    ):
        at_the_end.callback(lambda: ShardWriter.close_all(writers))  # `writers` as it is then
        for batch, encodings in encoded:
            total.merge(batch.tally)
            if batch.ends_source or total.num_records >= CHECK_EVERY_RECORDS:
                total.check(data.corpus.max_bad_share)
            _write_batch(writers, batch, encodings)
            num_new = sum(writer.num_tokens for writer in writers)
            progress.update(num_stored + num_new, bad_records=f"{total.num_bad:,}")
            if not batch.ends_shard:
                continue

            if batch.ends_source and needs_both_splits:
                check_not_empty(data, manifest, *writers)
            _publish_shard(folder, manifest, writers, total, batch.ends_source)
            num_stored += num_new
            writers = _new_writers(folder, manifest)


def _publish_shard(
    folder: Path, manifest: Manifest, writers: list[ShardWriter], total: Tally, is_last: bool
) -> None:
    """Add the shard of these writers to the manifest.

    total: The counts of all records so far, those of this shard included.
    is_last: Whether the corpus has no more records, so that the folder is complete.
    """
    # Without new records, as at the end of a source, there is no shard to add.
    if total.num_records > manifest.tally.num_records:
        for writer in writers:
            manifest.files += writer.publish()
        sync(folder)
        manifest.num_shards += 1
    manifest.tally = deepcopy(total)
    manifest.complete = is_last
    manifest.save(folder)  # last, as it makes the shard exist


def _new_writers(folder: Path, manifest: Manifest) -> list[ShardWriter]:
    """Return the writers of the next shard, one for each split."""
    return [
        ShardWriter(folder, split, manifest.num_shards, manifest.dtype, manifest.eos_id)
        for split in SPLITS
    ]


def _write_batch(writers: list[ShardWriter], batch: _Batch, encodings: list[Encoding]) -> None:
    """Give each document of a batch to the writer of its split."""
    for writer in writers:
        writes_heldout = writer.split == "heldout"
        pieces = []
        for encoding, goes_to_heldout, group in zip(
            encodings, batch.are_heldout, batch.groups, strict=True
        ):
            if goes_to_heldout == writes_heldout:
                pieces.append(TokenPiece(encoding.ids, group))
        writer.write(pieces)


def _remove_unnamed(folder: Path, manifest: Manifest) -> None:
    """Remove the files of a shard that the manifest does not name: a killed run has left them,
    under their temporary or their final names."""
    names_in_manifest: set[str] = set()
    for file in manifest.files:
        names_in_manifest |= set(file.names)
    for path in folder.iterdir():
        is_shard = path.name.startswith(("train-", "heldout-"))
        is_unnamed_shard = is_shard and path.name not in names_in_manifest
        if is_unnamed_shard or path.suffix == ".tmp":
            path.unlink()
