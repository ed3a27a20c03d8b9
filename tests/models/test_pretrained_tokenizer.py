"""Tokenizers of transformers: taken as they are, cut off nothing, adapted where they are slow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from olmo_sparsity import measure
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.models.load import load_model, wrap_model
from olmo_sparsity.models.loaded import identity_of
from olmo_sparsity.models.pretrained_tokenizer import as_tokenizer, find_tokenizer, tokens_before
from tests.support.models import llama

BOS, EOS = ("<s>", 0), ("</s>", 1)
WRAPPED = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[BOS, EOS])
WORDS = ["<s>", "</s>", "<|user|>", "Ġa", *map(chr, range(98, 123)), "a", "Ġ"]


def word_tokenizer(adds_bos: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, [("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(WORDS[:3])
    if adds_bos:
        tokenizer.post_processor = WRAPPED
    return tokenizer


TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"


def fast_tokenizer(**settings: Any) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(), bos_token="<s>", eos_token="</s>", **settings
    )


class LowersInCall(transformers.PreTrainedTokenizerFast):
    def __call__(self, text: str, **options: Any) -> Any:
        return super().__call__(text.lower(), **options)


class LowersInEncode(transformers.PreTrainedTokenizerFast):
    def encode(self, text: str, **options: Any) -> Any:
        return super().encode(text.lower(), **options)


class ReversesText(transformers.PreTrainedTokenizerFast):
    def __call__(self, text: str, **options: Any) -> Any:
        return super().__call__(text[::-1], **options)


class TakesNoOption(transformers.PreTrainedTokenizerFast):
    def __call__(self, text: str) -> Any:
        return super().__call__(text)


class SaysMore(transformers.PreTrainedTokenizerFast):
    def describe(self) -> str:
        return "changes no token"


def test_a_tokenizer_whose_python_code_changes_tokens_is_refused() -> None:
    # Of the first probe it knows no word.
    few_words = Tokenizer(models.WordLevel({"a": 0, "B": 1, "?": 2}, unk_token="?"))
    few_words.pre_tokenizer = pre_tokenizers.Whitespace()
    for kind, backend, way in (
        (LowersInCall, word_tokenizer(), "\\(text\\) does not return the tokens"),
        (LowersInEncode, word_tokenizer(), ".encode\\(text\\) does not return the tokens"),
        (ReversesText, few_words, "\\(text\\) does not return the tokens"),
        (TakesNoOption, word_tokenizer(), "\\(text\\) raises TypeError"),
    ):
        with pytest.raises(ConfigError, match=f"tokenizer: {kind.__name__}{way}.*normalizer"):
            as_tokenizer(kind(tokenizer_object=backend))
    as_tokenizer(SaysMore(tokenizer_object=word_tokenizer()))


def test_a_tokenizer_that_is_checked_stays_as_it_is() -> None:
    fast = fast_tokenizer(model_max_length=3, split_special_tokens=True)
    fast.backend_tokenizer.enable_truncation(2)
    fast.backend_tokenizer.enable_padding(length=9)
    fast.backend_tokenizer.model.dropout = 0.5
    before = (fast.backend_tokenizer.to_str(), fast.model_max_length)
    assert as_tokenizer(fast).encode("a</s>b", add_special_tokens=False).ids == [29, 1, 4]
    assert (fast.backend_tokenizer.to_str(), fast.model_max_length) == before


def test_a_tokenizer_of_either_library_is_taken() -> None:
    fast = fast_tokenizer(chat_template=TEMPLATE)
    for given, whole in ((word_tokenizer(), None), (fast, fast)):
        loaded = wrap_model(llama(), given)
        assert loaded.encode(["ab"]) == [[29, 4]]
        assert loaded.prefix_ids("auto", "a") == [0]
        assert loaded.transformers_tokenizer is whole
    text = fast.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False)
    assert loaded.encode([text]) == [[2, 29, 30, 4, 1]]
    assert wrap_model(llama(), word_tokenizer(adds_bos=False)).prefix_ids("auto", "a") == []
    for other in (3, transformers.ByT5Tokenizer()):  # which is written in Python
        with pytest.raises(ConfigError, match=f"tokenizer must be .*, not {type(other).__name__}"):
            wrap_model(llama(vocab_size=400), other)


@pytest.mark.parametrize("puts", [WRAPPED, processors.BertProcessing(EOS, BOS)])
def test_the_prefix_is_read_and_not_tried_on_a_letter(puts: Any) -> None:
    """Also of a tokenizer that has no token for the letter."""
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "b": 2, "c": 3}, []))
    tokenizer.pre_tokenizer, tokenizer.post_processor = pre_tokenizers.WhitespaceSplit(), puts
    tokenizer.add_special_tokens(["<s>", "</s>"])
    for given in (tokenizer, transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)):
        loaded = wrap_model(llama(), given)
        assert loaded.prefix_ids("auto", "b c") == [0]
        assert loaded.encode(["b c", "c"]) == [[2, 3], [3]]


def test_a_prefix_that_cannot_be_found_is_an_error() -> None:
    changing = SimpleNamespace(encode=lambda _, add_special_tokens: [7 - add_special_tokens])
    with pytest.raises(DataError, match="prefix=auto"):
        tokens_before(changing, "x y")


def test_the_dropout_of_a_bpe_is_left_out(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.model.dropout = 0.5
    text = " a" * 100
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for given in (tokenizer, transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)):
        assert wrap_model(llama(), given).encode([text]) == [[3] * 100]
    assert find_tokenizer(tmp_path).encode(text).ids[1:-1] == [3] * 100
    assert tokenizer.model.dropout == 0.5, "the tokenizer that was passed is left as it was"


def test_truncation_and_padding_of_the_original_are_left_out(tmp_path: Path) -> None:
    fast = fast_tokenizer()
    loaded = wrap_model(llama(), fast)
    fast("abc", truncation=True, max_length=2)
    llama().save_pretrained(tmp_path)
    tokenizer = word_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for one in (loaded, wrap_model(llama(), fast), load_model(str(tmp_path))):
        assert len(one.encode(["abcabc"])[0]) == 6


def test_a_tokenizer_too_large_for_the_embedding_is_refused() -> None:
    with pytest.raises(ConfigError, match="IDs up to 30, the embedding 30 rows"):
        wrap_model(llama(vocab_size=30), word_tokenizer())
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens(["<image>"])  # no text but its own has it
    loaded = wrap_model(llama(vocab_size=31), tokenizer)
    assert loaded.encode(["ab"]) == [[29, 4]]
    with pytest.raises(DataError, match=r"token 31 \('<image>'\) is not in its 31"):
        loaded.encode(["ab", "a<image>"])


def test_a_regular_expression_without_end_is_one_line() -> None:
    """tokenizers panics, which is no `Exception`."""
    tokenizer = word_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(b+)+$|(?<!b)c"), "isolated")
    with pytest.raises(DataError, match=r"its tokenizer cannot read the text .*retry-limit"):
        wrap_model(llama(), tokenizer).encode(["b" * 60 + "!"])
    with pytest.raises(DataError, match=r"a text for .*'\\ud800', its character 2, is half of a"):
        wrap_model(llama(), tokenizer).encode(["b\ud800"])


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "change", "changed"),
    [
        ("tokenizer.json", lambda c: None, []),
        ("config.json", lambda c: c.update(rms_norm_eps=0.5), ["model"]),
        ("tokenizer.json", lambda c: c["model"]["merges"].clear(), ["tokenizer"]),
        ("tokenizer.json", lambda c: c.update(normalizer={"type": "Lowercase"}), ["tokenizer"]),
        ("tokenizer_config.json", lambda c: c.update(chat_template="!"), ["chat_template"]),
        ("tokenizer_config.json", lambda c: c.update(bos_token="</s>"), ["chat_template"]),
    ],
)
def test_the_identity_of_a_folder_is_of_all_that_makes_its_numbers(
    file: str, change: Any, changed: list[str], tmp_path: Path
) -> None:
    llama().save_pretrained(tmp_path)
    fast_tokenizer().save_pretrained(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", lambda c: c.update(chat_template=TEMPLATE))
    before = identity_of(load_model(tmp_path, device="cpu"))
    edit_json(tmp_path / file, change)
    after = identity_of(load_model(tmp_path, device="cpu"))
    assert [name for name in before if before[name] != after[name]] == changed


def test_a_measurement_is_not_resumed_with_another_template(tmp_path: Path) -> None:
    texts = [f"{word} bc cd " * 9 for word in ("ab", "bd", "ca")]
    made: dict[str, Any] = {"out": tmp_path, "long": 24, "short": 8, "draws": 1, "halves": 0}
    made |= {"selectors": "add_one_screened", "min_gap": 0.0, "max_targets": 1}
    measure(wrap_model(llama(), fast_tokenizer()), texts, **made)
    with pytest.raises(ConfigError, match="holds work with chat_template"):
        measure(wrap_model(llama(), fast_tokenizer(chat_template=TEMPLATE)), texts, **made)
