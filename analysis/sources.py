"""Held-out text for a measurement, as token ids of the model that is measured.

Place in the flow: text → **documents** → windows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.config import CorpusConfig, DataConfig, PlantedConfig
from olmo_sparsity.config_file import load_config
from olmo_sparsity.data.corpus import read_documents
from olmo_sparsity.data.shards import TokenShards, open_shards
from olmo_sparsity.data.tokenizer import tokenizer_fingerprint
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.model.load import LoadedModel, find_folder


@dataclass(frozen=True)
class Source:
    """Documents as token ids; a document's index is its place in the source."""

    name: str
    fingerprint: str
    documents: list[np.ndarray] = field(repr=False)
    planted: list[np.ndarray] | None = None
    """Only with planted dependencies: the places of the marks in each document of the first half;
    the second half holds the same documents without them."""

    num_too_short: int = 0
    """Documents left out because they cannot hold what is planted."""

    def same_text(self, one: int, other: int) -> bool:
        period = len(self.documents) if self.planted is None else len(self.planted)
        return one % period == other % period


FORMS = "a prepared folder, embedded, c4, c4_files:GLOB or text:PATH"


def open_source(
    loaded: LoadedModel, text: str | None = None, max_documents: int | None = None
) -> Source:
    """`text` None: the held-out documents of the run that the model comes from."""
    if max_documents is not None and max_documents < 2:
        raise ConfigError(f"--max-documents={max_documents} must be at least 2: one in each half")
    data = DataConfig(folder=text) if text is not None else _data_of(loaded.name)
    kind, _, path = (text or "").partition(":")
    if text is None or (Path(text) / "manifest.json").is_file():
        shards = open_shards(data, "heldout")
        name = f"held-out documents of {data.folder}"
        _same_tokenizer(shards, loaded, name)
        count = len(shards) if max_documents is None else min(max_documents, len(shards))
        documents = [shards.document(index) for index in range(count)]
    elif kind in ("embedded", "c4", "c4_files", "text"):
        # `kind` is one of its literals by the line above, which mypy does not follow.
        corpus = CorpusConfig(source=kind, path=path or None, max_documents=max_documents)  # type: ignore[arg-type]
        if (kind in ("c4_files", "text")) != bool(path):
            raise ConfigError(f"--text={text}: must be {FORMS}")
        name = text
        documents = list(_tokenized(corpus, loaded))
    else:
        hint = f": did you mean --text=text:{text}?" if Path(text).exists() else ""
        raise ConfigError(f"--text={text} is not {FORMS}{hint}")
    if not documents:
        raise DataError(f"{name} holds no documents")
    vocabulary = loaded.model.vocab_size
    largest = max(int(document.max()) for document in documents if len(document))
    if largest >= vocabulary:
        raise DataError(f"{name} holds token {largest}, the model's vocabulary has {vocabulary}")
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "little") + document.astype("<u4").tobytes())
    return Source(name, digest.hexdigest(), documents)


def planted_config(loaded: LoadedModel) -> PlantedConfig:
    """As the model was trained, or else the defaults."""
    path = find_folder(loaded.name) / "config.yaml"
    return load_config(path).data.planted if path.is_file() else PlantedConfig()


def _data_of(model_name: str) -> DataConfig:
    path = find_folder(model_name) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"'{model_name}' is not a run of ours: give --text ({FORMS})")
    return load_config(path).data


def _same_tokenizer(shards: TokenShards, loaded: LoadedModel, name: str) -> None:
    if loaded.tokenizer is None:
        return
    theirs, ours = (tokenizer_fingerprint(t) for t in (shards.tokenizer, loaded.tokenizer))
    if theirs != ours and not _encode_alike(shards, loaded.tokenizer):
        raise DataError(
            f"{name} were made with another tokenizer than the model's; give the text itself "
            "(--text=text:PATH) or the shards the model was trained with"
        )


def _encode_alike(shards: TokenShards, tokenizer: Tokenizer) -> bool:
    """A tokenizer that another library has saved anew has another fingerprint."""
    probe = shards.tokenizer.decode(shards.document(0).tolist())
    ids = [t.encode(probe, add_special_tokens=False).ids for t in (shards.tokenizer, tokenizer)]
    return ids[0] == ids[1] and shards.tokenizer.get_vocab() == tokenizer.get_vocab()


def _tokenized(corpus: CorpusConfig, loaded: LoadedModel) -> Iterator[np.ndarray]:
    if loaded.tokenizer is None:
        raise DataError(
            f"'{loaded.name}' has no tokenizer beside it, so text cannot be read for it; give a "
            "prepared folder, or put its tokenizer.json there"
        )
    for document in read_documents(corpus):
        ids = loaded.tokenizer.encode(document.text, add_special_tokens=False).ids
        yield np.array(ids, dtype=np.int64)
