"""Read, check and write the settings of a training run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.folders import leaves
from olmo_sparsity.config.schema import Rules, build, enforce, read_given, read_yaml, to_yaml, used
from olmo_sparsity.config.sections import ModelConfig, RunConfig


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read and check the settings of a run."""
    return config_from_dict(read_given(path, overrides), str(path))


REMOVED: dict[str, dict[str, Any]] = {
    "data": {"train_files": (None,), "heldout_files": (None,), "token_dtype": ("uint16",)},
    "evaluation": {"sparsity_targets": range(10**6 + 1), "track": range(10**6 + 1)},
}
"""Settings that earlier versions saved, with the values that have no effect on the weights."""


def load_saved_config(path: str | Path) -> RunConfig:
    """Read what `save_config` wrote. The folder may be anybody's, so the file is read by itself: no
    base, no references."""
    given = _with_transform(read_yaml(Path(path)))
    for section, removed in REMOVED.items():
        if isinstance(values := given.get(section), dict):
            kept = {name: v for name, v in values.items() if v not in removed.get(name, ())}
            given = given | {section: kept}
    return config_from_dict(given, str(path))


def _with_transform(given: dict[str, Any]) -> dict[str, Any]:
    """Replace `data.planted` and `data.repeated`, which earlier versions saved. A run that was
    trained on such text can be loaded; it does not go on, as no transform has this name."""
    if not isinstance(data := given.get("data"), dict):
        return given
    sections = {name: data[name] for name in ("planted", "repeated") if name in data}
    kept = {name: value for name, value in data.items() if name not in sections}
    active = {name: of for name, of in sections.items() if isinstance(of, dict) and of.get("share")}
    if active:
        kept |= {"transform": "text of an earlier version", "transform_options": active}
    return given | {"data": kept}


def config_from_dict(given: dict, origin: str = "config") -> RunConfig:
    config = build(RunConfig, given, origin)
    for rules in (_lengths, _schedule, _positions, _scaling, _data):
        enforce(origin, rules(config))
    check_model(config.model, origin)
    return config


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write all fields that have an effect, resolved, such that the file gives the same run."""
    write_atomically(Path(path), to_yaml(config))


def flatten(config: RunConfig) -> dict[str, Any]:
    """Every dotted key that has an effect, and its value."""
    return dict(leaves(used(config)))


# --- what must hold -------------------------------------------------------------------------------


def _lengths(config: RunConfig) -> Rules:
    training = config.training
    ends = [stage.until for stage in training.lengths]
    if None in ends[:-1] or ends[-1:] not in ([], [None]):
        yield "training.length: each stage but the last needs `until`, its last step; the last none"
    rising = [0, *(end for end in ends if end is not None), training.num_steps]
    if not all(first < second for first, second in pairwise(rising)):
        yield f"training.length: last steps {rising[1:-1]} must rise, below {training.num_steps=}"
    for stage in training.lengths:
        if training.length % stage.tokens:
            yield f"training.length: {stage.tokens} does not divide the longest, {training.length}"


def _schedule(config: RunConfig) -> Rules:
    """Where a run starts, its batches, evaluations and checkpoints, and its engine."""
    training, evaluation, engine = config.training, config.evaluation, config.engine
    optimizer, num_stable = config.optimizer, training.num_steps - config.optimizer.warmup_steps
    if config.init_from is not None and config.branch_from is not None:
        yield f"init_from and branch_from={config.branch_from} exclude each other"
    if 0 < evaluation.documents < 8:
        yield f"{evaluation.documents=} must be 0 or at least 8"
    if evaluation.document_length is not None and not evaluation.documents:
        yield f"{evaluation.document_length=} is set, but evaluation.documents=0 reads none"
    beyond = [s for s in config.checkpoint.keep_steps or [] if not 1 <= s <= training.num_steps]
    if beyond:
        yield f"checkpoint.keep_steps={beyond} must lie between 1 and {training.num_steps=}"
    if optimizer.schedule == "wsd" and not 0 < optimizer.cooldown_steps <= num_stable:
        yield f"{optimizer.cooldown_steps=} must be 1 to {num_stable}, the steps after the warm-up"
    if engine.name == "zero3" and training.compile:
        yield "training.compile=true cannot be combined with engine.name=zero3; take fsdp"


def _positions(config: RunConfig) -> Rules:
    training, positions, model = config.training, config.positions, config.model
    if positions.scheme != "contiguous" and config.largest_length < training.length:
        yield f"{positions.target_length=} is below {training.length=}"
    if not config.data.mask_documents and positions.per_document:
        yield "positions.per_document=true needs data.mask_documents=true"
    if positions.scheme == "pose" and positions.num_chunks > training.shortest:
        yield f"{positions.num_chunks=} is above training.length={training.shortest}"
    if model.max_sequence_length < config.largest_length:
        yield f"{model.max_sequence_length=} is below the {config.largest_length} positions trained"


def _scaling(config: RunConfig) -> Rules:
    positions = config.positions
    if positions.scaling == "none":
        return
    if not config.model.rope:
        yield f"{positions.scaling=!s} changes RoPE, but model.rope=false; remove one"
    if positions.beta_slow >= positions.beta_fast:
        yield f"{positions.beta_slow=} must be below {positions.beta_fast=}"
    if positions.low_frequency_factor >= positions.high_frequency_factor:
        yield f"{positions.low_frequency_factor=} must be below {positions.high_frequency_factor=}"


def _data(config: RunConfig) -> Rules:
    model, data = config.model, config.data
    if data.mask_documents and model.sliding_window is not None:
        yield f"{model.sliding_window=} cannot be combined with data.mask_documents=true"
    if data.mask_documents and model.query_scale_length is not None:
        yield f"{model.query_scale_length=} cannot be combined with data.mask_documents=true"
    if data.transform is None and (data.transform_options or data.transform_sha256):
        yield "data.transform_options are set, but data.transform is not; name the function"
    if (data.tokenizer.name is None) == (data.tokenizer.train_vocab is None):
        yield "set exactly one of data.tokenizer.name and data.tokenizer.train_vocab"


def check_model(model: ModelConfig, origin: str) -> None:
    """Also used for a task's model. Upstream would fail with an assertion."""
    enforce(origin, _model(model))


def _model(model: ModelConfig) -> Rules:
    is_gated = model.architecture != "gpt_neox" and model.activation_type == "swiglu"
    if is_gated and (model.mlp_hidden_size or 0) % 2:
        yield f"{model.mlp_hidden_size=} must be even: swiglu takes half of it for its gate"
    if (model.sliding_window is not None) != (model.architecture == "olmo3"):
        yield f"{model.sliding_window=} is for model.architecture=olmo3, which requires it"
    if model.embedding_size is not None and model.embedding_size < model.vocab_size:
        yield f"{model.embedding_size=} is below {model.vocab_size=}; raise it or leave it out"
    if model.n_heads % (model.n_kv_heads or 1):
        yield f"{model.n_heads=} is not a multiple of {model.n_kv_heads=}"
    if model.d_model % model.n_heads and model.head_width is None:
        yield f"{model.d_model=} is not a multiple of {model.n_heads=}; or set model.head_width"
    if not model.attention_layer_norm and model.attention_norm_per_head:
        yield "model.attention_norm_per_head=true needs model.attention_layer_norm=true"
    if model.qkv_bias and model.include_bias:
        yield "model.qkv_bias=true is set, but model.include_bias=true adds all biases; remove one"
    if not model.alibi and model.alibi_bias_max != 8.0:
        yield f"{model.alibi_bias_max=} is set, but model.alibi=false has no bias"
    if model.rope and model.alibi:
        yield "model.rope and model.alibi exclude each other"
    if not 0 < model.rotary_fraction <= 1:
        yield f"{model.rotary_fraction=} must lie in (0, 1]"
    if not model.rope and model.rotary_fraction != 1.0:
        yield f"{model.rotary_fraction=} is set, but model.rope=false rotates nothing"
