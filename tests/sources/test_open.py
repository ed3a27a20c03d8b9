"""`attribute` on a server: the same answer as in this process, resumed after a server has died."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from olmo_sparsity import attribute, estimate_cost, explain, load_model, measure
from olmo_sparsity.analysis.scoring.logprobs import count_forwards
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.models.huggingface.whole_prompts import WholePrompts
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.models.prompts import Prompt
from olmo_sparsity.sources.gate.gate import check
from olmo_sparsity.sources.gate.questions import measure_questions
from olmo_sparsity.sources.options import SourceSettings
from olmo_sparsity.sources.request import AttributeRequest
from olmo_sparsity.sources.servers import connection
from tests.support.explanations import WORDS, make_tokenizer
from tests.support.fake_server import FakeServer, TableModel
from tests.support.families import REFUSED, build
from tests.support.sources import GIVEN, SOURCES, model_of


class TransformersServer(FakeServer):
    """Its numbers are those of a tiny model of transformers."""

    def start(self) -> None:
        inner = model_of()

        class Model:
            @torch.no_grad()
            def log_p(self, ids: Any) -> np.ndarray:
                logits_LV = inner(input_ids=torch.tensor([list(ids)])).logits[0]
                return logits_LV.double().log_softmax(-1).numpy()

        super().start()
        self.model: Any = Model()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(connection, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(connection, "NEW_PATIENCE_S", 0.1)
    made = TransformersServer(make_tokenizer(bos=False), "vllm")
    yield made
    made.stop()


@pytest.fixture
def model(server: FakeServer) -> LoadedModel:
    return load_model(server.url, tokenizer=make_tokenizer())


def test_verdicts_are_those_of_transformers(
    model: LoadedModel, server: FakeServer, tmp_path: Path
) -> None:
    here, there = attribute(model_of(), make_tokenizer(), **GIVEN), attribute(model, **GIVEN)
    verdict = ["gives", "lost", "se_gives", "se_lost", "p_gives", "p_lost"]
    np.testing.assert_allclose(here.matrix[verdict], there.matrix[verdict], atol=1e-4)
    assert here.statements.kind.tolist() == there.statements.kind.tolist()
    written = json.loads(there.to_json())
    assert written["model"] == f"table ({server.url})"
    assert written["fingerprint"] == model.weights_sha256
    nowhere = "http://127.0.0.1:1"  # a cost is counted here
    make_tokenizer().save_pretrained(tmp_path)
    counted = estimate_cost(attribute, nowhere, tmp_path, **GIVEN)
    assert 0 < there.token_forwards <= counted.token_forwards


def test_a_prompt_leaves_a_place_for_a_generated_token(server: FakeServer) -> None:
    """vLLM replies to one of `max_model_len` tokens that `max_tokens` is 0."""
    server.prompts, tokenizer = [], make_tokenizer()
    attribute(load_model(server.url, tokenizer=tokenizer), **GIVEN)
    longest = max(len(prompt) for prompt in server.prompts if prompt[0] == 1)
    server.card = {"max_model_len": longest + 1}
    assert attribute(load_model(server.url, tokenizer=tokenizer), **GIVEN).texts
    server.card = {"max_model_len": longest}
    with pytest.raises(ConfigError, match="max_model_len"):
        attribute(load_model(server.url, tokenizer=tokenizer), **GIVEN)


def test_an_answer_is_generated_on_the_server(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = attribute(model, **GIVEN | {"answer": None, "max_new_tokens": 1})
    ids = found.layout.document.tokens[: found.layout.block.start]
    assert len(found.texts) == 1
    with torch.no_grad():
        best = model_of()(input_ids=torch.tensor([[1, *ids]])).logits[0, -1].argmax()
    assert found.layout.document.tokens[-1] == int(best)
    monkeypatch.setattr(
        connection.Connection, "_send", lambda *given: {"choices": [{"text": None}]}
    )
    with pytest.raises(DataError, match="returned no text"):
        model.model.generate(ids, 1)


def test_a_server_that_truncates_long_prompts_is_noticed(server: FakeServer) -> None:
    """It passed the checks of the start, whose prompts are short."""
    model = load_model(server.url, tokenizer=make_tokenizer())
    most = max(len(prompt) for prompt in server.prompts)
    whole = server.model

    class Truncating:
        def log_p(self, ids: Any) -> np.ndarray:
            cut = max(0, len(ids) - most)
            return np.concatenate([whole.log_p(ids)[:cut], whole.log_p(ids[cut:])])

    server.model = Truncating()
    long = GIVEN | {"sources": SOURCES | {"b": "w5 w6 w7 " * (most // 3)}}
    rng = np.random.default_rng(0)
    long |= {"decoys": [" ".join(rng.choice(WORDS, 2 * most)) for _ in range(8)], "draws": 2}
    with pytest.raises(DataError, match="did not read a: decoys"):
        attribute(model, **long)
    server.model = whole
    assert attribute(model, **long).names == ["a", "b", "c"]


def test_what_needs_states_says_so(model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log-probabilities only"):
        explain(model, text="w1 w2 w3 w4 w5 w6 w7 w8", at="w8", short=2)
    with pytest.raises(ConfigError, match="log-probabilities only"):
        measure(model, ["w1 w2 w3 w4 w5 w6 w7 w8 " * 20], out=tmp_path / "out")
    with pytest.raises(ConfigError, match="batch_tokens"):
        attribute(model, **GIVEN, batch_tokens=9)


def test_a_server_is_waited_for_as_long_as_the_options_say(server: FakeServer) -> None:
    def tokenizer() -> Any:
        return make_tokenizer()

    server.delay_s = 0.3
    with pytest.raises(DataError, match=r"no whole reply within 0\.1 s\); .* raise --timeout"):
        load_model(server.url, tokenizer=tokenizer(), timeout=0.1, patience=0.01)
    server.delay_s = 0.0
    server.restart(after_s=0.3)  # it still loads its model: longer than a wrong URL gets
    found = attribute(server.url, tokenizer(), **GIVEN, timeout=5.0, patience=10.0)
    assert len(found.statements) == 3
    with pytest.raises(ConfigError, match="is not a server"):
        attribute("demo", **GIVEN, timeout=5.0)


def test_questions_resume_after_a_server_has_died(
    model: LoadedModel, server: FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "q.jsonl"
    common = {"sources": SOURCES, "answer": ["w1 w2", "w8 w9"]}
    lines = [json.dumps(common | {"question": f"w{20 + i}"}) for i in range(3)]
    path.write_text("\n".join(lines))

    def measured(name: str, model: LoadedModel) -> Any:
        settings, decoys = SourceSettings(draws=4), GIVEN["decoys"]
        request = AttributeRequest(model=model, settings=settings, decoys=decoys)
        return measure_questions(request, path, tmp_path / name)

    began = server.number
    whole = measured("whole", model)
    needed = server.number - began
    for one in model.model.servers:
        one._connection.limits = connection.WaitLimits(patience_s=0.05)
    server.fault = lambda number: "closed" if number > first + needed // 2 else None
    first = server.number
    with pytest.raises(DataError, match="no server is left"):
        measured("parts", model)
    assert 0 < len(list((tmp_path / "parts" / "questions").glob("0*.json"))) < 3
    server.fault = lambda number: None
    again = measured("parts", load_model(server.url, tokenizer=make_tokenizer()))
    assert again.to_json() == whole.to_json()
    server.model = TableModel(seed=1)  # exchanged between two runs, under the same name
    other = load_model(server.url, tokenizer=make_tokenizer())
    with pytest.raises(DataError, match=r"serves another model than when .*parts was begun"):
        measured("parts", other)
    measured("other", other)
    assert not check(path, tmp_path / "parts", tmp_path / "whole").notes
    with pytest.raises(ConfigError, match="other model"):
        check(path, tmp_path / "other", tmp_path / "whole")


@pytest.mark.parametrize(
    "name",
    ["Qwen 3 Next", "Olmo Hybrid", "Falcon-H1", "Granite 4", "LFM 2", "BLOOM", "Mamba"],
)
def test_prompts_that_share_states_score_as_whole_ones(name: str) -> None:
    """Mamba of transformers forgets its state when more tokens than one follow."""
    model = build(next(f for f in REFUSED if f.name == name), vocab_size=45).eval()
    scored, rng = WholePrompts(model), np.random.default_rng(0)
    text, prompts = rng.integers(3, 45, 60), list[Prompt]()
    for place in rng.integers(5, 50, 12):
        ids = np.append(text, 44)
        ids[place : place + 3], num = rng.integers(3, 45, 3), int(rng.integers(1, 4))
        prompts.append(Prompt(ids[: 58 - num], ids[58 - num : 58]))
    found = scored.score([*prompts, prompts[0]])
    assert scored.shares == (name != "Mamba")
    whole = sum(len(prompt.inputs) for prompt in prompts)
    assert scored.token_forwards == (count_forwards(prompts) if scored.shares else whole)
    for prompt, log_p in zip([*prompts, prompts[0]], found, strict=True):
        with torch.no_grad():
            logits_LV = model(input_ids=torch.tensor(prompt.inputs[None])).logits[0]
        num = len(prompt.continuation)
        truth_WV = logits_LV[-num:].log_softmax(-1)
        np.testing.assert_allclose(log_p, truth_WV[range(num), prompt.continuation], atol=2e-5)


@pytest.mark.parametrize(("eos", "ends"), [(0, {0}), ([0, 7], {0, 7}), (None, set())])
def test_generated_text_has_no_token_that_ends_a_text(eos: Any, ends: set[int]) -> None:
    """Tokenizers of GPT-NeoX number theirs 0."""
    model = build(next(f for f in REFUSED if f.name == "BLOOM"), vocab_size=45).eval()
    model.generation_config.eos_token_id = eos
    written = torch.tensor([[3, 4, 0, 7, 9]])
    model.generate = lambda ids, **options: torch.cat([ids, written], 1)
    generated = WholePrompts(model).generate([5, 6], max_new_tokens=5)
    assert generated == [token for token in written[0].tolist() if token not in ends]


@pytest.mark.parametrize("name", ["Mamba", "BLOOM", "Falcon (ALiBi)"])
def test_models_without_position_ids_score_whole_prompts(name: str, tmp_path: Path) -> None:
    index = next(i for i, family in enumerate(REFUSED) if family.name == name)
    model = build(REFUSED[index], vocab_size=45, bos_token_id=1, eos_token_id=2)
    found = attribute(model, make_tokenizer(), **GIVEN)
    block = found.layout.block
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(block.tokens[None])).logits[0]
    first = block.num_before
    log_p = logits[first - 1 : -1].log_softmax(-1)[range(block.num_targets), block.targets_W]
    ends = [end for _, end in found.layout.statements]
    own = [-float(part.sum()) for part in np.split(log_p.numpy(), ends[:-1])]
    np.testing.assert_allclose(found.losses.all_T, own, rtol=1e-4)
    with pytest.raises(ConfigError, match=r"is not supported: .*; explain and measure take"):
        explain(model, make_tokenizer(), text="w1 w2 w3 w4 w5 w6 w7 w8", at="w8", short=2)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    again = attribute(tmp_path, **GIVEN)
    np.testing.assert_allclose(again.matrix.gives, found.matrix.gives, atol=1e-4)
    made = attribute(model, make_tokenizer(), **GIVEN | {"answer": None, "max_new_tokens": 2})
    assert 1 <= made.layout.block.num_targets <= 2
