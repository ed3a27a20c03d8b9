"""The comparison of `explain` with other packages: what it counts, and how it judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from benchmarks import explain
from olmo_sparsity.analysis.models.huggingface import HuggingFaceLM
from olmo_sparsity.analysis.selectors.influence import SELECTORS
from study.benchmarks import explainers
from tests.support.families import SUPPORTED, build, find

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return explain.word_tokenizer(64)


@pytest.fixture
def model() -> transformers.PreTrainedModel:
    return build(SUPPORTED[find("Llama 1, 2, 3")], vocab_size=64)


@pytest.fixture
def question(tokenizer: transformers.PreTrainedTokenizerFast) -> Any:
    ids = np.random.default_rng(0).integers(1, 64, 30).tolist()
    return explainers.Question(ids[:20], ids[20:28], ids[28:], tokenizer)


def test_pieces_are_the_text(question: Any) -> None:
    assert "".join(question.pieces) == question.prompt + question.answer_text
    read = question.tokenizer(question.prompt)["input_ids"]
    assert read == question.far + question.near


@pytest.mark.parametrize("selector", ["add_one", "gradient"])
def test_token_forwards_are_those_that_the_scorer_counts(
    selector: str, model: Any, question: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    select = SELECTORS[selector]

    def counted(scorer: Any, asked: Any) -> Any:
        choice = select(scorer, asked)
        counts.append(scorer.token_forwards)
        return choice

    monkeypatch.setitem(SELECTORS, selector, counted)
    scores = explainers.ours(selector, model, question.tokenizer)
    counter = explainers.TokenForwards(model)
    scores(question)  # a model with a new hook is tried once
    counter.count = 0
    counts.clear()
    assert np.count_nonzero(scores(question)) == len(question.far)
    assert [counter.count] == counts


def test_scores_that_are_the_truth_are_judged_so(model: Any, question: Any) -> None:
    judge = explain.Judge(HuggingFaceLM(model), question)
    judge.prepare(seed=0)
    every = np.arange(len(question.far))
    # Kept whole, both ways read one text.
    assert judge.masked([every]) == pytest.approx(judge.deleted([every]), abs=1e-4)
    drops = judge.masked([every])[0] - judge.masked([np.delete(every, j) for j in every])
    found = judge.judge(drops)
    assert found["−1 masked"] == pytest.approx(drops.max(), abs=1e-4)
    assert found["lds masked"] > judge.judge(-drops)["lds masked"]
    assert judge.judge(np.zeros(len(every)))["lds masked"] == 0


def test_what_cannot_run_is_a_reason(tmp_path: Path) -> None:
    rows, reason = explain.ask("flashtrace", tmp_path, [], 10, "")
    assert rows == []
    assert reason == "requires NumPy 2: name its environment by --other-python"


def test_costs_of_before_do_not_stay_where_an_answer_no_longer_comes(tmp_path: Path) -> None:
    file = tmp_path / "costs.csv"
    one = {"cpu_s": 1.0, "wall_s": 2.0, "token_forwards": 3.0, "memory_mib": 4.0}
    for length in (1, 2):
        explain.keep_costs(file, length, ["a", "b", "c"], dict.fromkeys("abc", one))
    explain.keep_costs(file, 2, ["a", "b"], {"a": one | {"cpu_s": 5.0}})
    lines = "length,name,cpu_s,token_forwards,memory_mib|1,a,1.0,3.0,4.0|1,b,1.0,3.0,4.0|"
    lines += "1,c,1.0,3.0,4.0|2,a,5.0,3.0,4.0|2,c,1.0,3.0,4.0"
    assert file.read_text().splitlines() == lines.split("|")
