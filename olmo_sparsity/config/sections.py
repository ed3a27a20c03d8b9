"""Declare the settings of a training run, as dataclasses with defaults.

Place in the flow: YAML → **sections** → the modules that each section is for. `rules.py` checks the
rules between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from olmo_sparsity.config.schema import option
from olmo_sparsity.config.text import DataConfig, PositionsConfig

Precision = Literal["auto", "fp32", "bf16"]


# --- what a field of the model changes -----------------------------------------------------------

COMPUTATION = "computation"
"""With other values, the same weights compute something else, or do not fit. A run that starts from
weights (`init_from`) must have the value of their model, and an export must express it: both follow
from this word, in models/exchange.py and models/families.py."""

ANGLES = "angles"
"""RoPE's frequencies, which a run that starts from weights may lower."""

ROUNDING = "rounding"
"""The same computation, rounded in another way."""

TRAINING = "training"
"""What happens in training only, such as dropout."""

START = "start"
"""How weights are drawn."""

USE = "use"
"""Which inputs are allowed, and which tokens have a purpose."""

NOTHING = "nothing"
"""Refused: what the field means to OLMo is set elsewhere here."""


@dataclass
class ModelConfig:
    """The fields of `olmo.config.ModelConfig`, which takes seconds to import, and of this project.
    OLMo's classes take it in place of theirs, whose enums equal these texts."""

    # OLMo: defaults of GPT-2 (dropout 0.1, biases, GPT-2's vocabulary); here: the values of all
    # published OLMo configs, so that our YAML files state only differences.
    d_model: int = option(768, changes=COMPUTATION, least=1, most=10**6)
    """Width of the residual stream."""

    n_heads: int = option(12, changes=COMPUTATION, least=1, most=10**5)
    """Attention heads of a layer."""

    n_kv_heads: int | None = option(None, changes=COMPUTATION, least=1, most=10**5)
    """Heads of keys and values, of which several queries share one (GQA). None: n_heads."""

    clip_qkv: float | None = option(None, changes=COMPUTATION, least=1e-30, most=1e30)
    """Limit queries, keys and values to this absolute value. None: no limit."""

    n_layers: int = option(12, changes=COMPUTATION, least=1, most=10**5)
    """Layers of the model."""

    mlp_ratio: int = option(4, changes=COMPUTATION, least=1, most=10**5)
    """Width of the MLP, as a multiple of d_model. With swiglu it counts both halves: 8 is what
    others call 4."""

    mlp_hidden_size: int | None = option(None, changes=COMPUTATION, least=1, most=10**6)
    """Width of the MLP, instead of mlp_ratio. With swiglu it counts both halves: twice Llama's
    intermediate_size."""

    activation_type: Literal["gelu", "relu", "swiglu"] = option("swiglu", changes=COMPUTATION)
    """Activation of the MLP."""

    block_type: Literal["sequential", "llama"] = option("sequential", changes=COMPUTATION)
    """Order of the maps of a layer. llama: separate maps of queries, keys and values."""

    block_group_size: int = option(
        1, changes=NOTHING, refused="FSDP wrapping is not available here"
    )
    alibi: bool = option(False, changes=COMPUTATION)
    """Use linear biases by distance (ALiBi), without RoPE."""

    alibi_bias_max: float = option(8.0, changes=COMPUTATION, least=0, most=1e6)
    """ALiBi's biases go from 2^-(this / n_heads) to 2^-this a token."""

    rope: bool = option(True, changes=COMPUTATION)
    """Use rotary positions."""

    rope_full_precision: bool = option(True, changes=ROUNDING)
    """Rotate in fp32, also where the rest is bf16."""

    rope_theta: float = option(10_000.0, changes=ANGLES, least=1, most=1e12)
    """Base of RoPE's frequencies. OLMo: a whole number, hence the other type."""

    flash_attention: bool = option(
        False, changes=NOTHING, refused="PyTorch's own fused attention is always used"
    )
    attention_dropout: float = option(0.0, changes=TRAINING, least=0, most=0.999)
    """Share of attention weights that are dropped."""

    multi_query_attention: bool | None = option(
        None, changes=NOTHING, refused="set model.n_kv_heads=1"
    )
    attention_layer_norm: bool = option(False, changes=COMPUTATION)
    """Norm queries and keys."""

    residual_dropout: float = option(0.0, changes=TRAINING, least=0, most=0.999)
    """Share of what a layer adds that is dropped."""

    embedding_dropout: float = option(0.0, changes=TRAINING, least=0, most=0.999)
    """Share of embeddings that are dropped."""

    embedding_layer_norm: bool = option(False, changes=COMPUTATION)
    """Norm the embeddings."""

    layer_norm_type: Literal["default", "low_precision", "rms"] = option(
        "default", changes=COMPUTATION
    )
    """Kind of norm. default: LayerNorm; rms: RMSNorm."""

    layer_norm_with_affine: bool = option(True, changes=COMPUTATION)
    """Give norms weights."""

    layer_norm_eps: float = option(1e-5, changes=COMPUTATION, least=0, most=1)
    """Added to a variance before the root."""

    attention_layer_norm_with_affine: bool = option(True, changes=COMPUTATION)
    """Give the norms of queries and keys weights."""

    max_sequence_length: int = option(1024, changes=USE, least=1, most=10**9)
    """Positions of the model, at least the largest that is trained."""

    include_bias: bool = option(False, changes=COMPUTATION)
    """Give all maps biases."""

    bias_for_layer_norm: bool | None = option(None, changes=COMPUTATION)
    """Give norms biases. None: as include_bias."""

    scale_logits: bool = option(False, changes=COMPUTATION)
    """Divide logits by the root of d_model."""

    vocab_size: int = option(0, changes=COMPUTATION, least=0, most=10**9)
    """0: the tokenizer's size, rounded up to a multiple of 128 for fast matrix products."""

    embedding_size: int | None = option(None, changes=COMPUTATION, least=1, most=10**9)
    """Rows of the embedding, at least vocab_size. None: vocab_size."""

    weight_tying: bool = option(True, changes=COMPUTATION)
    """Share the weights of embedding and output."""

    eos_token_id: int = option(0, changes=USE)
    """ID of the end-of-text token. A run replaces it by the tokenizer's."""

    pad_token_id: int = option(0, changes=USE)
    """A run replaces it by the tokenizer's end-of-text token."""

    init_device: str | None = option(None, changes=NOTHING, refused="set training.device")
    init_fn: Literal["mitchell", "normal", "kaiming_normal", "fan_in", "full_megatron"] = option(
        "normal", changes=START
    )
    """How weights are drawn at the start."""

    init_std: float = option(0.02, changes=START, least=0, most=1e6)
    """Standard deviation of the weights at the start, with init_fn=normal."""

    init_cutoff_factor: float | None = option(None, changes=START, least=1e-3, most=1e6)
    """Draw no weight beyond this many standard deviations. None: no limit."""

    precision: str | None = option(None, changes=NOTHING, refused="set training.precision")
    scale_emb_init: bool = option(False, changes=START)
    """Draw embeddings larger by the root of d_model, with init_fn=full_megatron."""

    emb_init_std: float | None = option(None, changes=START, least=0, most=1e6)
    """Standard deviation of the embedding at the start. None: init_std."""

    norm_after: bool = option(False, changes=COMPUTATION)
    """Norm what attention and MLP return, as OLMo 2 does, not what they take."""

    # Not OLMo's.
    architecture: Literal["olmo", "gpt_neox", "olmo3"] = option("olmo", changes=COMPUTATION)
    """gpt_neox, olmo3: transformers' GPTNeoXForCausalLM and Olmo3ForCausalLM, built from the same
    fields."""

    sliding_window: int | None = option(None, changes=COMPUTATION, least=1, most=10**9)
    """Of olmo3: three of four layers attend to position IDs that differ by less than this."""

    nope_every: int | None = option(None, changes=COMPUTATION, least=2, most=10**5)
    """Every so many layers, one has no positions (NoPE), as in SmolLM3: 4 leaves layers 4, 8, …
    without rotation. None: RoPE rotates in all layers."""

    rotary_fraction: float = option(1.0, changes=COMPUTATION)
    """Share of each head's width that RoPE rotates. 1.0 is OLMo's, 0.25 GPT-NeoX's."""

    query_scale_length: float | None = option(None, changes=COMPUTATION, least=2, most=1e12)
    """Multiply each query by ln(n + 1) / ln(this), n the number of keys it sees, so that attention
    is as sharp over many keys as over few. Not in the paper. None: no scaling."""

    query_scale_learned: bool = option(False, changes=COMPUTATION)
    """Multiply each query by s·ln(n), n the number of keys it sees, with a weight s for each head
    of each layer (Scalable-Softmax, Nakanishi 2025). As in that paper, s begins such that the
    factor is 1 on average: over sequences of max_sequence_length, 0.168 for 1,024 tokens."""

    head_width: int | None = option(None, changes=COMPUTATION, least=2, most=10**6)
    """Width of a head. None: d_model / n_heads."""

    qkv_bias: bool = option(False, changes=COMPUTATION)
    """Biases of queries, keys and values, and no others (Qwen 2). include_bias: all biases."""

    attention_norm_per_head: bool = option(False, changes=COMPUTATION)
    """With attention_layer_norm: each head is normed by itself (Qwen 3), not all of them as one."""

    rope_scaling: dict[str, Any] | None = option(
        None, changes=ANGLES, refused="set positions.scaling"
    )
    """How frequencies of RoPE are lowered, in the words of transformers. In a run: of positions."""

    @property
    def effective_n_kv_heads(self) -> int:
        if self.n_kv_heads is None:
            return 1 if self.multi_query_attention else self.n_heads
        return self.n_kv_heads

    @property
    def scales_queries(self) -> bool:
        """Return whether a query depends on the number of keys that it sees."""
        return self.query_scale_length is not None or self.query_scale_learned

    @property
    def effective_head_width(self) -> int:
        return self.head_width or self.d_model // self.n_heads


@dataclass
class OptimizerConfig:
    name: Literal["adamw", "muon"] = "adamw"
    """muon: PyTorch's Muon for the matrices of the layers, whose updates it makes orthogonal, and
    AdamW for embeddings, output, norms and biases. Not with DeepSpeed's engines."""

    learning_rate: float = option(5e-5, least=0, most=1e30)
    """Highest learning rate. Muon's updates are scaled to the size of AdamW's, so that one rate
    serves both."""

    weight_decay: float = option(0.1, least=0, most=1)
    """Weight decay of AdamW."""

    beta1: float = option(0.9, least=0, most=0.9999999)
    """Decay of AdamW's mean of gradients."""

    beta2: float = option(0.95, least=0, most=0.9999999)
    """Decay of AdamW's mean of squared gradients."""

    momentum: float = option(0.95, least=0, most=0.9999999, only_if=("name", "muon"))
    """Decay of Muon's mean of gradients (Nesterov's)."""

    eps: float = option(1e-8, least=1e-30, most=1)
    """Added to AdamW's denominator."""

    decay_norm_and_bias: bool = True
    """Apply weight decay to norms and biases."""

    decay_embeddings: bool = True
    """Apply weight decay to embeddings."""

    schedule: Literal["linear", "cosine", "wsd", "constant"] = "linear"
    """wsd: warm-up, stable, decay; constant: the same, but the decay may be left out and ends at 0.
    The stable part depends on no number of steps, so `branch_from` can decay from it."""

    warmup_steps: int = option(300, least=0, most=10**12)
    """Steps in which the learning rate rises linearly."""

    final_lr_share: float = option(
        0.0, least=0, most=1, only_if=("schedule", "linear", "cosine", "wsd")
    )
    """The rate at the last step, as a share of learning_rate."""

    cooldown_steps: int = option(0, least=0, most=10**12, only_if=("schedule", "constant", "wsd"))
    """The last steps, in which the rate falls linearly."""

    skip_sigmas: float | None = option(None, least=1, most=1e6)
    """Skip the update of a step whose loss or gradient norm is more than so many standard
    deviations above the mean of the last 128 steps. None: no step is skipped."""


@dataclass
class StageConfig:
    """A stretch of steps with sequences of one length, one share of each corpus, and one way of
    turning position IDs into angles."""

    tokens: int = option(128, least=2, most=10**9)
    """Tokens of a training sequence."""

    until: int | None = option(None, least=1)
    """Last step of the stage. None: the last step of the run."""

    weights: dict[str, float] = option({})
    """Weights of the corpora in this stage, by name: of all of them. Empty: data.corpus's own."""

    positions: PositionsConfig | None = None
    """Positions in this stage: a section like the run's `positions`, in place of all of it. None:
    the run's."""

    rope_theta: float | None = option(None, least=1, most=1e12)
    """Base of RoPE's frequencies in this stage. None: model.rope_theta."""


@dataclass
class EarlierWeights:
    """Weights of the corpora in batches that were read before a branch."""

    until: int = option(1, least=1)
    """The number of batches before their end, counted from the first of the run."""

    weights: dict[str, float] = option({})
    """Weights by name, of all corpora."""


@dataclass
class TrainingConfig:
    length: int = option(128, least=2, most=10**9)
    """Tokens of a training sequence; or a list of stages (`StageConfig`), and then this is the
    longest."""

    lengths: list[StageConfig] = option([], several="length")

    earlier_weights: list[EarlierWeights] = field(default_factory=list)
    """A branch on several corpora sets it at its start: by which weights they were read up to the
    checkpoint, so that each corpus goes on where it was."""

    batch_size: int = option(32, least=1, most=10**9)
    """Sequences per optimizer step, all processes together. In a stage of shorter ones, each of
    these is cut: a step always has as many tokens."""

    micro_batch_size: int | None = option(
        None,
        least=0,
        most=10**9,
        parse=lambda text: 0 if text == "auto" else text,
        other_names=dict.fromkeys(
            (
                "gradient_accumulation_steps",
                "grad_accumulation_steps",
                "accumulate_grad_batches",
                "gradient_accumulation",
                "grad_accum_steps",
                "device_train_microbatch_size",
                "per_device_train_batch_size",
                "micro_batch",
                "accumulation_steps",
            ),
            "set training.micro_batch_size (sequences per forward on one process, or auto); "
            "gradients are added up until training.batch_size sequences are read",
        ),
    )
    """Sequences per forward on one process, of the longest, at most: the largest divisor of a
    process's share is taken. None: no gradient accumulation. auto (or 0): as many as fit into
    memory by the formulas of `--dry-run`, up to 65,536 tokens."""

    num_steps: int = option(1000, least=1, most=10**12)
    """Optimizer steps of the run."""

    max_grad_norm: float | None = option(1.0, least=1e-12, most=1e12)
    """Clip gradients to this norm. None: no clipping."""

    z_loss: float = option(0.0, least=0, most=1)
    """Weight of the squared log of the softmax's sum, which keeps logits from drifting; OLMo 2
    takes 1e-5. Only the gradient has it: the loss that is logged stays the cross-entropy."""

    precision: Precision = "auto"
    """bf16 keeps fp32 weights and autocasts matrix products. auto: bf16 if the hardware has it."""

    device: str = "auto"
    """Device such as cpu, cuda or cuda:1. auto: a GPU if there is one."""

    activation_checkpointing: bool = False
    """Recompute layers in the backward pass, which saves memory."""

    max_epochs: float = option(4.0, least=0, most=1e12)
    """How often the text may be read, at most. A run that needs more is refused, unless it has
    begun already."""

    on_nan: Literal["stop", "skip"] = "stop"
    """What to do when a loss, gradient or weight is not finite. stop: end with an error. skip: go
    back to the last checkpoint and leave out the batch of that step."""

    max_skips: int = option(3, least=1, only_if=("on_nan", "skip"))
    """How many batches a run may leave out, before it ends with an error."""

    checkpoint_every: int = option(1, least=1, only_if=("activation_checkpointing", True))
    """Recompute every n-th layer; the others keep their activations."""

    compile: bool = False
    """Compile the model with torch.compile."""

    activation_memory_budget: float | None = option(
        None, least=0, most=1, only_if=("compile", True)
    )
    """The share of activations that compiled layers keep for the backward pass. PyTorch's compiler
    computes the others again, the cheapest first. 0: keep the inputs of layers alone, as with
    activation_checkpointing; 1 or None: keep what makes a step fastest."""

    deterministic: bool = False
    """Use only deterministic kernels. Otherwise, on a GPU, gradients of attention vary, and a
    resumed run ends close to an uninterrupted one, not at the same bits. On CPU all are."""

    def __post_init__(self) -> None:
        if self.lengths:
            self.length = max(stage.tokens for stage in self.lengths)

    @property
    def shortest(self) -> int:
        return min((stage.tokens for stage in self.lengths), default=self.length)

    @property
    def first_steps(self) -> list[int]:
        """Return the first step of each stage; of a run without stages that is 1."""
        return [1, *(stage.until + 1 for stage in self.lengths if stage.until is not None)]

    def stage_at(self, step: int) -> StageConfig | None:
        """Return the stage of a step, of a run that has stages; the first step is 1."""
        for stage in self.lengths:
            if stage.until is None or step <= stage.until:
                return stage
        return None

    def length_at(self, step: int) -> int:
        """Return the tokens of a sequence in a step."""
        stage = self.stage_at(step)
        return self.length if stage is None else stage.tokens


@dataclass
class EngineConfig:
    name: Literal["auto", "single", "ddp", "fsdp", "zero1", "zero2", "zero3"] = "auto"
    """single: one process; ddp: PyTorch's DistributedDataParallel; fsdp: PyTorch's fully_shard;
    zero1 … zero3: DeepSpeed. auto: single or ddp, by the number of processes launched. A run may
    resume with another engine."""

    shard_over: Literal["all", "node"] = option("all", only_if=("name", "fsdp"))
    """The processes that share one copy of the model. node: each node has a copy, so that weights
    stay within it and gradients alone are sent between nodes."""

    reduce_every_micro_batch: bool = option(False, only_if=("name", "fsdp"))
    """Add up gradients over processes after each micro-batch, not once a step: they are sent as
    often, and no process holds those of the whole model (4 bytes a parameter)."""

    deepspeed_config: str | None = option(None, only_if=("name", "zero1", "zero2", "zero3"))
    """DeepSpeed's own settings, a JSON file. None: this project's configs/deepspeed/<name>.json."""

    meeting_timeout_s: int = option(600, least=1)
    """Seconds that processes wait until all of them are there."""

    step_timeout_s: int = option(300, least=1)
    """Seconds of an optimizer step after the first (of the run, and of a stage), until all
    processes write their stacks and end, with the exit code 76: the same command goes on."""

    work_timeout_s: int = option(1800, least=1)
    """The same, of the start with the first step, the first step of a stage, an evaluation, and a
    checkpoint."""


@dataclass
class EvaluationConfig:
    interval_steps: int | None = option(None, least=1)
    """None: only after the last step."""

    length: int | None = option(None, least=2, most=10**9)
    """Tokens of a held-out sequence (contiguous IDs); None: twice the positions trained."""

    num_sequences: int = option(256, least=1, most=10**9)
    """Held-out sequences of an evaluation."""

    batch_size: int = option(32, least=1)
    """Sequences per forward on one process."""

    documents: int = option(0, least=0, most=10**6)
    """Number of held-out documents on which each evaluation also measures the loss by place, with
    the spread over documents (docs/train.md#compare-checkpoints-by-loss). 0: none, else at least
    8."""

    document_length: int | None = option(None, least=16)
    """Tokens of each of them; shorter documents are left out. None: the positions trained."""

    lm_eval: list[str] = field(default_factory=list)
    """Tasks that each evaluation measures with lm_eval: its names, or YAML files of tasks."""


@dataclass
class CheckpointConfig:
    interval_steps: int | None = option(
        0, least=0, parse=lambda text: 0 if text == "auto" else text
    )
    """auto (or 0): after ten steps, then every ten minutes, or less often where saving would take
    more than 2% of the time. None: only after the last step (and on a signal)."""

    max_starts: int = option(3, least=1)
    """How often a run may be started and die without a new checkpoint, before it is refused."""

    keep: int = option(2, least=1)
    """How many of the latest checkpoints stay on disk. The steps below are always written, and stay
    forever."""

    keep_every_steps: int | None = option(None, least=1)
    """Keep multiples of this."""

    keep_steps: list[int] | None = None
    """Keep these steps."""

    keep_powers_of_two: bool = False
    """Keep steps 1, 2, 4, 8, …"""

    export_at_end: bool = False
    """After the last step also export the model for transformers, to `huggingface/` of the run."""

    def stays(self, step: int) -> bool:
        """Return whether the checkpoint of this step stays forever."""
        interval = self.keep_every_steps
        return (
            (interval is not None and step % interval == 0)
            or step in (self.keep_steps or ())
            or (self.keep_powers_of_two and step & (step - 1) == 0)
        )

    def num_staying(self, after: int, until: int) -> int:
        """Return an upper bound of the number of steps after + 1 … until that stay. A step that
        stays for two reasons counts twice."""
        num_staying = sum(after < step <= until for step in self.keep_steps or ())
        interval = self.keep_every_steps
        if interval is not None:
            num_staying += until // interval - after // interval
        if self.keep_powers_of_two:
            num_staying += until.bit_length() - after.bit_length()
        return num_staying


@dataclass
class LoggingConfig:
    interval_steps: int = option(10, least=1)
    """Steps between lines of the log and speeds in the metrics."""

    tensorboard: bool = False
    """Also write TensorBoard files to the run folder."""

    wandb_project: str | None = None
    """Log to this project of Weights & Biases. None: do not."""


@dataclass
class RunConfig:
    run_folder: str = "runs/run"
    """Folder of the run."""

    seed: int = option(0, least=0, most=2**62)
    """Seed of weights, order of the text and position IDs."""

    init_from: str | None = None
    """Start from the weights of a checkpoint folder of ours or of OLMo, or of a Hugging Face
    folder, at step 0 with a new optimizer."""

    branch_from: str | None = None
    """Continue a checkpoint folder of another run (weights, optimizer, step, place in the text)
    with this run's settings. The text must be the same, in the same order."""

    start_over: bool = False
    """Begin at step 0 where all checkpoints of the run folder are damaged or gone; what is left is
    kept in its folder set_aside_1. Without an effect where a checkpoint can be resumed."""

    data: DataConfig = field(default_factory=DataConfig)
    positions: PositionsConfig = field(default_factory=PositionsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        self.model = replace(self.model, rope_scaling=self.positions.rope_scaling)

    @property
    def positions_of_stages(self) -> list[PositionsConfig]:
        """Return the positions of each stage, in order; of a run without stages its only ones."""
        if not self.training.lengths:
            return [self.positions]
        return [stage.positions or self.positions for stage in self.training.lengths]

    @property
    def largest_length(self) -> int:
        """Return one more than the largest position ID that a training batch can hold."""
        return max(
            positions.target_length or self.training.length
            for positions in self.positions_of_stages
        )

    def at(self, step: int) -> RunConfig:
        """Return the config as it is in a step (1 is the first): `positions` and `model` are those
        of the step's stage. A checkpoint of the step holds a model of this config."""
        stage = self.training.stage_at(step)
        if stage is None:
            return self
        model = self.model
        if stage.rope_theta is not None:
            model = replace(model, rope_theta=stage.rope_theta)
        # Scaling is part of the positions, from which a new config sets that of the model.
        return replace(self, positions=stage.positions or self.positions, model=model)
