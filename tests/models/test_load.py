"""Any model behind one call: the logits are its own, gaps in position IDs are gaps and no more, and
what cannot be read or would mean something different is refused by name."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from olmo_sparsity.base.errors import ConfigError, DataError, UserError
from olmo_sparsity.base.manifest import write_manifest
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.find import DTYPES
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.models.identity.file_fingerprint import fingerprint
from olmo_sparsity.models.load import load_model, wrap_model
from olmo_sparsity.models.loaded import LoadedModel, using
from tests.support.models import (
    COUNTED,
    FIELDS,
    GAPPED,
    OLDER_SIZES,
    SIZES,
    TOKEN_IDS,
    draw_tokens,
    llama,
    steps,
    tiny,
    truncate,
    write_checkpoint,
)

# --- Hugging Face families ----------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("class_name", "settings"),
    [
        ("LlamaForCausalLM", SIZES | {"tie_word_embeddings": True}),
        ("GPT2LMHeadModel", OLDER_SIZES | TOKEN_IDS),
    ],
)
def test_a_folder_of_transformers_is_its_model(
    class_name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    theirs = tiny(class_name, **settings)
    theirs.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    assert (loaded.max_positions, loaded.tokenizer) == (64, None)
    assert loaded.num_parameters == theirs.num_parameters()
    check_logits(loaded, theirs)
    for name in ("bf16", "fp16"):  # passes its checks, and stays what it is
        low = load_model(str(tmp_path), device="cpu", dtype=name).model
        assert {p.dtype for p in low.parameters()} == {DTYPES[name]}
    in_memory = wrap_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert in_memory.fingerprint == wrap_model(theirs).fingerprint


# --- GPT-NeoX from OLMo's fields ----------------------------------------------------------------


def gpt_neox(**changes: Any) -> HuggingFaceLM:
    torch.manual_seed(0)
    return build_model(ModelConfig(architecture="gpt_neox", **(FIELDS | changes)))


def test_gpt_neox_is_built_from_the_same_fields() -> None:
    dropouts = {"attention_dropout": 0.1, "residual_dropout": 0.2, "embedding_dropout": 0.2}
    shape = {"mlp_ratio": 3, "rotary_fraction": 0.5, "rope_theta": 500, "layer_norm_eps": 1e-4}
    config = gpt_neox(**dropouts, **shape, weight_tying=False, embedding_size=128).model.config
    names = ("num_hidden_layers", "num_attention_heads", "max_position_embeddings", "vocab_size")
    assert [getattr(config, name) for name in names] == [2, 4, 64, 128]
    assert (config.intermediate_size, config.layer_norm_eps) == (96, 1e-4)
    assert (config.attention_dropout, config.hidden_dropout) == (0.1, 0.2)
    assert not config.tie_word_embeddings
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    assert config.rope_parameters["rope_theta"] == 500
    assert gpt_neox(mlp_hidden_size=40).model.config.intermediate_size == 40


def test_gpt_neox_ignores_no_field() -> None:
    wrong = {"alibi": True, "n_kv_heads": 2, "activation_type": "relu", "vocab_size": 0}
    for field, value in {**wrong, "bias_for_layer_norm": False, "residual_dropout": 0.1}.items():
        with pytest.raises(ConfigError, match=f"model.{field}={value}"):
            gpt_neox(**{field: value})


# --- weights and checkpoint folders of ours -----------------------------------------------------


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
    assert low(draw_tokens(), GAPPED).dtype == torch.bfloat16


@pytest.mark.parametrize("architecture", ["olmo", "gpt_neox"])
def test_loading_leaves_the_global_random_state(tmp_path: Path, architecture: str) -> None:
    write_checkpoint(tmp_path / "step000003", architecture=architecture)
    before = torch.get_rng_state()
    load_model(tmp_path / "step000003", device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    (folder,) = steps(tmp_path, 1)
    config = tmp_path / "config.yaml"
    config.write_bytes((folder / "config.yaml").read_bytes())
    assert load_model(str(tmp_path), device="cpu").name == str(folder)
    config.write_text(config.read_text().replace("seed: 0", "seed: 7"))
    with pytest.raises(DataError, match=r"step000001' is of another run .*seed=0 \(now 7\)"):
        load_model(str(tmp_path), device="cpu")
    load_model(str(folder), device="cpu")  # it is whole, and named itself


def test_a_device_is_not_chosen_twice() -> None:
    with pytest.raises(ConfigError, match="device=cpu: device_map=auto says where the model is"):
        load_model("demo", device="cpu", device_map="auto")


# --- what cannot be read ------------------------------------------------------------------------


def test_damaged_checkpoints_of_ours_are_named(tmp_path: Path) -> None:
    (folder,) = steps(tmp_path, 1)
    with pytest.raises(ConfigError, match="device_map=auto"):
        load_model(str(folder), device_map="auto")
    truncate(folder / "model.safetensors")
    with pytest.raises(DataError, match=r"step000001.*model.safetensors has"):
        load_model(str(folder))
    for name in ("model.safetensors", "tokenizer.json"):
        write_manifest(folder)  # written so by a trainer whose disk was full
        with pytest.raises(DataError, match=f"{name}' cannot be read"):
            load_model(str(folder))
        write_checkpoint(tmp_path / name)
        shutil.copy(tmp_path / name / "model.safetensors", folder)
        (folder / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("nobody/nothing", {}, "'nobody/nothing' is neither a folder"),
        ("/nobody/nothing", {}, "/nobody/nothing' does not exist"),
        (".", {}, "a folder with config.json"),
        (None, {}, "None is neither a folder"),
        (".", {"dtype": "int8"}, "dtype=int8"),
        (".", {"device": "cuda"}, "device=cuda"),
    ],
)
def test_what_is_no_model_is_named(
    name: Any, settings: dict[str, str], problem: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=problem):
        load_model(str(tmp_path) if name == "." else name, **settings)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(DataError, match=r"holds no step\* folder"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("files", [["train"], {}], ids=["prepared text", "a measurement"])
def test_a_folder_with_another_manifest_is_no_checkpoint(files: Any, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"files": files}))
    with pytest.raises(DataError, match="is not a model folder; pass a run"):
        load_model(str(tmp_path))


@torch.no_grad()
def check_logits(loaded: LoadedModel, theirs: Callable[..., Any]) -> None:
    tokens_BL = draw_tokens()
    expected = theirs(input_ids=tokens_BL).logits
    torch.testing.assert_close(loaded.model(tokens_BL, COUNTED), expected)
    near = (tokens_BL[:1, 7:], COUNTED[:, 7:])
    distant = loaded.model.distant_states(tokens_BL[:1, :7], COUNTED[:, :7])
    found = loaded.model.unembed(loaded.model.hidden(*near, distant=distant))
    torch.testing.assert_close(found, expected[:1, 7:], atol=1e-4, rtol=1e-4)


def test_a_model_in_memory_is_taken_as_it_is() -> None:
    model = llama().train()
    loaded = wrap_model(model)
    assert loaded.model.model is model
    with using(loaded):
        assert not model.training
        check_logits(loaded, model)
    assert model.training
    assert wrap_model(loaded) is loaded
    assert wrap_model(loaded.model, name="mine").name == "mine"
    with pytest.raises(ConfigError, match="'LlamaForCausalLM' has its own"):
        wrap_model(loaded, name="other")


@torch.no_grad()
def test_a_dispatched_or_offloaded_model_answers_alike() -> None:
    from accelerate import cpu_offload, dispatch_model

    plain, tokens_BL = wrap_model(llama()), draw_tokens()
    offloaded = llama()
    cpu_offload(offloaded, execution_device=torch.device("cpu"))
    assert next(offloaded.parameters()).is_meta
    dispatched = dispatch_model(llama(), {"": "cpu"}, force_hooks=True)
    for model in (dispatched, offloaded):
        loaded = wrap_model(model)
        assert loaded.device == torch.device("cpu")
        assert loaded.fingerprint == plain.fingerprint
        assert torch.equal(loaded.model(tokens_BL, GAPPED), plain.model(tokens_BL, GAPPED))


quietly = pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's calls of transformers


def with_lora(model: transformers.PreTrainedModel, **settings: Any) -> Any:
    torch.manual_seed(1)
    import peft

    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(model, config).eval()


@quietly
@pytest.mark.parametrize(
    "settings",
    [{}, {"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["embed_tokens"]}],
    ids=str,
)
def test_adapters_are_applied_and_not_merged(settings: dict[str, Any]) -> None:
    base = llama()
    before = wrap_model(base)
    logits = before.model(draw_tokens(), COUNTED)
    adapted = with_lora(llama(), **settings)
    loaded = wrap_model(adapted)
    check_logits(loaded, adapted)
    assert not torch.allclose(loaded.model(draw_tokens(), COUNTED), logits, atol=0.1)
    assert not any(getattr(module, "merged", False) for module in adapted.modules())
    assert loaded.fingerprint != before.fingerprint
    assert loaded.num_parameters > before.num_parameters


@quietly
def test_adapters_that_are_no_part_of_the_layers_are_refused() -> None:
    import peft

    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ConfigError, match=r"PromptTuningConfig\) puts places before"):
        wrap_model(peft.get_peft_model(llama(), prompt))
    with pytest.raises(ConfigError, match="its logits do not follow"):
        wrap_model(with_lora(llama(), alora_invocation_tokens=[3, 4]))


@pytest.fixture
def adapter_folder(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "base")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with_lora(whole).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@quietly
def test_an_adapter_folder_is_its_base_with_the_adapter(adapter_folder: Path) -> None:
    whole = transformers.AutoModelForCausalLM.from_pretrained(adapter_folder.parent / "base")
    loaded = load_model(str(adapter_folder), device="cpu")
    check_logits(loaded, with_lora(whole))
    base = load_model(str(adapter_folder.parent / "base"), device="cpu")
    assert base.fingerprint != loaded.fingerprint


@quietly
def test_adapter_folders_that_cannot_be_read_are_one_line(
    adapter_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = adapter_folder / "adapter_config.json"
    text, base = config.read_text(), str(adapter_folder.parent / "base")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "peft", None)
        with pytest.raises(ConfigError, match=r"a PEFT adapter needs .*olmo-sparsity\[peft\]"):
            load_model(str(adapter_folder), device="cpu")

    def refuse(problem: str) -> None:
        with pytest.raises(DataError, match=problem):
            load_model(str(adapter_folder), device="cpu")

    for changed, problem in (
        ("{}", "adapter_config.json: base_model_name_or_path=None"),
        (text.replace(base, "/gone"), "'/gone' does not exist"),
        (text.replace(base, str(adapter_folder)), "is not a base model of transformers"),
    ):
        config.write_text(changed)
        refuse(problem)
    config.write_text(text)
    weights = adapter_folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file(dict(list(tensors.items())[1:]), weights)
    refuse("lack 1 weights of its adapter")
    save_file(tensors | {"other": torch.ones(1)}, weights)
    refuse("hold 1 more weights than its adapter, such as other")
    # peft would read the pickle, and the fingerprint would be of another file.
    weights.rename(adapter_folder / "x.safetensors")
    (adapter_folder / "adapter_model.bin").write_bytes(b"pickle")
    refuse(r"adapter_model.bin' is a pickle")


def test_a_name_on_the_hub_may_have_a_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama().save_pretrained(tmp_path)
    asked = []

    def snapshot_download(name: str, revision: str | None, **_: Any) -> str:
        asked.append((name, revision))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    for name in ("some/model", "some/model@step1000"):
        assert repr(load_model(name, device="cpu")).startswith(f"{name}: LlamaForCausalLM, ")
    assert asked == [("some/model", None), ("some/model", "step1000")]


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_weights_that_are_no_numbers_are_named(name: str) -> None:
    broken = llama(tie_word_embeddings=False)
    with torch.no_grad():
        broken.get_parameter(name)[0, 0] = float("inf")
    with pytest.raises(ConfigError, match="no numbers: its weight " + name):
        wrap_model(broken)


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("fast", [True, False])
def test_the_dtype_is_that_of_the_checkpoint_where_the_cpu_multiplies_in_it(
    fast: bool, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abilities = {"avx512_bf16": fast, "avx512_fp16": fast}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: abilities)
    llama().bfloat16().save_pretrained(tmp_path)
    if not said:
        path = tmp_path / "config.json"
        path.write_text(path.read_text().replace('"dtype"', '"no_dtype"'))
    for dtype, expected in (
        ("auto", torch.bfloat16 if fast else torch.float32),
        ("bf16", torch.bfloat16),
        ("fp32", torch.float32),
    ):
        model = load_model(str(tmp_path), device="cpu", dtype=dtype).model
        assert {p.dtype for p in model.parameters()} == {expected}


@torch.no_grad()
def test_the_fused_causal_kernel_runs_with_gaps_and_without_a_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen = HuggingFaceLM(llama()), []
    attend = F.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return attend(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model(draw_tokens(), GAPPED)
    assert seen == [(None, True)] * 2


def test_without_the_second_product_a_url_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "olmo_sparsity.sources.open", None)
    with pytest.raises(ConfigError, match=r"needs olmo_sparsity\.sources.*\s*.*install"):
        load_model("http://localhost:1", tokenizer="demo")
