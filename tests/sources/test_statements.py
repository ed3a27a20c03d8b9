"""Sources: numbers against plain transformers, verdicts against what is known."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_sparsity import Answer, Segment, attribute, estimate_cost
from olmo_sparsity.analysis.scoring.logprobs import ModelLogprobs
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.models.load import load_model
from olmo_sparsity.sources import cost as cost_module
from olmo_sparsity.sources.report.how_to_read import HOW_TO_READ, how_to_read
from olmo_sparsity.sources.verdicts.decoys import draw_decoys, read_decoys
from olmo_sparsity.sources.verdicts.losses import mean_over_decoys
from olmo_sparsity.sources.verdicts.trials import Trials, next_round
from tests.support.explanations import make_tokenizer
from tests.support.sources import (
    FAMILIES,
    GIVEN,
    GIVES_AND_LOST,
    SOURCES,
    Plain,
    asked,
    made_up,
    model_of,
    with_verdicts,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_plain_transformers(family: str) -> None:
    found = asked(family, draws=4)
    plain = Plain(family)
    close(found.losses.all_T, plain.losses())
    texts = read_decoys(found.prompt.model, found.prompt, GIVEN["decoys"])
    decoys = draw_decoys(found.prompt, texts, 4, 0)
    trials = Trials(ModelLogprobs(Scorer(HuggingFaceLM(model_of(family)))), found.layout, decoys)
    trials.evaluate(next_round(shown=[0, 1], replaced=range(3), num_draws=2))
    trials.evaluate(next_round(shown=range(3), replaced=range(3), num_draws=4))
    losses = trials.statement_losses
    assert np.isnan(losses.pop("all")).all()
    for draw, ids in enumerate(zip(*(rows.tolist() for rows in decoys), strict=True)):
        in_all_places = dict(enumerate(ids))
        close(losses["decoys"][:, draw], plain.with_decoys(in_all_places).losses())
        for source in range(3):
            others = {number: in_all_places[number] for number in range(3) if number != source}
            close(losses["among"][:, source, draw], plain.with_decoys(others).losses())
            alone = {source: in_all_places[source]}
            close(losses["without"][:, source, draw], plain.with_decoys(alone).losses())
    # `attribute` evaluates some of them.
    for way, expected in losses.items():
        evaluated = getattr(found.losses, f"{way}_{'TD' if way == 'decoys' else 'TSD'}")
        is_evaluated = np.isfinite(evaluated)
        assert is_evaluated.any() or way == "among"
        close(evaluated[is_evaluated], expected[is_evaluated])


def test_the_matrix_is_computed_from_the_losses() -> None:
    found = asked(draws=4)
    spread_TS = found._judgement.evidence.spread_TS
    for name, nats_TSD in (("gives", found.losses.gives_TSD), ("lost", found.losses.lost_TSD)):
        close(found.matrix[name], mean_over_decoys(nats_TSD).ravel())
        tried = found.matrix[f"tried_{name}"]
        assert tried.tolist() == [sum(np.isfinite(nats)) for nats in nats_TSD.reshape(9, -1)]
        close(found.matrix[f"se_{name}"], spread_TS.ravel() / np.sqrt(tried.where(tried > 0)))


def test_the_table_of_statements_is_computed_from_the_losses() -> None:
    found = asked(draws=4)
    close(found.statements.nats, found.losses.gap_T)
    close(found.statements.spread, found._judgement.evidence.spread_TS.mean(1))
    smallest_p_T = found.matrix[["p_gives", "p_lost"]].min(axis=1).groupby("statement").min()
    num_tests = 2 * 3  # both effects of three sources
    close(found.statements.p, np.minimum(1, num_tests * smallest_p_T))


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_sources_have_the_statements_that_rely_on_them() -> None:
    found = replace(with_verdicts(asked()), losses=made_up(*GIVES_AND_LOST, noise=0.0))
    rows = found.sources.set_index("source")
    assert rows.statements.to_dict() == {"a": (0, 1, 2), "b": (2,), "c": (1,)}
    assert rows.nats.tolist() == [8.0, 4.5, 7.5]
    assert rows.verdict["a"].startswith("statement 1, 2, 3 relies on it (8.0")


def test_an_equal_effect_is_not_beyond_a_decoy() -> None:
    found = replace(with_verdicts(asked()), losses=made_up(*GIVES_AND_LOST, noise=0.0))
    beyond = found.matrix[["beyond_gives", "beyond_lost"]].to_numpy().T.reshape(2, 3, 3)
    assert beyond.tolist() == np.where(np.array(GIVES_AND_LOST) > 0, 8, 0).tolist()


def test_a_source_that_no_verdict_names_has_no_statements() -> None:
    no_effects = made_up(np.zeros((3, 3)), np.zeros((3, 3)), noise=0.0)
    sources = replace(asked(sources=SOURCES | {"b": "w5"}), losses=no_effects).sources
    assert sources.statements.tolist() == [()] * 3
    assert not sources.verdict.str.contains("statement").any()


@pytest.mark.parametrize(("num_sources", "draws"), [(1, 2), (3, 2), (2, 5)])
def test_the_prompts_are_counted_at_most_and_if_the_first_source_is_clear(
    num_sources: int, draws: int
) -> None:
    """With decoys that share no token. Of one source, those in place of all are its own."""
    sources = dict(list(SOURCES.items())[:num_sources])
    cost = estimate_cost(
        attribute, model_of(), make_tokenizer(), **GIVEN | {"sources": sources, "draws": draws}
    )
    of_all = 1 + draws + 2 * num_sources * draws
    found = re.findall(r"in (\d+) prompts", cost.details)  # what is expected comes first
    assert [int(number) for number in found] == [1 + 1 + num_sources + 2, of_all]
    assert re.search(r"on this CPU +about [\d,]+ s if clear at once, at most [\d,]+ s", str(cost))


def test_seconds_on_this_cpu_are_flops_by_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(cost_module, "flops_per_second", lambda: 1000.0)
    model = model_of()
    cost = estimate_cost(attribute, model, make_tokenizer(), **GIVEN)
    seconds = re.search(r"about ([\d,]+) s if clear at once, at most ([\d,]+) s", cost.details)
    token_forwards = re.findall(r"([\d,]+) in \d+ prompts", cost.details)
    assert seconds is not None
    flops_of_token = 2 * sum(weight.numel() for weight in model.parameters())
    for found, count in zip(seconds.groups(), token_forwards, strict=True):
        expected = int(count.replace(",", "")) * flops_of_token / 1000
        assert int(found.replace(",", "")) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("stays", [False, True])
def test_the_cost_is_counted_before(stays: bool) -> None:
    changed: dict[str, Any] = {"draws": 5}
    if stays:
        changed["sources"] = ["w33 w34", *(Segment(*item) for item in SOURCES.items())]
        changed["candidates"] = ["a", "c"]
    cost = estimate_cost(attribute, model_of(), make_tokenizer(), **GIVEN | changed)
    assert cost.token_forwards >= asked(**changed).token_forwards  # prompts share beginnings
    assert f"{cost.flops:.2e}" in str(cost)


def test_the_rates_above_the_verdicts_are_those_of_the_page() -> None:
    page = Path("docs/sources.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+ \| \d+) \|$", page, re.MULTILINE))
    named = rows[
        "the right source is named, and no other, where 2 nats or more are lost without it"
    ]
    missing = rows["a source is named although the right one is missing"]
    for row, words in ((named, "of 52 test questions"), (missing, "Of 83 whose")):
        share, num = re.fullmatch(r"([\d.]+) \[.*\] \| (\d+)", row).groups()  # type: ignore[union-attr]
        assert num in words
        assert words in HOW_TO_READ
        assert f"in {float(share):.0%}." in HOW_TO_READ.split(words)[1]


@pytest.mark.parametrize(
    "name",
    ["smollm2", "smollm2 (Q4_1)", "llama:smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"],
)
def test_the_rates_above_the_verdicts_are_those_of_smollm2(name: str) -> None:
    assert how_to_read(name) == HOW_TO_READ


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B (http://127.0.0.1:8000)", "SmolLM2-1.7B", "SmolLM2-360M-Instruct"]
)
def test_another_model_is_said_to_have_rates_that_are_not_known(name: str) -> None:
    assert how_to_read(name) == (
        f"{HOW_TO_READ} {name} has rates of its own, which are not known until you measure them."
    )


@pytest.mark.parametrize("page", ["README.md", "docs/sources.md"])
def test_samples_of_the_output_show_all_lines_that_are_printed(page: str) -> None:
    samples = re.findall(r"```text\n(.*?)```", Path(page).read_text(), re.DOTALL)
    (sample, *_) = [sample for sample in samples if "rests on" in sample]
    first, blank, *lines, last = sample.splitlines()
    found = with_verdicts(asked())
    printed = found.describe().splitlines()
    assert (first, blank) == (HOW_TO_READ, "")
    assert printed[0].startswith(first)  # followed by a sentence about a model that is not SmolLM2
    assert printed[1] == ""
    assert lines[-1] == printed[-2] == ""
    assert len(printed) == 2 + 2 * len(found.texts) + 2  # these have no words
    for shown in (lines[:-1], printed[2:-2]):
        verdicts = [line for line in shown if line.startswith("  ")]
        assert all(line.startswith(("  rests on ", "  by word, in nats: ")) for line in verdicts)
    counts = r"statements: \d+, sources: \d+"
    assert re.sub(counts, "", last) == re.sub(counts, "", printed[-1])


@pytest.fixture
def written_json() -> dict[str, Any]:
    """An answer as JSON, whose statements rest on a, on either of a and c, and on a and b."""
    answer = Answer("w1 w2 w3  w8 w9 w30 w5", [(0, 8), (10, 15), (16, 19)])
    written: dict[str, Any] = json.loads(with_verdicts(asked(answer=answer)).to_json())
    return written


def test_json_has_the_keys_that_the_page_lists(written_json: dict[str, Any]) -> None:
    page = Path("docs/sources.md").read_text()
    objects = {
        "the answer": written_json,
        "a statement": written_json["statements"][0],
        "a row of the matrix": written_json["matrix"][0],
    }
    for name, keys in objects.items():
        (row,) = re.findall(rf"^\| {name} \| (.*) \|$", page, re.M)
        assert set(re.findall(r"`(\w+)`", row)) == set(keys)


def test_json_says_its_schema_and_version(written_json: dict[str, Any]) -> None:
    assert written_json["schema"] == "olmo-sparsity/attribution"
    assert written_json["version"] == 4


def test_a_statement_in_json_is_a_span_of_the_answer(written_json: dict[str, Any]) -> None:
    for row in written_json["statements"]:
        assert written_json["answer"][row["first"] : row["end"]] == row["text"]


def test_json_has_the_sources_of_each_statement_and_a_row_for_each_pair(
    written_json: dict[str, Any],
) -> None:
    sources = [row["sources"] for row in written_json["statements"]]
    assert sources == [["a"], ["a", "c"], ["a", "b"]]
    assert len(written_json["matrix"]) == 9


def test_a_clear_verdict_does_not_depend_on_the_order_of_the_sources() -> None:
    notes = {
        "bridge": "The new bridge was opened by Katharina Weiss in June 1921.",
        "fair": "The spring fair moved to the meadow behind the mill, as it had rained for weeks.",
        "ferry": "Until then a ferry had carried people across the river, six at a time.",
    }
    demo = load_model("demo")
    for order in permutations(notes):
        found = attribute(
            demo,
            sources={name: notes[name] for name in order},
            question="When was the bridge opened, and by whom?",
            answer=["It was opened in June 1921.", "Katharina Weiss opened it."],
            decoys="docs/examples/other_notes.jsonl",
        )
        assert found.names == list(order)
        assert found.statements.sources.tolist() == [(), ("bridge",)]
