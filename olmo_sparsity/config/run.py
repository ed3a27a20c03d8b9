"""Read, check and write the settings of a training run."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from olmo_sparsity.config.sections import ModelConfig, RunConfig
from olmo_sparsity.config.text import LEAST_SHARE, RepeatedConfig
from olmo_sparsity.folders import leaves
from olmo_sparsity.io import write_atomically
from olmo_sparsity.settings import Rules, build, enforce, read_given, read_yaml, to_yaml, used


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read and check the settings of a run."""
    return config_from_dict(read_given(path, overrides), str(path))


REMOVED = {"train_files": None, "heldout_files": None, "token_dtype": "uint16"}
"""Settings of `data` that earlier versions saved, with the values that meant nothing."""


def load_saved_config(path: str | Path) -> RunConfig:
    """Read what `save_config` wrote. The folder may be anybody's, so the file is read by itself: no
    base, no references."""
    given = read_yaml(Path(path))
    if isinstance(data := given.get("data"), dict):
        kept = {name: value for name, value in data.items() if (name, value) not in REMOVED.items()}
        given = given | {"data": kept}
    return config_from_dict(given, str(path))


def config_from_dict(given: dict, origin: str = "config") -> RunConfig:
    config = build(RunConfig, given, origin)
    for rules in (_lengths, _schedule, _positions, _scaling, _data, _corpora):
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
    yield (
        None not in ends[:-1] and ends[-1:] in ([], [None]),
        "training.length: each stage but the last needs `until`, its last step, and the last none",
    )
    rising = [0, *(end for end in ends if end is not None), training.num_steps]
    yield (
        all(first < second for first, second in pairwise(rising)),
        f"training.length: the last steps of its stages ({', '.join(map(str, rising[1:-1]))}) must "
        f"rise, and lie below {training.num_steps=}",
    )
    for stage in training.lengths:
        yield (
            training.length % stage.tokens == 0,
            f"training.length: {stage.tokens} tokens do not divide the longest, {training.length}",
        )


def _schedule(config: RunConfig) -> Rules:
    """Where a run starts, its batches, evaluations and checkpoints, and its engine."""
    training, evaluation, engine = config.training, config.evaluation, config.engine
    yield (
        config.init_from is None or config.branch_from is None,
        f"init_from={config.init_from} and branch_from={config.branch_from} exclude each other",
    )
    yield not 0 < evaluation.track < 8, f"{evaluation.track=} must be 0 or at least 8"
    targets = evaluation.sparsity_targets
    yield targets not in (1, 2, 3), f"{evaluation.sparsity_targets=} must be 0 or at least 4"
    yield (
        not targets or training.length >= 32,
        f"{evaluation.sparsity_targets=} needs training.length >= 32, not {training.length}",
    )
    beyond = [s for s in config.checkpoint.keep_steps or [] if not 1 <= s <= training.num_steps]
    yield (
        not beyond,
        f"checkpoint.keep_steps={beyond} never come: steps run from 1 to {training.num_steps=}",
    )
    yield (
        engine.name != "zero3" or not training.compile,
        "training.compile=true cannot be combined with engine.name=zero3; take zero2",
    )


def _positions(config: RunConfig) -> Rules:
    training, positions, model = config.training, config.positions, config.model
    if positions.scheme != "contiguous":
        yield (
            config.largest_length >= training.length,
            f"{positions.target_length=} is below {training.length=}",
        )
    yield (
        config.data.mask_documents or not positions.per_document,
        "positions.per_document=true needs data.mask_documents=true",
    )
    yield (
        positions.scheme != "pose" or positions.num_chunks <= training.shortest,
        f"{positions.num_chunks=} is above training.length={training.shortest}",
    )
    yield (
        model.max_sequence_length >= config.largest_length,
        f"{model.max_sequence_length=} is below the positions trained ({config.largest_length})",
    )


def _scaling(config: RunConfig) -> Rules:
    positions = config.positions
    if positions.scaling == "none":
        return
    yield (
        config.model.rope,
        f"{positions.scaling=!s} changes RoPE, but model.rope=false; remove one",
    )
    yield (
        positions.beta_slow < positions.beta_fast,
        f"{positions.beta_slow=} must be below {positions.beta_fast=}",
    )
    yield (
        positions.low_frequency_factor < positions.high_frequency_factor,
        f"{positions.low_frequency_factor=} must be below {positions.high_frequency_factor=}",
    )


def _data(config: RunConfig) -> Rules:
    training, model, data = config.training, config.model, config.data
    planted, repeated, shortest = data.planted, data.repeated, training.shortest
    yield (
        not data.mask_documents or model.sliding_window is None,
        f"{model.sliding_window=} cannot be combined with data.mask_documents=true",
    )
    yield (
        not data.mask_documents or model.query_scale_length is None,
        f"{model.query_scale_length=} cannot be combined with data.mask_documents=true",
    )
    yield (
        planted.share == 0 or shortest >= planted.num_tokens + 2,
        f"{data.planted.num_tokens=} does not fit into training.length={shortest}",
    )
    yield (
        repeated.share > 0 or repeated == RepeatedConfig(),
        "data.repeated is set, but data.repeated.share=0 repeats nothing; raise the share",
    )
    yield (
        repeated.min_length <= repeated.max_length,
        f"{data.repeated.min_length=} is above max_length={repeated.max_length}",
    )
    yield (
        repeated.share == 0 or 2 * repeated.max_length <= shortest,
        f"{data.repeated.max_length=} does not fit twice into training.length={shortest}",
    )
    yield (
        planted.share + repeated.share <= 1,
        f"{data.planted.share=} and {data.repeated.share=} add up to more than 1",
    )
    yield (
        (data.tokenizer.name is None) != (data.tokenizer.train_vocab is None),
        "set exactly one of data.tokenizer.name and data.tokenizer.train_vocab",
    )


def _corpora(config: RunConfig) -> Rules:
    data = config.data
    names, total = [part.name for part in data.corpora], sum(part.weight for part in data.corpora)
    for number, one in enumerate(data.corpora):
        yield (
            re.fullmatch(r"\w[\w-]*", one.name) is not None and names.count(one.name) == 1,
            f"data.corpus[{number}].name={one.name} must be letters and digits, and differ from "
            "the other names",
        )
        yield (
            one.weight / total >= LEAST_SHARE,
            f"data.corpus[{number}].weight={one.weight} is less than {LEAST_SHARE} of all",
        )


def check_model(model: ModelConfig, origin: str) -> None:
    """Also used for a task's model. Upstream would fail with an assertion."""
    enforce(origin, _model(model))


def _model(model: ModelConfig) -> Rules:
    is_gated = model.architecture != "gpt_neox" and model.activation_type == "swiglu"
    yield (
        not is_gated or (model.mlp_hidden_size or 0) % 2 == 0,
        f"{model.mlp_hidden_size=} must be even: swiglu takes half of it for its gate",
    )
    yield (
        (model.sliding_window is not None) == (model.architecture == "olmo3"),
        f"{model.sliding_window=} is for model.architecture=olmo3, which requires it",
    )
    yield (
        model.embedding_size is None or model.embedding_size >= model.vocab_size,
        f"{model.embedding_size=} is below {model.vocab_size=}; raise it or leave it out",
    )
    yield (
        model.n_heads % (model.n_kv_heads or 1) == 0,
        f"{model.n_heads=} is not a multiple of {model.n_kv_heads=}",
    )
    yield (
        model.d_model % model.n_heads == 0 or model.head_width is not None,
        f"{model.d_model=} is not a multiple of {model.n_heads=}; or set model.head_width",
    )
    yield (
        model.attention_layer_norm or not model.attention_norm_per_head,
        "model.attention_norm_per_head=true needs model.attention_layer_norm=true",
    )
    yield (
        not (model.qkv_bias and model.include_bias),
        "model.qkv_bias=true is set, but model.include_bias=true adds all biases; remove one",
    )
    yield (
        model.alibi or model.alibi_bias_max == 8.0,
        f"{model.alibi_bias_max=} is set, but model.alibi=false has no bias",
    )
    yield not (model.rope and model.alibi), "model.rope and model.alibi exclude each other"
    yield 0 < model.rotary_fraction <= 1, f"{model.rotary_fraction=} must lie in (0, 1]"
    yield (
        model.rope or model.rotary_fraction == 1.0,
        f"{model.rotary_fraction=} is set, but model.rope=false rotates nothing",
    )
