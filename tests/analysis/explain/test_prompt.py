"""A prompt and its answer: found where the chat template puts them, and where they end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from olmo_sparsity import explain
from olmo_sparsity.analysis.explain.explanation import Explanation
from olmo_sparsity.errors import ConfigError, DataError
from tests.support.explanations import TEXT, asked, make_model, make_tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


def answered(model: Any, prompt: str, **changed: Any) -> Explanation:
    return asked(model, text=None, at=None, prompt=prompt, **changed)


def test_a_prompt_and_its_answer(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Given, or what transformers writes."""
    prompt = " ".join(TEXT.split()[:30])
    given = answered(model, prompt, target="w3 w4", units="words")
    assert given.targets.text.str.strip().tolist() == ["w3 w4"]
    assert given.targets.target.tolist() == [30]
    written = answered(model, prompt, max_new_tokens=5)
    ids = torch.tensor([make_tokenizer()(prompt).input_ids])
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=2)[0, 31:]
    expected = [int(i) for i in expected if i != 2]
    assert written.document.tokens[30:].tolist() == expected
    said = "the answer ends at 5 tokens (max_new_tokens), unfinished"
    assert (said in capsys.readouterr().err) == (len(expected) == 5)


def test_an_answer_ends_where_the_generation_config_ends_it() -> None:
    model, prompt = make_model(), " ".join(TEXT.split()[:30])
    first = answered(model, prompt, max_new_tokens=1).document.tokens[-1]
    model.generation_config.eos_token_id = [2, int(first)]
    with pytest.raises(DataError, match="the model generated nothing"):
        answered(model, prompt, max_new_tokens=1)
    for wrong in ({"a": 1}, "</s>", [2, 1.5]):
        model.generation_config.eos_token_id = wrong
        with pytest.raises(ConfigError, match="not a token ID of the model"):
            answered(model, prompt, max_new_tokens=1)


def test_a_chat_template_is_prefix_and_end(model: Any) -> None:
    prompt = " ".join(TEXT.split()[:30])
    found = answered(model, prompt, target="w3", chat=True)
    assert found.windows.prefix == (1, 43)  # <s> Q:
    assert found.document.tokens[29:].tolist()[1:] == [44, 6]  # A: w3
    assert found.targets.target.tolist() == [31]
    # What the template puts behind the prompt is no candidate, unless that is asked for.
    prompt = " ".join(TEXT.split()[:3])
    given = {"target": "w3", "chat": True}
    assert answered(model, prompt, **given, short=None).windows.short == 1
    with pytest.raises(ConfigError, match="prefix"):
        answered(model, prompt, **given, prefix="none")


def test_a_prompt_is_found_where_the_template_puts_it(model: Any) -> None:
    tokenizer = make_tokenizer()
    prompt = "w3 w5 w3"
    given = {"prompt": prompt, "target": "w3", "chat": True, "k": 1}
    # The template says the words of the prompt before it.
    tokenizer.chat_template = "{{ bos_token }} w3 w5 w3 Q: {{ messages[0]['content'] }} A:"
    found = explain(model, tokenizer, **given)
    assert found.windows.prefix == (1, 6, 8, 6, 43), "what the template sets is no candidate"
    assert found.document.tokens.tolist() == [6, 8, 6, 44, 6]
    tokenizer.chat_template = "{{ bos_token }} {{ messages[0]['content'].replace('w3', 'w4') }}"
    with pytest.raises(DataError, match="the chat template"):
        explain(model, tokenizer, **given)
    for broken in ("{{ raise_exception('roles must alternate') }}", "{% if %}", "{{ 1 / 0 }}"):
        tokenizer.chat_template = broken
        with pytest.raises(DataError, match=r"template of .* does not take a prompt"):
            explain(model, tokenizer, **given)
