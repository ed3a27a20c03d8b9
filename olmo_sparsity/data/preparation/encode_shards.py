"""Write the token shards of one prepared folder, and add each to the manifest when it is complete.

    read_batches       │ _encode_batches    │ _write_batch → ShardWriter of each split
    in a thread        │ in another thread, │ in this thread
                       │ on all cores       │

A shard exists once the manifest names it. So `write_shards` resumes after the last shard that it
names, and writes the next one from its start.

Place in the flow: document_batches.py → **`write_shards`** → a folder that shards.py reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import Encoding, Tokenizer

from olmo_sparsity.base.errors import naming_panics
from olmo_sparsity.base.files import naming_written_file, sync
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.data.background import in_background
from olmo_sparsity.data.preparation.document_batches import DocumentBatch, read_batches
from olmo_sparsity.data.preparation.shard_writer import ShardWriter, TokenPiece
from olmo_sparsity.data.preparation.split_checks import check_not_empty
from olmo_sparsity.data.shard_manifest import SPLITS, Manifest
from olmo_sparsity.text.tally import CHECK_EVERY_RECORDS, Tally

if TYPE_CHECKING:
    from olmo_sparsity.config.text import DataConfig

CACHED_WORDS = 2**18
"""The number of words whose tokens the tokenizer caches, by default 10,000. More make it a tenth
faster on natural text, for some 50 MB."""


class _EncodedBatch(NamedTuple):
    """A batch, and the tokens of each of its pieces."""

    batch: DocumentBatch
    encodings: list[Encoding]


def write_shards(
    data: DataConfig,
    folder: Path,
    manifest: Manifest,
    tokenizer: Tokenizer,
    progress: Progress,
    needs_both_splits: bool,
) -> None:
    """Write the shards that are not in the manifest yet, and add each to it once it is complete.

    Args:
        needs_both_splits: Whether to raise DataError if the folder has no training or no held-out
            text.
    """
    _remove_unnamed(folder, manifest)
    num_stored = manifest.num_tokens(*SPLITS)
    progress.resume_at(num_stored)
    if manifest.num_shards:
        progress.note(
            f"continuing after {manifest.num_shards} finished shards, {num_stored:,} tokens"
        )
    encoded_batches = _encode_in_background(data, manifest, tokenizer)

    writers = _new_writers(folder, manifest)
    # The manifest counts the records of finished shards, this tally also those of the shard that is
    # being written.
    total = deepcopy(manifest.tally)
    with (
        naming_written_file(folder),
        contextlib.closing(encoded_batches),
        contextlib.ExitStack() as at_the_end,
    ):
        # A lambda, as each shard has new writers: those of the moment are closed.
        at_the_end.callback(lambda: ShardWriter.close_all(writers))
        for batch, encodings in encoded_batches:
            # Check early, and not after hours, whether the corpus is too bad to go on.
            total.merge(batch.tally)
            if batch.ends_corpus or total.num_records >= CHECK_EVERY_RECORDS:
                total.check(data.corpus.max_bad_share)

            _write_batch(writers, batch, encodings)
            num_new = sum(writer.num_tokens for writer in writers)
            progress.update(num_stored + num_new, bad_records=f"{total.num_bad:,}")
            if not batch.ends_shard:
                continue

            if batch.ends_corpus and needs_both_splits:
                check_not_empty(data, manifest, *writers)
            _publish_shard(folder, manifest, writers, total, batch.ends_corpus)
            num_stored += num_new
            writers = _new_writers(folder, manifest)


def _encode_in_background(
    data: DataConfig, manifest: Manifest, tokenizer: Tokenizer
) -> Generator[_EncodedBatch, None, None]:
    """Yield the encoded batches that follow the finished shards. Threads read and tokenize the next
    ones meanwhile."""
    max_documents = data.corpus.max_documents
    if max_documents is not None:
        max_documents -= manifest.num_documents(*SPLITS)
    if hasattr(tokenizer.model, "_resize_cache"):  # BPE has it; no token depends on it
        tokenizer.model._resize_cache(CACHED_WORDS)

    # Reading (decompress, parse, hash), tokenizing (all cores, without the interpreter lock) and
    # writing (IDs to bytes, SHA-256) overlap; the queues hold at most a few batches. Reading and
    # writing share the interpreter lock: some 40 MB/s, which a dozen cores can tokenize.
    batches = read_batches(data, manifest.tally.num_records, max_documents)
    encoded_batches = _encode_batches(tokenizer, in_background(batches, depth=2))
    return in_background(encoded_batches, depth=1)


def _encode_batches(
    tokenizer: Tokenizer, batches: Generator[DocumentBatch, None, None]
) -> Generator[_EncodedBatch, None, None]:
    """Yield each batch with the encodings of its pieces."""
    with contextlib.closing(batches):
        for batch in batches:
            texts = [piece.text for piece in batch.pieces]
            with naming_panics("data.tokenizer"):
                encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            yield _EncodedBatch(batch, encodings)


def _write_batch(
    writers: list[ShardWriter], batch: DocumentBatch, encodings: list[Encoding]
) -> None:
    """Give each piece of a batch to the writer of its split."""
    for writer in writers:
        writes_heldout = writer.split == "heldout"
        token_pieces = [
            TokenPiece(encoding.ids, piece.group)
            for piece, encoding in zip(batch.pieces, encodings, strict=True)
            if piece.is_heldout == writes_heldout
        ]
        writer.write(token_pieces)


def _new_writers(folder: Path, manifest: Manifest) -> list[ShardWriter]:
    """Return the writers of the next shard, one for each split."""
    return [
        ShardWriter(folder, split, manifest.num_shards, manifest.dtype, manifest.eos_id)
        for split in SPLITS
    ]


def _publish_shard(
    folder: Path, manifest: Manifest, writers: list[ShardWriter], total: Tally, is_last: bool
) -> None:
    """Add the shard of these writers to the manifest.

    Args:
        total: The counts of all records so far, those of this shard included.
        is_last: Whether the corpus has no more records, so that the folder is complete.
    """
    # Where the last shard ended with the last record, the end of the corpus has nothing to add.
    has_new_records = total.num_records > manifest.tally.num_records
    if has_new_records:
        for writer in writers:
            manifest.files += writer.publish()
        # The names of the files must survive a power cut if the manifest, which has them, does.
        sync(folder)
        manifest.num_shards += 1
    manifest.tally = deepcopy(total)
    manifest.complete = is_last
    manifest.save(folder)  # last, as it makes the shard exist


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
