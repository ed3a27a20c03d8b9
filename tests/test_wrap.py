"""A model that is in memory is the model: its logits, its adapters, its tokenizer, and nothing is
asked of it that it would answer wrongly without a word."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import peft
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import AutoModelForCausalLM, ByT5Tokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from analysis.documents import Document, token_texts
from analysis.recovery import recover
from analysis.scoring import Scorer
from analysis.windows import Windows
from olmo_sparsity.config import ModelConfig
from olmo_sparsity.errors import ConfigError, DataError
from olmo_sparsity.model.huggingface import HuggingFaceLM
from olmo_sparsity.model.load import DTYPES, LoadedModel, build_model, load_model, wrap_model
from tests.test_families import quantize
from tests.test_load import COUNTED, FIELDS, GAPPED, SIZES, draw_tokens, tiny


def llama(**settings: Any) -> PreTrainedModel:
    return tiny("LlamaForCausalLM", **(SIZES | settings))


@torch.no_grad()
def check_logits(loaded: LoadedModel, theirs: Callable[..., Any]) -> None:
    tokens_BL = draw_tokens()
    expected = theirs(input_ids=tokens_BL).logits
    torch.testing.assert_close(loaded.model(tokens_BL, COUNTED), expected)
    near = (tokens_BL[:1, 7:], COUNTED[:, 7:])
    far = loaded.model.far_states(tokens_BL[:1, :7], COUNTED[:, :7])
    found = loaded.model.unembed(loaded.model.hidden(*near, far=far))
    torch.testing.assert_close(found, expected[:1, 7:], atol=1e-4, rtol=1e-4)


# --- models ---------------------------------------------------------------------------------------


def test_a_model_in_memory_is_taken_as_it_is() -> None:
    model = llama().train()
    loaded = wrap_model(model)
    assert isinstance(loaded.model, HuggingFaceLM)
    assert loaded.model.model is model
    assert not model.training
    check_logits(loaded, model)
    assert (loaded.name, loaded.max_positions, loaded.tokenizer) == ("LlamaForCausalLM", 64, None)
    assert (loaded.transformers_tokenizer, loaded.bos_prefix) == (None, [])
    assert loaded.num_parameters == model.num_parameters()
    assert loaded.device == torch.device("cpu")
    assert wrap_model(loaded) is loaded
    assert wrap_model(loaded.model, name="mine").name == "mine"
    for other in ({"name": "other"}, {"tokenizer": ByT5Tokenizer()}):
        with pytest.raises(ConfigError, match="'LlamaForCausalLM' is loaded already"):
            wrap_model(loaded, **other)


def test_a_model_of_ours_is_taken_too() -> None:
    model = build_model(ModelConfig(**FIELDS))
    loaded = wrap_model(model)
    assert loaded.model is model
    assert (loaded.name, loaded.max_positions) == ("PositionedOLMo", 64)
    with pytest.raises(ConfigError, match=r"65 .* 'PositionedOLMo' is prepared for: 64 \(max_seq"):
        loaded.check_positions(65)
    loaded.check_positions(64)


def test_what_is_no_causal_model_is_refused_by_name(tmp_path: Path) -> None:
    for given, problem in (
        (str(tmp_path), "load_model reads"),
        (nn.Linear(3, 3), "Linear is no model of transformers"),
        (nn.DataParallel(llama()), "DataParallel is no model of transformers"),
        (llama().base_model, "LlamaModel .*no last linear map"),
    ):
        with pytest.raises(ConfigError, match=problem):
            wrap_model(given)


def test_a_forward_that_fails_is_one_line() -> None:
    model = llama()
    model.base_model.layers[0].mlp = nn.Linear(3, 3)
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM is not supported: .*RuntimeError"
    ) as e:
        wrap_model(model)
    assert "\n" not in str(e.value)


def test_a_limit_is_named(tmp_path: Path) -> None:
    theirs = tiny("MistralForCausalLM", **SIZES, sliding_window=16)
    theirs.save_pretrained(tmp_path)
    for loaded in (wrap_model(theirs), load_model(str(tmp_path), device="cpu")):
        assert loaded.max_positions == 16
        loaded.check_positions(16)
        with pytest.raises(ConfigError, match=r"17 .* is right for: 16 \(sliding window\)"):
            loaded.check_positions(17)


def test_the_fingerprint_is_of_every_weight(tmp_path: Path) -> None:
    one, same = llama(), llama()
    first = wrap_model(one).fingerprint
    assert wrap_model(same).fingerprint == first
    with torch.no_grad():
        same.lm_head.weight[-1, -1] += 1
    assert wrap_model(same).fingerprint != first
    assert wrap_model(llama().bfloat16()).fingerprint != first
    assert wrap_model(quantize(llama())).fingerprint == first  # the same weights, rounded later
    one.save_pretrained(tmp_path)
    assert wrap_model(AutoModelForCausalLM.from_pretrained(tmp_path)).fingerprint == first


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
        found, expected = (
            recover(Scorer(one.model), Document(tokens_BL[0].numpy()), Windows("all", 3), [6])
            for one in (loaded, plain)
        )
        pd.testing.assert_frame_equal(found["recovery"], expected["recovery"])


# --- PEFT -----------------------------------------------------------------------------------------


quietly = pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's calls of transformers


def with_lora(model: PreTrainedModel, **settings: Any) -> Any:
    torch.manual_seed(1)
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
def test_the_fingerprint_knows_how_far_an_adapter_counts() -> None:
    found = [wrap_model(with_lora(llama(), lora_alpha=alpha)).fingerprint for alpha in (8, 8, 16)]
    assert found[0] == found[1] != found[2]


@quietly
def test_adapters_that_are_no_part_of_the_layers_are_refused() -> None:
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ConfigError, match=r"PromptTuningConfig\) puts places of its own before"):
        wrap_model(peft.get_peft_model(llama(), prompt))
    with pytest.raises(ConfigError, match="its adapter is not part of its layers"):
        wrap_model(with_lora(llama(), alora_invocation_tokens=[3, 4]))


@quietly
def test_a_training_loss_would_miss_an_adapter_of_the_last_map() -> None:
    adapted = wrap_model(with_lora(llama(), target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match=r"last map of LlamaForCausalLM .* merge its adapter"):
        _ = adapted.model.unembedding


@pytest.fixture
def adapter_folder(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "base")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with_lora(whole).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@quietly
def test_an_adapter_folder_is_its_base_with_the_adapter(adapter_folder: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(adapter_folder.parent / "base")
    loaded = load_model(str(adapter_folder), device="cpu")
    check_logits(loaded, with_lora(whole))
    assert loaded.name == str(adapter_folder)
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
        with pytest.raises(ConfigError, match="is a PEFT adapter; pip install peft"):
            load_model(str(adapter_folder), device="cpu")
    for changed, problem in (
        ("{", "adapter_config.json: not readable JSON"),
        ("{}", "adapter_config.json: base_model_name_or_path=None"),
        (text.replace(base, "/gone"), "'/gone' does not exist"),
        (text.replace(base, str(adapter_folder)), "is no base model of transformers"),
    ):
        config.write_text(changed)
        with pytest.raises(DataError, match=problem):
            load_model(str(adapter_folder), device="cpu")
    config.write_text(text)
    weights = adapter_folder / "adapter_model.safetensors"
    weights.rename(adapter_folder / "adapter_model.bin")
    with pytest.raises(DataError, match=r"adapter_model.bin' is a pickle"):
        load_model(str(adapter_folder), device="cpu")


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_dtype_is_that_of_the_checkpoint(dtype: Any, said: bool, tmp_path: Path) -> None:
    llama().to(DTYPES[dtype]).save_pretrained(tmp_path)
    if not said:
        path = tmp_path / "config.json"
        assert '"dtype"' in path.read_text()
        path.write_text(path.read_text().replace('"dtype"', '"no_dtype"'))
    assert {p.dtype for p in load_model(str(tmp_path)).model.parameters()} == {DTYPES[dtype]}
    again = load_model(str(tmp_path), dtype="fp32")
    assert {p.dtype for p in again.model.parameters()} == {torch.float32}


# --- tokenizers -----------------------------------------------------------------------------------

WORDS = ["<s>", "</s>", "<|user|>", "Ġa", *map(chr, range(98, 123)), "a", "Ġ"]


def word_tokenizer(adds_bos: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, [("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(WORDS[:3])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return tokenizer


TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"


def fast_tokenizer(**settings: Any) -> FastTokenizer:
    return FastTokenizer(
        tokenizer_object=word_tokenizer(), bos_token="<s>", eos_token="</s>", **settings
    )


def test_a_tokenizer_of_either_library_is_taken() -> None:
    fast = fast_tokenizer(chat_template=TEMPLATE)
    for given, whole in ((word_tokenizer(), None), (fast, fast)):
        loaded = wrap_model(llama(), given)
        assert loaded.tokenizer.encode("ab", add_special_tokens=False).ids == [29, 4]
        assert loaded.bos_prefix == [0]
        assert loaded.transformers_tokenizer is whole
    text = fast.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False)
    assert loaded.tokenizer.encode(text, add_special_tokens=False).ids == [2, 29, 30, 4, 1]
    assert wrap_model(llama(), word_tokenizer(adds_bos=False)).bos_prefix == []
    with pytest.raises(ConfigError, match="tokenizer: int has no encode; give a tokenizers"):
        wrap_model(llama(), 3)


def test_a_call_of_the_original_truncates_nothing_here() -> None:
    fast = fast_tokenizer()
    loaded = wrap_model(llama(), fast)
    fast("abc", truncation=True, max_length=2)
    again = wrap_model(llama(), fast)
    for tokenizer in (loaded.tokenizer, again.tokenizer):
        assert len(tokenizer.encode("abcabc", add_special_tokens=False).ids) == 6


def test_a_tokenizer_json_that_truncates_is_read_without_it(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    tokenizer = word_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = load_model(str(tmp_path)).tokenizer
    assert len(found.encode("abcabc", add_special_tokens=False).ids) == 6


def test_a_slow_tokenizer_is_adapted() -> None:
    slow = ByT5Tokenizer()
    loaded = wrap_model(llama(vocab_size=400), slow)
    tokenizer = loaded.tokenizer
    assert loaded.transformers_tokenizer is slow
    text = "Wörter, naïve."
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == slow.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    pieces = token_texts(tokenizer, ids)
    assert "".join(pieces) == text
    assert pieces[:4] == ["W", "", "ö", "r"]
    assert tokenizer.get_vocab_size() == len(tokenizer.get_vocab()) == 384
    (of_batch,) = tokenizer.encode_batch([text], add_special_tokens=False)
    assert of_batch.ids == ids
    assert loaded.bos_prefix == []  # what it adds stands behind a text
    assert 1 in tokenizer.get_added_tokens_decoder()
    assert (
        tokenizer.to_str() == wrap_model(llama(vocab_size=400), ByT5Tokenizer()).tokenizer.to_str()
    )


def test_a_tokenizer_too_large_for_the_embedding_is_refused() -> None:
    with pytest.raises(ConfigError, match="IDs up to 258, its embedding only 61 rows"):
        wrap_model(llama(), ByT5Tokenizer())
    # Its added tokens reach from 259 to 383, and no text but their own has them.
    loaded = wrap_model(llama(vocab_size=300), ByT5Tokenizer())
    assert len(loaded.encode(["plain"])[0]) == 5
    with pytest.raises(DataError, match="the text holds '<extra_id_124>', token 383, and the emb"):
        loaded.encode(["plain", "of <extra_id_124>"])


def test_the_tokenizer_of_a_folder_is_opened_by_transformers_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    llama().save_pretrained(tmp_path)
    fast_tokenizer(chat_template=TEMPLATE).save_pretrained(tmp_path)
    opened: list[Any] = []
    read = transformers.AutoTokenizer.from_pretrained

    def spy(folder: Any, **settings: Any) -> Any:
        opened.append(settings["trust_remote_code"])
        return read(folder, **settings)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", spy)
    loaded = load_model(str(tmp_path))
    assert opened == []
    assert loaded.bos_prefix == [0]
    found = loaded.transformers_tokenizer
    text = found.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert text == "<|user|>a</s>"
    assert opened == [False]


def test_a_folder_with_a_slow_tokenizer_has_one(tmp_path: Path) -> None:
    from transformers import CTRLTokenizer

    llama(vocab_size=400).save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a@@": 0, "b": 1, "<unk>": 2, "ab": 3}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b</w>\n")
    CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")).save_pretrained(
        tmp_path
    )
    tokenizer = load_model(str(tmp_path)).tokenizer
    assert tokenizer.encode("ab ab", add_special_tokens=False).ids == [3, 3]


def test_a_tokenizer_that_transformers_cannot_read_is_one_line(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    loaded = load_model(str(tmp_path))
    assert loaded.tokenizer is not None
    with pytest.raises(DataError, match="cannot read its tokenizer"):
        _ = loaded.transformers_tokenizer
