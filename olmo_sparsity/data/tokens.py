"""Prepare a folder of token shards: tokenize documents once, on all cores (the command `prepare`).

    prepare ─ one corpus ─────> _fill_folder                     (one process)
            ├ several corpora > one folder for each, one tokenizer
            └ several processes > _prepare_with_others: a folder for each file, joined at the end

`_fill_folder` begins or resumes a folder: it obtains the tokenizer, then encode_shards.py writes
shard after shard. The manifest has the settings that determine the content, so a folder is resumed
only with the same ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from olmo_sparsity.base.differences import differences
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.files import sync, write_atomically
from olmo_sparsity.base.launch import read_launch
from olmo_sparsity.base.locks import locked
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.base.share import WHOLE, Share
from olmo_sparsity.base.work_folder import WorkFolder, check_unchanged
from olmo_sparsity.config.schema import applies
from olmo_sparsity.data import encode_shards
from olmo_sparsity.data.shards import SPLITS, Manifest, check_files, open_tokenizer
from olmo_sparsity.data.split_checks import check_both_splits, check_not_empty
from olmo_sparsity.data.tokenizer import (
    find_eos_id,
    find_tokenizer_file,
    load_tokenizer,
    train_tokenizer,
)
from olmo_sparsity.text.corpus import DAMAGED, is_heldout, list_inputs, read_records
from olmo_sparsity.text.record_files import is_records
from olmo_sparsity.text.records import TextRecord
from olmo_sparsity.text.tally import Tally
from olmo_sparsity.text.vocabulary import count_vocabulary, tokenizer_fingerprint

if TYPE_CHECKING:
    from olmo_sparsity.config.text import CorpusConfig, DataConfig

TOKENIZER_SAMPLE_CHARACTERS = 100_000_000
"""The number of characters of the training split that a tokenizer is trained on, from its start.
Memory grows with the number of distinct words, and the sample has all common ones, which become
tokens."""


def prepare(data: DataConfig, shard: tuple[int, int] = (0, 1)) -> Manifest | None:
    """Fill `data.folder`, or resume filling it, or find it finished. Return the manifest.

    shard: (i, n) for the i-th of n processes, which share the files of records. The result is None
        if other processes have files left.
    """
    share = Share(*shard)
    if read_launch().world_size > 1:
        raise ConfigError("prepare is one process on all cores; start it as one task")
    if data.corpora:
        return _prepare_corpora(data, share)
    return _prepare_corpus(data, share)


def _prepare_corpora(data: DataConfig, share: Share) -> Manifest | None:
    """Prepare each of several corpora in a folder of its own, with one tokenizer. Return the last
    manifest; None if other processes have files left."""
    parts = data.parts()
    if share != WHOLE:
        for part in parts.values():
            _shared_files(part, share)  # raises now what it would raise after hours
    tokenizer = _obtain_tokenizer_of_all(data, parts)
    manifests = [_prepare_corpus(part, share, tokenizer) for part in parts.values()]
    return manifests[-1] if all(manifests) else None


def _obtain_tokenizer_of_all(data: DataConfig, parts: Mapping[str, DataConfig]) -> Tokenizer:
    """Return the common tokenizer of several corpora. A stored one is kept, even if it was trained
    before a corpus was added, because the others have shards that were written with it."""
    path = Path(data.folder) / "tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():  # the folder may be read-only
        return load_tokenizer(str(path))
    with locked(path.parent, waits=True):
        if path.exists():  # another process has trained it meanwhile
            return load_tokenizer(str(path))
        total = sum(data.weights.values())
        # As much text of each corpus as training reads of it, in proportion.
        texts = (
            _sample(part, TOKENIZER_SAMPLE_CHARACTERS * data.weights[name] / total)
            for name, part in parts.items()
        )
        with Progress("prepare", total=None, unit="tokens") as progress:
            tokenizer = _make_tokenizer(data, chain.from_iterable(texts), progress)
        write_atomically(path, tokenizer.to_str(pretty=True))
    return tokenizer


def is_prepared(data: DataConfig) -> bool:
    """Return whether every corpus has a complete manifest. Its settings are not compared here;
    `train` does that."""
    parts = list(data.parts().values()) or [data]
    return all(_is_finished(part) for part in parts)


def _prepare_corpus(
    data: DataConfig, share: Share, common_tokenizer: Tokenizer | None = None
) -> Manifest | None:
    """Prepare one corpus, alone or with other processes. `common_tokenizer`: that of several
    corpora, of which this is one."""
    if share == WHOLE:
        return _fill_folder(data, common_tokenizer, needs_both_splits=True)
    return _prepare_with_others(data, share, common_tokenizer)


def _prepare_with_others(
    data: DataConfig, share: Share, common_tokenizer: Tokenizer | None
) -> Manifest | None:
    """Prepare the files of this process, each in a folder of its own below `parts/`. The process
    that finds all folders finished joins them. From C4's files the result has the same bytes as
    from one process. From other files, shards end with their file, which they do not in one
    process."""
    folder = Path(data.folder)
    files = _shared_files(data, share)
    if (folder / "manifest.json").exists():
        return _fill_folder(data, common_tokenizer, needs_both_splits=True)
    # A folder for each file, so that a process can prepare its files without the others. The
    # folders are numbered in the order in which one process would read the files, and are joined in
    # it.
    file_folders = [
        replace(
            data,
            folder=f"{folder}/parts/{number:05d}",
            corpus=replace(data.corpus, path=str(file)),
        )
        for number, file in enumerate(files)
    ]
    are_finished = all(map(_is_finished, file_folders))
    # The folders of files are gone if another process has joined them since the check above.
    if not are_finished and (folder / "manifest.json").exists():
        return _fill_folder(data, common_tokenizer, needs_both_splits=True)
    if not are_finished:
        # Over all files, as a single file may well have no held-out document.
        check_both_splits(data)
        tokenizer = common_tokenizer
        if tokenizer is None:
            with Progress("prepare", total=None, unit="tokens") as progress:
                tokenizer = _make_tokenizer(data, _sample(data), progress)
        for part in share.of(file_folders):
            _fill_folder(part, tokenizer, needs_both_splits=False)

    # The processes do not wait for each other. The one that ends last finds all files finished, or
    # two that end together do: the lock lets one of them join.
    are_finished = all(map(_is_finished, file_folders))
    if not are_finished and not (folder / "manifest.json").exists():
        return None
    with locked(folder, waits=True):
        if not (folder / "manifest.json").exists():
            _join(data, folder, [Path(part.folder) for part in file_folders])
    return _fill_folder(data, common_tokenizer, needs_both_splits=True)


def _shared_files(data: DataConfig, share: Share) -> list[Path]:
    """Return the files of a corpus, which processes share. Each process reads whole files, so
    reject a corpus that only one process can read."""
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
    files = list_inputs(corpus)
    texts = [file for file in files if not is_records(file)]
    if texts:
        raise ConfigError(
            f"{option}: processes share files of records, and {texts[0]} is plain text; write the "
            "texts to some .jsonl or .parquet files, or prepare them as one process"
        )
    return files


def _is_finished(data: DataConfig) -> bool:
    """Return whether the folder of a single corpus is complete."""
    folder = Path(data.folder)
    return (folder / "manifest.json").exists() and Manifest.load(folder).complete


def _join(data: DataConfig, folder: Path, parts: list[Path]) -> None:
    """Move the shards of all parts into the folder, under consecutive numbers. The manifest is
    written last, so that a process that is killed before can do it again."""
    _check_damaged_files(data, [Manifest.load(part).tally for part in parts])
    joined = replace(Manifest.load(parts[0]), num_shards=0, tally=Tally(), files=[])
    joined.settings = _decisive_settings(data)
    joined.inputs_sha256 = _hash_inputs(data.corpus)
    write_atomically(folder / "tokenizer.json", (parts[0] / "tokenizer.json").read_text())
    for part in parts:
        manifest = Manifest.load(part)
        for file in manifest.files:
            renamed = file.renumbered(joined.num_shards + file.shard_number)
            for old, new in zip(file.names, renamed.names, strict=True):
                if (part / old).exists():  # otherwise a process that was killed has moved it
                    os.replace(part / old, folder / new)
            joined.files.append(renamed)
        joined.num_shards += manifest.num_shards
        joined.tally.merge(manifest.tally)
    check_not_empty(data, joined)
    sync(folder)
    joined.save(folder)
    shutil.rmtree(folder / "parts")


def _check_damaged_files(data: DataConfig, tallies: list[Tally]) -> None:
    """Raise DataError if more files are damaged, of all processes together, than are allowed. While
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


def _fill_folder(
    data: DataConfig, common_tokenizer: Tokenizer | None, *, needs_both_splits: bool
) -> Manifest:
    """Prepare a folder as one process.

    common_tokenizer: That of several files or corpora, of which this is one.
    needs_both_splits: Whether the folder must have training text and held-out text.
    """
    work = WorkFolder(Path(data.folder), "data.folder", "manifest.json")
    folder = work.path
    # A finished folder may be read-only, as one that users of a cluster share. So it is not locked.
    opened = contextlib.nullcontext() if _is_finished(data) else work.opened()
    with opened, Progress("prepare", total=None, unit="tokens") as progress:
        manifest = _begin_or_resume(data, folder, common_tokenizer)
        if manifest.complete:
            manifest.tally.check(data.corpus.max_bad_share)
            progress.note(f"{folder} is already prepared: {_describe(manifest)}")
            return manifest
        if needs_both_splits and not manifest.files:
            check_both_splits(data)
        tokenizer = _obtain_tokenizer(data, folder, manifest, progress, common_tokenizer)
        encode_shards.write_shards(data, folder, manifest, tokenizer, progress, needs_both_splits)
        progress.note(f"{folder}: {_describe(manifest)}")
    return manifest


def _describe(manifest: Manifest) -> str:
    """Return the sizes of both splits, and what was left out."""
    parts = [
        f"{split} {manifest.num_documents(split):,} documents, "
        f"{manifest.num_tokens(split):,} tokens"
        for split in SPLITS
    ]
    if manifest.tally.num_bad or manifest.tally.left_out:
        parts.append(f"left out: {manifest.tally.describe()}")
    return "; ".join(parts)


def _begin_or_resume(
    data: DataConfig, folder: Path, common_tokenizer: Tokenizer | None
) -> Manifest:
    """Return the manifest of the folder after comparing it with the settings, or a new one."""
    settings = _decisive_settings(data)
    if not (folder / "manifest.json").exists():
        return _begin(data, folder, settings)
    manifest = Manifest.load(folder)
    changed = differences(manifest.settings, settings)
    if _has_other_inputs(data, manifest):
        changed.append("other source files, by name or size")

    # The name in the settings may lead to another file than before.
    path = None
    if data.tokenizer.name is not None:
        path = find_tokenizer_file(data.tokenizer.name)
    tokenizer = common_tokenizer if path is None else load_tokenizer(str(path))
    # A start that was killed before it wrote the tokenizer left none to compare with.
    if tokenizer is not None and manifest.tokenizer_sha256 is not None:
        is_same = tokenizer_fingerprint(tokenizer) == manifest.tokenizer_sha256
        if not is_same:
            changed.append(f"another tokenizer than {path or 'that of the other files'} is now")

    if changed and not manifest.files:
        return _begin(data, folder, settings)  # it has no shards to lose
    check_unchanged(f"data.folder={folder}", changed)
    check_files(folder, manifest, manifest.files if manifest.complete else ())
    if manifest.complete:
        open_tokenizer(folder, manifest)
    return manifest


def _has_other_inputs(data: DataConfig, manifest: Manifest) -> bool:
    """Return whether the source has other files than when the folder was begun. The source of a
    finished folder may be gone."""
    try:
        return _hash_inputs(data.corpus) != manifest.inputs_sha256
    except DataError:
        if not manifest.complete:
            raise
        return False


def _begin(data: DataConfig, folder: Path, settings: dict[str, Any]) -> Manifest:
    """Write the manifest of a folder without shards."""
    manifest = Manifest(settings, _hash_inputs(data.corpus))
    manifest.save(folder)
    return manifest


def check_same_settings(data: DataConfig) -> None:
    """Reject a run whose config names another text than the shards in its folder hold."""
    if data.corpora:
        for part in data.parts().values():
            check_same_settings(part)
        return
    manifest = Manifest.load(Path(data.folder))
    changed = differences(manifest.settings, _decisive_settings(data))
    check_unchanged(f"data.folder={data.folder}", changed)


def _decisive_settings(data: DataConfig) -> dict[str, Any]:
    """Return the settings that determine the content of the shards."""
    corpus = {
        item.name: getattr(data.corpus, item.name)
        for item in fields(data.corpus)
        # These two only decide whether preparing ends with an error.
        if item.name not in ("max_bad_share", "max_damaged_files") and applies(data.corpus, item)
    }
    return {
        "corpus": corpus,
        "tokenizer": asdict(data.tokenizer),
        "heldout_share": data.heldout_share,
        "shard_characters": encode_shards.SHARD_CHARACTERS,
    }


def _hash_inputs(corpus: CorpusConfig) -> str | None:
    """Return a hash of the names and sizes of the source files; None for a source without files."""
    paths = list_inputs(corpus)
    if not paths:
        return None
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path}\0{path.stat().st_size}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _obtain_tokenizer(
    data: DataConfig,
    folder: Path,
    manifest: Manifest,
    progress: Progress,
    common_tokenizer: Tokenizer | None,
) -> Tokenizer:
    """Return the tokenizer of the folder. Load or train it if there is none yet."""
    if manifest.tokenizer_sha256 is not None:
        return open_tokenizer(folder, manifest)
    tokenizer = common_tokenizer or _make_tokenizer(data, _sample(data), progress)
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    manifest.tokenizer_sha256 = tokenizer_fingerprint(tokenizer)
    manifest.vocab_size = count_vocabulary(tokenizer)
    manifest.eos_id = find_eos_id(tokenizer)
    manifest.dtype = "uint16" if manifest.vocab_size <= 2**16 else "uint32"
    manifest.save(folder)
    return tokenizer


def _make_tokenizer(data: DataConfig, texts: Iterator[str], progress: Progress) -> Tokenizer:
    """Load the tokenizer that the settings name, or train it on these texts."""
    if data.tokenizer.name is not None:
        return load_tokenizer(data.tokenizer.name)
    assert data.tokenizer.train_vocab is not None
    progress.note(f"training a tokenizer of {data.tokenizer.train_vocab:,} tokens")
    tokenizer = train_tokenizer(texts, data.tokenizer.train_vocab)
    if tokenizer.get_vocab_size() < data.tokenizer.train_vocab:
        progress.note(f"the text only gives {tokenizer.get_vocab_size():,} tokens")
    return tokenizer


def _sample(data: DataConfig, num_characters: float | None = None) -> Iterator[str]:
    """Yield the text of the training split that the tokenizer is trained on."""
    num_left = int(TOKENIZER_SAMPLE_CHARACTERS if num_characters is None else num_characters)
    if num_left <= 0:
        return
    for record in read_records(data.corpus):
        if isinstance(record, TextRecord) and not is_heldout(record, data.heldout_share):
            yield record.text[:num_left]
            num_left -= len(record.text)
            if num_left <= 0:
                return
