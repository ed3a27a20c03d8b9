"""What can be known wrong from a config alone, before anything is read or built.

Place in the flow: config.py → **refused or passed** → everything else.
"""

from __future__ import annotations

from operator import attrgetter

from olmo_sparsity.config import ModelConfig, RepeatedConfig, RunConfig
from olmo_sparsity.errors import ConfigError

_AT_LEAST_ONE = {
    "training": ("length", "batch_size", "num_steps", "micro_batch_size"),
    "evaluation": ("interval_steps", "num_sequences", "batch_size"),
    "checkpoint": ("interval_steps", "keep", "keep_every_steps"),
    "logging": ("interval_steps",),
}
_MODEL_AT_LEAST_ONE = (
    *("d_model", "n_heads", "n_layers", "n_kv_heads", "max_sequence_length", "rope_theta"),
    *("mlp_ratio", "mlp_hidden_size"),
)
_MODEL_RANGES = [
    ("attention_dropout", 0.0, 0.999),
    ("residual_dropout", 0.0, 0.999),
    ("embedding_dropout", 0.0, 0.999),
    ("layer_norm_eps", 0.0, 1.0),
    ("init_std", 0.0, 1e6),
    ("emb_init_std", 0.0, 1e6),
    ("init_cutoff_factor", 1e-3, 1e6),
    ("clip_qkv", 1e-30, 1e30),
    ("vocab_size", 0, 10**9),
]
_RANGES = [
    ("", "seed", 0, 2**62),
    ("optimizer", "learning_rate", 0.0, 1e30),
    ("optimizer", "weight_decay", 0.0, 1.0),
    ("optimizer", "beta1", 0.0, 0.9999999),
    ("optimizer", "beta2", 0.0, 0.9999999),
    ("optimizer", "eps", 1e-30, 1.0),
    ("optimizer", "warmup_steps", 0, 10**12),
    ("optimizer", "final_lr_share", 0.0, 1.0),
    ("training", "max_grad_norm", 1e-12, 1e12),
    ("training", "num_steps", 1, 10**12),
    ("evaluation", "length", 2, 10**9),
    ("evaluation", "num_sequences", 1, 10**9),
    ("evaluation", "sparsity_targets", 0, 10**6),
    ("data", "heldout_share", 0.0, 0.999),
    ("data.planted", "share", 0.0, 1.0),
    ("data.planted", "num_tokens", 1, 16),
    ("data.planted", "num_values", 2, 4096),
    ("data.repeated", "share", 0.0, 1.0),
    ("data.repeated", "min_length", 2, 10**9),
]


def check(config: RunConfig, origin: str) -> None:
    """What can be known wrong from the config alone. Each message: field, value, what to do."""
    training, positions, model, data = config.training, config.positions, config.model, config.data
    check_model(model, origin)

    def require(holds: bool, message: str) -> None:
        if not holds:
            raise ConfigError(f"{origin}: {message}")

    for section, names in _AT_LEAST_ONE.items():
        for name in names:
            value = getattr(getattr(config, section), name)
            require(value is None or value >= 1, f"{section}.{name}={value} must be at least 1")
    for section, name, lowest, highest in _RANGES:
        value = attrgetter(f"{section}.{name}".lstrip("."))(config)
        require(
            value is None or lowest <= value <= highest,
            f"{section}.{name}={value}".lstrip(".") + f" must lie between {lowest} and {highest}",
        )
    require(training.length >= 2, f"training.length={training.length} leaves nothing to predict")
    require(
        config.init_from is None or config.branch_from is None,
        f"init_from={config.init_from} and branch_from={config.branch_from} exclude each other: "
        "the first takes weights alone, the second goes on from where that run was",
    )
    require(
        not config.evaluation.sparsity_targets or training.length >= 32,
        f"evaluation.sparsity_targets={config.evaluation.sparsity_targets} asks in windows within "
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
    if positions.scheme == "pose":
        require(
            1 <= positions.num_chunks <= training.length,
            f"positions.num_chunks={positions.num_chunks} must lie between 1 and "
            f"training.length={training.length}",
        )
    require(
        model.max_sequence_length >= config.largest_length,
        f"model.max_sequence_length={model.max_sequence_length} is below the positions trained "
        f"({config.largest_length}); raise it to at least that",
    )
    require(
        data.train_files is not None or data.token_dtype == "uint16",
        f"data.token_dtype={data.token_dtype} is for data.train_files; a prepared folder "
        "knows its own",
    )
    require(
        not (data.mask_documents and positions.skip_text),
        "data.mask_documents=true needs every end of a document, and positions.skip_text=true "
        "leaves some out; set one of them to false",
    )
    require(
        not data.mask_documents or model.query_scale_length is None,
        f"model.query_scale_length={model.query_scale_length} counts the keys of a whole sequence, "
        "which data.mask_documents=true hides; set one of them back",
    )
    for name, share in (("planted", data.planted.share), ("repeated", data.repeated.share)):
        require(
            share == 0 or not positions.skip_text,
            f"data.{name}.share={share} is set, but positions.skip_text=true would skip what is "
            f"{name}",
        )
    require(
        data.planted.share == 0 or training.length >= data.planted.num_tokens + 2,
        f"data.planted.num_tokens={data.planted.num_tokens} does not fit into "
        f"training.length={training.length}",
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
        repeated.share == 0 or 2 * repeated.max_length <= training.length,
        f"data.repeated.max_length={repeated.max_length} does not fit twice into "
        f"training.length={training.length}",
    )
    require(
        data.planted.share + repeated.share <= 1,
        f"data.planted.share={data.planted.share} and data.repeated.share={repeated.share} add up "
        "to more than 1",
    )
    require(
        config.engine.name != "zero3" or not training.compile,
        "training.compile=true does not go with engine.name=zero3, which swaps weights in and out "
        "inside the compiled function; set training.compile=false or take zero2",
    )
    require(
        (data.train_files is None) == (data.heldout_files is None),
        "data.train_files and data.heldout_files go together",
    )
    require(
        (data.tokenizer.name is None) != (data.tokenizer.train_vocab is None),
        "set exactly one of data.tokenizer.name and data.tokenizer.train_vocab",
    )
    share = data.corpus.max_bad_share
    require(0 <= share <= 1, f"data.corpus.max_bad_share={share} must lie between 0 and 1")
    require(
        data.corpus.max_documents is None or data.corpus.max_documents >= 1,
        f"data.corpus.max_documents={data.corpus.max_documents} leaves no document",
    )
    require(
        data.tokenizer.train_vocab is None or data.tokenizer.train_vocab >= 257,
        f"data.tokenizer.train_vocab={data.tokenizer.train_vocab} is below 257: the bytes and "
        "the end of a text",
    )
    if data.corpus.source in ("c4_files", "files", "text"):
        require(
            data.corpus.path is not None,
            f"data.corpus.source={data.corpus.source} needs data.corpus.path",
        )


def check_model(model: ModelConfig, origin: str) -> None:
    """Also of a task's model. Else upstream would say it, by a failed assertion."""

    def require(holds: bool, message: str) -> None:
        if not holds:
            raise ConfigError(f"{origin}: {message}")

    for name in _MODEL_AT_LEAST_ONE:
        value = getattr(model, name)
        require(value is None or value >= 1, f"model.{name}={value} must be at least 1")
    for name, lowest, highest in _MODEL_RANGES:
        value = getattr(model, name)
        require(
            value is None or lowest <= value <= highest,
            f"model.{name}={value} must lie between {lowest} and {highest}",
        )
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
        model.d_model % model.n_heads == 0,
        f"model.d_model={model.d_model} is not a multiple of model.n_heads={model.n_heads}",
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
    scale_length = model.query_scale_length
    require(
        scale_length is None or scale_length >= 2,
        f"model.query_scale_length={scale_length} must be at least 2, a number of keys",
    )
