"""Declare the settings of a training run, as dataclasses with defaults.

    run_folder: runs/mine            a YAML file
    training: {length: 256}
    --optimizer.name=muon            a word of the command line

    RunConfig(run_folder="runs/mine", training=TrainingConfig(length=256),
              optimizer=OptimizerConfig(name="muon"))

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
    """adamw: PyTorch's AdamW for all weights. muon: PyTorch's Muon for the matrices of the layers,
    whose updates it makes orthogonal, and AdamW for embeddings, output, norms and biases; it cannot
    be combined with DeepSpeed's engines."""

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
    """Number that is added to AdamW's denominator, so that it is never 0."""

    decay_norm_and_bias: bool = True
    """Apply weight decay to norms and biases."""

    decay_embeddings: bool = True
    """Apply weight decay to embeddings."""

    schedule: Literal["linear", "cosine", "wsd", "constant"] = "linear"
    """How the learning rate goes on after the warm-up. linear, cosine: it falls until the last
    step. wsd (warm-up, stable, decay): it stays, and falls in the last cooldown_steps. constant:
    the same, but cooldown_steps may be 0, and the rate falls to 0. The stable part does not depend
    on the number of steps, so a run that continues it with `branch_from` can add the decay."""

    warmup_steps: int = option(300, least=0, most=10**12)
    """Steps in which the learning rate rises linearly."""

    final_lr_share: float = option(
        0.0, least=0, most=1, only_if=("schedule", "linear", "cosine", "wsd")
    )
    """The learning rate at the last step, as a share of learning_rate."""

    cooldown_steps: int = option(0, least=0, most=10**12, only_if=("schedule", "constant", "wsd"))
    """Number of steps at the end of the run in which the learning rate falls linearly."""

    skip_sigmas: float | None = option(None, least=1, most=1e6)
    """Skip the update of a step whose loss or gradient norm is more than this many standard
    deviations above the mean of the last 128 steps. None: no step is skipped."""


# --- training -------------------------------------------------------------------------------------


@dataclass
class StageConfig:
    """A stretch of steps in which the length of sequences, the weights of corpora, the position IDs
    and RoPE's base stay the same. In a file:

        training:
          length:
            - {tokens: 256, until: 9000}      # steps 1 to 9,000
            - {tokens: 1024}                  # the other steps
    """

    tokens: int = option(128, least=2, most=10**9)
    """Tokens of a training sequence."""

    until: int | None = option(None, least=1)
    """Last step of the stage. None: the last step of the run."""

    weights: dict[str, float] = option({})
    """Weights of the corpora in this stage, by name. Each corpus must have one. Empty: the weights
    in data.corpus."""

    positions: PositionsConfig | None = None
    """Position IDs in this stage: a section that replaces the whole section `positions` of the run.
    None: those of the run."""

    rope_theta: float | None = option(None, least=1, most=1e12)
    """Base of RoPE's frequencies in this stage. None: model.rope_theta."""


@dataclass
class EarlierWeights:
    """The weights of the corpora in the batches that another run had read before this one branched
    off. For example, it read both corpora alike up to batch 500, and then more of the web:

        [EarlierWeights(until=500, weights={"web": 1, "code": 1}),
         EarlierWeights(until=900, weights={"web": 3, "code": 1})]
    """

    until: int = option(1, least=1)
    """The last batch that was read with these weights. The first batch of the run is 1."""

    weights: dict[str, float] = option({})
    """The weight of each corpus, by name."""


@dataclass
class TrainingConfig:
    """The steps of a run: their number, their batches, and how one is computed."""

    length: int = option(128, least=2, most=10**9)
    """Tokens of a training sequence; or a list of stages, each with `tokens` and `until`, its last
    step."""

    # A list in place of the number above is read into this field, and saved under that key. The
    # number is then the longest of them (`__post_init__`).
    lengths: list[StageConfig] = option([], shares_key_with="length")

    earlier_weights: list[EarlierWeights] = field(default_factory=list)
    """By which weights several corpora were read up to the checkpoint that a run branches from, so
    that each corpus goes on where it was. The run sets it at its start."""

    batch_size: int = option(32, least=1, most=10**9)
    """Sequences per optimizer step, of all processes together. In a stage of shorter sequences each
    of these is cut into several, so that every step has the same number of tokens."""

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
    """Largest number of sequences per forward on one process, where sequences are longest; a run
    takes the largest divisor of the process's share that does not exceed it. None: the whole share,
    without gradient accumulation. auto (or 0): as many as fit into memory by the formulas of
    `--dry-run`, up to 65,536 tokens."""

    num_steps: int = option(1000, least=1, most=10**12)
    """Optimizer steps of the run."""

    max_gpu_hours: float | None = option(None, least=0, most=1e12)
    """The GPU-hours that a run may take in all of its starts together, with evaluations and saves.
    Then it saves a checkpoint and ends with the exit code 2, with which SLURM does not requeue it.
    The same command with a larger number goes on. None: no limit."""

    max_grad_norm: float | None = option(1.0, least=1e-12, most=1e12)
    """Clip gradients to this norm. None: no clipping."""

    z_loss: float = option(0.0, least=0, most=1)
    """Weight of an additional loss, the square of log Σ exp(logits), which keeps logits from
    drifting; OLMo 2 takes 1e-5. It is a part of the gradient only: the loss that is logged stays
    the cross-entropy."""

    precision: Precision = "auto"
    """fp32: compute in fp32. bf16: keep weights in fp32, and compute matrix products in bf16
    (autocast). auto: bf16 if the hardware has it."""

    device: str = "auto"
    """Device such as cpu, cuda or cuda:1. auto: a GPU if there is one."""

    activation_checkpointing: bool = False
    """Keep only the inputs of layers for the backward pass, and compute the rest again. This saves
    memory."""

    max_epochs: float = option(4.0, least=0, most=1e12)
    """Largest number of times that the text may be read. A run that would read it more often is
    refused, unless it has begun already."""

    on_nan: Literal["stop", "skip"] = "stop"
    """What to do when a loss, gradient or weight is not finite. stop: end with an error. skip: go
    back to the last checkpoint and leave out the batch of that step."""

    max_skips: int = option(3, least=1, only_if=("on_nan", "skip"))
    """Number of batches that a run may leave out before it ends with an error."""

    checkpoint_every: int = option(1, least=1, only_if=("activation_checkpointing", True))
    """Compute every n-th layer again in the backward pass; the others keep their activations."""

    compile: bool = False
    """Compile the model with torch.compile."""

    activation_memory_budget: float | None = option(
        None, least=0, most=1, only_if=("compile", True)
    )
    """The share of activations that compiled layers keep for the backward pass. PyTorch's compiler
    computes the others again, beginning with those that take least time. 0: keep the inputs of
    layers alone, as with activation_checkpointing; 1 or None: keep what makes a step fastest."""

    deterministic: bool = False
    """Use only deterministic kernels. Otherwise gradients of attention vary on a GPU, and a resumed
    run ends close to an uninterrupted one, but not at the same bits. On a CPU all kernels are
    deterministic."""

    def __post_init__(self) -> None:
        if self.lengths:
            self.length = max(stage.tokens for stage in self.lengths)

    @property
    def shortest_length(self) -> int:
        """Return the tokens of a sequence in the stage of the shortest ones."""
        return min((stage.tokens for stage in self.lengths), default=self.length)

    @property
    def first_steps(self) -> list[int]:
        """Return the first step of each stage: [1, 9001] for the stages in `StageConfig`. A run
        without stages counts as a single one."""
        return [1, *(stage.until + 1 for stage in self.lengths if stage.until is not None)]

    def stage_at(self, step: int) -> StageConfig | None:
        """Return the stage that a step is in; None if the run has no stages. The first step is
        1."""
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
    """The processes over which one copy of the model is divided. all: all of the run. node: those
    of a node; each node has a copy, so that weights stay within the node and only gradients are
    sent between nodes."""

    reduce_every_micro_batch: bool = option(False, only_if=("name", "fsdp"))
    """Add up gradients over processes after each micro-batch instead of once a step. Then they are
    sent more often, and no process holds the gradients of the whole model (4 bytes a
    parameter)."""

    deepspeed_config: str | None = option(None, only_if=("name", "zero1", "zero2", "zero3"))
    """DeepSpeed's own settings, a JSON file. None: this project's configs/deepspeed/<name>.json."""

    meeting_timeout_s: int = option(600, least=1)
    """Seconds that the first processes of a run wait for the others."""

    step_timeout_s: int = option(300, least=1)
    """Seconds that an optimizer step may take, other than the first of the run or of a stage.
    Beyond, all processes write their stacks and end with the exit code 76, after which the same
    command goes on. Where steps are long, the limit is 5 times the longest step so far, but no more
    than work_timeout_s."""

    work_timeout_s: int = option(1800, least=1)
    """Seconds that other work may take: the start with the first step, the first step of a stage,
    an evaluation, a checkpoint, or waiting for the disk."""


# --- evaluation, checkpoint, logging --------------------------------------------------------------


@dataclass
class EvaluationConfig:
    """What is measured of held-out text while a run trains."""

    interval_steps: int | None = option(None, least=1)
    """Steps from one evaluation to the next. None: only one, after the last step."""

    length: int | None = option(None, least=2, most=10**9)
    """Tokens of a held-out sequence, whose position IDs are contiguous. None: twice the number of
    positions that are trained."""

    num_sequences: int = option(256, least=1, most=10**9)
    """Held-out sequences of an evaluation."""

    batch_size: int = option(32, least=1)
    """Sequences per forward on one process."""

    documents: int = option(0, least=0, most=10**6)
    """Number of held-out documents on which each evaluation also measures the loss by place, with
    the spread over documents (docs/train.md#compare-checkpoints-by-loss). It must be 0, for none,
    or at least 8."""

    document_length: int | None = option(None, least=16)
    """Tokens that are read of each of these documents; shorter ones are left out. None: the number
    of positions that are trained."""

    lm_eval: list[str] = field(default_factory=list)
    """Tasks that each evaluation measures with lm_eval: names of its tasks, or YAML files."""


@dataclass
class CheckpointConfig:
    """When checkpoints are saved, and which of them are kept."""

    interval_steps: int | None = option(
        0, least=0, parse=lambda text: 0 if text == "auto" else text
    )
    """Steps from one checkpoint to the next. auto (or 0): after ten steps, then every ten minutes,
    or more seldom, up to every 30, where copying would take more than 2% of the time. None: only
    after the last step, and on a signal."""

    max_starts: int = option(3, least=1)
    """Number of times that a run may be started and die before it saves a checkpoint 100 steps, or
    10 minutes of training, beyond its beginning. After that it is refused."""

    keep: int = option(2, least=1)
    """Number of the latest checkpoints that stay on disk. Steps that the next keys name are always
    written, and stay forever."""

    keep_every_steps: int | None = option(
        0, least=0, parse=lambda text: 0 if text == "auto" else text
    )
    """Keep the checkpoints of all multiples of this step. A run that has diverged unnoticed can be
    branched from one of them. auto (or 0): a tenth of training.num_steps, in runs of 10,000 steps
    or more. None: keep none."""

    keep_steps: list[int] | None = None
    """Keep the checkpoints of these steps."""

    keep_powers_of_two: bool = False
    """Keep the checkpoints of steps 1, 2, 4, 8, …"""

    export_at_end: bool = False
    """After the last step also export the model for transformers, to `huggingface/` of the run."""

    def stays(self, step: int) -> bool:
        """Return whether the checkpoint of this step stays forever. `auto` must be resolved
        (training/setup/resolve.py), or it keeps none."""
        interval = self.keep_every_steps or None
        return (
            (interval is not None and step % interval == 0)
            or step in (self.keep_steps or ())
            or (self.keep_powers_of_two and step.bit_count() == 1)
        )

    def num_staying(self, after: int, until: int) -> int:
        """Return the number of steps after + 1 … until whose checkpoints stay: 2 for after=100,
        until=300 and keep_every_steps=100. Multiples are computed and not counted, as a run may
        have 10^12 steps."""
        named_steps = set(self.keep_steps or ())
        if self.keep_powers_of_two:
            named_steps |= {2**exponent for exponent in range(until.bit_length())}
        interval = self.keep_every_steps
        if not interval:
            return sum(after < step <= until for step in named_steps)
        num_multiples = until // interval - after // interval
        # Named steps that are multiples, too, are counted once.
        num_others = sum(after < step <= until and step % interval != 0 for step in named_steps)
        return num_multiples + num_others


@dataclass
class LoggingConfig:
    """Where a run writes its metrics, beside `metrics.jsonl`."""

    interval_steps: int = option(10, least=1)
    """Steps from one line of the log, and one speed in the metrics, to the next."""

    layer_gradient_norms: bool = False
    """Also log the gradient norm of each block, of the embeddings and of the unembedding, before
    clipping, every `logging.interval_steps` steps. Not with zero1, zero2 and zero3."""

    tensorboard: bool = False
    """Also write TensorBoard files to the run folder."""

    wandb_project: str | None = None
    """Also log to this project of Weights & Biases. None: do not."""


# --- the run --------------------------------------------------------------------------------------


@dataclass
class RunConfig:
    """The whole config of a run."""

    run_folder: str = "runs/run"
    """Folder of the run."""

    seed: int = option(0, least=0, most=2**62)
    """Seed of the first weights, of the order of the text, and of position IDs."""

    init_from: str | None = None
    """Start from the weights of a checkpoint folder of ours or of OLMo, or of a Hugging Face
    folder, at step 0 with a new optimizer."""

    branch_from: str | None = None
    """Continue a checkpoint folder of another run (weights, optimizer, step, place in the text)
    with this run's settings. The text must be the same, in the same order."""

    start_over: bool = False
    """Begin at step 0 if all checkpoints of the run folder are damaged or gone; what is left is
    moved to its folder set_aside_1. It has no effect where a checkpoint can be resumed."""

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
        """Return the section `positions` of each stage, in order. A run without stages counts as a
        single one."""
        if not self.training.lengths:
            return [self.positions]
        return [stage.positions or self.positions for stage in self.training.lengths]

    @property
    def largest_length(self) -> int:
        """Return one more than the largest position ID that a training batch can hold: 2,048 for
        sequences of 512 tokens with PoSE up to that target length."""
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
        # The scaling of RoPE is part of the positions: `__post_init__` copies it to the model.
        return replace(self, positions=stage.positions or self.positions, model=model)
