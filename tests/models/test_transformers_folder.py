"""Folders that somebody else wrote: read without running their code, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.models.huggingface.config_of_weights import config_of
from olmo_sparsity.models.load import load_model
from tests.support.models import llama, truncate


def change_weights(folder: Path, norm: Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors") | {"model.norm.weight": norm}
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def change_field(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda f: truncate(f / "model.safetensors"), "model.safetensors' cannot be read"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "is a pickle"),
        (lambda f: (f / "model.safetensors").unlink(), r"has no model\*.safetensors"),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: (f / "config.json").write_text('{"model_type": "unheard_of"}'), "unheard_of"),
        (lambda f: (f / "tokenizer.model").write_bytes(b"not one"), "cannot read its tokenizer"),
        (lambda f: change_weights(f, None), "lack 1 weights .*model.norm.weight"),
        (lambda f: change_weights(f, torch.ones(5)), "transformers cannot load"),
        (lambda f: change_field(f, num_hidden_layers=1), r"hold .* more weights .*layers\.1\."),
    ],
)
def test_damaged_hugging_face_folders_are_named(
    damage: Callable[[Path], Any], problem: str, folder: Path
) -> None:
    damage(folder)
    with pytest.raises(DataError, match=problem):
        load_model(str(folder), device="cpu")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def test_a_missing_shard_is_named(shards: Path) -> None:
    *others, last = sorted(shards.glob("*.safetensors"))
    assert others
    load_model(str(shards), device="cpu")
    last.unlink()
    with pytest.raises(DataError, match=last.name):
        load_model(str(shards), device="cpu")


@pytest.mark.parametrize("name", ["../other/m.safetensors", "/etc/passwd", 3, "pytorch_model.bin"])
def test_an_index_leads_neither_out_of_its_folder_nor_to_a_pickle(shards: Path, name: Any) -> None:
    path = shards / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"index.json' names '{name}', which is"):
        load_model(str(shards), device="cpu")


def test_code_of_a_folder_is_never_run_nor_asked_about(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    change_field(folder, model_type="theirs", auto_map=classes)
    (folder / "code.py").write_text("raise SystemExit('it ran')\n")
    for refused in (lambda: load_model(folder, device="cpu"), lambda: config_of(str(folder))):
        with pytest.raises(DataError, match=r"config\.json"):
            refused()
    assert asked == []


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("kernel", ["flash_attention_2", "eager", "somebody/kernel"])
def test_the_attention_kernel_is_not_the_folders_to_choose(
    folder: Path, field: str, kernel: str
) -> None:
    change_field(folder, **{field: kernel})
    model = load_model(folder, device="cpu").model
    assert model.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"num_hidden_layers": None},
        {"layer_types": ["full_attention"]},
        {"output_attentions": True, "attn_implementation": "flash_attention_2"},
        {"rope_parameters": [1]},
        {"rms_norm_eps": None},
    ],
    ids=str,
)
def test_what_config_json_may_say_wrong_is_one_line(folder: Path, fields: dict[str, Any]) -> None:
    change_field(folder, **fields)
    with pytest.raises(DataError, match=r"config\.json") as caught:
        load_model(folder, device="cpu")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("named", ["other.safetensors", "adapter_model.bin"])
def test_the_weight_files_are_not_the_configs_to_choose(folder: Path, named: str) -> None:
    """Its fingerprint would be of another file than the one that is loaded."""
    change_field(folder, transformers_weights=named)
    (folder / named).write_bytes(b"another file")
    assert load_model(str(folder), device="cpu").num_parameters > 0
