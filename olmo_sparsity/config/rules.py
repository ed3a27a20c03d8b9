"""Check the rules between the settings of a run.

Each `_rules_of_…` yields a message for each rule that does not hold, with the fields, their values
and what to do. Ranges of single fields are in the sections themselves.

Place in the flow: sections → **rules** → the config of `run.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.schema import Rules, enforce
from olmo_sparsity.config.sections import RunConfig, StageConfig
from olmo_sparsity.config.text import PositionsConfig


def check_config(config: RunConfig, origin: str) -> None:
    """Raise ConfigError with the first rule that does not hold. `origin` names where the settings
    are from."""
    for rules_of_part in (
        _rules_of_stages,
        _rules_of_schedule,
        _rules_of_positions,
        _rules_of_scaling,
        _rules_of_data,
        _rules_of_corpora,
    ):
        enforce(origin, rules_of_part(config))
    check_model(config.model, origin)


def check_model(model: ModelConfig, origin: str) -> None:
    """Raise ConfigError for a model, of a run or of a task, whose settings do not fit together.
    Upstream would fail with an assertion."""
    enforce(origin, _rules_of_model(model))


def _rules_of_stages(config: RunConfig) -> Rules:
    """Check the stages of a run whose sequences get longer."""
    training = config.training
    ends = [stage.until for stage in training.lengths]
    if ends and (None in ends[:-1] or ends[-1] is not None):
        yield (
            "training.length: each stage but the last needs `until`, its last step, and the last "
            "none"
        )
    rising = [0, *(end for end in ends if end is not None), training.num_steps]
    if not all(first < second for first, second in pairwise(rising)):
        yield (
            f"training.length: the last steps of its stages {rising[1:-1]} must rise, "
            f"below {training.num_steps=}"
        )
    for stage in training.lengths:
        # A stage cuts the longest sequences into equal pieces: every step has as many tokens.
        if training.length % stage.tokens:
            yield (
                f"training.length: {stage.tokens} tokens do not divide the longest sequences, of "
                f"{training.length}; pass a divisor"
            )


def _rules_of_schedule(config: RunConfig) -> Rules:
    """Check where a run starts, its batches, evaluations and checkpoints, and its engine."""
    training = config.training
    evaluation = config.evaluation
    optimizer = config.optimizer
    if config.init_from is not None and config.branch_from is not None:
        yield (
            f"init_from={config.init_from} and branch_from={config.branch_from} exclude each "
            "other: the first takes only weights, the second continues that run; remove one"
        )
    if 0 < evaluation.documents < 8:
        yield f"{evaluation.documents=} must be 0 or at least 8"
    if evaluation.document_length is not None and not evaluation.documents:
        yield (
            f"{evaluation.document_length=} is set, but evaluation.documents=0 reads none; set both"
        )
    keep_steps = config.checkpoint.keep_steps or []
    beyond = [step for step in keep_steps if not 1 <= step <= training.num_steps]
    if beyond:
        yield f"checkpoint.keep_steps={beyond} must lie between 1 and {training.num_steps=}"
    if optimizer.schedule == "wsd":
        num_stable = training.num_steps - optimizer.warmup_steps
        if not 0 < optimizer.cooldown_steps <= num_stable:
            yield (
                f"{optimizer.cooldown_steps=} must be 1 to {num_stable}, the steps after the "
                f"warm-up: {training.num_steps=}, {optimizer.warmup_steps=}"
            )
    if optimizer.name == "muon" and config.engine.name.startswith("zero"):
        yield (
            f"optimizer.name=muon needs whole matrices, which engine.name={config.engine.name} "
            "never gathers for an update; pass --engine.name=fsdp, or --optimizer.name=adamw"
        )
    if config.logging.layer_gradient_norms and config.engine.name.startswith("zero"):
        yield (
            "logging.layer_gradient_norms=true needs the gradients of each layer, which "
            f"engine.name={config.engine.name} does not keep; pass --engine.name=fsdp, or "
            "--logging.layer_gradient_norms=false"
        )
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


def _rules_of_positions(config: RunConfig) -> Rules:
    """Check position IDs against the lengths that are trained, and against documents."""
    model = config.model
    if config.positions.per_document and not config.data.mask_documents:
        yield (
            "positions.per_document=true needs data.mask_documents=true: without it all documents "
            "of a sequence are one text"
        )
    for place, stage, positions in _stages(config):
        if positions.scheme != "contiguous" and (positions.target_length or 0) < stage.tokens:
            yield (
                f"{place}{positions.target_length=} is below training.length={stage.tokens}; raise "
                "the first or lower the second"
            )
        if positions.scheme == "pose" and positions.num_chunks > stage.tokens:
            chunks = f"{place}{positions.num_chunks=}"
            yield f"{chunks} is above training.length={stage.tokens}; lower it"
        if positions.per_document != config.positions.per_document:
            yield (
                f"{place}{positions.per_document=} must be {config.positions.per_document}, as in "
                "the run's positions, by which held-out text is evaluated"
            )
    stages = config.training.lengths
    each_has_own = bool(stages) and all(stage.positions is not None for stage in stages)
    # `per_document` of the run may be set all the same, as evaluations read it.
    others = replace(config.positions, per_document=False)
    if each_has_own and others != PositionsConfig():
        yield (
            "positions is set, but each stage of training.length has positions of its own; leave "
            "them out of the stages that have the run's"
        )
    if model.max_sequence_length < config.largest_length:
        yield (
            f"{model.max_sequence_length=} is below the {config.largest_length} positions trained; "
            "raise it to at least that"
        )


def _stages(config: RunConfig) -> Iterator[tuple[str, StageConfig, PositionsConfig]]:
    """Yield each stage with its positions, and the beginning of their keys; a run without stages is
    one."""
    stages = config.training.lengths or [StageConfig(config.training.length)]
    for number, stage in enumerate(stages):
        if stage.positions is None:
            yield "", stage, config.positions
        else:
            yield f"training.length[{number}].", stage, stage.positions


def _rules_of_scaling(config: RunConfig) -> Rules:
    """Check how RoPE is scaled, and its base in each stage."""
    model = config.model
    for place, _, positions in _stages(config):
        if positions.scaling == "none":
            continue
        if not model.rope:
            yield f"{place}{positions.scaling=!s} changes RoPE, but model.rope=false; remove one"
        if positions.beta_slow >= positions.beta_fast:
            yield f"{place}{positions.beta_slow=} must be below {positions.beta_fast=}"
        if positions.low_frequency_factor >= positions.high_frequency_factor:
            yield (
                f"{place}{positions.low_frequency_factor=} must be below "
                f"{positions.high_frequency_factor=}"
            )
    for number, stage in enumerate(config.training.lengths):
        place = f"training.length[{number}]"
        if stage.rope_theta is not None and not model.rope:
            yield f"{place}.rope_theta is set, but model.rope=false; remove one"
        positions = stage.positions or config.positions
        changes_angles = (
            positions.rope_scaling != model.rope_scaling or stage.rope_theta is not None
        )
        if changes_angles and model.architecture != "olmo":
            yield (
                f"{place} changes RoPE, which model.architecture={model.architecture} cannot do "
                "within a run; set it for the whole run, and start another one with init_from"
            )


def _rules_of_data(config: RunConfig) -> Rules:
    """Check the transform of sequences and the tokenizer."""
    data = config.data
    if data.transform is None and (data.transform_options or data.transform_sha256):
        yield "data.transform_options are set, but data.transform is not; name the function"
    if (data.tokenizer.name is None) == (data.tokenizer.train_vocab is None):
        yield (f"set exactly one of {data.tokenizer.name=} and {data.tokenizer.train_vocab=}")


def _rules_of_corpora(config: RunConfig) -> Rules:
    """Check names and weights of several corpora."""
    names = list(config.data.weights)
    for name in names:
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) is None:
            yield (
                f"data.corpus: the name {name!r} must consist of letters, digits, - and _; it is a "
                "folder below data.folder"
            )
    if len(names) < len(config.data.corpora):
        yield f"data.corpus: two corpora have one name, of {', '.join(names)}; rename one"
    texts = dict[tuple[str, str | None, str], str]()
    for corpus in config.data.corpora:
        text = (corpus.source, corpus.path, corpus.field)
        other = texts.setdefault(text, str(corpus.name))
        if corpus.path is not None and other != corpus.name:
            yield (
                f"data.corpus: {other} and {corpus.name} are the same text ({corpus.path}), which "
                "would be read twice as often; remove one, and add its weight to the other"
            )
    for number, stage in enumerate(config.training.lengths):
        if stage.weights and stage.weights.keys() != set(names):
            wanted = ", ".join(names) or "none, as data.corpus is not a list"
            yield (
                f"training.length[{number}].weights has {', '.join(stage.weights)}; give a weight "
                f"for each corpus: {wanted}"
            )
    places = {"data.corpus": config.data.weights}
    for number, stage in enumerate(config.training.lengths):
        places[f"training.length[{number}].weights"] = stage.weights
    for place, weights in places.items():
        is_finite = all(0 <= weight <= 10**9 for weight in weights.values())
        if weights and not (is_finite and sum(weights.values()) > 0):
            yield f"{place}: weights must be from 0 to 1e9, and one of them above 0: {weights}"


def _rules_of_model(model: ModelConfig) -> Rules:
    """Check what can be checked of a model by itself."""
    yield from _rules_of_layers(model)
    yield from _rules_of_places(model)


def _rules_of_layers(model: ModelConfig) -> Rules:
    """Check sizes, norms and biases of the layers."""
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


def _rules_of_places(model: ModelConfig) -> Rules:
    """Check how a layer sees the places of tokens: RoPE, ALiBi or neither."""
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
