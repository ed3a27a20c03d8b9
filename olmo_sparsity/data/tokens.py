"""Tokenize documents into shards on disk, once, on all cores (the command `prepare`).

Place in the flow: `text/corpus.py` → **tokens** → shards. The manifest is rewritten atomically
after every shard, and a shard that it does not name does not exist: a resumed run keeps the shards
in it, and writes the next one from its start.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
from collections.abc import Generator, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Encoding, Tokenizer

from olmo_sparsity.base.differences import differences
from olmo_sparsity.base.errors import ConfigError, DataError, naming_panics
from olmo_sparsity.base.files import naming_written_file, sync, write_atomically
from olmo_sparsity.base.launch import read_launch
from olmo_sparsity.base.locks import locked
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.base.work_folder import WorkFolder, check_unchanged
from olmo_sparsity.config.schema import applies
from olmo_sparsity.data.background import in_background
from olmo_sparsity.data.shard_writer import ShardWriter
from olmo_sparsity.data.shards import SPLITS, Manifest, check_files, open_tokenizer
from olmo_sparsity.data.tokenizer import (
    cut_into_pieces,
    find_eos_id,
    find_tokenizer_file,
    load_tokenizer,
    train_tokenizer,
)
from olmo_sparsity.text.corpus import (
    CHECK_EVERY_RECORDS,
    DAMAGED,
    Tally,
    is_heldout,
    list_inputs,
    read_records,
)
from olmo_sparsity.text.records import Record, TextRecord, is_records
from olmo_sparsity.text.vocabulary import (
    BATCH_CHARACTERS,
    count_vocabulary,
    tokenizer_fingerprint,
)

if TYPE_CHECKING:
    from olmo_sparsity.config.text import CorpusConfig, DataConfig

SHARD_CHARACTERS = 2**28
"""A shard ends with the record that brings its text to this many characters: about 60M tokens, or
one or two minutes of two cores, which is the most that a kill can lose."""

ENCODING_CHARACTERS = 64
"""What an encoding takes beside its tokens, as characters: it counts for many tiny documents."""

CACHED_WORDS = 2**18
"""The tokenizer caches the tokens of words, by default of the first 10,000. More make it a tenth
faster on natural text, for some 50 MB."""

TOKENIZER_SAMPLE_CHARACTERS = 100_000_000
"""The tokenizer is trained on the first so many characters of the training split. Memory grows with
the number of distinct words, and the sample has all common ones, which become tokens."""


# --- prepare ------------------------------------------------------------------------------------


def prepare(data: DataConfig, shard: tuple[int, int] = (0, 1)) -> Manifest | None:
    """Fill `data.folder`, or resume filling it, or find it finished. Return the manifest. `shard`:
    the i-th of n processes, which share the files of records; return None if others have files
    left."""
    if read_launch().world_size > 1:
        raise ConfigError("prepare is one process on all cores; start it as one task")
    if data.corpora:
        return _prepare_corpora(data, shard)
    return _prepare_corpus(data, shard)


def _prepare_corpora(data: DataConfig, shard: tuple[int, int]) -> Manifest | None:
    """Prepare each of several corpora in a folder of its own, with one tokenizer. Return the last
    manifest; None if other processes have files left."""
    parts = data.parts()
    if shard[1] > 1:
        for part in parts.values():
            _shared_files(part, shard)  # before the first one takes hours
    tokenizer = _obtain_tokenizer_of_all(data, parts)
    manifests = [_prepare_corpus(part, shard, tokenizer) for part in parts.values()]
    return manifests[-1] if all(manifests) else None


def _obtain_tokenizer_of_all(data: DataConfig, parts: Mapping[str, DataConfig]) -> Tokenizer:
    """Return the tokenizer of several corpora: the stored one, also if it was trained before a
    corpus was added, as the others keep their shards."""
    path = Path(data.folder) / "tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():  # the folder may be read-only
        return load_tokenizer(str(path))
    with locked(path.parent, waits=True):
        if path.exists():  # another process has trained it meanwhile
            return load_tokenizer(str(path))
        total = sum(data.weights.values())
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
    data: DataConfig, shard: tuple[int, int], shared: Tokenizer | None = None
) -> Manifest | None:
    """Prepare one corpus, alone or with other processes. `shared`: the tokenizer of several
    corpora."""
    if shard[1] == 1:
        return _fill_folder(data, shared, needs_both_splits=True)
    return _prepare_with_others(data, shard, shared)


def _prepare_with_others(
    data: DataConfig, shard: tuple[int, int], shared: Tokenizer | None
) -> Manifest | None:
    """Prepare every n-th file in a folder of its own, below `parts/`. The process that finds all of
    them finished joins them. Of C4's files the result has the same bytes as that of one process;
    of other files a shard then ends with its file, which it does not otherwise."""
    index, num_processes = shard
    folder = Path(data.folder)
    files = _shared_files(data, shard)
    if (folder / "manifest.json").exists():
        return _fill_folder(data, shared, needs_both_splits=True)
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
        return _fill_folder(data, shared, needs_both_splits=True)
    if not are_finished:
        _check_both_splits(data)
        tokenizer = shared
        if tokenizer is None:
            with Progress("prepare", total=None, unit="tokens") as progress:
                tokenizer = _make_tokenizer(data, _sample(data), progress)
        for part in file_folders[index::num_processes]:
            _fill_folder(part, tokenizer, needs_both_splits=False)
    are_finished = all(map(_is_finished, file_folders))
    if not are_finished and not (folder / "manifest.json").exists():
        return None
    with locked(folder, waits=True):
        if not (folder / "manifest.json").exists():
            _join(data, folder, [Path(part.folder) for part in file_folders])
    return _fill_folder(data, shared, needs_both_splits=True)


def _shared_files(data: DataConfig, shard: tuple[int, int]) -> list[Path]:
    """Return the files that processes share, each file whole. Reject a corpus that only one process
    can read."""
    corpus = data.corpus
    option = f"--shard={shard[0]}/{shard[1]}"
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
    """Move the shards of all parts, under consecutive numbers, and write the manifest last."""
    _refuse_damaged(data, [Manifest.load(part).tally for part in parts])
    joined = replace(Manifest.load(parts[0]), num_shards=0, tally=Tally(), files=[])
    joined.settings = _decisive_settings(data)
    joined.inputs_sha256 = _hash_inputs(data.corpus)
    write_atomically(folder / "tokenizer.json", (parts[0] / "tokenizer.json").read_text())
    for part in parts:
        manifest = Manifest.load(part)
        for file in manifest.files:
            renamed = file.renumbered(joined.num_shards + file.shard_number)
            for old, new in zip(file.names, renamed.names, strict=True):
                if (part / old).exists():  # not moved before a kill
                    os.replace(part / old, folder / new)
            joined.files.append(renamed)
        joined.num_shards += manifest.num_shards
        joined.tally.merge(manifest.tally)
    _check_not_empty(data, joined)
    sync(folder)
    joined.save(folder)
    shutil.rmtree(folder / "parts")


def _refuse_damaged(data: DataConfig, tallies: list[Tally]) -> None:
    """Raise DataError if the files of all processes have more damaged ones than are allowed: each
    file by itself had the whole limit."""
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
    data: DataConfig, shared: Tokenizer | None, *, needs_both_splits: bool
) -> Manifest:
    """Prepare a folder as one process. `shared`: the tokenizer of several files or corpora of which
    this is one. `needs_both_splits`: whether it must have text on both sides of the split."""
    work = WorkFolder(Path(data.folder), "data.folder", "manifest.json")
    folder = work.path
    # A finished folder may be read-only: it is somebody else's, perhaps.
    opened = contextlib.nullcontext() if _is_finished(data) else work.opened()
    with opened, Progress("prepare", total=None, unit="tokens") as progress:
        manifest = _begin_or_resume(data, folder, shared)
        if manifest.complete:
            manifest.tally.check(data.corpus.max_bad_share)
            progress.note(f"{folder} is already prepared: {_describe(manifest)}")
            return manifest
        if needs_both_splits and not manifest.files:
            _check_both_splits(data)
        tokenizer = _obtain_tokenizer(data, folder, manifest, progress, shared)
        _write_shards(data, folder, manifest, tokenizer, progress, needs_both_splits)
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


def _begin_or_resume(data: DataConfig, folder: Path, shared: Tokenizer | None) -> Manifest:
    """Return the manifest of the folder, checked, or a new one."""
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
    tokenizer = shared if path is None else load_tokenizer(str(path))
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
    """Return whether the source has other files than when the folder was begun. Of a finished
    folder the source may be gone."""
    try:
        return _hash_inputs(data.corpus) != manifest.inputs_sha256
    except DataError:
        if not manifest.complete:
            raise
        return False


def _begin(data: DataConfig, folder: Path, settings: dict[str, Any]) -> Manifest:
    manifest = Manifest(settings, _hash_inputs(data.corpus))
    manifest.save(folder)
    return manifest


def refuse_other_settings(data: DataConfig) -> None:
    """Reject a run with a config that names another text than its shards hold."""
    if data.corpora:
        for part in data.parts().values():
            refuse_other_settings(part)
        return
    manifest = Manifest.load(Path(data.folder))
    changed = differences(manifest.settings, _decisive_settings(data))
    check_unchanged(f"data.folder={data.folder}", changed)


def _decisive_settings(data: DataConfig) -> dict[str, Any]:
    """Return the settings that determine the content of the shards."""
    corpus = {
        item.name: getattr(data.corpus, item.name)
        for item in fields(data.corpus)
        # These do not change the result.
        if item.name not in ("max_bad_share", "max_damaged_files") and applies(data.corpus, item)
    }
    return {
        "corpus": corpus,
        "tokenizer": asdict(data.tokenizer),
        "heldout_share": data.heldout_share,
        "shard_characters": SHARD_CHARACTERS,
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
    data: DataConfig, folder: Path, manifest: Manifest, progress: Progress, shared: Tokenizer | None
) -> Tokenizer:
    """Return the tokenizer of the folder; load or train it if there is none yet."""
    if manifest.tokenizer_sha256 is not None:
        return open_tokenizer(folder, manifest)
    tokenizer = shared or _make_tokenizer(data, _sample(data), progress)
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
    left = int(TOKENIZER_SAMPLE_CHARACTERS if num_characters is None else num_characters)
    if left <= 0:
        return
    for record in read_records(data.corpus):
        if isinstance(record, TextRecord) and not is_heldout(record, data.heldout_share):
            yield record.text[:left]
            left -= len(record.text)
            if left <= 0:
                return


# --- writing shards -----------------------------------------------------------------------------


@dataclass
class _Batch:
    """Pieces of consecutive documents, all of one shard."""

    pieces: list[str] = field(default_factory=list)
    heldout: list[bool] = field(default_factory=list)
    groups: list[int | None] = field(default_factory=list)
    """The group of the document at its last piece, None at the pieces before. A document ends where
    it has a group."""

    num_characters: int = 0
    tally: Tally = field(default_factory=Tally)
    ends_shard: bool = False
    ends_source: bool = False

    def add(self, piece: str, is_heldout: bool) -> None:
        """Append a piece of a document; the caller sets the group of the last one."""
        self.pieces.append(piece)
        self.heldout.append(is_heldout)
        self.groups.append(None)
        # 64: the overhead of an encoding, for many tiny documents.
        self.num_characters += len(piece) + 64


def _read_batches(
    data: DataConfig, skip: int, max_documents: int | None
) -> Generator[_Batch, None, None]:
    """Yield the records after the first `skip` in batches, the last of which ends the source."""
    batch = _Batch()
    shard_characters = 0
    file = None
    for record in read_records(replace(data.corpus, max_documents=max_documents), skip):
        if data.corpus.source == "c4_files":  # a shard is of one file, so that processes share them
            previous_file = file
            file = _file_of(record)
            if previous_file not in (None, file):
                batch.ends_shard = True
                yield batch
                batch = _Batch()
                shard_characters = 0
        batch.tally.add(record)
        if isinstance(record, TextRecord):
            side = is_heldout(record, data.heldout_share)
            for piece in cut_into_pieces(record.text):
                if batch.num_characters >= BATCH_CHARACTERS:
                    yield batch
                    batch = _Batch()
                batch.add(piece, side)
            batch.groups[-1] = record.group_hash
            shard_characters += len(record.text)
        if shard_characters >= SHARD_CHARACTERS:
            batch.ends_shard = True
            yield batch
            batch = _Batch()
            shard_characters = 0
        elif batch.tally.num_records >= CHECK_EVERY_RECORDS:
            yield batch  # bad records alone would never fill one
            batch = _Batch()
    batch.ends_shard = True
    batch.ends_source = True
    yield batch


def _file_of(record: Record) -> str:
    """Return the file that a record is in."""
    where = record.name if isinstance(record, TextRecord) else record.where
    return where.rpartition(":")[0] or where


def _encode_batches(
    tokenizer: Tokenizer, batches: Generator[_Batch, None, None]
) -> Generator[tuple[_Batch, list[Encoding]], None, None]:
    with contextlib.closing(batches):
        for batch in batches:
            with naming_panics("data.tokenizer"):
                encodings = tokenizer.encode_batch_fast(batch.pieces, add_special_tokens=False)
            yield batch, encodings


def _write_shards(
    data: DataConfig,
    folder: Path,
    manifest: Manifest,
    tokenizer: Tokenizer,
    progress: Progress,
    needs_both_splits: bool,
) -> None:
    """Write the shards that are not in the manifest yet, and add each to it."""
    _remove_unnamed(folder, manifest)
    done = manifest.num_tokens(*SPLITS)
    progress.resume_at(done)
    max_documents = data.corpus.max_documents
    if manifest.num_shards:
        progress.note(f"continuing after {manifest.num_shards} finished shards, {done:,} tokens")
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
    total = deepcopy(manifest.tally)
    with (
        naming_written_file(folder),
        contextlib.closing(encoded),
        contextlib.ExitStack() as at_the_end,
    ):
        at_the_end.callback(lambda: ShardWriter.close_all(writers))  # those of the last shard
        for batch, encodings in encoded:
            total.merge(batch.tally)
            if batch.ends_source or total.num_records >= CHECK_EVERY_RECORDS:
                total.check(data.corpus.max_bad_share)
            _write_batch(writers, batch, encodings)
            num_new = sum(writer.num_tokens for writer in writers)
            progress.update(done + num_new, bad_records=f"{total.num_bad:,}")
            if not batch.ends_shard:
                continue
            if batch.ends_source and needs_both_splits:
                _check_not_empty(data, manifest, *writers)
            if total.num_records > manifest.tally.num_records:
                for writer in writers:
                    manifest.files += writer.publish()
                sync(folder)
                manifest.num_shards += 1
            manifest.tally = deepcopy(total)
            manifest.complete = batch.ends_source
            manifest.save(folder)  # last, as it makes the shard exist
            done += num_new
            writers = _new_writers(folder, manifest)


def _new_writers(folder: Path, manifest: Manifest) -> list[ShardWriter]:
    """Return the writers of the next shard, one for each split."""
    return [
        ShardWriter(folder, split, manifest.num_shards, manifest.dtype, manifest.eos_id)
        for split in SPLITS
    ]


def _write_batch(writers: list[ShardWriter], batch: _Batch, encodings: list[Encoding]) -> None:
    """Give each document of a batch to the writer of its split."""
    for writer in writers:
        is_of_heldout = writer.split == "heldout"
        pieces = zip(encodings, batch.heldout, batch.groups, strict=True)
        writer.write((item.ids, group) for item, side, group in pieces if side == is_of_heldout)


def _remove_unnamed(folder: Path, manifest: Manifest) -> None:
    """Remove unfinished shards, or renamed ones that are not in the manifest."""
    named: set[str] = set()
    for file in manifest.files:
        named |= set(file.names)
    for path in folder.iterdir():
        is_shard = path.name.startswith(("train-", "heldout-")) and path.name not in named
        if is_shard or path.suffix == ".tmp":
            path.unlink()


NEEDED_HELDOUT = 20
"""Held-out documents for which a share is proposed where there would be none."""


def _check_both_splits(data: DataConfig) -> None:
    """Raise DataError if no document is held out, or all are, before anything is tokenized. Reading
    ends with the first document of each split, after about 1 / heldout_share of them."""
    if data.corpus.source == "c4" or data.heldout_share == 0:
        return  # the hub is not asked twice; nothing is to be held out
    tally = Tally()
    counts = dict.fromkeys(SPLITS, 0)
    for record in read_records(data.corpus):
        tally.add(record)
        if isinstance(record, TextRecord):
            counts["heldout" if is_heldout(record, data.heldout_share) else "train"] += 1
            if all(counts.values()):
                return
    tally.check(data.corpus.max_bad_share)
    _check_counts(data, counts)


def _check_not_empty(data: DataConfig, manifest: Manifest, *writers: ShardWriter) -> None:
    """Raise DataError if a split has no document, in finished shards and in those of `writers`."""
    counts = {split: manifest.num_documents(split) for split in SPLITS}
    for writer in writers:
        counts[writer.split] += writer.num_documents
    _check_counts(data, counts)


def _check_counts(data: DataConfig, counts: Mapping[str, int]) -> None:
    """Raise DataError if a split has no document. `counts`: by split."""
    total = sum(counts.values())
    read = f"of {total:,} documents and data.heldout_share={data.heldout_share}"
    if counts["train"] == 0:
        raise DataError(f"no training document {read}; give more text")
    if counts["heldout"] == 0 and data.heldout_share > 0:
        # Up to one digit, such as 0.04; of few documents every second one.
        needed = NEEDED_HELDOUT / max(total, 2 * NEEDED_HELDOUT)
        digit = 10.0 ** math.floor(math.log10(needed))
        share = f"{math.ceil(needed / digit) * digit:.1g}"
        raise DataError(
            f"no held-out document {read}; give more text, or raise the share: "
            f"--data.heldout_share={share} holds out about {NEEDED_HELDOUT}"
        )
