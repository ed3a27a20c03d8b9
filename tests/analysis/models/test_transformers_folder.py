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

from olmo_sparsity.analysis.models.load import load_model
from olmo_sparsity.errors import DataError
from olmo_sparsity.model.exchange import config_of
from tests.support.models import SIZES, tiny, truncate


def change_weights(folder: Path, norm: Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors") | {"model.norm.weight": norm}
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def change_field(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda f: truncate(f / "model.safetensors"), "model.safetensors' cannot be read"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "pytorch_model.bin' is a pickle.*save_pretrained",
        ),
        (lambda f: (f / "model.safetensors").unlink(), r"has no model\*.safetensors"),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: (f / "config.json").write_text('{"model_type": "unheard_of"}'), "unheard_of"),
        (lambda f: (f / "tokenizer.model").write_bytes(b"not one"), "cannot read its tokenizer"),
        (
            lambda f: change_weights(f, None),
            "lack 1 weights of LlamaForCausalLM, such as model.norm.weight",
        ),
        (lambda f: change_weights(f, torch.ones(5)), "transformers cannot load"),
        (
            lambda f: change_field(f, num_hidden_layers=1),
            r"hold \d+ more weights than LlamaForCausalLM, such as model\.layers\.1\.",
        ),
    ],
)
def test_damaged_hugging_face_folders_are_named(
    damage: Callable[[Path], Any], problem: str, tmp_path: Path
) -> None:
    tiny("LlamaForCausalLM", **SIZES).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=problem):
        load_model(str(tmp_path), device="cpu")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    tiny("LlamaForCausalLM", **SIZES).save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def test_a_missing_shard_is_named(shards: Path) -> None:
    *others, last = sorted(shards.glob("*.safetensors"))
    assert others
    load_model(str(shards), device="cpu")
    last.unlink()
    with pytest.raises(DataError, match=last.name):
        load_model(str(shards), device="cpu")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("../other/model-00001-of-00002.safetensors", "outside of its folder"),
        ("/etc/passwd", "outside of its folder"),
        (3, "outside of its folder"),
        ("pytorch_model.bin", "not a safetensors file"),
    ],
)
def test_an_index_leads_neither_out_of_its_folder_nor_to_a_pickle(
    shards: Path, name: Any, problem: str
) -> None:
    path = shards / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"index.json' names '{name}', which is .*{problem}"):
        load_model(str(shards), device="cpu")


@pytest.fixture
def change_config(tmp_path: Path) -> Callable[..., str]:
    """A whole folder whose config.json has these fields."""

    def write(**fields: Any) -> str:
        folder = tmp_path / "model"
        tiny("LlamaForCausalLM", **SIZES).save_pretrained(folder)
        change_field(folder, **fields)
        return str(folder)

    return write


def test_code_of_a_folder_is_never_run_nor_asked_about(
    change_config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    folder = change_config(model_type="theirs", auto_map=classes)
    (Path(folder) / "code.py").write_text("raise SystemExit('it ran')\n")
    for refused in (lambda: load_model(folder, device="cpu"), lambda: config_of(folder)):
        with pytest.raises(DataError, match=r"config\.json"):
            refused()
    assert asked == []


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("kernel", ["flash_attention_2", "eager", "somebody/kernel"])
def test_the_attention_kernel_is_not_the_folders_to_choose(
    change_config: Callable[..., str], field: str, kernel: str
) -> None:
    model = load_model(change_config(**{field: kernel}), device="cpu").model
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
def test_what_config_json_may_say_wrong_is_one_line(
    change_config: Callable[..., str], fields: dict[str, Any]
) -> None:
    folder = change_config(**fields)
    with pytest.raises(DataError, match=r"config\.json") as caught:
        load_model(folder, device="cpu")
    assert folder in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("named", ["other.safetensors", "adapter_model.bin"])
def test_the_weight_files_are_not_the_configs_to_choose(
    change_config: Callable[..., str], named: str
) -> None:
    """Its fingerprint would be of another file than the one that is loaded."""
    folder = Path(change_config(transformers_weights=named))
    (folder / named).write_bytes(b"another file")
    assert load_model(str(folder), device="cpu").num_parameters > 0
