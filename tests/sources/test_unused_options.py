"""An option of `attribute` that would have no effect is refused, whoever passes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity import attribute, check, estimate_cost, load_model
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.sources.gate.questions_file import read_questions
from olmo_sparsity.sources.options import SourceSettings
from olmo_sparsity.sources.request import AttributeRequest, ModelOptions
from tests.support.explanations import make_tokenizer
from tests.support.sources import GIVEN, model_of

LOG = [
    {"role": "system", "content": "w1 w2 w3"},
    {"role": "user", "content": "w20 w21"},
    {"role": "assistant", "content": "w1 w2"},
]
QUESTION = {name: GIVEN[name] for name in ("sources", "question", "answer")}


def test_a_prefix_has_no_effect_where_a_template_writes_the_prompt() -> None:
    model, tokenizer = model_of(), make_tokenizer()
    with pytest.raises(ConfigError, match="prefix=w3: a chat template"):
        attribute(model, tokenizer, **GIVEN, chat=True, prefix="w3")
    with pytest.raises(ConfigError, match="prefix=w3: a chat template"):
        attribute(model, tokenizer, messages=LOG, prefix="w3")


def read(tmp_path: Path, *lines: dict[str, Any], **options: Any) -> list[AttributeRequest]:
    """Return the requests of a file with these lines."""
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = SourceSettings(max_new_tokens=options.get("max_new_tokens"))
    loading = ModelOptions(prefix=options.get("prefix", "auto"))
    return read_questions(AttributeRequest(model=None, settings=settings, loading=loading), path)


def test_a_prefix_must_have_an_effect_on_a_line_of_a_questions_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefix=w3: a chat template"):
        read(tmp_path, {"messages": LOG}, {"messages": LOG}, prefix="w3")
    assert len(read(tmp_path, {"messages": LOG}, QUESTION, prefix="w3")) == 2


def test_a_length_of_answers_must_have_an_effect_on_a_line_of_a_questions_file(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens=5: it limits an answer"):
        read(tmp_path, QUESTION, {"messages": LOG}, max_new_tokens=5)
    generated = QUESTION | {"answer": None}
    assert len(read(tmp_path, QUESTION, generated, max_new_tokens=5)) == 2


def test_options_of_weights_and_batches_are_refused_for_a_server() -> None:
    url, tokenizer = "http://127.0.0.1:1", make_tokenizer()
    with pytest.raises(ConfigError, match=f"device=cpu: '{url}' computes where its server runs"):
        load_model(url, tokenizer=tokenizer, device="cpu")
    # A price that ignores an option which the run refuses would be of another run.
    with pytest.raises(ConfigError, match=r"batch_tokens=9: .* forms batches by itself"):
        estimate_cost(attribute, url, tokenizer, **GIVEN, batch_tokens=9)


def test_options_of_servers_and_of_loading_are_refused_for_other_models() -> None:
    with pytest.raises(
        ConfigError, match=r"timeout=5\.0: 'llama:x\.gguf' is not a server; omit it"
    ):
        load_model("llama:x.gguf", timeout=5.0)
    with pytest.raises(ConfigError, match="device_map=auto: a model in memory has its own"):
        attribute(model_of(), make_tokenizer(), **GIVEN, device_map="auto")
    with pytest.raises(ConfigError, match=r"patience=5\.0: load_model takes it"):
        attribute(model_of(), make_tokenizer(), **GIVEN, patience=5.0)


@pytest.mark.parametrize("name", ["new_need_source", "allow_other_model"])
def test_options_of_a_comparison_are_refused_without_a_baseline(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=True has no effect without baseline"):
        check(model_of(), [], tmp_path, **{name: True})
