"""Sentences of a model's reasoning as sources of its answer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from olmo_sparsity import Answer, Segment, attribute
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.sources.attribution import Attribution
from olmo_sparsity.sources.reading.reasoning import num_reasoning_tokens, sentence_spans
from tests.support.explanations import WORDS
from tests.support.sources import GIVEN, SOURCES, made_up, model_of

NAMES = {**{f"w{i}": f"W{i}." for i in range(10, 20)}, "w38": "<think>", "w39": "</think>"}
"""Some words end a sentence, and two are tags."""


FIRST, SECOND = "W1 w2 w3 w4 W10.", "W5 w6 w7 w8 W11."


REASONING = f"<think> {FIRST} {SECOND} </think>"


@cache
def tokenizer() -> Any:
    names = ["<unk>", "<s>", "</s>", *(NAMES.get(word, word) for word in WORDS), "W1", "W5"]
    inner = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")


def attributed(**changed: Any) -> Attribution:
    given = {"decoys": GIVEN["decoys"], "draws": 4, "question": "w20 w21", "sources": SOURCES}
    given |= {"reasoning": REASONING, "answer": ["w1 w2 w3", "w8 w9"], "prefix": "</s>"}
    return attribute(model_of(), tokenizer(), **given | changed)


def rest_on(one: Attribution, *rows: list[float]) -> Attribution:
    """With losses as if its statements lost so many nats without each source."""
    object.__setattr__(one, "losses", made_up(rows, rows))
    for name in ("statements", "matrix", "_judgement"):
        vars(one).pop(name, None)
    return one


@pytest.fixture
def chained() -> Attribution:
    """The first statement relies on the second sentence, this on the first and b, that on a."""
    one = attributed()
    by_hand = attributed(answer=[SECOND]), attributed(reasoning=None, answer=[FIRST])
    one.steps["reasoning 1"] = rest_on(by_hand[1], [8.0, 0.0, 0.0])
    one.steps["reasoning 2"] = rest_on(by_hand[0], [0.0, 4.0, 0.0, 4.0, 0.0])
    by_hand[0].steps["reasoning 1"] = by_hand[1]
    return rest_on(one, [0.0, 0.0, 0.0, 0.0, 8.0], [0.0, 0.0, 8.0, 0.0, 0.0])


def test_each_link_is_an_attribution_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all sentences named, so that each is judged."""
    every = property(lambda one: list(range(one.prompt.num_reasoning)))
    monkeypatch.setattr(Attribution, "named_sentences", every)
    whole, named = attributed(), [Segment(*item) for item in SOURCES.items()]
    assert whole.names == ["a", "b", "c", "reasoning 1", "reasoning 2"]
    assert list(whole.steps) == ["reasoning 1", "reasoning 2"]
    before = [*named, "w20 w21 <think>"]
    one, two = Segment("reasoning 1", FIRST), Segment("reasoning 2", SECOND)
    same(whole, attributed(sources=[*before, one, two], question="</think>", reasoning=None))
    bare = {"reasoning": None, "answer": [FIRST]}
    same(whole.steps["reasoning 1"], attributed(question="w20 w21 <think>", **bare))
    # The token before a statement stays in view.
    cut = Segment("reasoning 1", FIRST.removesuffix(" W10."))
    last = {"reasoning": None, "answer": [SECOND]}
    same(whole.steps["reasoning 2"], attributed(sources=[*before, cut], question="W10.", **last))
    assert whole.token_forwards > sum(step.token_forwards for step in whole.steps.values())


def same(one: Attribution, other: Attribution) -> None:
    assert one.layout.block.tokens.tolist() == other.layout.block.tokens.tolist()
    assert one.names == other.names
    np.testing.assert_allclose(one.matrix, other.matrix, atol=1e-5)


def test_an_answer_brings_its_reasoning() -> None:
    together = attributed(reasoning=None, answer=f"{REASONING} w1 w2 w3")
    same(together, attributed(answer="w1 w2 w3"))
    assert together.to_dict()["answer"].strip() == "w1 w2 w3"


@pytest.mark.parametrize(
    ("answer", "reasoning", "remedy"),
    [
        ("<think>w5</think> w1 w2 w3", "<think>w4</think>", "reasoning is given, too; pass all"),
        (["<think>w5</think> w1", "w2 w3"], None, "pass what precedes it as reasoning"),
        (Answer("w5</think> w1", [(11, 13)]), None, "pass what precedes it as reasoning"),
        ("<think> w5 w6 w7", None, "begins with <think> and has no </think>"),
    ],
)
def test_reasoning_is_never_judged_as_a_statement(
    answer: Any, reasoning: str | None, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        attributed(reasoning=reasoning, answer=answer)


def test_a_chain_leads_to_sources(chained: Attribution) -> None:
    rows = chained.statements
    assert rows.sources.tolist() == [("reasoning 2",), ("c",)]
    assert rows.origins.tolist() == [("a", "b"), ("c",)]
    assert chained.sources.statements.tolist() == [(0,), (0,), (1,), (), (0,)]


def test_a_statement_relies_on_the_sources_of_its_reasoning(chained: Attribution) -> None:
    assert chained.relies_on("a", statement=0)
    assert chained.relies_on("reasoning 2")
    assert not chained.relies_on("a", statement=1)
    assert chained.text().startswith("w1 w2 w3 [1][2] w8 w9 [3]")


def test_a_chain_is_shown_in_terminal_and_page(chained: Attribution, tmp_path: Path) -> None:
    first = repr(chained).splitlines().index("w1 w2 w3")
    shown = repr(chained).splitlines()[first:]
    assert shown.pop(2).startswith("  by word, in nats: ")
    assert shown[2].startswith(f"    reasoning 2, '{SECOND}', rests on b and reasoning 1 together")
    assert shown[3].startswith(f"      reasoning 1, '{FIRST}', rests on a (")
    chained.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f"<li>→ → reasoning 1, “{FIRST}”, rests on a (" in page


def test_json_has_the_sentences_of_the_reasoning(chained: Attribution) -> None:
    first, second = json.loads(chained.to_json())["reasoning"]
    assert (first["name"], first["text"], first["sources"]) == ("reasoning 1", FIRST, ["a"])
    assert second["origins"] == ["a", "b"]
    assert [cell["source"] for cell in first["matrix"]] == ["a", "b", "c"]


def sentence_texts(text: str) -> list[str]:
    ids = tokenizer()(text, add_special_tokens=False).input_ids
    spans = sentence_spans(ids, tokenizer().backend_tokenizer)
    return [tokenizer().decode(ids[first:end]) for first, end in spans]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (REASONING, [FIRST, SECOND]),
        (f"{FIRST} {SECOND}", [FIRST, SECOND]),
        (f"{FIRST} </think>", [FIRST]),
        # Sentences of fewer than five tokens are joined to a neighbour.
        (f"<think> W1 W10. {SECOND} W1 W12. </think>", [f"W1 W10. {SECOND} W1 W12."]),
        ("<think> </think>", []),
        ("", []),
    ],
)
def test_sentences_have_no_tags_and_at_least_five_tokens(text: str, expected: list[str]) -> None:
    assert sentence_texts(text) == expected


def test_what_precedes_the_closing_tag_is_reasoning() -> None:
    ids = tokenizer()(f"{REASONING} w1", add_special_tokens=False).input_ids
    assert num_reasoning_tokens(ids, tokenizer().backend_tokenizer) == len(ids) - 1
    assert num_reasoning_tokens(ids[-1:], tokenizer().backend_tokenizer) == 0
