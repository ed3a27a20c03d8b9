"""Any model behind one call: the logits are its own, gaps in position IDs are gaps and no more, and
what cannot be read or would mean something different is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from olmo_sparsity.config import ModelConfig, RunConfig
from olmo_sparsity.config_file import save_config
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.manifest import verify_manifest, write_manifest
from olmo_sparsity.model.checkpoint_files import (
    fingerprint,
    load_weights,
    save_weights,
    verified_checkpoints,
)
from olmo_sparsity.model.exchange import config_of
from olmo_sparsity.model.huggingface import HuggingFaceLM
from olmo_sparsity.model.load import DTYPES, build_model, load_model

COUNTED = torch.arange(12)[None]
GAPPED = torch.tensor([[0, 1, 2, 3, 9, 10, 11, 12, 30, 31, 32, 33]])

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # attention must matter enough to show what it attends to
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
OLDER_SIZES = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
TOKEN_IDS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": SIZES | {"tie_word_embeddings": True},
    "GPT2LMHeadModel": OLDER_SIZES | TOKEN_IDS,
}


def draw_tokens(length: int = 12) -> Tensor:
    return torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(1))


def tiny(class_name: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(**settings)).eval()


def read_without_any_mask(model: PreTrainedModel, tokens: Tensor, positions: Tensor) -> Tensor:
    """Token by token through a cache: each sees all earlier ones, and there is no mask at all."""
    cache, logits = DynamicCache(config=model.config), []
    for place in range(tokens.shape[1]):
        out = model(
            input_ids=tokens[:, place : place + 1],
            position_ids=positions[:, place : place + 1].expand(len(tokens), -1),
            past_key_values=cache,
            use_cache=True,
        )
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


# --- Hugging Face families ----------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("class_name", FAMILIES)
def test_a_family_is_read_and_takes_gaps_for_gaps(class_name: str, tmp_path: Path) -> None:
    theirs = tiny(class_name, **FAMILIES[class_name])
    theirs.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    model, tokens_BL = loaded.model, draw_tokens()
    assert loaded.max_positions == 64
    assert loaded.num_parameters == theirs.num_parameters()
    assert loaded.tokenizer is None
    assert not model.training
    torch.testing.assert_close(model(tokens_BL, COUNTED), theirs(tokens_BL).logits)
    gapped = model(tokens_BL, GAPPED)
    expected = read_without_any_mask(theirs, tokens_BL, GAPPED)
    torch.testing.assert_close(gapped, expected, atol=1e-4, rtol=1e-4)
    if class_name != "GPT2LMHeadModel":
        # Left to itself it takes them for packed sequences, or none of this would test anything.
        packed = theirs(tokens_BL, position_ids=GAPPED.expand(2, -1), use_cache=False).logits
        assert float((packed - expected)[:, 4:].abs().max()) > 0.01
    for name in ("bf16", "fp16"):  # passes its checks, and stays what it is
        low = load_model(str(tmp_path), device="cpu", dtype=name).model
        assert {p.dtype for p in low.parameters()} == {DTYPES[name]}


@torch.no_grad()
def test_the_fused_causal_kernel_runs_with_gaps_and_without_a_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen = HuggingFaceLM(tiny("LlamaForCausalLM", **SIZES)), []
    attend = F.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return attend(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model(draw_tokens(), GAPPED)
    assert seen == [(None, True)] * 2


# --- GPT-NeoX from OLMo's fields ----------------------------------------------------------------

FIELDS: dict[str, Any] = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 61,
    "max_sequence_length": 64,
    "init_std": 0.2,
}


def gpt_neox(**changes: Any) -> HuggingFaceLM:
    torch.manual_seed(0)
    return build_model(ModelConfig(architecture="gpt_neox", **(FIELDS | changes)))


def test_gpt_neox_is_built_from_the_same_fields() -> None:
    config = gpt_neox(
        mlp_ratio=3, rotary_fraction=0.5, rope_theta=500, layer_norm_eps=1e-4,
        attention_dropout=0.1, residual_dropout=0.2, embedding_dropout=0.2,
        weight_tying=False, embedding_size=128,
    ).model.config  # fmt: skip
    expected = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "layer_norm_eps": 1e-4, "initializer_range": 0.2,
        "attention_dropout": 0.1, "hidden_dropout": 0.2, "vocab_size": 128,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    assert expected.items() <= config.to_dict().items()
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    assert config.rope_parameters["rope_theta"] == 500
    assert gpt_neox(mlp_hidden_size=40).model.config.intermediate_size == 40


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alibi", True),
        ("n_kv_heads", 2),
        ("activation_type", "relu"),
        ("bias_for_layer_norm", False),
        ("residual_dropout", 0.1),
        ("vocab_size", 0),
    ],
)
def test_gpt_neox_ignores_no_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"model.{field}={value}"):
        gpt_neox(**{field: value})


# --- weights and checkpoint folders of ours -----------------------------------------------------


def word_tokenizer(num_words: int) -> Tokenizer:
    return Tokenizer(models.WordLevel({f"t{i}": i for i in range(num_words)}, unk_token="t0"))


def write_checkpoint(
    folder: Path, tokenizer: Tokenizer | None = None, **changes: Any
) -> torch.nn.Module:
    """Random in every weight: norms' too, which would begin as ones and biases as zeros."""
    folder.mkdir(parents=True)
    run = RunConfig(model=ModelConfig(**(FIELDS | {"max_sequence_length": 256} | changes)))
    run.data.tokenizer.name = "tokenizer.json"
    torch.manual_seed(len(folder.name))
    model = build_model(run.model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    save_config(run, folder / "config.yaml")
    save_weights(model, folder / "model.safetensors")
    (tokenizer or word_tokenizer(60)).save(str(folder / "tokenizer.json"))
    (folder / "engine").mkdir()
    (folder / "engine" / "optimizer.bin").write_bytes(b"moments")
    write_manifest(folder)
    return model.eval()


def steps(run: Path, *numbers: int) -> list[Path]:
    folders = [run / "checkpoints" / f"step{number:06}" for number in numbers]
    for folder in folders:
        write_checkpoint(folder)
    return folders


@pytest.mark.parametrize("architecture", ["olmo", "gpt_neox"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_and_tied_ones_are_stored_once(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    config = ModelConfig(**FIELDS, architecture=architecture, weight_tying=tied)
    first, second = build_model(config), build_model(config)
    save_weights(first, tmp_path / "w.safetensors")
    save_weights(first.state_dict(), tmp_path / "gathered.safetensors")
    files = [tmp_path / f"{name}.safetensors" for name in ("w", "gathered")]
    assert files[0].read_bytes() == files[1].read_bytes()
    stored = load_file(tmp_path / "w.safetensors")
    assert sum(t.shape == (61, 32) for t in stored.values()) == (1 if tied else 2)
    load_weights(second, tmp_path / "w.safetensors")
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: w.pop("transformer.ln_f.weight"), "lacks .* transformer.ln_f.weight"),
        (lambda w: w.update(extra=torch.ones(1)), "no place for: extra"),
        (lambda w: w.update({"transformer.ln_f.weight": torch.ones(3)}), r"\[3\], .* \[32\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict], Any], problem: str
) -> None:
    model, path = build_model(ModelConfig(**FIELDS)), tmp_path / "w.safetensors"
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(weights)
    save_file(weights, path)
    with pytest.raises(DataError, match=f"w.safetensors.*{problem}"):
        load_weights(model, path)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["olmo", "gpt_neox"])
def test_a_checkpoint_of_ours_is_read(tmp_path: Path, architecture: str) -> None:
    folder = tmp_path / "checkpoints" / "step000003"
    model = write_checkpoint(folder, architecture=architecture)
    for path in (tmp_path, folder):
        loaded = load_model(str(path), device="cpu")
        assert torch.equal(loaded.model(draw_tokens(), GAPPED), model(draw_tokens(), GAPPED))
        assert not loaded.model.training
        assert loaded.tokenizer.get_vocab_size() == 60
        assert (loaded.name, loaded.max_positions) == (str(folder), 256)
        assert loaded.num_parameters == sum(p.numel() for p in model.parameters())
        assert loaded.fingerprint == fingerprint([folder / "model.safetensors"])
    low = load_model(str(folder), device="cpu", dtype="bf16").model
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    assert low(draw_tokens(), GAPPED).dtype == torch.bfloat16


def test_other_weights_have_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for number, byte in enumerate((b"a", b"a", b"b")):
        path = tmp_path / str(number) / "model.safetensors"
        path.parent.mkdir()
        path.write_bytes(b"x" * 200_000 + byte)
        paths.append(path)
    for whole_bytes in (2**30, 1000):  # read whole, then by samples
        monkeypatch.setattr("olmo_sparsity.model.checkpoint_files._WHOLE_BYTES", whole_bytes)
        first, same, other = (fingerprint([path]) for path in paths)
        assert first == same != other
    assert fingerprint(paths[:2]) != fingerprint(paths[1:])


def test_the_latest_checkpoint_is_the_newest_whole_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def newest(*only: str) -> Path | None:
        checked = verified_checkpoints(tmp_path, only or None)
        return next((folder for folder, problem in checked if problem is None), None)

    assert newest() is None
    ninth, tenth = steps(tmp_path, 9, 10)
    millionth = tmp_path / "checkpoints" / "step1000000"  # sorts before step000009 as text
    shutil.copytree(tenth, millionth)
    shutil.copytree(tenth, tmp_path / "checkpoints" / "step2000000.tmp")
    assert newest() == millionth
    (millionth / "engine" / "optimizer.bin").write_bytes(b"Moments")
    assert newest() == tenth
    assert newest("model.safetensors") == millionth
    (millionth / "model.safetensors").unlink()
    assert load_model(str(tmp_path), device="cpu").name == str(tenth)
    said = capsys.readouterr().err
    assert "model.safetensors is missing; reading step000010 instead" in said
    assert f"{tmp_path} has not ended: reading step 10 of 1,000" in said
    for folder in (ninth, tenth):
        (folder / "manifest.json").unlink()
    assert newest() is None
    with pytest.raises(
        DataError, match=r"no checkpoint of .* is intact.*model.safetensors is miss"
    ):
        load_model(str(tmp_path))


def test_a_manifest_vouches_for_every_byte_and_leads_nowhere_else(tmp_path: Path) -> None:
    (folder,) = steps(tmp_path, 1)
    assert verify_manifest(folder) is None
    state = folder / "engine" / "optimizer.bin"
    for damage, problem in (
        (b"momentz", "engine/optimizer.bin does not have the SHA-256"),
        (b"moment", "engine/optimizer.bin has 6 bytes, manifest.json says 7"),
        (None, "engine/optimizer.bin is missing"),
    ):
        state.unlink() if damage is None else state.write_bytes(damage)
        assert str(verify_manifest(folder)).startswith(problem)
        assert verify_manifest(folder, {"config.yaml", "model.safetensors"}) is None
    assert verify_manifest(folder, {"other"}) == "manifest.json does not list other"
    content = json.loads((folder / "manifest.json").read_text())
    content["files"]["../../outside"] = content["files"]["config.yaml"]
    (tmp_path / "outside").write_bytes((folder / "config.yaml").read_bytes())
    for text, problem in (
        ("{", "not a readable list"),
        ("[]", "not a readable list"),
        ('{"files": {"config.yaml": 3}}', "not a readable list"),
        (json.dumps(content), "'../../outside', which is outside of the folder"),
    ):
        (folder / "manifest.json").write_text(text)
        assert problem in str(verify_manifest(folder))


# --- what cannot be read ------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_damaged_checkpoints_of_ours_are_named(tmp_path: Path) -> None:
    (folder,) = steps(tmp_path, 1)
    with pytest.raises(ConfigError, match="device_map=auto"):
        load_model(str(folder), device_map="auto")
    truncate(folder / "model.safetensors")
    with pytest.raises(DataError, match=r"step000001.*model.safetensors has"):
        load_model(str(folder))
    write_manifest(folder)  # written so by a trainer whose disk was full
    with pytest.raises(DataError, match=r"model.safetensors' cannot be read"):
        load_model(str(folder))
    (folder / "tokenizer.json").write_text("{")
    write_manifest(folder)
    write_checkpoint(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    write_manifest(folder)
    with pytest.raises(DataError, match=r"tokenizer.json' cannot be read"):
        load_model(str(folder))


def test_a_tokenizer_too_large_for_the_embedding_is_refused(tmp_path: Path) -> None:
    with_gap = Tokenizer(models.WordLevel({"t0": 0, "t61": 61}, unk_token="t0"))
    write_checkpoint(tmp_path / "a", with_gap)
    with pytest.raises(ConfigError, match="IDs up to 61, its embedding only 61 rows"):
        load_model(str(tmp_path / "a"))


def change_weights(folder: Path, norm: Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors") | {"model.norm.weight": norm}
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda f: truncate(f / "model.safetensors"), "model.safetensors' cannot be read"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "pytorch_model.bin' is a pickle.*save_pretrained",
        ),
        (lambda f: (f / "model.safetensors").unlink(), r"no \*.safetensors"),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: (f / "config.json").write_text('{"model_type": "unheard_of"}'), "unheard_of"),
        (lambda f: (f / "tokenizer.model").write_bytes(b"not one"), "cannot read its tokenizer"),
        (
            lambda f: change_weights(f, None),
            "lack 1 weights of LlamaForCausalLM, such as model.norm.weight",
        ),
        (lambda f: change_weights(f, torch.ones(5)), "transformers cannot load"),
    ],
)
def test_damaged_hugging_face_folders_are_named(
    damage: Callable[[Path], Any], problem: str, tmp_path: Path
) -> None:
    tiny("LlamaForCausalLM", **SIZES).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=problem):
        load_model(str(tmp_path), device="cpu")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny("LlamaForCausalLM", **SIZES).save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    load_model(str(tmp_path), device="cpu")
    shards[-1].unlink()
    with pytest.raises(DataError, match=shards[-1].name):
        load_model(str(tmp_path), device="cpu")


def test_what_is_no_model_says_what_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="'nobody/nothing' is no folder here, and the hub"):
        load_model("nobody/nothing")
    with pytest.raises(DataError, match="/nobody/nothing' does not exist"):
        load_model("/nobody/nothing")
    with pytest.raises(DataError, match=r"neither config.json"):
        load_model(str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(DataError, match=r"checkpoints' holds no step\* folder"):
        load_model(str(tmp_path))
    with pytest.raises(ConfigError, match="dtype=int8"):
        load_model(str(tmp_path), dtype="int8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device=cuda"):
        load_model(str(tmp_path), device="cuda")


# --- folders that somebody else wrote -------------------------------------------------------------


@pytest.fixture
def change_config(tmp_path: Path) -> Callable[..., str]:
    """A whole folder whose config.json has these fields."""

    def write(**fields: Any) -> str:
        folder = tmp_path / "model"
        tiny("LlamaForCausalLM", **SIZES).save_pretrained(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
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
        # No machine has the memory, or the time to build so many layers.
        {"vocab_size": 10**12},
        {"vocab_size": 10**12, "tie_word_embeddings": True},
        {"hidden_size": 10**12},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -1},
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


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    tiny("LlamaForCausalLM", **SIZES).save_pretrained(blobs, max_shard_size="20KB")
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert load_model(str(snapshot), device="cpu").num_parameters > 0
