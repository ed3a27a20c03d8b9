"""Fill one folder with token shards, or resume filling it.

    start    folder                              what happens
    first    empty                               a manifest, the tokenizer, shards 0, 1, 2, …
    second   shards 0 to 2, then it was killed   goes on with shard 3
    third    complete                            all files are hashed and compared; none is written
    any      begun with another tokenizer        ConfigError, unless it has no shard yet

    fill_folder ─ _begin_or_resume: a new manifest, or the stored one after a comparison
                ├ _obtain_tokenizer: the stored one, the one that settings name, or a trained one
                └ encode_shards.write_shards: shard after shard, each added to the manifest

The manifest has the settings that determine the content (`decisive_settings`), so a folder is
resumed only with the same ones.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from olmo_sparsity.base.differences import differences
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.base.work_folder import WorkFolder, check_unchanged
from olmo_sparsity.config.schema import schema_fields
from olmo_sparsity.data.preparation import document_batches
from olmo_sparsity.data.preparation.encode_shards import write_shards
from olmo_sparsity.data.preparation.split_checks import check_both_splits
from olmo_sparsity.data.shard_manifest import (
    SPLITS,
    Manifest,
    check_contents,
    check_sizes,
    open_tokenizer,
)
from olmo_sparsity.data.tokenizer import (
    find_eos_id,
    find_tokenizer_file,
    load_tokenizer,
    train_tokenizer,
)
from olmo_sparsity.text.corpus import is_heldout, list_inputs, read_records
from olmo_sparsity.text.records import TextRecord
from olmo_sparsity.text.vocabulary import count_vocabulary, tokenizer_fingerprint

if TYPE_CHECKING:
    from olmo_sparsity.config.text import CorpusConfig, DataConfig

TOKENIZER_SAMPLE_CHARACTERS = 100_000_000
"""The number of characters of the training split that a tokenizer is trained on, from its start.
Memory grows with the number of distinct words, and the sample has all common ones, which become
tokens."""


def fill_folder(
    data: DataConfig, common_tokenizer: Tokenizer | None, *, needs_both_splits: bool
) -> Manifest:
    """Prepare a folder as one process, and return its manifest.

    Args:
        common_tokenizer: The tokenizer of several files or corpora, if this folder has one of them.
        needs_both_splits: Whether the folder must have training text and held-out text.
    """
    work = WorkFolder(Path(data.folder), "data.folder", "manifest.json")
    folder = work.path
    # A finished folder may be read-only, such as one that users of a cluster share. So it is not
    # locked.
    opened = contextlib.nullcontext() if is_finished(data) else work.opened()
    with opened, Progress("prepare", total=None, unit="tokens") as progress:
        manifest = _begin_or_resume(data, folder, common_tokenizer)
        if manifest.complete:
            manifest.tally.check(data.corpus.max_bad_share)
            progress.note(f"{folder} is already prepared: {_describe(manifest)}")
            return manifest

        if needs_both_splits and not manifest.files:
            check_both_splits(data)
        tokenizer = _obtain_tokenizer(data, folder, manifest, progress, common_tokenizer)
        write_shards(data, folder, manifest, tokenizer, progress, needs_both_splits)
        progress.note(f"{folder}: {_describe(manifest)}")
    return manifest


def is_finished(data: DataConfig) -> bool:
    """Return whether the folder of a single corpus is complete."""
    folder = Path(data.folder)
    return (folder / "manifest.json").exists() and Manifest.load(folder).complete


def _describe(manifest: Manifest) -> str:
    """Return a line with the sizes of both splits, and what was left out."""
    sizes = [
        f"{split} {manifest.num_documents(split):,} documents, "
        f"{manifest.num_tokens(split):,} tokens"
        for split in SPLITS
    ]
    if manifest.tally.num_bad or manifest.tally.left_out:
        sizes.append(f"left out: {manifest.tally.describe()}")
    return "; ".join(sizes)


# --- the manifest at the start --------------------------------------------------------------------


def _begin_or_resume(
    data: DataConfig, folder: Path, common_tokenizer: Tokenizer | None
) -> Manifest:
    """Return the manifest of the folder after comparing it with the settings, or a new one. Raise
    if the folder has shards of other settings."""
    settings = decisive_settings(data)
    if not (folder / "manifest.json").exists():
        return _begin(data, folder, settings)
    manifest = Manifest.load(folder)
    changed = differences(manifest.settings, settings)
    if _has_other_inputs(data, manifest):
        changed.append("other source files, by name or size")
    changed += _changes_of_tokenizer(data, manifest, common_tokenizer)

    if changed and not manifest.files:
        return _begin(data, folder, settings)  # it has no shards to lose
    check_unchanged(f"data.folder={folder}", changed)
    if manifest.complete:
        # Nothing else will be written, so this is the time to find damage that is there already.
        check_contents(folder, manifest, manifest.files)
        open_tokenizer(folder, manifest)
    else:
        check_sizes(folder, manifest)
    return manifest


def _begin(data: DataConfig, folder: Path, settings: dict[str, Any]) -> Manifest:
    """Write and return the manifest of a folder without shards."""
    manifest = Manifest(settings, hash_inputs(data.corpus))
    manifest.save(folder)
    return manifest


def decisive_settings(data: DataConfig) -> dict[str, Any]:
    """Return the settings that determine the content of the shards."""
    corpus = {
        item.name: getattr(data.corpus, item.name)
        for item in schema_fields(type(data.corpus)).values()
        # These two only decide whether preparing ends with an error.
        if item.name not in ("max_bad_share", "max_damaged_files") and item.applies(data.corpus)
    }
    return {
        "corpus": corpus,
        "tokenizer": asdict(data.tokenizer),
        "heldout_share": data.heldout_share,
        "shard_characters": document_batches.SHARD_CHARACTERS,
    }


def hash_inputs(corpus: CorpusConfig) -> str | None:
    """Return a hash of the names and sizes of the files that a corpus is read from; None for a
    corpus without files."""
    paths = list_inputs(corpus)
    if not paths:
        return None
    # Not of their content, which would take as long to read as preparing takes.
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path}\0{path.stat().st_size}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _has_other_inputs(data: DataConfig, manifest: Manifest) -> bool:
    """Return whether the corpus has other files than when the folder was begun. The files of a
    finished folder may be gone."""
    try:
        return hash_inputs(data.corpus) != manifest.inputs_sha256
    except DataError:
        if not manifest.complete:
            raise
        return False


def _changes_of_tokenizer(
    data: DataConfig, manifest: Manifest, common_tokenizer: Tokenizer | None
) -> list[str]:
    """Return a sentence if the folder was begun with another tokenizer than now, else none."""
    # The name in the settings may lead to another file than before.
    path = None
    if data.tokenizer.name is not None:
        path = find_tokenizer_file(data.tokenizer.name)
    tokenizer = common_tokenizer if path is None else load_tokenizer(str(path))
    # A start that was killed before it wrote the tokenizer left none to compare with.
    if tokenizer is None or manifest.tokenizer_sha256 is None:
        return []
    if tokenizer_fingerprint(tokenizer) == manifest.tokenizer_sha256:
        return []
    return [f"another tokenizer than {path or 'that of the other files'} is now"]


# --- the tokenizer --------------------------------------------------------------------------------


def _obtain_tokenizer(
    data: DataConfig,
    folder: Path,
    manifest: Manifest,
    progress: Progress,
    common_tokenizer: Tokenizer | None,
) -> Tokenizer:
    """Return the tokenizer of the folder. If there is none yet, load or train it, and store it and
    what follows from it in the manifest."""
    if manifest.tokenizer_sha256 is not None:
        return open_tokenizer(folder, manifest)
    tokenizer = common_tokenizer or load_or_train_tokenizer(
        data, sample_for_tokenizer(data), progress
    )
    # The file first: a manifest that names a tokenizer must find it after a kill.
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    manifest.tokenizer_sha256 = tokenizer_fingerprint(tokenizer)
    manifest.vocab_size = count_vocabulary(tokenizer)
    manifest.eos_id = find_eos_id(tokenizer)
    # OLMo reads both. Where all IDs fit into 16 bits, they take half of the disk.
    manifest.dtype = "uint16" if manifest.vocab_size <= 2**16 else "uint32"
    manifest.save(folder)
    return tokenizer


def load_or_train_tokenizer(
    data: DataConfig, texts: Iterator[str], progress: Progress
) -> Tokenizer:
    """Load the tokenizer that the settings name, or train it on these texts."""
    if data.tokenizer.name is not None:
        return load_tokenizer(data.tokenizer.name)
    assert data.tokenizer.train_vocab is not None
    progress.note(f"training a tokenizer of {data.tokenizer.train_vocab:,} tokens")
    tokenizer = train_tokenizer(texts, data.tokenizer.train_vocab)
    # A short text runs out of pairs of tokens to merge.
    if tokenizer.get_vocab_size() < data.tokenizer.train_vocab:
        progress.note(f"the text only gives {tokenizer.get_vocab_size():,} tokens")
    return tokenizer


def sample_for_tokenizer(
    data: DataConfig, num_characters: float = TOKENIZER_SAMPLE_CHARACTERS
) -> Iterator[str]:
    """Yield texts from the start of the training split until they have this many characters."""
    num_left = int(num_characters)
    if num_left <= 0:
        return
    for record in read_records(data.corpus):
        # Held-out text must have no part in the model, not even by its tokens.
        if isinstance(record, TextRecord) and not is_heldout(record, data.heldout_share):
            yield record.text[:num_left]
            num_left -= len(record.text)
            if num_left <= 0:
                return
