"""Check the rules that hold between several settings of a run.

`check_config` is called once a config has been read; `check_model` also checks models that are
built without one. A range of a single field is declared next to the field (`option` in schema.py),
so it is not here.

Each rule is one `if` that yields a message when the settings break it. The message names the
fields, their values and what to do:

    if model.rope and model.alibi:
        yield "model.rope=true and model.alibi=true exclude each other; set one to false"

The first message becomes the ConfigError, so the order of the functions and of the rules in them
decides what a user with several wrong settings reads first.

Place in the flow: sections → **rules** → the config of `run.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from olmo_sparsity.config.build import Rules, enforce
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import RunConfig, StageConfig
from olmo_sparsity.config.text import PositionsConfig


def check_config(config: RunConfig, origin: str) -> None:
    """Raise ConfigError with the message of the first rule that the config breaks. `origin`: where
    the settings are from, such as a file; the message begins with it."""
    for rules_of_topic in (
        _rules_of_stages,
        _rules_of_start,
        _rules_of_evaluation,
        _rules_of_checkpoints,
        _rules_of_optimizer,
        _rules_of_deepspeed,
        _rules_of_compilation,
        _rules_of_positions,
        _rules_of_rope,
        _rules_of_data,
        _rules_of_corpora,
    ):
        enforce(origin, rules_of_topic(config))
    check_model(config.model, origin)


def check_model(model: ModelConfig, origin: str) -> None:
    """Raise ConfigError if the settings of a model contradict each other. OLMo's own code would
    fail later, with an assertion that names no setting."""
    enforce(origin, _rules_of_layers(model))
    enforce(origin, _rules_of_order(model))


# --- steps, engine, evaluation --------------------------------------------------------------------


def _rules_of_stages(config: RunConfig) -> Rules:
    """Check the stages of `training.length`: each ends after the one before it, and its sequences
    divide the longest ones."""
    training = config.training
    last_steps = [stage.until for stage in training.lengths]
    # `until: null` means "up to the end of the run", so the last stage has it, and no other may.
    if last_steps and (None in last_steps[:-1] or last_steps[-1] is not None):
        yield (
            "training.length: each stage but the last needs `until`, its last step, and the last "
            "none"
        )
    given_steps = [step for step in last_steps if step is not None]
    boundaries = [0, *given_steps, training.num_steps]
    if not all(boundary < next_one for boundary, next_one in pairwise(boundaries)):
        yield (
            f"training.length: the last steps of its stages {boundaries[1:-1]} must rise, "
            f"below {training.num_steps=}"
        )
    for stage in training.lengths:
        # A stage cuts the longest sequences into equal pieces: every step has as many tokens.
        if training.length % stage.tokens:
            yield (
                f"training.length: {stage.tokens} tokens do not divide the longest sequences, of "
                f"{training.length}; pass a divisor"
            )


def _rules_of_start(config: RunConfig) -> Rules:
    """Check that a run begins from new weights, from those of another model, or as a branch of
    another run, but not from two of these."""
    if config.init_from is not None and config.branch_from is not None:
        yield (
            f"init_from={config.init_from} and branch_from={config.branch_from} exclude each "
            "other: the first takes only weights, the second continues that run; remove one"
        )


def _rules_of_evaluation(config: RunConfig) -> Rules:
    """Check the documents whose loss is measured by place."""
    evaluation = config.evaluation
    # The spread over fewer documents would say nothing.
    if 0 < evaluation.documents < 8:
        yield f"{evaluation.documents=} must be 0 or at least 8"
    if evaluation.document_length is not None and not evaluation.documents:
        yield (
            f"{evaluation.document_length=} is set, but evaluation.documents=0 reads none; set both"
        )


def _rules_of_checkpoints(config: RunConfig) -> Rules:
    """Check that the steps to keep are steps of the run."""
    training = config.training
    keep_steps = config.checkpoint.keep_steps or []
    outside_of_run = [step for step in keep_steps if not 1 <= step <= training.num_steps]
    if outside_of_run:
        yield f"checkpoint.keep_steps={outside_of_run} must lie between 1 and {training.num_steps=}"


def _rules_of_optimizer(config: RunConfig) -> Rules:
    """Check that a cool-down fits between the end of the warm-up and the end of the run."""
    training = config.training
    optimizer = config.optimizer
    if optimizer.schedule == "wsd":
        num_after_warmup = training.num_steps - optimizer.warmup_steps
        if not 0 < optimizer.cooldown_steps <= num_after_warmup:
            yield (
                f"{optimizer.cooldown_steps=} must be 1 to {num_after_warmup}, the steps after the "
                f"warm-up: {training.num_steps=}, {optimizer.warmup_steps=}"
            )


def _rules_of_deepspeed(config: RunConfig) -> Rules:
    """Check that nothing needs the whole gradient of a matrix, which DeepSpeed's engines divide
    among processes."""
    if not config.engine.name.startswith("zero"):
        return
    if config.optimizer.name == "muon":
        yield (
            f"optimizer.name=muon needs whole matrices, which engine.name={config.engine.name} "
            "never gathers for an update; pass --engine.name=fsdp, or --optimizer.name=adamw"
        )
    if config.logging.layer_gradient_norms:
        yield (
            "logging.layer_gradient_norms=true needs the gradients of each layer, which "
            f"engine.name={config.engine.name} does not keep; pass --engine.name=fsdp, or "
            "--logging.layer_gradient_norms=false"
        )


def _rules_of_compilation(config: RunConfig) -> Rules:
    """Check what cannot be combined with a compiled model."""
    training = config.training
    if training.activation_checkpointing and training.activation_memory_budget is not None:
        yield (
            f"{training.activation_memory_budget=} and training.activation_checkpointing=true both "
            "compute layers again; set the second to false"
        )
    if config.engine.name == "zero3" and training.compile:
        yield (
            "training.compile=true cannot be combined with engine.name=zero3, which swaps weights "
            "in and out inside the compiled function; take fsdp, or set training.compile=false"
        )


# --- position IDs and RoPE ------------------------------------------------------------------------


class _Stage(NamedTuple):
    """A stage of a run with the position IDs that it trains."""

    key_prefix: str
    """What precedes "positions.…" in the names of these settings, for messages:
    "training.length[0]." if the stage has positions of its own, and nothing if they are the
    run's."""

    tokens: int
    """Tokens of a training sequence."""

    positions: PositionsConfig


def _stages_of(config: RunConfig) -> Iterator[_Stage]:
    """Yield the stages of a run. A run without stages counts as a single one."""
    stages = config.training.lengths or [StageConfig(config.training.length)]
    for stage_index, stage in enumerate(stages):
        if stage.positions is None:
            yield _Stage("", stage.tokens, config.positions)
        else:
            yield _Stage(f"training.length[{stage_index}].", stage.tokens, stage.positions)


def _rules_of_positions(config: RunConfig) -> Rules:
    """Check position IDs against the trained lengths and against the separation of documents."""
    model = config.model
    if config.positions.per_document and not config.data.mask_documents:
        yield (
            "positions.per_document=true needs data.mask_documents=true: without it all documents "
            "of a sequence are one text"
        )
    for key_prefix, num_tokens, positions in _stages_of(config):
        # Every token needs a position ID of its own, and `target_length` is how many there are.
        if positions.scheme != "contiguous" and (positions.target_length or 0) < num_tokens:
            yield (
                f"{key_prefix}{positions.target_length=} is below training.length={num_tokens}; "
                "raise the first or lower the second"
            )
        if positions.scheme == "pose" and positions.num_chunks > num_tokens:
            chunks = f"{key_prefix}{positions.num_chunks=}"
            yield f"{chunks} is above training.length={num_tokens}; lower it"
        if positions.per_document != config.positions.per_document:
            yield (
                f"{key_prefix}{positions.per_document=} must be {config.positions.per_document}, "
                "as in the run's positions, by which held-out text is evaluated"
            )

    stages = config.training.lengths
    all_have_positions = bool(stages) and all(stage.positions is not None for stage in stages)
    # `per_document` of the run may be set all the same, as evaluations read it.
    unread_positions = replace(config.positions, per_document=False)
    if all_have_positions and unread_positions != PositionsConfig():
        yield (
            "positions is set, but each stage of training.length has positions of its own; leave "
            "them out of the stages that have the run's"
        )
    if model.max_sequence_length < config.largest_length:
        yield (
            f"{model.max_sequence_length=} is below the {config.largest_length} positions trained; "
            "raise it to at least that"
        )


def _rules_of_rope(config: RunConfig) -> Rules:
    """Check how each stage scales RoPE, and its base."""
    for key_prefix, _, positions in _stages_of(config):
        if positions.scaling != "none":
            yield from _rules_of_scaling(config.model, positions, key_prefix)

    model = config.model
    for stage_index, stage in enumerate(config.training.lengths):
        key = f"training.length[{stage_index}]"
        if stage.rope_theta is not None and not model.rope:
            yield f"{key}.rope_theta is set, but model.rope=false; remove one"
        positions = stage.positions or config.positions
        changes_angles = (
            positions.rope_scaling != model.rope_scaling or stage.rope_theta is not None
        )
        # OLMo's model is ours and can be changed between two steps; one of transformers computes
        # its angles once, when it is built.
        if changes_angles and model.architecture != "olmo":
            yield (
                f"{key} changes RoPE, which model.architecture={model.architecture} cannot do "
                "within a run; set it for the whole run, and start another one with init_from"
            )


def _rules_of_scaling(model: ModelConfig, positions: PositionsConfig, key_prefix: str) -> Rules:
    """Check the limits between which YaRN and Llama's scaling blend. `key_prefix`: as in
    `_Stage`."""
    if not model.rope:
        yield f"{key_prefix}{positions.scaling=!s} changes RoPE, but model.rope=false; remove one"
    if positions.beta_slow >= positions.beta_fast:
        yield f"{key_prefix}{positions.beta_slow=} must be below {positions.beta_fast=}"
    if positions.low_frequency_factor >= positions.high_frequency_factor:
        yield (
            f"{key_prefix}{positions.low_frequency_factor=} must be below "
            f"{positions.high_frequency_factor=}"
        )


# --- text -----------------------------------------------------------------------------------------


def _rules_of_data(config: RunConfig) -> Rules:
    """Check that options of a transform have one to go with, and that a tokenizer is either named
    or trained."""
    data = config.data
    if data.transform is None and (data.transform_options or data.transform_sha256):
        yield "data.transform_options are set, but data.transform is not; name the function"
    if (data.tokenizer.name is None) == (data.tokenizer.train_vocab is None):
        yield f"set exactly one of {data.tokenizer.name=} and {data.tokenizer.train_vocab=}"


def _rules_of_corpora(config: RunConfig) -> Rules:
    """Check the names of several corpora, that no two are the same text, and their weights."""
    names = list(config.data.weights)
    for name in names:
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) is None:
            yield (
                f"data.corpus: the name {name!r} must consist of letters, digits, - and _; it is a "
                "folder below data.folder"
            )
    # Two corpora of one name are one entry of `weights`.
    if len(names) < len(config.data.corpora):
        yield f"data.corpus: two corpora have one name, of {', '.join(names)}; rename one"

    name_of_text: dict[tuple[str, str | None, str], str] = {}
    for corpus in config.data.corpora:
        text = (corpus.source, corpus.path, corpus.field)
        first_name = name_of_text.setdefault(text, str(corpus.name))
        if corpus.path is not None and first_name != corpus.name:
            yield (
                f"data.corpus: {first_name} and {corpus.name} are the same text ({corpus.path}), "
                "which would be read twice as often; remove one, and add its weight to the other"
            )
    yield from _rules_of_weights(config)


def _rules_of_weights(config: RunConfig) -> Rules:
    """Check the weights of several corpora, those of the whole run and those of single stages."""
    names = set(config.data.weights)
    for stage_index, stage in enumerate(config.training.lengths):
        if stage.weights and stage.weights.keys() != names:
            wanted = ", ".join(config.data.weights) or "none, as data.corpus is not a list"
            yield (
                f"training.length[{stage_index}].weights has {', '.join(stage.weights)}; give a "
                f"weight for each corpus: {wanted}"
            )

    weights_by_key = {"data.corpus": config.data.weights}
    for stage_index, stage in enumerate(config.training.lengths):
        weights_by_key[f"training.length[{stage_index}].weights"] = stage.weights
    for key, weights in weights_by_key.items():
        is_in_range = all(0 <= weight <= 10**9 for weight in weights.values())
        if weights and not (is_in_range and sum(weights.values()) > 0):
            yield f"{key}: weights must be from 0 to 1e9, and one of them above 0: {weights}"


# --- the model ------------------------------------------------------------------------------------


def _rules_of_layers(model: ModelConfig) -> Rules:
    """Check the sizes of a layer, its norms and its biases."""
    # SwiGLU multiplies one half of the hidden width by the other.
    is_gated = model.architecture != "gpt_neox" and model.activation_type == "swiglu"
    if is_gated and (model.mlp_hidden_size or 0) % 2:
        yield f"{model.mlp_hidden_size=} must be even: swiglu takes half of it for its gate"
    if (model.sliding_window is not None) != (model.architecture == "olmo3"):
        yield (
            f"{model.sliding_window=} does not fit model.architecture={model.architecture}: olmo3 "
            "requires it, and no other has one"
        )
    if model.embedding_size is not None and model.embedding_size < model.vocab_size:
        yield f"{model.embedding_size=} is below {model.vocab_size=}; raise it or leave it out"
    if model.n_heads % (model.n_kv_heads or 1):
        yield f"{model.n_heads=} is not a multiple of {model.n_kv_heads=}; change one of them"
    if model.d_model % model.n_heads and model.head_width is None:
        yield (
            f"{model.d_model=} is not a multiple of {model.n_heads=}; change one of them, or set "
            "model.head_width"
        )
    if model.attention_norm_per_head and not model.attention_layer_norm:
        yield (
            "model.attention_norm_per_head=true needs model.attention_layer_norm=true, without "
            "which it norms nothing; set both"
        )
    if model.qkv_bias and model.include_bias:
        yield "model.qkv_bias=true is set, but model.include_bias=true adds all biases; remove one"


def _rules_of_order(model: ModelConfig) -> Rules:
    """Check how layers learn the order of tokens: by RoPE, by ALiBi, or not at all. Also check the
    factors by which queries grow with the number of keys."""
    if not model.alibi and model.alibi_bias_max != 8.0:
        yield f"{model.alibi_bias_max=} is set, but model.alibi=false has no bias; leave it out"
    if model.rope and model.alibi:
        yield "model.rope=true and model.alibi=true exclude each other; set one to false"
    if model.nope_every is not None and not model.rope:
        yield f"{model.nope_every=} is set, but model.rope=false rotates in no layer; leave it out"
    if model.nope_every is not None and model.nope_every > model.n_layers:
        yield (
            f"{model.nope_every=} leaves no layer of {model.n_layers=} without positions; lower it"
        )
    if model.query_scale_learned and model.query_scale_length is not None:
        yield (
            f"{model.query_scale_length=} and model.query_scale_learned=true both scale queries; "
            "remove one"
        )
    if not 0 < model.rotary_fraction <= 1:
        yield f"{model.rotary_fraction=} must lie in (0, 1]"
    if not model.rope and model.rotary_fraction != 1.0:
        yield (
            f"{model.rotary_fraction=} is set, but model.rope=false rotates nothing; leave it out"
        )
