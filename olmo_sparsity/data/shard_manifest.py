"""The manifest of a prepared folder: which token shards it has, and how they were made.

    {"settings": {"corpus": …, "tokenizer": …}, "vocab_size": 32000, "num_shards": 2,
     "files": [{"split": "train", "tokens": "train-00000.tokens.uint16", …}, …],
     "complete": true, "totals": …}

A shard exists once the manifest lists it. `Manifest.load` reads and checks a manifest,
`check_sizes` and `check_contents` compare the files of the folder with it, and `open_tokenizer`
reads the tokenizer, whose hash it has. shards.py describes the files.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.base.conform import conform
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import read_json, write_atomically
from olmo_sparsity.base.json_text import with_crc
from olmo_sparsity.base.manifest import FileEntry, find_damaged_file, stays_inside
from olmo_sparsity.data.tokenizer import load_tokenizer
from olmo_sparsity.text.tally import Tally
from olmo_sparsity.text.vocabulary import tokenizer_fingerprint

SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class ShardEntry:
    """An entry of the manifest: one split of one shard, which is three files in the folder."""

    split: str
    """train or heldout."""

    tokens: str
    """Name of the file with the token IDs, such as train-00012.tokens.uint16."""

    ends: str
    """Name of the file with the end of each document."""

    num_tokens: int
    """Number of tokens, with an EOS for each document."""

    num_documents: int
    tokens_sha256: str
    ends_sha256: str
    groups: str
    """Name of the file with the hash of each document's group."""

    groups_sha256: str

    def file_entries(self, token_size: int) -> dict[str, FileEntry]:
        """Return the SHA-256 and the size of each file, by its name, for tokens of `token_size`
        bytes."""
        return {
            self.tokens: FileEntry(self.tokens_sha256, self.num_tokens * token_size),
            self.ends: FileEntry(self.ends_sha256, self.num_documents * 8),
            self.groups: FileEntry(self.groups_sha256, self.num_documents * 8),
        }

    @property
    def names(self) -> list[str]:
        return [self.tokens, self.ends, self.groups]

    @property
    def shard_number(self) -> int:
        """Return the number of the shard in the names: 12 for train-00012.tokens.uint16."""
        return int(self.tokens.split("-")[1].partition(".")[0])

    def renumbered(self, number: int) -> ShardEntry:
        """Return an entry for the same files, under the names that they have as shard `number`."""
        kinds = [name.partition(".")[2] for name in self.names]
        tokens, ends, groups = (f"{self.split}-{number:05d}.{kind}" for kind in kinds)
        return replace(self, tokens=tokens, ends=ends, groups=groups)


@dataclass
class Manifest:
    """The content of manifest.json: how the folder was prepared, and its finished shards.

    The fields from `tokenizer_sha256` to `dtype` are set once the folder has a tokenizer."""

    settings: dict[str, Any]
    """The settings that determine the content. `prepare` with other ones is rejected."""

    inputs_sha256: str | None
    """Hash of the names and sizes of the files that the text was read from; None for a corpus
    without files."""

    tokenizer_sha256: str | None = None
    vocab_size: int = 0
    eos_id: int = 0
    dtype: Literal["uint16", "uint32"] = "uint16"
    num_shards: int = 0
    tally: Tally = field(default_factory=Tally)
    """Counts of the records in the finished shards. A resumed run continues after this number of
    records."""

    files: list[ShardEntry] = field(default_factory=list)
    complete: bool = False
    """Whether the whole corpus has been read. Until then `prepare` resumes."""

    def num_documents(self, *splits: str) -> int:
        """Return the number of documents of these splits in finished shards."""
        return sum(file.num_documents for file in self.files if file.split in splits)

    def num_tokens(self, *splits: str) -> int:
        """Return the number of tokens of these splits in finished shards, with EOS."""
        return sum(file.num_tokens for file in self.files if file.split in splits)

    def save(self, folder: Path) -> None:
        """Write the manifest. It gets totals, too, which only people read."""
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
        content.pop("totals", None)  # they follow from `files`
        try:
            manifest = conform(content, Manifest)
        except ValueError as error:
            raise DataError(f"{path} is not of a prepared folder ({error}); {remedy}") from None
        # A prepared folder may be a stranger's, and must not lead to files elsewhere.
        for file in manifest.files:
            for name in file.names:
                if not stays_inside(name):
                    raise DataError(f"{path} names '{name}', outside of its folder; {remedy}")
        return manifest


def remedy_of(folder: Path) -> str:
    """Return what to do with a folder whose files are damaged, for messages."""
    return f"delete {folder} and run `olmo-sparsity prepare` again"


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise DataError unless all files have the sizes that the manifest lists, which takes no time:
    nothing is read."""
    _check_files(folder, manifest, names_to_hash=set())


def check_contents(folder: Path, manifest: Manifest, entries: Collection[ShardEntry]) -> None:
    """Raise DataError unless the files of `entries` have the SHA-256 that the manifest lists, which
    takes as long as reading them, and all files have their sizes."""
    names_to_hash: set[str] = set()
    for entry in entries:
        names_to_hash |= set(entry.names)
    _check_files(folder, manifest, names_to_hash)


def _check_files(folder: Path, manifest: Manifest, names_to_hash: set[str]) -> None:
    """Raise DataError unless all files have their sizes, and some of them their SHA-256."""
    token_size = np.dtype(manifest.dtype).itemsize
    listed: dict[str, FileEntry] = {}
    for entry in manifest.files:
        listed |= entry.file_entries(token_size)
    problem = find_damaged_file(folder, listed, names_to_hash)
    if problem is not None:
        raise DataError(f"{folder}/{problem}; {remedy_of(folder)}")


def open_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """Return the tokenizer that the shards of a folder were written with."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path} is missing; {remedy_of(folder)}")
    tokenizer = load_tokenizer(str(path))
    if tokenizer_fingerprint(tokenizer) != manifest.tokenizer_sha256:
        raise DataError(
            f"{path} is not the tokenizer the shards were written with (its fingerprint is not "
            f"that of manifest.json); restore it, or {remedy_of(folder)}"
        )
    return tokenizer
