"""Prepare folders of token shards: tokenize documents once, on all cores (the command `prepare`).

    prepare(data)                  one process, one corpus: fills `data.folder`
    prepare(data, shard=(2, 8))    the third of eight processes that share the files of a corpus

A folder is filled by preparation/folder.py, and by several processes through
preparation/together.py.
Several corpora have a folder each, below `data.folder`, and one tokenizer:

    data/mine/tokenizer.json       trained on text of all corpora, in proportion to their weights
    data/mine/wiki/…               shards of the corpus `wiki`
    data/mine/books/…              shards of the corpus `books`
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from olmo_sparsity.base.differences import differences
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.launch import read_launch
from olmo_sparsity.base.locks import locked
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.base.share import WHOLE, Share
from olmo_sparsity.base.work_folder import check_unchanged
from olmo_sparsity.data.preparation.folder import (
    TOKENIZER_SAMPLE_CHARACTERS,
    decisive_settings,
    fill_folder,
    is_finished,
    load_or_train_tokenizer,
    sample_for_tokenizer,
)
from olmo_sparsity.data.preparation.together import check_files_can_be_shared, prepare_together
from olmo_sparsity.data.shard_manifest import Manifest
from olmo_sparsity.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from olmo_sparsity.config.text import DataConfig


def prepare(data: DataConfig, shard: tuple[int, int] = (0, 1)) -> Manifest | None:
    """Fill `data.folder`, or resume filling it, or find it finished. Return the manifest.

    Args:
        shard: (i, n) for the i-th of n processes, which share the files of records. The result is
            None if other processes have files left.
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
    corpora = data.configs_by_corpus()
    if share != WHOLE:
        for corpus in corpora.values():
            # Otherwise the last corpus would be rejected after hours, when its turn comes.
            check_files_can_be_shared(corpus, share)
    tokenizer = _obtain_common_tokenizer(data, corpora)
    manifests = [_prepare_corpus(corpus, share, tokenizer) for corpus in corpora.values()]
    return manifests[-1] if all(manifests) else None


def _obtain_common_tokenizer(data: DataConfig, corpora: Mapping[str, DataConfig]) -> Tokenizer:
    """Return the common tokenizer of several corpora. A stored one is kept, even if it was trained
    before a corpus was added, because the others have shards that were written with it."""
    path = Path(data.folder) / "tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():  # without the lock, as the folder may be read-only
        return load_tokenizer(str(path))
    with locked(path.parent, waits=True):
        if path.exists():  # another process has trained it meanwhile
            return load_tokenizer(str(path))
        total_weight = sum(data.weights.values())
        # As much text of each corpus as training reads of it, in proportion.
        samples = (
            sample_for_tokenizer(
                corpus, TOKENIZER_SAMPLE_CHARACTERS * data.weights[name] / total_weight
            )
            for name, corpus in corpora.items()
        )
        with Progress("prepare", total=None, unit="tokens") as progress:
            tokenizer = load_or_train_tokenizer(data, chain.from_iterable(samples), progress)
        write_atomically(path, tokenizer.to_str(pretty=True))
    return tokenizer


def _prepare_corpus(
    data: DataConfig, share: Share, common_tokenizer: Tokenizer | None = None
) -> Manifest | None:
    """Prepare one corpus, alone or with other processes. Return its manifest; None if other
    processes have files left. If it is one of several corpora, they have a common tokenizer."""
    if share == WHOLE:
        return fill_folder(data, common_tokenizer, needs_both_splits=True)
    return prepare_together(data, share, common_tokenizer)


def is_prepared(data: DataConfig) -> bool:
    """Return whether every corpus has a complete manifest. Its settings are not compared here;
    `train` does that."""
    corpora = list(data.configs_by_corpus().values()) or [data]
    return all(is_finished(corpus) for corpus in corpora)


def check_same_settings(data: DataConfig) -> None:
    """Raise if a config names another text than the shards in its folder hold, such as another
    tokenizer."""
    if data.corpora:
        for corpus in data.configs_by_corpus().values():
            check_same_settings(corpus)
        return
    manifest = Manifest.load(Path(data.folder))
    changed = differences(manifest.settings, decisive_settings(data))
    check_unchanged(f"data.folder={data.folder}", changed)
