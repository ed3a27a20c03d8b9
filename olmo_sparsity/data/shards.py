"""Read and write prepared folders: token shards and their manifest.

    manifest.json                source, tokenization, and SHA-256 of every file below
    tokenizer.json               the complete tokenizer
    train-00000.tokens.uint16    token ids, little-endian, no header; every document ends with EOS
    train-00000.ends.uint64      where each document ends in the file above (after its EOS)
    train-00000.groups.uint64    the hash of each document's group, as one package or one article

Token files have the format of OLMo's `MemMapDataset`, which names them .npy.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.base.conform import conform, with_crc
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import read_json, write_atomically
from olmo_sparsity.base.manifest import FileEntry, find_damaged_file, stays_inside
from olmo_sparsity.base.share import Share
from olmo_sparsity.data.token_files import (
    FileState,
    is_verified,
    read_verified,
    remember,
    states_of,
)
from olmo_sparsity.data.tokenizer import find_eos_id, load_tokenizer
from olmo_sparsity.text.tally import Tally
from olmo_sparsity.text.vocabulary import count_vocabulary, tokenizer_fingerprint

if TYPE_CHECKING:
    from olmo_sparsity.config.text import DataConfig

SPLITS = ("train", "heldout")


# --- the manifest -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardFile:
    """The three files of one split of one shard, as the manifest lists them."""

    split: str
    tokens: str
    ends: str
    num_tokens: int
    num_documents: int
    tokens_sha256: str
    ends_sha256: str
    groups: str
    groups_sha256: str

    def contents(self, token_size: int) -> dict[str, FileEntry]:
        """Return the SHA-256 and the size of each file; a token has `token_size` bytes."""
        return {
            self.tokens: FileEntry(self.tokens_sha256, self.num_tokens * token_size),
            self.ends: FileEntry(self.ends_sha256, self.num_documents * 8),
            self.groups: FileEntry(self.groups_sha256, self.num_documents * 8),
        }

    @property
    def names(self) -> list[str]:
        return list(self.contents(0))

    @property
    def shard_number(self) -> int:
        """Return the number in the names: train-00012.tokens.uint16 has 12."""
        return int(self.tokens.split("-")[1].partition(".")[0])

    def renumbered(self, number: int) -> ShardFile:
        """Return the same files under the names of another shard."""
        kinds = [name.partition(".")[2] for name in self.names]
        tokens, ends, groups = (f"{self.split}-{number:05d}.{kind}" for kind in kinds)
        return replace(self, tokens=tokens, ends=ends, groups=groups)


@dataclass
class Manifest:
    """The content of manifest.json: how the folder was prepared, and its finished shards."""

    settings: dict[str, Any]
    """The settings that determine the content. A run with other ones is rejected."""

    inputs_sha256: str | None
    """Hash of the names and sizes of the source files; None for a source without files."""

    tokenizer_sha256: str | None = None
    vocab_size: int = 0
    eos_id: int = 0
    dtype: Literal["uint16", "uint32"] = "uint16"
    num_shards: int = 0
    tally: Tally = field(default_factory=Tally)
    """Counts of the records in the finished shards. A resumed run continues after this number of
    records."""

    files: list[ShardFile] = field(default_factory=list)
    complete: bool = False

    def num_documents(self, *splits: str) -> int:
        """Return how many documents these splits have in finished shards."""
        return sum(file.num_documents for file in self.files if file.split in splits)

    def num_tokens(self, *splits: str) -> int:
        """Return how many tokens these splits have in finished shards, with EOS."""
        return sum(file.num_tokens for file in self.files if file.split in splits)

    def save(self, folder: Path) -> None:
        """Write the manifest, with totals for readers."""
        content = asdict(self)
        content["totals"] = {
            split: {"documents": self.num_documents(split), "tokens": self.num_tokens(split)}
            for split in SPLITS
        }
        write_atomically(folder / "manifest.json", json.dumps(with_crc(content), indent=1) + "\n")

    @staticmethod
    def load(folder: Path) -> Manifest:
        """Read and check the manifest of a prepared folder."""
        path = folder / "manifest.json"
        remedy = (
            f"is {folder} a folder of texts, name it text:{folder}; did `olmo-sparsity prepare` "
            "write it, remove it and prepare again"
        )
        content = read_json(path, dict, remedy)
        content.pop("totals", None)
        try:
            manifest = conform(content, Manifest)
        except ValueError as error:
            raise DataError(f"{path} is not of a prepared folder ({error}); {remedy}") from None
        for file in manifest.files:
            for name in file.names:
                if not stays_inside(name):
                    raise DataError(f"{path} names '{name}', outside of its folder; {remedy}")
        return manifest


def _remedy(folder: Path) -> str:
    return f"delete {folder} and run `olmo-sparsity prepare` again"


def check_files(folder: Path, manifest: Manifest, hashed: Collection[ShardFile] = ()) -> None:
    """Raise DataError unless all files have the sizes, and those in `hashed` also the SHA-256, that
    the manifest lists."""
    size = np.dtype(manifest.dtype).itemsize
    names_to_hash: set[str] = set()
    for file in hashed:
        names_to_hash |= set(file.names)
    listed: dict[str, FileEntry] = {}
    for file in manifest.files:
        listed |= file.contents(size)
    problem = find_damaged_file(folder, listed, names_to_hash.__contains__)
    if problem is not None:
        raise DataError(f"{folder}/{problem}; {_remedy(folder)}")


def open_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """Return the tokenizer that the shards of a folder were written with."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path} is missing; {_remedy(folder)}")
    tokenizer = load_tokenizer(str(path))
    if tokenizer_fingerprint(tokenizer) != manifest.tokenizer_sha256:
        raise DataError(
            f"{path} is not the tokenizer the shards were written with (its fingerprint is not "
            f"that of manifest.json); restore it, or {_remedy(folder)}"
        )
    return tokenizer


# --- opening ------------------------------------------------------------------------------------


class TokenShards:
    """The token files of one split, as documents. `shards.document(i)` reads the i-th; len(shards)
    is their number."""

    def __init__(
        self,
        paths: list[Path],
        dtype: str,
        tokenizer: Tokenizer,
        fingerprint: str,
        ends_paths: list[Path],
        groups_paths: list[Path],
        states: Mapping[Path, FileState],
        corpora: Mapping[str, TokenShards] = MappingProxyType({}),
    ) -> None:
        """Describe files that exist; `open_shards` checks them first.

        paths, ends_paths, groups_paths: The files of each shard, in order.
        fingerprint: Hash of the content of all files.
        states: Size and time of each token file when it was verified.
        corpora: The shards of each of several corpora, by name. Together their files are these.
        """
        self.states = states
        self.corpora = corpora
        self.paths = paths
        self.ends_paths = ends_paths
        self.groups_paths = groups_paths
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.vocab_size = count_vocabulary(tokenizer)
        self.eos_id = find_eos_id(tokenizer)
        self.num_tokens = sum(path.stat().st_size for path in paths) // self.dtype.itemsize

    def count_sequences(self, length: int) -> int:
        """Return how many sequences of `length` tokens the files hold."""
        return sum(state.size // self.dtype.itemsize // length for state in self.states.values())

    @cached_property
    def arrays(self) -> list[np.ndarray]:
        """Return the tokens of each file, mapped into memory."""
        return [np.memmap(path, dtype=self.dtype, mode="r") for path in self.paths]

    @cached_property
    def ends(self) -> list[np.ndarray]:
        """Return, for each token file, the places after the EOS of its documents."""
        paths_and_tokens = zip(self.ends_paths, self.arrays, strict=True)
        return [_open_ends(path, len(tokens)) for path, tokens in paths_and_tokens]

    @cached_property
    def _groups(self) -> np.ndarray:
        """Return the hash of each document's group."""
        return np.concatenate([np.fromfile(path, dtype="<u8") for path in self.groups_paths])

    def group(self, index: int) -> str:
        """Return a name of the document's group, such as one package or one article. All documents
        of a group have the same name."""
        return f"{self._groups[index]:016x}"

    @cached_property
    def bytes_per_token(self) -> float:
        """Return the UTF-8 bytes per token of the first million tokens. An end-of-text token counts
        as a token without bytes."""
        # No memory map, as this is read in training, when the file may be cut short.
        tokens = np.fromfile(self.paths[0], self.dtype, count=2**20)
        text = self.tokenizer.decode(tokens[tokens != self.eos_id].tolist())
        if not text:
            raise DataError(
                f"{self.paths[0]} decodes to no text with its tokenizer.json; "
                f"{_remedy(self.paths[0].parent)}"
            )
        return len(text.encode()) / len(tokens)

    @cached_property
    def _first_documents(self) -> list[int]:
        """Return the number of the first document of each shard, and the number of all
        documents."""
        return [0, *np.cumsum([len(ends) for ends in self.ends]).tolist()]

    def __len__(self) -> int:
        return self._first_documents[-1]

    def document(self, index: int) -> np.ndarray:
        """Return the token IDs of a document, without the final EOS."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        shard = bisect_right(self._first_documents, index) - 1
        index_in_shard = index - self._first_documents[shard]
        ends = self.ends[shard]
        start = int(ends[index_in_shard - 1]) if index_in_shard else 0
        end = int(ends[index_in_shard])
        return np.array(self.arrays[shard][start : end - 1])


def open_shards(
    data: DataConfig, split: str, share: tuple[int, int] | None = (0, 1)
) -> TokenShards:
    """Open one split of the prepared folder, and check the sizes of all its files.

    share: (i, n) if this process verifies the content of the i-th of n shares of the files; None if
        it verifies none.
    """
    assert split in SPLITS
    if data.corpora:
        parts = data.parts()
        return _join({name: open_shards(part, split, share) for name, part in parts.items()})
    folder = Path(data.folder)
    if not (folder / "manifest.json").is_file():
        raise DataError(f"{folder} is not prepared; run `olmo-sparsity prepare` first")
    manifest = Manifest.load(folder)
    if not manifest.complete:
        raise DataError(f"{folder} is prepared in part; run `olmo-sparsity prepare` to finish it")
    files = [file for file in manifest.files if file.split == split]
    check_files(folder, manifest)
    # Noted before any file is hashed, so that one that changes meanwhile is noticed when it is
    # read.
    states = states_of(folder, (file.tokens for file in files))
    verified_now: list[ShardFile] = []
    if share is not None:
        verified_now = _verify_once(folder, manifest, files, Share(*share))
    if not files:
        remedy = "raise data.heldout_share above 0"
        if split == "train":
            remedy = "prepare more text, or lower data.heldout_share"
        raise DataError(f"{folder} has no {split} documents; {remedy}")
    content = [manifest.tokenizer_sha256, *(file.tokens_sha256 for file in files)]
    shards = TokenShards(
        paths=[folder / file.tokens for file in files],
        dtype=manifest.dtype,
        tokenizer=open_tokenizer(folder, manifest),
        fingerprint=hashlib.sha256(json.dumps(content).encode()).hexdigest(),
        ends_paths=[folder / file.ends for file in files],
        groups_paths=[folder / file.groups for file in files],
        states={folder / name: state for name, state in states.items()},
    )
    # Raises before training for a file whose ends are wrong. Other files were checked like this by
    # the start that verified them.
    for file in verified_now:
        _open_ends(folder / file.ends, file.num_tokens)
    return shards


def _join(corpora: Mapping[str, TokenShards]) -> TokenShards:
    """Return the shards of several corpora as one text, in which each can be found."""
    first_name, first = next(iter(corpora.items()))
    tokenizer = tokenizer_fingerprint(first.tokenizer)
    paths: list[Path] = []
    ends_paths: list[Path] = []
    groups_paths: list[Path] = []
    states: dict[Path, FileState] = {}
    for name, shards in corpora.items():
        if tokenizer_fingerprint(shards.tokenizer) != tokenizer:
            folder = shards.paths[0].parent
            raise DataError(
                f"the corpora {first_name} and {name} were prepared with two tokenizers; "
                f"{_remedy(folder)}"
            )
        paths += shards.paths
        ends_paths += shards.ends_paths
        groups_paths += shards.groups_paths
        states |= shards.states
    content = [[name, shards.fingerprint] for name, shards in corpora.items()]
    return TokenShards(
        paths=paths,
        dtype=first.dtype.name,
        tokenizer=first.tokenizer,
        fingerprint=hashlib.sha256(json.dumps(content).encode()).hexdigest(),
        ends_paths=ends_paths,
        groups_paths=groups_paths,
        states=states,
        corpora=corpora,
    )


def _verify_once(
    folder: Path, manifest: Manifest, files: Sequence[ShardFile], share: Share
) -> list[ShardFile]:
    """Compare this process's share of the files with the manifest's SHA-256. Files that an earlier
    start has verified, and that have not changed, are left out. Return the files that were
    hashed."""
    verified = read_verified(folder)
    size = np.dtype(manifest.dtype).itemsize
    to_hash = []
    states: dict[str, FileState] = {}
    hashes: dict[str, str] = {}
    for file in share.of(files):
        listed = file.contents(size)
        current_states = states_of(folder, listed)
        is_known = all(
            is_verified(
                folder / name, current_states[name], listed[name].sha256, verified.get(name)
            )
            for name in listed
        )
        if not is_known:
            to_hash.append(file)
            states |= current_states
            hashes |= {name: content.sha256 for name, content in listed.items()}
    if to_hash:
        check_files(folder, manifest, to_hash)
        remember(folder, share, states, hashes, verified)
    return to_hash


def _open_ends(path: Path, num_tokens: int) -> np.ndarray:
    """Return where documents end. Raise DataError unless each document has at least its EOS and the
    last ends with the file."""
    ends = np.memmap(path, dtype="<u8", mode="r")
    if not len(ends) or ends[0] < 1 or ends[-1] != num_tokens or (ends[1:] <= ends[:-1]).any():
        raise DataError(
            f"{path} does not hold the ends of documents, which rise to the {num_tokens:,} tokens "
            f"of their file; {_remedy(path.parent)}"
        )
    return ends
