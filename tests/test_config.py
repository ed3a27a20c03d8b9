"""Configuration: nothing unknown, nothing ignored, and what is written reads back the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from olmo_sparsity.config import RunConfig
from olmo_sparsity.config_file import config_from_dict, flatten, load_config, save_config
from olmo_sparsity.config_names import NAMES
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.model.load import build_model
from olmo_sparsity.training.estimate import count_parameters, estimate

CONFIGS = Path(__file__).parents[1] / "configs"
MINIMAL = {"data": {"tokenizer": {"train_vocab": 300}}}


def given(data: dict | None = None, **sections: Any) -> dict:
    return {"data": MINIMAL["data"] | (data or {}), **sections}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"trainin": {"length": 3}}, "unknown key 'trainin'; did you mean 'training"),
        ({"training": {"lenght": 3}}, "did you mean 'training.length'"),
        ({"training": {"warmup_steps": 3}}, "did you mean 'optimizer.warmup_steps'"),
        ({"training": {"length": "long"}}, "training.length"),
        ({"training": {"precision": "fp8"}}, "expected one of"),
        ({"positions": {"num_chunks": 3}}, "positions.scheme=contiguous does not use it"),
        ({"positions": {"scheme": "pose"}}, "needs positions.target_length"),
        (
            {"positions": {"scheme": "pose", "target_length": 64}, "training": {"length": 128}},
            "positions.target_length=64 is below training.length=128",
        ),
        (
            {"positions": {"scheme": "pose", "target_length": 4096}},
            "model.max_sequence_length=1024 is below the positions trained (4096)",
        ),
        ({"training": {"batch_size": 10, "micro_batch_size": 4}}, "not a multiple"),
        ({"model": {"flash_attention": True}}, "model.flash_attention would be ignored"),
        ({"model": {"rope": True, "alibi": True}}, "exclude each other"),
        ({"model": {"rope": False, "rotary_fraction": 0.5}}, "rotates nothing"),
        ({"model": {"query_scale_length": 1.0}}, "model.query_scale_length=1.0 must be at least 2"),
        ({"model": {"d_model": 10, "n_heads": 3}}, "not a multiple of model.n_heads=3"),
        ({"data": {"tokenizer": {"train_vocab": 256}}}, "must be at least 257"),
        (
            {"data": {"corpus": {"max_documents": 0}}},
            "data.corpus.max_documents=0 must be at least 1",
        ),
        ({"data": {"tokenizer": {"name": "a", "train_vocab": 300}}}, "exactly one of"),
        ({"data": {"corpus": {"source": "c4_files"}}}, "needs data.corpus.path"),
        ({"data": {"corpus": {"source": "embedded", "path": "x"}}}, "does not use it"),
        ({"data": {"train_files": ["a.npy"]}}, "go together"),
        (
            {"data": {"mask_documents": True}, "model": {"query_scale_length": 16}},
            "query_scale_length=16.0 counts the keys",
        ),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep=0"),
        (
            {"checkpoint": {"keep_steps": [0, 3, 7]}, "training": {"num_steps": 6}},
            "keep_steps=[0, 7] never come: steps run from 1 to",
        ),
        ({"engine": {"name": "zero4"}}, "engine.name"),
        (
            {"engine": {"name": "ddp", "deepspeed_config": "x.json"}},
            "engine.deepspeed_config is set, but engine.name=ddp",
        ),
        ({"data": {"token_dtype": "uint32"}}, "is for data.train_files"),
        ({"data": {"repeated": {"share": 0.5, "min_length": 20, "max_length": 10}}}, "above max_"),
        ({"data": {"repeated": {"share": 0.5, "max_length": 10**6}}}, "does not fit twice"),
        ({"data": {"repeated": {"of": "text"}}}, "repeats nothing"),
        ({"data": {"repeated": {"share": 0.6}, "planted": {"share": 0.6}}}, "more than 1"),
        ({"model": {"alibi_bias_max": 4.0}}, "has no bias"),
        (
            {"optimizer": {"schedule": "constant", "final_lr_share": 0.1}},
            "optimizer.schedule=constant does not use it",
        ),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate=nan"),
        ({"optimizer": {"beta2": 2.0}}, "optimizer.beta2=2.0"),
        ({"model": {"n_heads": 0}}, "model.n_heads=0"),
        ({"model": {"n_kv_heads": 5}}, "not a multiple of model.n_kv_heads=5"),
        ({"checkpoint": {"interval_steps": 0}}, "checkpoint.interval_steps=0"),
        ({"evaluation": {"num_sequences": 0}}, "evaluation.num_sequences=0"),
        ({"training": {"max_grad_norm": -1.0}}, "training.max_grad_norm=-1.0"),
        (
            {"engine": {"name": "zero3"}, "training": {"compile": True}},
            "training.compile=true does not go with engine.name=zero3",
        ),
        ({"run_folder": 2024}, "config: run_folder=2024 is no text to YAML; quote it"),
        ({"data": {"corpus": {"path": 1e3}}}, "data.corpus.path=1000.0 is no text"),
        ({"optimizer": 5}, "not a subclass of OptimizerConfig"),
        ({"training": {"num_steps": 0}}, "must be at least 1"),
        ({"model": {"residual_dropout": 1.5}}, "model.residual_dropout=1.5 must be at most 0.999"),
        ({"model": {"embedding_dropout": -0.1}}, "model.embedding_dropout=-0.1"),
        ({"model": {"attention_dropout": float("nan")}}, "model.attention_dropout=nan"),
        ({"model": {"mlp_hidden_size": 3}}, "model.mlp_hidden_size=3 must be even"),
        ({"model": {"mlp_hidden_size": 0}}, "model.mlp_hidden_size=0 must be at least 1"),
        ({"model": {"mlp_ratio": 0}}, "model.mlp_ratio=0"),
        ({"model": {"init_std": -1.0}}, "model.init_std=-1.0"),
        ({"model": {"clip_qkv": -1.0}}, "model.clip_qkv=-1.0"),
        ({"model": {"vocab_size": 300, "embedding_size": 10}}, "model.embedding_size=10 is below"),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_from_dict(given(**wrong))


def test_overrides_reach_their_key(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("data: {tokenizer: {train_vocab: 300}}\n")
    config = load_config(path, ["--training.length=32", "--model.d_model=96", "--seed=4"])
    assert (config.training.length, config.model.d_model, config.seed) == (32, 96, 4)
    with pytest.raises(ConfigError, match="--seed=VALUE"):
        load_config(path, ["--seed"])


def test_null_takes_back_a_value_or_a_section(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("""
        data: {tokenizer: {train_vocab: 300}, repeated: {share: 0.5}}
        positions: {scheme: pose, target_length: 64}
    """)
    taken_back = ["--positions.target_length=null", "--data.repeated=null"]
    config = load_config(path, [*taken_back, "--positions.scheme=contiguous"])
    assert config == config_from_dict({"data": {"tokenizer": {"train_vocab": 300}}})


def test_a_base_file_lies_beneath(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "seed: 1\ntraining: {length: 32, batch_size: 2}\ndata: {tokenizer: {train_vocab: 300}}\n"
    )
    path = tmp_path / "top.yaml"
    path.write_text("base: base.yaml\ntraining: {batch_size: 8}\n")
    config = load_config(path)
    assert (config.seed, config.training.length, config.training.batch_size) == (1, 32, 8)


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "\x00", "base: nowhere.yaml"])
def test_unreadable_files_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml|nowhere\.yaml"):
        load_config(path)


def test_a_missing_file_names_the_closest_one(tmp_path: Path) -> None:
    (tmp_path / "quick.yaml").write_text("seed: 1")
    with pytest.raises(ConfigError, match=r"did you mean '.*/quick\.yaml'"):
        load_config(tmp_path / "quik.yaml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_are_valid_and_read_back_the_same(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    save_config(config, tmp_path / "saved.yaml")
    assert flatten(load_config(tmp_path / "saved.yaml")) == flatten(config)


@pytest.mark.parametrize("scheme", ["contiguous", "randomized", "pose"])
def test_saved_configs_hold_only_what_applies(scheme: str, tmp_path: Path) -> None:
    positions = {"scheme": scheme}
    if scheme != "contiguous":
        positions["target_length"] = 256
    save_config(config_from_dict(given(positions=positions)), tmp_path / "saved.yaml")
    text = (tmp_path / "saved.yaml").read_text()
    assert ("num_chunks" in text) == (scheme == "pose")
    assert ("target_length" in text) == (scheme != "contiguous")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("c4_*.yaml")), ids=lambda path: path.stem)
def test_c4_configs_are_the_papers_and_as_large_as_they_say(path: Path) -> None:
    config = load_config(path)
    assert config.data.corpus.source == "c4"
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay) == (5e-5, 0.1)
    assert (optimizer.schedule, optimizer.warmup_steps) == ("linear", 300)
    assert (config.positions.scheme == "pose") == path.stem.endswith("pose")
    config.model.vocab_size, config.model.embedding_size = 50280, 50304
    with torch.device("meta"):
        parameters = count_parameters(build_model(config.model))
    said = re.search(r"\((\d+)M parameters", path.read_text())
    assert round(parameters / 1e6) == int(said[1])
    found = estimate(config)
    memory = re.match(r"([\d.]+) GiB .*optimizer ([\d.]+)", found["memory"])
    needs = re.search(r"(\d+) GiB of GPU memory, ([\d.]+) of them.*\n# (\S+) F", path.read_text())
    assert (round(float(memory[1])), f"{float(memory[2]):.1f}") == (int(needs[1]), needs[2])
    assert f"{float(found['FLOPs in all']):.1e}" == needs[3]


def test_rope_and_pose_configs_differ_in_positions_alone() -> None:
    for rope_path in CONFIGS.glob("c4_*_rope.yaml"):
        rope = flatten(load_config(rope_path))
        pose = flatten(load_config(str(rope_path).replace("_rope", "_pose")))
        different = {key for key in rope if rope[key] != pose[key]}
        assert different == {"run_folder", "positions.scheme", "positions.target_length"}


def test_names_of_olmo_are_understood() -> None:
    theirs = given(
        save_folder="runs/x", global_train_batch_size=8, training={"length": 100},
        max_duration="1.7e4T", optimizer={"betas": [0.8, 0.9]}, precision="amp_bf16",
        scheduler={"name": "cosine_with_warmup", "t_warmup": 7}, save_interval=5,
    )  # fmt: skip
    ours = given(
        run_folder="runs/x", training={"length": 100, "batch_size": 8, "num_steps": 22,
        "precision": "bf16"}, checkpoint={"interval_steps": 5},
        optimizer={"beta1": 0.8, "beta2": 0.9, "schedule": "cosine", "warmup_steps": 7},
    )  # fmt: skip
    assert config_from_dict(theirs) == config_from_dict(ours)
    assert config_from_dict(given(max_duration=30)).training.num_steps == 30
    for name, key in NAMES.items():
        assert set(key.split(", ")) <= set(flatten(RunConfig())), f"{name} means {key}"


def test_settings_that_are_gone() -> None:
    pose = {"scheme": "pose", "target_length": 512}
    old = pose | {"chunk_lengths": "published", "skips": "published", "skip_text": False}
    assert config_from_dict(given(positions=old)) == config_from_dict(given(positions=pose))
    with pytest.raises(ConfigError, match=r"positions\.skips=sorted is gone, only published"):
        config_from_dict(given(positions=pose | {"skips": "sorted"}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"save_folder": "a", "run_folder": "b"}, "are the same; .* --run_folder=…"),
        ({"max_duration": "1ep"}, "steps, or tokens with a T"),
        ({"max_duration": "2e9T"}, "needs training.batch_size and training.length"),
        ({"optimizer": {"betas": 0.9}}, "must be 2 numbers"),
        ({"scheduler": {"name": "inverse_sqrt"}}, "inverse_sqrt"),
        ({"scheduler": {"t_max": 3}}, "unknown key 'scheduler'"),
        ({"optimizer": 5, "scheduler": {"name": "linear"}}, "optimizer=5 must be a section"),
        ({"fsdp": {"precision": "mixed"}}, "unknown key 'fsdp'"),
    ],
)
def test_names_of_olmo_that_do_not_fit_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict(given(**wrong))
