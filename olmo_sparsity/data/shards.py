"""Read prepared folders: token shards, as documents and as files for batches.

    shards = open_shards(config.data, "train")    # checks the folder
    shards.document(0)                            # the token IDs of a document, as an array
    shards.paths                                  # files, of which sequences.py makes batches

A folder:

    manifest.json                source, tokenization, and SHA-256 of every file below
    tokenizer.json               the complete tokenizer
    train-00000.tokens.uint16    token ids, little-endian, no header; every document ends with EOS
    train-00000.ends.uint64      where each document ends in the file above (after its EOS)
    train-00000.groups.uint64    the hash of each document's group, as one package or one article

Two documents, "ab" and "c", of two groups:

    tokens    17 18 0 19 0       0 is EOS
    ends      3 5                tokens 0 to 2 are the first document, 3 and 4 the second
    groups    8823… 1406…

Token files have the format of OLMo's `MemMapDataset`, which names them .npy.
preparation/encode_shards.py writes them.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.share import Share
from olmo_sparsity.data.shard_manifest import (
    SPLITS,
    Manifest,
    ShardEntry,
    check_contents,
    check_sizes,
    open_tokenizer,
    remedy_of,
)
from olmo_sparsity.data.token_files import (
    FileState,
    HashedFile,
    is_verified,
    read_verified,
    remember,
    states_of,
)
from olmo_sparsity.data.tokenizer import find_eos_id
from olmo_sparsity.text.vocabulary import count_vocabulary, tokenizer_fingerprint

if TYPE_CHECKING:
    from olmo_sparsity.config.text import DataConfig


class ShardPaths(NamedTuple):
    """The three files of one split of one shard."""

    tokens: Path
    ends: Path
    groups: Path

    @staticmethod
    def of(folder: Path, file: ShardEntry) -> ShardPaths:
        return ShardPaths(folder / file.tokens, folder / file.ends, folder / file.groups)


class TokenShards:
    """The documents of one split. `shards.document(i)` reads the i-th, and len(shards) is their
    number. Batches read `shards.paths`, the token files, by themselves."""

    def __init__(
        self,
        files: Sequence[ShardPaths],
        dtype: str,
        tokenizer: Tokenizer,
        fingerprint: str,
        states: Mapping[Path, FileState],
        corpora: Mapping[str, TokenShards] = MappingProxyType({}),
    ) -> None:
        """Describe files that exist; `open_shards` checks them first.

        Args:
            files: The files of each shard, in order.
            fingerprint: Hash of the content of all files.
            states: Size and time of each token file when it was verified.
            corpora: The shards of each of several corpora, by name. `files` are theirs, one corpus
                after the other.
        """
        self.files = list(files)
        self.paths = [file.tokens for file in files]
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.fingerprint = fingerprint
        self.states = states
        self.corpora = corpora
        self.tokenizer = tokenizer
        self.vocab_size = count_vocabulary(tokenizer)
        self.eos_id = find_eos_id(tokenizer)
        self.num_tokens = sum(path.stat().st_size for path in self.paths) // self.dtype.itemsize

    def count_sequences(self, length: int) -> int:
        """Return how many sequences of `length` tokens the files hold. The rest of each file is
        unused."""
        return sum(state.size // self.dtype.itemsize // length for state in self.states.values())

    @cached_property
    def arrays(self) -> list[np.ndarray]:
        """Return the tokens of each file, mapped into memory."""
        return [np.memmap(path, dtype=self.dtype, mode="r") for path in self.paths]

    @cached_property
    def ends(self) -> list[np.ndarray]:
        """Return for each token file where its documents end: for each document the index after
        its EOS."""
        files_and_tokens = zip(self.files, self.arrays, strict=True)
        return [_open_ends(file.ends, len(tokens)) for file, tokens in files_and_tokens]

    @cached_property
    def _groups(self) -> np.ndarray:
        """Return the hash of each document's group."""
        return np.concatenate([np.fromfile(file.groups, dtype="<u8") for file in self.files])

    def group(self, index: int) -> str:
        """Return the name of the document's group, such as all files of one package. Documents of
        one group have the same name."""
        return f"{self._groups[index]:016x}"

    @cached_property
    def bytes_per_token(self) -> float:
        """Return the mean number of UTF-8 bytes of the first million tokens. An end-of-text token
        counts as a token without bytes, as the loss on it counts in the mean loss, too."""
        # No memory map, as this is read in training, when the file may be cut short.
        tokens = np.fromfile(self.paths[0], self.dtype, count=2**20)
        text = self.tokenizer.decode(tokens[tokens != self.eos_id].tolist())
        if not text:
            raise DataError(
                f"{self.paths[0]} decodes to no text with its tokenizer.json; "
                f"{remedy_of(self.paths[0].parent)}"
            )
        return len(text.encode()) / len(tokens)

    @cached_property
    def _first_documents(self) -> list[int]:
        """Return the index of the first document of each shard, and at the end the number of all
        documents: [0, 3, 5] for two shards of three and two documents."""
        return [0, *np.cumsum([len(ends) for ends in self.ends]).tolist()]

    def __len__(self) -> int:
        return self._first_documents[-1]

    def document(self, index: int) -> np.ndarray:
        """Return the token IDs of a document, without the final EOS."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        # The last shard whose first document is this one or an earlier one.
        shard_index = bisect_right(self._first_documents, index) - 1
        index_in_shard = index - self._first_documents[shard_index]

        ends = self.ends[shard_index]
        # A document begins where the one before it ends.
        start = int(ends[index_in_shard - 1]) if index_in_shard else 0
        end = int(ends[index_in_shard])
        # A copy, so that the caller can change it and the mapped file stays.
        return np.array(self.arrays[shard_index][start : end - 1])


def open_shards(
    data: DataConfig, split: str, share: tuple[int, int] | None = (0, 1)
) -> TokenShards:
    """Open one split of the prepared folder, and check the sizes of all its files.

    Args:
        share: (i, n) if this process verifies the content of the i-th of n shares of the files;
            None if it verifies none.
    """
    assert split in SPLITS
    own_share = None if share is None else Share(*share)
    if not data.corpora:
        return _open_corpus(data, split, own_share)
    corpora = data.configs_by_corpus()
    return _join_corpora(
        {name: _open_corpus(corpus, split, own_share) for name, corpus in corpora.items()}
    )


def _open_corpus(data: DataConfig, split: str, share: Share | None) -> TokenShards:
    """Open one split of the folder of a single corpus. Raise DataError if it has no document.

    Args:
        share: Which of the files this process verifies; None: none.
    """
    folder = Path(data.folder)
    manifest = _load_complete_manifest(folder)
    check_sizes(folder, manifest)
    files = [file for file in manifest.files if file.split == split]

    # Noted before any file is hashed, so that one that changes meanwhile is noticed when it is
    # read.
    states = states_of(folder, (file.tokens for file in files))
    verified_now: list[ShardEntry] = []
    if share is not None:
        verified_now = _hash_unverified(folder, manifest, files, share)
    if not files:
        remedy = "raise data.heldout_share above 0"
        if split == "train":
            remedy = "prepare more text, or lower data.heldout_share"
        raise DataError(f"{folder} has no {split} documents; {remedy}")

    # Raises before training for a file whose ends are wrong. Other files were checked like this by
    # the start that verified them.
    for file in verified_now:
        _open_ends(folder / file.ends, file.num_tokens)

    # The manifest's hashes identify the text: the files were compared with them, now or earlier.
    hashes = [manifest.tokenizer_sha256, *(file.tokens_sha256 for file in files)]
    return TokenShards(
        files=[ShardPaths.of(folder, file) for file in files],
        dtype=manifest.dtype,
        tokenizer=open_tokenizer(folder, manifest),
        fingerprint=_hash_of(hashes),
        states={folder / name: state for name, state in states.items()},
    )


def _load_complete_manifest(folder: Path) -> Manifest:
    """Return the manifest of a prepared folder. Raise DataError if it is not prepared, or in part
    only."""
    if not (folder / "manifest.json").is_file():
        raise DataError(f"{folder} is not prepared; run `olmo-sparsity prepare` first")
    manifest = Manifest.load(folder)
    if not manifest.complete:
        raise DataError(f"{folder} is prepared in part; run `olmo-sparsity prepare` to finish it")
    return manifest


def _hash_unverified(
    folder: Path, manifest: Manifest, shard_entries: Sequence[ShardEntry], share: Share
) -> list[ShardEntry]:
    """Compare this process's share of the shards with the SHA-256 of the manifest, and return those
    that were hashed. Files that an earlier start has verified, and that have not changed since, are
    not hashed again."""
    verified = read_verified(folder)
    token_size = np.dtype(manifest.dtype).itemsize
    to_hash: list[ShardEntry] = []
    hashed: dict[str, HashedFile] = {}  # the three files of each, by name
    for shard_entry in share.of(shard_entries):
        file_entries = shard_entry.file_entries(token_size)
        current_states = states_of(folder, file_entries)
        was_verified = all(
            is_verified(folder / name, current_states[name], entry.sha256, verified.get(name))
            for name, entry in file_entries.items()
        )
        if was_verified:
            continue
        to_hash.append(shard_entry)
        for name, entry in file_entries.items():
            hashed[name] = HashedFile(current_states[name], entry.sha256)
    if to_hash:
        check_contents(folder, manifest, to_hash)  # raises if a file has another SHA-256
        remember(folder, share, hashed, verified)
    return to_hash


def _open_ends(path: Path, num_tokens: int) -> np.ndarray:
    """Return where the documents of a token file end. Raise DataError unless each document has at
    least its EOS, and the last one ends with the file of `num_tokens` tokens."""
    ends = np.memmap(path, dtype="<u8", mode="r")
    is_right = (
        len(ends) > 0
        and ends[0] >= 1  # the first document has at least its EOS
        and (ends[1:] > ends[:-1]).all()  # and so has each later one
        and ends[-1] == num_tokens
    )
    if not is_right:
        raise DataError(
            f"{path} does not hold the ends of documents, which rise to the {num_tokens:,} tokens "
            f"of their file; {remedy_of(path.parent)}"
        )
    return ends


def _hash_of(values: Sequence[object]) -> str:
    """Return the SHA-256 of values, written as JSON."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _join_corpora(corpora: Mapping[str, TokenShards]) -> TokenShards:
    """Return the shards of several corpora as one text, which also has those of each corpus. Raise
    DataError if they have different tokenizers."""
    first_name, first = next(iter(corpora.items()))
    expected_fingerprint = tokenizer_fingerprint(first.tokenizer)
    files: list[ShardPaths] = []
    states: dict[Path, FileState] = {}
    for name, shards in corpora.items():
        if tokenizer_fingerprint(shards.tokenizer) != expected_fingerprint:
            folder = shards.paths[0].parent
            raise DataError(
                f"the corpora {first_name} and {name} were prepared with two tokenizers; "
                f"{remedy_of(folder)}"
            )
        files += shards.files
        states |= shards.states
    hashes = [[name, shards.fingerprint] for name, shards in corpora.items()]
    return TokenShards(
        files=files,
        dtype=first.dtype.name,
        tokenizer=first.tokenizer,
        fingerprint=_hash_of(hashes),
        states=states,
        corpora=corpora,
    )
