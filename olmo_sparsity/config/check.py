"""Check that the values of a config are in range and fit together.

Place in the flow: config.py → **checked** → everything else. Nothing is read or built before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import Field
from functools import partial
from itertools import pairwise

from olmo_sparsity.config.sections import OLMO_RANGES, ModelConfig, RunConfig
from olmo_sparsity.config.text import LEAST_SHARE, DataConfig, RepeatedConfig
from olmo_sparsity.errors import ConfigError

Require = Callable[[bool, str], None]


def check_range(origin: str, key: str, section: object, item: Field, value: object) -> None:
    """Check a value, or each value of a list, against the range of its field."""
    limits = item.metadata.get("within")
    if limits is None and isinstance(section, ModelConfig):
        limits = OLMO_RANGES.get(item.name)
    for number in value if isinstance(value, list) else [value]:
        if limits is None or not isinstance(number, int | float):
            continue
        least, most = limits
        if not number >= least:  # refuses NaN too
            raise ConfigError(f"{origin}: {key}={value} must be at least {least}")
        if most is not None and number > most:
            raise ConfigError(f"{origin}: {key}={value} must be at most {most}")


def _require(origin: str, holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(f"{origin}: {message}")


def check(config: RunConfig, origin: str) -> None:
    """Check a complete config. Each message names field, value and remedy."""
    check_model(config.model, origin)
    require = partial(_require, origin)
    _check_schedule(config, require)
    _check_positions(config, require)
    _check_data(config, require)


def _check_schedule(config: RunConfig, require: Require) -> None:
    """Where a run starts, its batches, evaluations and checkpoints, and its engine."""
    training = config.training
    require(
        config.init_from is None or config.branch_from is None,
        f"init_from={config.init_from} and branch_from={config.branch_from} exclude each other: "
        "the first takes only weights, the second continues that run; remove one",
    )
    require(
        config.evaluation.sparsity_targets not in (1, 2, 3),
        f"evaluation.sparsity_targets={config.evaluation.sparsity_targets} must be 0 or at least 4",
    )
    _check_lengths(config, require)
    require(
        not config.evaluation.sparsity_targets or training.length >= 32,
        f"evaluation.sparsity_targets={config.evaluation.sparsity_targets} needs windows within "
        f"training.length={training.length}, which must be at least 32",
    )
    beyond = [s for s in config.checkpoint.keep_steps or [] if not 1 <= s <= training.num_steps]
    require(
        not beyond,
        f"checkpoint.keep_steps={beyond} never come: steps run from 1 to "
        f"training.num_steps={training.num_steps}",
    )
    micro = training.micro_batch_size or training.batch_size
    require(
        training.batch_size % micro == 0,
        f"training.batch_size={training.batch_size} is not a multiple of "
        f"training.micro_batch_size={micro}",
    )
    require(
        config.engine.name != "zero3" or not training.compile,
        "training.compile=true does not go with engine.name=zero3, which swaps weights in and out "
        "inside the compiled function; set training.compile=false or take zero2",
    )


def _check_lengths(config: RunConfig, require: Require) -> None:
    training = config.training
    ends = [stage.until for stage in training.lengths]
    require(
        None not in ends[:-1] and ends[-1:] in ([], [None]),
        "training.length: each stage but the last needs `until`, its last step, and the last none",
    )
    rising = [0, *(end for end in ends if end is not None), training.num_steps]
    require(
        all(first < second for first, second in pairwise(rising)),
        f"training.length: the last steps of its stages ({', '.join(map(str, rising[1:-1]))}) must "
        f"rise, and lie below training.num_steps={training.num_steps}",
    )
    for stage in training.lengths:
        require(
            training.length % stage.tokens == 0,
            f"training.length: {stage.tokens} tokens do not divide the longest sequences of "
            f"{training.length}, of which a step has training.batch_size={training.batch_size}; "
            "take a divisor",
        )


def _check_positions(config: RunConfig, require: Require) -> None:
    training, positions, model = config.training, config.positions, config.model
    if positions.scheme != "contiguous":
        require(
            positions.target_length is not None,
            f"positions.scheme={positions.scheme} needs positions.target_length",
        )
        require(
            config.largest_length >= training.length,
            f"positions.target_length={positions.target_length} is below "
            f"training.length={training.length}; raise the first or lower the second",
        )
    _check_scaling(config, require)
    require(
        config.data.mask_documents or not positions.per_document,
        "positions.per_document=true is set, but with data.mask_documents=false all documents of a "
        "sequence are one text; set both",
    )
    if positions.scheme == "pose":
        require(
            positions.num_chunks <= training.shortest,
            f"positions.num_chunks={positions.num_chunks} is above "
            f"training.length={training.shortest}",
        )
    require(
        model.max_sequence_length >= config.largest_length,
        f"model.max_sequence_length={model.max_sequence_length} is below the positions trained "
        f"({config.largest_length}); raise it to at least that",
    )


def _check_scaling(config: RunConfig, require: Require) -> None:
    positions = config.positions
    if positions.scaling == "none":
        return
    require(
        config.model.rope,
        f"positions.scaling={positions.scaling} changes RoPE, but model.rope=false; remove one",
    )
    needed = ["factor"] + ["original_length"] * (positions.scaling in ("yarn", "llama3"))
    for name in needed:
        require(
            getattr(positions, name) is not None,
            f"positions.scaling={positions.scaling} needs positions.{name}",
        )
    require(
        positions.beta_slow < positions.beta_fast,
        f"positions.beta_slow={positions.beta_slow} must be below "
        f"positions.beta_fast={positions.beta_fast}",
    )
    require(
        positions.low_frequency_factor < positions.high_frequency_factor,
        f"positions.low_frequency_factor={positions.low_frequency_factor} must be below "
        f"positions.high_frequency_factor={positions.high_frequency_factor}",
    )


def _check_data(config: RunConfig, require: Require) -> None:
    training, model, data = config.training, config.model, config.data
    require(
        data.train_files is not None or data.token_dtype == "uint16",
        f"data.token_dtype={data.token_dtype} is for data.train_files; a prepared folder "
        "knows its own",
    )
    require(
        not data.mask_documents or model.query_scale_length is None,
        f"model.query_scale_length={model.query_scale_length} counts the keys of a whole sequence, "
        "which data.mask_documents=true hides; unset one of them",
    )
    require(
        data.planted.share == 0 or training.shortest >= data.planted.num_tokens + 2,
        f"data.planted.num_tokens={data.planted.num_tokens} does not fit into "
        f"training.length={training.shortest}",
    )
    repeated = data.repeated
    require(
        repeated.share > 0 or repeated == RepeatedConfig(),
        "data.repeated is set, but data.repeated.share=0 repeats nothing; raise the share",
    )
    require(
        repeated.min_length <= repeated.max_length,
        f"data.repeated.min_length={repeated.min_length} is above max_length={repeated.max_length}",
    )
    require(
        repeated.share == 0 or 2 * repeated.max_length <= training.shortest,
        f"data.repeated.max_length={repeated.max_length} does not fit twice into "
        f"training.length={training.shortest}",
    )
    require(
        data.planted.share + repeated.share <= 1,
        f"data.planted.share={data.planted.share} and data.repeated.share={repeated.share} add up "
        "to more than 1",
    )
    require(
        (data.train_files is None) == (data.heldout_files is None),
        "data.train_files and data.heldout_files go together",
    )
    require(
        (data.tokenizer.name is None) != (data.tokenizer.train_vocab is None),
        "set exactly one of data.tokenizer.name and data.tokenizer.train_vocab",
    )
    for number, part in enumerate(data.parts()):
        key = f"data.corpus[{number}]" if data.corpora else "data.corpus"
        require(
            part.corpus.path is not None or part.corpus.source not in ("c4_files", "files", "text"),
            f"{key}.source={part.corpus.source} needs {key}.path",
        )
    _check_mixture(data, require)


def _check_mixture(data: DataConfig, require: Require) -> None:
    names, total = [part.name for part in data.corpora], sum(part.weight for part in data.corpora)
    for number, part in enumerate(data.corpora):
        require(
            re.fullmatch(r"\w[\w-]*", part.name) is not None and names.count(part.name) == 1,
            f"data.corpus[{number}].name={part.name} must be letters and digits, and another than "
            "those of the other corpora: it names a folder, and a loss in the metrics",
        )
        require(
            part.weight / total >= LEAST_SHARE,
            f"data.corpus[{number}].weight={part.weight} is less than {LEAST_SHARE} of all; leave "
            "it out or raise it",
        )
    require(
        not data.corpora or data.train_files is None,
        "data.train_files takes the place of data.corpus, which has a list; leave one of them out",
    )


def check_model(model: ModelConfig, origin: str) -> None:
    """Also used for a task's model. Upstream would fail with an assertion."""
    require = partial(_require, origin)
    require(
        model.architecture != "olmo"
        or model.activation_type != "swiglu"
        or model.mlp_hidden_size is None
        or model.mlp_hidden_size % 2 == 0,
        f"model.mlp_hidden_size={model.mlp_hidden_size} must be even: swiglu takes half of it for "
        "its gate",
    )
    require(
        model.embedding_size is None or model.embedding_size >= max(model.vocab_size, 1),
        f"model.embedding_size={model.embedding_size} is below model.vocab_size="
        f"{model.vocab_size}; raise it or leave it out",
    )
    require(
        model.n_kv_heads is None or model.n_heads % model.n_kv_heads == 0,
        f"model.n_heads={model.n_heads} is not a multiple of model.n_kv_heads={model.n_kv_heads}",
    )
    require(
        model.d_model % model.n_heads == 0 or model.head_width is not None,
        f"model.d_model={model.d_model} is not a multiple of model.n_heads={model.n_heads}; change "
        "one of them, or set model.head_width",
    )
    require(
        model.attention_layer_norm or not model.attention_norm_per_head,
        "model.attention_norm_per_head=true is set, but model.attention_layer_norm=false norms "
        "nothing; set both",
    )
    require(
        not (model.qkv_bias and model.include_bias),
        "model.qkv_bias=true is set, but model.include_bias=true adds all biases; remove one",
    )
    require(
        model.alibi or model.alibi_bias_max == 8.0,
        f"model.alibi_bias_max={model.alibi_bias_max} is set, but model.alibi=false has no bias",
    )
    require(not (model.rope and model.alibi), "model.rope and model.alibi exclude each other")
    require(
        0 < model.rotary_fraction <= 1,
        f"model.rotary_fraction={model.rotary_fraction} must lie in (0, 1]",
    )
    require(
        model.rope or model.rotary_fraction == 1.0,
        f"model.rotary_fraction={model.rotary_fraction} is set, but model.rope=false rotates "
        "nothing",
    )
