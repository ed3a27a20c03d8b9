"""Weights travel between OLMo's code and Hugging Face's, and the logits stay what they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.manifest import MANIFEST, write_manifest
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.run import load_config
from olmo_sparsity.config.text import PositionsConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.checkpoint_files import WEIGHTS, fill, part_name, write_index
from olmo_sparsity.models.huggingface.computation import computation_of, describe_changes
from olmo_sparsity.models.huggingface.config_of_weights import config_of
from olmo_sparsity.models.huggingface.exchange import check_exportable, export, import_weights
from olmo_sparsity.models.huggingface.families import family_of
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.models.load import load_model
from tests.support import models as tiny_models
from tests.support.models import COUNTED, FIELDS, GAPPED, SIZES, draw_tokens

CONFIGS = Path(__file__).parents[2] / "configs"

TINY: dict[str, Any] = FIELDS | {
    "vocab_size": 259,
    "max_sequence_length": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "rope_theta": 500,
}
OLMO_1 = {"layer_norm_with_affine": False}
OLMO_2 = {"layer_norm_type": "rms", "norm_after": True, "attention_layer_norm": True}
OLMO_3 = OLMO_2 | {"architecture": "olmo3", "n_layers": 4, "sliding_window": 5}
LLAMA = {"layer_norm_type": "rms"}
YARN = {"scaling": "yarn", "factor": 4, "original_length": 8, "attention_factor": 1.3}
LLAMA_3 = {"scaling": "llama3", "factor": 8, "original_length": 16}
NEOX = {"architecture": "gpt_neox", "rotary_fraction": 0.5}

EXPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo": ("OlmoForCausalLM", OLMO_1),
    "olmo, clipped, untied": (
        "OlmoForCausalLM",
        OLMO_1 | {"clip_qkv": 0.3, "weight_tying": False, "rope_full_precision": False},
    ),
    "olmo 2, grouped, untied": (
        "Olmo2ForCausalLM",
        OLMO_2 | {"n_kv_heads": 2, "weight_tying": False, "layer_norm_eps": 1e-3},
    ),
    "llama, wide heads": ("LlamaForCausalLM", LLAMA | {"head_width": 12, "n_kv_heads": 2}),
    "second layer without positions": (
        "SmolLM3ForCausalLM",
        LLAMA | {"nope_every": 2, "n_kv_heads": 2},
    ),
    "olmo 2, ntk": ("Olmo2ForCausalLM", OLMO_2 | {"positions": {"scaling": "ntk", "factor": 4}}),
    "olmo 2, yarn": ("Olmo2ForCausalLM", OLMO_2 | {"positions": YARN}),
    "llama, llama3": ("LlamaForCausalLM", LLAMA | {"positions": LLAMA_3}),
    "olmo 3": ("Olmo3ForCausalLM", OLMO_3 | {"n_kv_heads": 2}),
    "olmo 3, yarn": ("Olmo3ForCausalLM", OLMO_3 | {"positions": YARN}),
    "gpt-neox, yarn": ("GPTNeoXForCausalLM", NEOX | {"positions": YARN}),
    "gpt-neox": ("GPTNeoXForCausalLM", NEOX),
}


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<{name}>") for name in ("unused", "eos", "pad")])
    return tokenizer


def write_checkpoint(folder: Path, **changes: Any) -> torch.nn.Module:
    return tiny_models.write_checkpoint(folder, byte_tokenizer(), **(TINY | changes))


# --- export -------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(("class_name", "changes"), EXPORTED.values(), ids=EXPORTED)
def test_transformers_computes_the_same_from_an_export_and_a_run_begins_there(
    tmp_path: Path, class_name: str, changes: dict[str, Any]
) -> None:
    model = write_checkpoint(tmp_path / "checkpoints" / "step000001", **changes)
    assert export(tmp_path, tmp_path / "out") == class_name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == class_name
    assert theirs.dtype == torch.float32
    assert (theirs.config.eos_token_id, theirs.config.pad_token_id) == (257, 258)
    assert theirs.config.max_position_embeddings == 256
    assert theirs.config.tie_word_embeddings == changes.get("weight_tying", True)
    tokens_BL, near = draw_tokens(), {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(theirs(tokens_BL).logits, model(tokens_BL, COUNTED), **near)
    again = load_model(str(tmp_path / "out"), device="cpu").model
    if changes.get("positions", {}).get("scaling") == "ntk":  # a base, to transformers
        base = theirs.config.rope_parameters["rope_theta"]
        changes = changes | {"positions": {}, "rope_theta": base}
    # A run may prepare the model for longer texts than its source knew.
    scaling = PositionsConfig(**changes.get("positions", {})).rope_scaling
    changes = TINY | changes | {"max_sequence_length": 1024, "rope_scaling": scaling}
    config = ModelConfig(**{name: v for name, v in changes.items() if name != "positions"})
    begun = build_model(config).eval()
    begun.load_state_dict(import_weights(str(tmp_path / "out"), config))
    for found in (again, begun):
        torch.testing.assert_close(found(tokens_BL, GAPPED), model(tokens_BL, GAPPED), **near)


def test_a_checkpoint_of_two_processes_is_exported(tmp_path: Path) -> None:
    """Each process saves weights into a file of its own, next to an index of all."""
    write_checkpoint(tmp_path / "step", **OLMO_1)
    export(tmp_path / "step", tmp_path / "whole")
    weights = load_file(tmp_path / "step" / WEIGHTS)
    (tmp_path / "step" / WEIGHTS).unlink()
    part_of = {name: number % 2 for number, name in enumerate(weights)}
    for part in range(2):
        own = {name: weight for name, weight in weights.items() if part_of[name] == part}
        save_file(own, tmp_path / "step" / part_name(part, 2), {"format": "pt"})
    write_index(tmp_path / "step", part_of, 2)
    (tmp_path / "step" / MANIFEST).unlink()
    write_manifest(tmp_path / "step")
    export(tmp_path / "step", tmp_path / "of_parts")
    exported = [load_file(tmp_path / name / WEIGHTS) for name in ("whole", "of_parts")]
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])


def test_the_tokenizer_travels_and_an_export_overwrites_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step", **OLMO_1)
    export(tmp_path / "step", tmp_path / "out")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), byte_tokenizer()
    for text in ("One way, <eos> and back.", "  zwölf\n\tñandúes — 12,345!"):
        assert theirs(text).input_ids == ours.encode(text).ids
        assert theirs.decode(theirs(text).input_ids) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (257, 258)
    assert theirs.model_max_length == 256
    assert load_model(str(tmp_path / "out"), device="cpu").tokenizer.get_vocab_size() == 259
    with pytest.raises(ConfigError, match="out' exists"):
        export(tmp_path / "step", tmp_path / "out")
    with pytest.raises(ConfigError, match="is a Hugging Face folder already"):
        export(tmp_path / "out", tmp_path / "again")


def test_a_gguf_file_is_not_exported(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ConfigError, match=r"model\.gguf' is a GGUF file; pass a run"):
        export(file, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "layer_norm_with_affine=True .* OlmoForCausalLM has False"),
        (OLMO_1 | {"rope": False}, "rope=False"),
        (OLMO_1 | {"query_scale_length": 40.0}, "query_scale_length=40.0"),
        (OLMO_1 | {"query_scale_learned": True}, "query_scale_learned=True .* pass the run itself"),
        (OLMO_1 | {"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-06 .* OlmoForCausalLM has 1e-05"),
        (OLMO_2 | {"clip_qkv": 8.0}, "clip_qkv=8.0 .* Olmo2ForCausalLM has None"),
        (LLAMA | {"attention_layer_norm": True}, "attention_norm_per_head=False .* Qwen3"),
        (OLMO_2 | {"head_width": 12}, "head_width=12 .* Olmo2"),
        (OLMO_2 | {"nope_every": 2}, "nope_every=2 .* Olmo2ForCausalLM has None"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"model.{problem}|{problem}"):
        check_exportable(ModelConfig(**(TINY | changes)))


def test_a_bias_of_the_output_has_no_counterpart(tmp_path: Path) -> None:
    theirs = tiny_models.tiny("Olmo2ForCausalLM", **(LIKE_LLAMA | {"attention_bias": True}))
    with torch.no_grad():
        theirs.model.layers[1].self_attn.o_proj.bias[3] = 1.0
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"layers.1.self_attn.o_proj.bias is not 0"):
        import_weights(str(tmp_path), ModelConfig(**config_of(str(tmp_path))))


# --- import -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("n_layers", 3, 2),
        ("n_kv_heads", 2, 4),
        ("layer_norm_type", "rms", "default"),
        ("embedding_size", 384, 259),
        ("architecture", "gpt_neox", "olmo"),
    ],
)
@pytest.mark.parametrize("kind", ["ours", "hugging face"])
def test_the_first_field_that_differs_is_named_with_both_values(
    sources: dict[str, Path], kind: str, field: str, value: Any, expected: Any
) -> None:
    config = ModelConfig(**(TINY | OLMO_1 | {field: value}))
    with pytest.raises(ConfigError) as error:
        import_weights(str(sources[kind]), config)
    assert f"has model.{field}={expected}" in str(error.value)
    assert f"this run {value}" in str(error.value)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    write_checkpoint(folder / "ours", **OLMO_1)
    export(folder / "ours", folder / "hugging face")
    return {path.name: path for path in folder.iterdir()}


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("class_name", "settings", "problem"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, "attention_bias=True"),
        ("LlamaForCausalLM", {"rope_parameters": DYNAMIC}, "rope_type=dynamic"),
        ("GPTNeoXForCausalLM", {"use_parallel_residual": False}, "use_parallel_residual=False"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("MistralForCausalLM", {}, "is mistral, not olmo, olmo2, llama"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1] * 36}, "no_rope_layers="),
        ("Olmo3ForCausalLM", {"layer_types": ["full_attention"] * 32}, "layer_types="),
    ],
)
def test_hugging_face_models_without_counterpart_are_refused(
    tmp_path: Path, class_name: str, settings: dict[str, Any], problem: str
) -> None:
    config_class = getattr(transformers, class_name).config_class
    settings = {"hidden_size": 32, "num_attention_heads": 4, "tie_word_embeddings": True} | settings
    config_class(**settings).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=problem):
        import_weights(str(tmp_path), ModelConfig(**TINY))


LIKE_LLAMA = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 256}
SCALED = {"factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
LIKE_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "OLMo 2": ("Olmo2ForCausalLM", {"rope_parameters": {"rope_theta": 500_000.0}}),
    "Llama 3.1": ("LlamaForCausalLM", {"rope_parameters": SCALED | LIKE_3}),
    "Llama, linear, wide heads": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "head_dim": 12},
    ),
    "Qwen 2.5": ("Qwen2ForCausalLM", {"rms_norm_eps": 1e-6, "tie_word_embeddings": True}),
    "Qwen 2.5, YaRN": ("Qwen2ForCausalLM", {"rope_parameters": SCALED | {"rope_type": "yarn"}}),
    "SmolLM 3": (
        "SmolLM3ForCausalLM",
        {"no_rope_layer_interval": 2, "tie_word_embeddings": True},
    ),
    "Qwen 3": ("Qwen3ForCausalLM", {"head_dim": 12, "tie_word_embeddings": True}),
}


@torch.no_grad()
@pytest.mark.parametrize(("class_name", "settings"), PUBLISHED.values(), ids=PUBLISHED)
def test_a_folder_of_transformers_computes_the_same_here_and_back_there(
    tmp_path: Path, class_name: str, settings: dict[str, Any]
) -> None:
    """Random in every weight, biases and norms too."""
    theirs = tiny_models.tiny(class_name, **(LIKE_LLAMA | settings))
    tiny_models.randomize_vectors(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    config = ModelConfig(**config_of(str(tmp_path / "theirs")))
    weights = import_weights(str(tmp_path / "theirs"), config)
    ours = build_model(config).eval()
    fill(ours, weights, "theirs")
    tokens_BL, near = draw_tokens(50), {"atol": 1e-5, "rtol": 1e-5}
    counted = torch.arange(50)[None]
    gapped = counted + 9 * (counted > 20)
    expected = theirs(tokens_BL).logits
    torch.testing.assert_close(ours(tokens_BL, counted), expected, **near)
    expected_gapped = HuggingFaceLM(theirs)(tokens_BL, gapped)
    torch.testing.assert_close(ours(tokens_BL, gapped), expected_gapped, **near)
    torch.testing.assert_close(
        ours.hidden(tokens_BL, gapped, num_last=7), ours.hidden(tokens_BL, gapped)[:, -7:], **near
    )
    positions = _positions_of(config)
    fields = {name: v for name, v in vars(config).items() if name != "rope_scaling"}
    folder = tmp_path / "step000001"
    tiny_models.write_checkpoint(folder, weights=weights, positions=positions, **fields)
    assert export(tmp_path / "step000001", tmp_path / "back") == class_name
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    torch.testing.assert_close(back(tokens_BL).logits, expected, **near)
    analysed = load_model(str(tmp_path / "step000001"), device="cpu").model
    torch.testing.assert_close(analysed(tokens_BL, gapped), expected_gapped, **near)


def _positions_of(config: ModelConfig) -> dict[str, Any]:
    names = {
        "rope_type": "scaling",
        "original_max_position_embeddings": "original_length",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
    }
    return {names.get(name, name): value for name, value in (config.rope_scaling or {}).items()}


def test_a_run_may_change_angles_but_forgets_none(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain", **OLMO_1)
    write_checkpoint(tmp_path / "scaled", **OLMO_1, positions=LLAMA_3)

    def begin(source: str, **changes: Any) -> str:
        positions = PositionsConfig(**changes.pop("positions", {}))
        config = ModelConfig(**(TINY | OLMO_1 | changes), rope_scaling=positions.rope_scaling)
        import_weights(str(tmp_path / source), config)
        theirs = ModelConfig(**config_of(str(tmp_path / source)))
        return describe_changes(theirs, config)

    assert begin("plain") == begin("scaled", positions=LLAMA_3) == ""
    assert begin("plain", rope_theta=10_000).endswith(
        "base 500, scaling none → base 10000, scaling none"
    )
    assert begin("scaled", positions=YARN).startswith("; changes its RoPE: base 500, scaling l")
    with pytest.raises(ConfigError, match=r"model\.rope_theta=100 must be at least 500\.0"):
        begin("plain", rope_theta=100)
    with pytest.raises(
        ConfigError, match=r"scales RoPE \(base 500, scaling llama3, .*not this run"
    ):
        begin("scaled")


EXTENDED: dict[str, tuple[int, int]] = {  # the vocabulary, and the rows of its embedding
    "extend_olmo_1b": (50280, 50304),
    "extend_llama_3.2_1b": (128256, 128256),
    "extend_qwen3_0.6b": (151669, 151936),
    "extend_olmo_3_7b": (100278, 100278),
}


def test_a_run_may_drop_the_positions_of_its_source(tmp_path: Path) -> None:
    """DroPE: the same weights, and no rotation."""
    model = write_checkpoint(tmp_path / "source", **LLAMA, rope_theta=1000.0)
    source = str(tmp_path / "source")
    config = ModelConfig(**(TINY | LLAMA | {"rope": False}))
    change = describe_changes(ModelConfig(**config_of(source)), config)
    assert change.endswith("base 1000, scaling none → none")
    dropped = build_model(config).eval()
    dropped.load_state_dict(import_weights(source, config))
    tokens_BL = draw_tokens()
    moved = dropped(tokens_BL, GAPPED)
    torch.testing.assert_close(moved, dropped(tokens_BL, COUNTED))
    assert not torch.allclose(moved, model(tokens_BL, GAPPED), atol=1e-3)
    write_checkpoint(tmp_path / "without", **LLAMA, rope=False)
    with pytest.raises(ConfigError, match="rope=False, this run True"):
        import_weights(str(tmp_path / "without"), ModelConfig(**(TINY | LLAMA)))


@pytest.mark.parametrize("size", ["150m", "1b"])
def test_the_configs_of_olmo_2_are_exported_as_such(size: str) -> None:
    model = load_config(CONFIGS / f"c4_{size}_olmo2_pose.yaml").model
    assert family_of(computation_of(model)).class_name == "Olmo2ForCausalLM"


OF_ALL = {"hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False}
CONFIG_JSON = """
extend_olmo_1b:
  {model_type: olmo, hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16,
  num_attention_heads: 16, num_key_value_heads: 16, max_position_embeddings: 2048,
  rope_theta: 10000.0, clip_qkv: null, vocab_size: 50304}
extend_llama_3.2_1b:
  {model_type: llama, hidden_size: 2048, intermediate_size: 8192, head_dim: 64,
  num_hidden_layers: 16, num_attention_heads: 32, num_key_value_heads: 8, rms_norm_eps: 1.0e-05,
  max_position_embeddings: 131072, rope_theta: 500000.0, vocab_size: 128256, mlp_bias: false,
  rope_scaling: {factor: 32.0, high_freq_factor: 4.0, low_freq_factor: 1.0,
  original_max_position_embeddings: 8192, rope_type: llama3}}
extend_qwen3_0.6b:
  {model_type: qwen3, hidden_size: 1024, intermediate_size: 3072, head_dim: 128,
  num_hidden_layers: 28, num_attention_heads: 16, num_key_value_heads: 8, rms_norm_eps: 1.0e-06,
  max_position_embeddings: 40960, rope_theta: 1000000, rope_scaling: null, vocab_size: 151936,
  use_sliding_window: false, sliding_window: null, max_window_layers: 28}
extend_olmo_3_7b:
  {model_type: olmo3, hidden_size: 4096, intermediate_size: 11008, num_hidden_layers: 32,
  num_attention_heads: 32, num_key_value_heads: 32, rms_norm_eps: 1.0e-06, sliding_window: 4096,
  max_position_embeddings: 65536, rope_theta: 500000, vocab_size: 100278,
  rope_scaling: {attention_factor: 1.2079441541679836, beta_fast: 32.0, beta_slow: 1.0, factor: 8.0,
  original_max_position_embeddings: 8192, rope_type: yarn}, tie_word_embeddings: false}
"""


@pytest.mark.parametrize("name", EXTENDED)
def test_a_config_that_extends_a_model_is_of_its_shape(tmp_path: Path, name: str) -> None:
    published = OF_ALL | yaml.safe_load(CONFIG_JSON)[name]
    (tmp_path / "config.json").write_text(json.dumps(published))
    run = load_config(CONFIGS / f"{name}.yaml")
    config = run.model
    config.vocab_size, config.embedding_size = EXTENDED[name]
    implied = ModelConfig(**config_of(str(tmp_path)))
    found = computation_of(implied)
    assert {name: found.get(name) for name in computation_of(config)} == computation_of(config)
    assert config.rope_theta == implied.rope_theta
    assert config.max_sequence_length > implied.max_sequence_length
    assert "scaling" in describe_changes(implied, config)
    assert run.training.length <= published["max_position_embeddings"]
