"""Prepare one corpus with several processes that do not wait for each other.

Each process takes every n-th file of the corpus, and fills a folder for each of its files. The
process that finds all of them finished joins them:

    data/c4/parts/00000/train-00000.tokens.uint16       file 0, by process 0
    data/c4/parts/00001/train-00000.tokens.uint16       file 1, by process 1
    data/c4/parts/00001/train-00001.tokens.uint16
        ↓ _join_folders
    data/c4/train-00000.tokens.uint16, train-00001…, train-00002…, and one manifest.json

From C4's files the result has the same bytes as from one process. From other files, shards end with
their file, which they do not in one process.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.files import sync, write_atomically
from olmo_sparsity.base.locks import locked
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.base.share import Share
from olmo_sparsity.data.preparation.folder import (
    decisive_settings,
    fill_folder,
    hash_inputs,
    is_finished,
    load_or_train_tokenizer,
    sample_for_tokenizer,
)
from olmo_sparsity.data.preparation.split_checks import check_both_splits, check_not_empty
from olmo_sparsity.data.shard_manifest import Manifest, ShardEntry
from olmo_sparsity.text.corpus import list_inputs
from olmo_sparsity.text.corpus_readers import DAMAGED
from olmo_sparsity.text.record_files import is_records
from olmo_sparsity.text.tally import Tally

if TYPE_CHECKING:
    from olmo_sparsity.config.text import DataConfig


def prepare_together(
    data: DataConfig, share: Share, common_tokenizer: Tokenizer | None
) -> Manifest | None:
    """Prepare this process's share of the files of a corpus, and join the folders of all files if
    they are finished then. Return the manifest; None if other processes have files left.

    Args:
        common_tokenizer: The tokenizer of several corpora, if this is one of them.
    """
    check_files_can_be_shared(data, share)
    folder = Path(data.folder)
    if _is_joined(folder):
        return fill_folder(data, common_tokenizer, needs_both_splits=True)
    file_folders = _folders_of_files(data)
    if not _are_finished(file_folders):
        # They are gone, too, if another process has joined them since the check above.
        if _is_joined(folder):
            return fill_folder(data, common_tokenizer, needs_both_splits=True)
        _fill_share(data, file_folders, share, common_tokenizer)

    # The process that ends last finds all files finished, or two that end together do: the lock
    # lets one of them join.
    if not _are_finished(file_folders) and not _is_joined(folder):
        return None
    with locked(folder, waits=True):
        if not _is_joined(folder):
            _join_folders(data, folder, [Path(one_file.folder) for one_file in file_folders])
    return fill_folder(data, common_tokenizer, needs_both_splits=True)


def _is_joined(folder: Path) -> bool:
    """Return whether the folders of all files are one, whose manifest is written last."""
    return (folder / "manifest.json").exists()


def check_files_can_be_shared(data: DataConfig, share: Share) -> None:
    """Raise ConfigError for a corpus that only one process can read, as each process of several
    reads whole files."""
    corpus = data.corpus
    option = f"--shard={share.index}/{share.count}"
    if corpus.source not in ("c4_files", "files"):
        raise ConfigError(
            f"{option}: processes share files of records (data.corpus.source=c4_files or files), "
            f"and data.corpus.source={corpus.source}; prepare it as one process"
        )
    if corpus.max_documents is not None:
        raise ConfigError(
            f"{option}: data.corpus.max_documents={corpus.max_documents} counts over all files, "
            "which no process reads; pass --data.corpus.max_documents=null"
        )
    texts = [file for file in list_inputs(corpus) if not is_records(file)]
    if texts:
        raise ConfigError(
            f"{option}: processes share files of records, and {texts[0]} is plain text; write the "
            "texts to some .jsonl or .parquet files, or prepare them as one process"
        )


def _folders_of_files(data: DataConfig) -> list[DataConfig]:
    """Return the config of each file of a corpus, as a corpus with a folder of its own. Folders are
    numbered in the order in which one process would read the files, and are joined in it."""
    return [
        replace(
            data,
            folder=f"{Path(data.folder)}/parts/{file_index:05d}",
            corpus=replace(data.corpus, path=str(file)),
        )
        for file_index, file in enumerate(list_inputs(data.corpus))
    ]


def _are_finished(file_folders: list[DataConfig]) -> bool:
    """Return whether the folder of each file is complete."""
    return all(map(is_finished, file_folders))


def _fill_share(
    data: DataConfig,
    file_folders: list[DataConfig],
    share: Share,
    common_tokenizer: Tokenizer | None,
) -> None:
    """Prepare this process's files, each in its folder."""
    # Over all files, as a single file may well have no held-out document.
    check_both_splits(data)
    tokenizer = common_tokenizer
    if tokenizer is None:
        # Each process trains it on the same texts, so all of them get the same.
        with Progress("prepare", total=None, unit="tokens") as progress:
            tokenizer = load_or_train_tokenizer(data, sample_for_tokenizer(data), progress)
    for one_file in share.of(file_folders):
        fill_folder(one_file, tokenizer, needs_both_splits=False)


def _join_folders(data: DataConfig, folder: Path, file_folders: list[Path]) -> None:
    """Move the shards of all files into one folder, under consecutive numbers. The manifest is
    written last, so that a process that is killed before can do it again."""
    _check_damaged_files(data, [Manifest.load(file_folder).tally for file_folder in file_folders])
    first = file_folders[0]
    joined = replace(Manifest.load(first), num_shards=0, tally=Tally(), files=[])
    joined.settings = decisive_settings(data)
    joined.inputs_sha256 = hash_inputs(data.corpus)
    write_atomically(folder / "tokenizer.json", (first / "tokenizer.json").read_text())
    for file_folder in file_folders:
        manifest = Manifest.load(file_folder)
        joined.files += _move_shards(file_folder, folder, manifest, joined.num_shards)
        joined.num_shards += manifest.num_shards
        joined.tally.merge(manifest.tally)
    check_not_empty(data, joined)
    # The new names must survive a power cut if the manifest, which has them, does.
    sync(folder)
    joined.save(folder)
    shutil.rmtree(folder / "parts")


def _move_shards(
    file_folder: Path, folder: Path, manifest: Manifest, first_number: int
) -> list[ShardEntry]:
    """Move the shards of one file into the common folder, under numbers from `first_number` on.
    Return their entries for its manifest."""
    moved = []
    for file in manifest.files:
        renamed = file.renumbered(first_number + file.shard_number)
        for old_name, new_name in zip(file.names, renamed.names, strict=True):
            # Otherwise a process that was killed has moved it already.
            if (file_folder / old_name).exists():
                os.replace(file_folder / old_name, folder / new_name)
        moved.append(renamed)
    return moved


def _check_damaged_files(data: DataConfig, tallies: list[Tally]) -> None:
    """Raise DataError if more files are damaged than are allowed, counted over all processes. While
    they were read, each file had the whole limit for itself."""
    total = Tally()
    for tally in tallies:
        total.merge(tally)
    num_damaged = total.left_out.get(DAMAGED, 0)
    if num_damaged > data.corpus.max_damaged_files:
        raise DataError(
            f"{num_damaged} files are damaged ({total.describe()}); copy them again and prepare "
            f"anew, or raise data.corpus.max_damaged_files={data.corpus.max_damaged_files}"
        )
