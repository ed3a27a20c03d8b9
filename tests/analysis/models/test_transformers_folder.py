"""Folders that somebody else wrote: read without running their code, or refused in one line."""

from __future__ import annotations

import io
import json
import logging
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


def test_names_of_tensors_reach_no_terminal_as_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny("LlamaForCausalLM", **SIZES).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {"\x1b]0;title\x07": torch.ones(1)}
    save_file(tensors, path, metadata={"format": "pt"})
    handlers = logging.getLogger("transformers").handlers  # of the terminal, as pytest's are not
    heard = io.StringIO()
    handlers.append(logging.StreamHandler(heard))
    try:
        with pytest.raises(DataError, match="hold 1 more weights"):
            load_model(str(tmp_path), device="cpu")
    finally:
        handlers.pop()
    assert "title" not in heard.getvalue() + capfd.readouterr().err


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny("LlamaForCausalLM", **SIZES).save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    load_model(str(tmp_path), device="cpu")
    shards[-1].unlink()
    with pytest.raises(DataError, match=shards[-1].name):
        load_model(str(tmp_path), device="cpu")


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
        {"quantization_config": 5},
        {"num_hidden_layers": None},
        {"head_dim": "x"},
        {"layer_types": ["full_attention"]},
        {"sliding_window": "a"},
        {"output_attentions": True, "attn_implementation": "flash_attention_2"},
        {"rope_parameters": [1]},
        {"num_attention_heads": 0},
        {"pad_token_id": 10**9},
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


@pytest.mark.parametrize("name", ["../whole/model-00001-of-00002.safetensors", "/etc/passwd", 3])
def test_an_index_must_not_lead_out_of_its_folder(tmp_path: Path, name: Any) -> None:
    for folder in ("whole", "model"):
        tiny("LlamaForCausalLM", **SIZES).save_pretrained(tmp_path / folder, max_shard_size="20KB")
    path = tmp_path / "model" / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"index.json' names '{name}', which is outside"):
        load_model(str(tmp_path / "model"), device="cpu")


def test_an_index_must_not_lead_to_a_pickle(tmp_path: Path) -> None:
    tiny("LlamaForCausalLM", **SIZES).save_pretrained(tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"]["model.norm.weight"] = "pytorch_model.bin"
    path.write_text(json.dumps(content))
    torch.save({"model.norm.weight": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"names 'pytorch_model.bin', which is not a safetensors"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize("named", ["other.safetensors", "adapter_model.bin"])
def test_the_weight_files_are_not_the_configs_to_choose(
    change_config: Callable[..., str], named: str
) -> None:
    """Its fingerprint would be of another file than the one that is loaded."""
    folder = Path(change_config(transformers_weights=named))
    (folder / named).write_bytes(b"another file")
    assert load_model(str(folder), device="cpu").num_parameters > 0


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    tiny("LlamaForCausalLM", **SIZES).save_pretrained(blobs, max_shard_size="20KB")
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert load_model(str(snapshot), device="cpu").num_parameters > 0
