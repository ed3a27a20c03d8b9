"""Declare the settings of a training run, as dataclasses with defaults.

`RunConfig`, at the end, is the whole config of a run. Each of its sections is a class:

    data, positions   DataConfig, PositionsConfig    text.py
    model             ModelConfig                    model.py
    optimizer         OptimizerConfig                here, as all that follow
    training          TrainingConfig, and StageConfig for each stage of its length
    engine            EngineConfig
    evaluation        EvaluationConfig
    checkpoint        CheckpointConfig
    logging           LoggingConfig

The text below a field explains its key; docs/keys.md is written from these texts.

Place in the flow: YAML → **sections** → the modules that each section is for. `rules.py` checks the
rules between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.schema import option
from olmo_sparsity.config.text import DataConfig, PositionsConfig

Precision = Literal["auto", "fp32", "bf16"]


# --- optimizer ------------------------------------------------------------------------------------


@dataclass
class OptimizerConfig:
    """The optimizer, and the learning rate of each step."""

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


# --- training -------------------------------------------------------------------------------------


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
    """The steps of a run: their number, their batches, and how one is computed."""

    length: int = option(128, least=2, most=10**9)
    """Tokens of a training sequence; or a list of stages (`StageConfig`), and then this is the
    longest."""

    # A list in place of the number above is read into this field, and saved under that key.
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

    max_gpu_hours: float | None = option(None, least=0, most=1e12)
    """GPU-hours of all starts of the run, with their evaluations and saves, at which it saves and
    ends with the exit code 2, which is not requeued. The same command with a larger number goes on.
    None: no limit."""

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
    def shortest_length(self) -> int:
        """Return the tokens of a sequence in the stage of the shortest ones."""
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


# --- engine ---------------------------------------------------------------------------------------


@dataclass
class EngineConfig:
    """The engine that runs a step on one process or several, and its time limits."""

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
    processes write their stacks and end, with the exit code 76: the same command goes on. Where
    steps are long, it is 5 times the longest step so far, at most work_timeout_s."""

    work_timeout_s: int = option(1800, least=1)
    """The same, of the start with the first step, the first step of a stage, an evaluation, a
    checkpoint, and a wait for the disk."""


# --- evaluation, checkpoint, logging --------------------------------------------------------------


@dataclass
class EvaluationConfig:
    """What is measured of held-out text while a run trains."""

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
    """When checkpoints are saved, and which of them are kept."""

    interval_steps: int | None = option(
        0, least=0, parse=lambda text: 0 if text == "auto" else text
    )
    """auto (or 0): after ten steps, then every ten minutes, or up to every 30 where copying would
    take more than 2% of the time. None: only after the last step (and on a signal)."""

    max_starts: int = option(3, least=1)
    """How often a run may be started and die before it saves a checkpoint 100 steps, or 10 minutes
    of training, beyond its beginning. Then it is refused."""

    keep: int = option(2, least=1)
    """How many of the latest checkpoints stay on disk. The steps below are always written, and stay
    forever."""

    keep_every_steps: int | None = option(
        0, least=0, parse=lambda text: 0 if text == "auto" else text
    )
    """Keep multiples of this. auto (or 0): a tenth of training.num_steps, in runs of 10,000 steps
    or more. None: none. A run that has diverged unnoticed can be branched from one of them."""

    keep_steps: list[int] | None = None
    """Keep these steps."""

    keep_powers_of_two: bool = False
    """Keep steps 1, 2, 4, 8, …"""

    export_at_end: bool = False
    """After the last step also export the model for transformers, to `huggingface/` of the run."""

    def stays(self, step: int) -> bool:
        """Return whether the checkpoint of this step stays forever. `auto` must be resolved
        (training/resolve.py), or it keeps none."""
        interval = self.keep_every_steps or None
        return (
            (interval is not None and step % interval == 0)
            or step in (self.keep_steps or ())
            or (self.keep_powers_of_two and step.bit_count() == 1)
        )

    def num_staying(self, after: int, until: int) -> int:
        """Return the number of steps after + 1 … until that stay."""
        named_steps = set(self.keep_steps or ())
        if self.keep_powers_of_two:
            named_steps |= {2**exponent for exponent in range(until.bit_length())}
        interval = self.keep_every_steps
        if not interval:
            return sum(after < step <= until for step in named_steps)
        num_multiples = until // interval - after // interval
        return num_multiples + sum(
            after < step <= until and step % interval != 0 for step in named_steps
        )


@dataclass
class LoggingConfig:
    """Where a run writes its metrics, beside `metrics.jsonl`."""

    interval_steps: int = option(10, least=1)
    """Steps between lines of the log and speeds in the metrics."""

    layer_gradient_norms: bool = False
    """Also log the gradient norm of each block, of the embeddings and of the unembedding, before
    clipping, every `logging.interval_steps` steps. Not with zero1, zero2 and zero3."""

    tensorboard: bool = False
    """Also write TensorBoard files to the run folder."""

    wandb_project: str | None = None
    """Log to this project of Weights & Biases. None: do not."""


# --- the run --------------------------------------------------------------------------------------


@dataclass
class RunConfig:
    """The whole config of a run."""

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
        # Users set the scaling of RoPE with the position IDs that it is for, under `positions`. The
        # model computes with it, so it has a copy.
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
