"""Check that a prepared folder has training text and held-out text, before and after tokenizing.

    12 documents and data.heldout_share=0.001     0.012 held-out documents, so probably none:
    DataError: no held-out document of 12 documents and data.heldout_share=0.001; give more text, or
    raise the share: --data.heldout_share=0.5 holds out about 6

folder.py calls `check_both_splits` before hours of tokenizing, and `check_not_empty` is
called when the last shard is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.data.preparation.shard_writer import ShardWriter
from olmo_sparsity.data.shard_manifest import SPLITS, Manifest
from olmo_sparsity.text.corpus import is_heldout, read_records
from olmo_sparsity.text.records import TextRecord
from olmo_sparsity.text.tally import Tally

if TYPE_CHECKING:
    from olmo_sparsity.config.text import DataConfig

NEEDED_HELDOUT = 20
"""The number of held-out documents that the share proposed in the message gives. Of few documents,
half are held out."""


def check_both_splits(data: DataConfig) -> None:
    """Raise DataError if no document would be held out, or all would be. It is called before
    anything is tokenized. Reading ends as soon as both splits have a document: with a share of
    0.001 after about 1,000 documents."""
    # The hub is not asked for the same text twice; and with a share of 0 nothing is held out.
    if data.corpus.source == "c4" or data.heldout_share == 0:
        return
    tally = Tally()
    counts = dict.fromkeys(SPLITS, 0)
    for record in read_records(data.corpus):
        tally.add(record)  # a corpus of bad records alone gets their message, not one of splits
        if isinstance(record, TextRecord):
            counts["heldout" if is_heldout(record, data.heldout_share) else "train"] += 1
            if all(counts.values()):
                return
    tally.check(data.corpus.max_bad_share)
    check_counts(data, counts)


def check_not_empty(data: DataConfig, manifest: Manifest, *writers: ShardWriter) -> None:
    """Raise DataError if a split has no document in finished shards, nor in the shards that
    `writers` are writing."""
    counts = {split: manifest.num_documents(split) for split in SPLITS}
    for writer in writers:
        counts[writer.split] += writer.num_documents
    check_counts(data, counts)


def check_counts(data: DataConfig, counts: Mapping[str, int]) -> None:
    """Raise DataError if a split has no document, by the number of documents of each split."""
    total = sum(counts.values())
    inputs = f"of {total:,} documents and data.heldout_share={data.heldout_share}"
    if counts["train"] == 0:
        raise DataError(f"no training document {inputs}; give more text")
    if counts["heldout"] == 0 and data.heldout_share > 0:
        needed_share = NEEDED_HELDOUT / max(total, 2 * NEEDED_HELDOUT)
        # Rounded up to one digit, such as 0.04.
        digit = 10.0 ** math.floor(math.log10(needed_share))
        share = float(f"{math.ceil(needed_share / digit) * digit:.1g}")
        num_heldout = round(share * total)
        if share <= data.heldout_share or num_heldout == 0:
            raise DataError(f"no held-out document {inputs}; give more text")
        raise DataError(
            f"no held-out document {inputs}; give more text, or raise the share: "
            f"--data.heldout_share={share:g} holds out about {num_heldout}"
        )
