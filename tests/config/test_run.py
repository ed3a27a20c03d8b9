"""Settings that are out of range or do not fit together are refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.run import config_from_dict, flatten, load_saved_config, save_config
from olmo_sparsity.config.schema import schema_fields
from olmo_sparsity.config.sections import RunConfig

MINIMAL = {"data": {"tokenizer": {"train_vocab": 300}}}
YARN = {"scaling": "yarn", "factor": 4, "original_length": 64}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"trainin": {"length": 3}}, "unknown key 'trainin'; did you mean 'training"),
        ({"training": {"lenght": 3}}, "did you mean 'training.length'"),
        ({"training": {"warmup_steps": 3}}, "did you mean 'optimizer.warmup_steps'"),
        (
            {"training": {"checkpoint_every": 2}},
            "unset it (--training.checkpoint_every=null), or set training.activation_checkpointing "
            "to true",
        ),
        (
            {"training": {"activation_memory_budget": 0.5}},
            "training.compile=false does not use it; unset it "
            "(--training.activation_memory_budget=null), or set training.compile to true",
        ),
        (
            {
                "training": {
                    "activation_memory_budget": 0.5,
                    "activation_checkpointing": True,
                    "compile": True,
                }
            },
            "both compute layers again; set the second to false",
        ),
        ({"training": {"length": "long"}}, "training.length must be a whole number, not 'long'"),
        ({"training": {"precision": "fp8"}}, "must be one of auto, fp32, bf16, not 'fp8'"),
        ({"positions": {"num_chunks": 3}}, "positions.scheme=contiguous does not use it"),
        ({"positions": {"scheme": "pose"}}, "needs positions.target_length"),
        (
            {"positions": {"scheme": "pose", "target_length": 64}, "training": {"length": 128}},
            "positions.target_length=64 is below training.length=128",
        ),
        ({"positions": {"scheme": "pose", "target_length": 4096}}, "model.max_sequence_length"),
        ({"positions": {"per_document": True}}, "needs data.mask_documents=true"),
        ({"positions": {"factor": 4}}, "positions.scaling=none does not use it"),
        ({"positions": {"scaling": "ntk"}}, "positions.scaling=ntk needs positions.factor"),
        ({"positions": YARN, "model": {"rope": False, "alibi": True}}, "positions.scaling=yarn"),
        ({"positions": YARN | {"beta_slow": 32}}, "beta_slow=32.0 must be below"),
        (
            {"positions": YARN | {"scaling": "llama3", "low_frequency_factor": 5}},
            "low_frequency_factor=5.0 must be below positions.high_frequency_factor=4.0",
        ),
        ({"model": {"rope_scaling": {"rope_type": "yarn"}}}, "ignored: set positions.scaling"),
        ({"model": {"attention_norm_per_head": True}}, "needs model.attention_layer_norm=true"),
        ({"model": {"qkv_bias": True, "include_bias": True}}, "adds all biases"),
        ({"model": {"flash_attention": True}}, "model.flash_attention would be ignored"),
        ({"model": {"rope": True, "alibi": True}}, "exclude each other"),
        ({"model": {"rope": False, "rotary_fraction": 0.5}}, "rotates nothing"),
        (
            {"optimizer": {"name": "muon"}, "engine": {"name": "zero1"}},
            "optimizer.name=muon needs whole matrices, which engine.name=zero1 never gathers",
        ),
        ({"optimizer": {"momentum": 0.9}}, "optimizer.name=adamw does not use it"),
        ({"model": {"rope": False, "nope_every": 2}}, "rotates in no layer"),
        ({"model": {"n_layers": 2, "nope_every": 3}}, "leaves no layer of model.n_layers=2"),
        ({"model": {"d_model": 10, "n_heads": 3}}, "not a multiple of model.n_heads=3"),
        ({"data": {"tokenizer": {"name": "a", "train_vocab": 300}}}, "exactly one of"),
        ({"data": {"corpus": {"source": "c4_files"}}}, "needs data.corpus.path"),
        ({"checkpoint": {"keep_steps": [0, 3, 7]}, "training": {"num_steps": 6}}, "keep_steps=[0"),
        ({"data": {"transform_options": {"share": 0.5}}}, "data.transform is not"),
        ({"model": {"alibi_bias_max": 4.0}}, "has no bias"),
        ({"optimizer": {"schedule": "constant", "final_lr_share": 0.1}}, "optimizer.schedule"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate=nan"),
        ({"model": {"n_kv_heads": 5}}, "not a multiple of model.n_kv_heads=5"),
        ({"engine": {"name": "zero3"}, "training": {"compile": True}}, "training.compile=true"),
        (
            {"engine": {"name": "zero2"}, "logging": {"layer_gradient_norms": True}},
            "engine.name=zero2 does not keep; pass --engine.name=fsdp",
        ),
        ({"training": {"length": [{"tokens": 16}, {"tokens": 32}]}}, "training.length"),
        (
            {"training": {"length": [{"tokens": 16, "until": 9}, {"tokens": 32, "until": 12}]}},
            "the last none",
        ),
        (
            {"training": {"num_steps": 9, "length": [{"tokens": 8, "until": 9}, {"tokens": 32}]}},
            "[9] must rise, below training.num_steps=9",
        ),
        ({"training": {"length": [{"tokens": 24, "until": 9}, {"tokens": 32}]}}, "training.length"),
        ({"training": {"length": [{"tokens": 1, "until": 9}]}}, "training.length[0].tokens=1"),
        ({"training": {"length": []}}, "training.length=[] must be a list of sections with tokens"),
        ({"run_folder": 2024}, "run_folder must be a string, but 2024 is a number"),
        ({"optimizer": 5}, "optimizer must be a mapping, not 5"),
        ({"model": {"residual_dropout": 1.5}}, "model.residual_dropout=1.5 must be at most 0.999"),
        ({"model": {"mlp_hidden_size": 3}}, "model.mlp_hidden_size=3 must be even"),
        ({"model": {"vocab_size": 300, "embedding_size": 10}}, "model.embedding_size=10 is below"),
        ({"data": {"corpus": {"source": "jsonl"}}}, "data.corpus.source=files"),
        ({"data": {"corpus": {"source": "parquet"}}}, "data.corpus.source=files"),
        ({"training": {"gradient_accumulation_steps": 4}}, "training.micro_batch_size"),
        ({"gradient_accumulation": 4}, "training.micro_batch_size"),
        ({"data": {"tokenizer": {"eos_token": "</s>"}}}, "end-of-text token"),
        ({"model": {"rope_theta": float("inf")}}, "model.rope_theta=inf must be at most"),
        (
            {"model": {"query_scale_length": 16, "query_scale_learned": True}},
            "query_scale_length=16.0 and model.query_scale_learned=true",
        ),
        ({"model": {"query_scale_length": float("inf")}}, "query_scale_length=inf must be at most"),
        ({"model": {"alibi_bias_max": float("inf"), "alibi": True}}, "alibi_bias_max=inf must be"),
        (
            {"positions": {"scheme": "pose", "target_length": 0}},
            "positions.target_length=0 must be at least 2",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_from_dict(wrong | {"data": MINIMAL["data"] | wrong.get("data", {})})


def test_a_saved_config_may_hold_removed_settings_that_meant_nothing(tmp_path: Path) -> None:
    config, path = config_from_dict(MINIMAL), tmp_path / "config.yaml"
    save_config(config, path)
    saved = yaml.safe_load(path.read_text())
    saved["data"] |= {"train_files": None, "heldout_files": None, "token_dtype": "uint16"}
    path.write_text(yaml.safe_dump(saved))
    assert load_saved_config(path) == config
    saved["data"]["train_files"] = ["a.npy"]
    path.write_text(yaml.safe_dump(saved))
    with pytest.raises(ConfigError, match=r"data\.train_files"):
        load_saved_config(path)


def test_a_run_on_planted_text_of_an_earlier_version_loads_and_differs_from_any_other(
    tmp_path: Path,
) -> None:
    config, path = config_from_dict(MINIMAL), tmp_path / "config.yaml"
    save_config(config, path)
    saved = yaml.safe_load(path.read_text())
    saved["data"] |= {"planted": {"share": 0.0}, "repeated": {"share": 0.0, "of": "random"}}
    saved["evaluation"]["track"] = 64
    path.write_text(yaml.safe_dump(saved))
    assert load_saved_config(path) == config
    saved["data"]["planted"]["share"] = 0.5
    path.write_text(yaml.safe_dump(saved))
    loaded = load_saved_config(path)
    assert loaded.model == config.model
    assert flatten(loaded)["data.transform_options.planted.share"] == 0.5


def _numbers(schema: type, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, item in schema_fields(schema).items():
        kind = item.kind
        if is_dataclass(kind):
            yield from _numbers(kind, (*above, name))
        elif {int, float} & {kind, *get_args(kind)} and item.properties.refused is None:
            yield (*above, name)


@pytest.mark.parametrize("path", list(_numbers(RunConfig)), ids=".".join)
def test_a_number_without_end_is_refused_for_every_setting(path: tuple[str, ...]) -> None:
    for number in (10**31, float("inf"), float("nan")):
        wrong: Any = number
        for name in reversed(path):
            wrong = {name: wrong}
        with pytest.raises(ConfigError, match=rf"{'.'.join(path)}( |=)"):
            config_from_dict(wrong)
