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
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.command.cli import main
from olmo_sparsity.models.huggingface import HuggingFaceLM
from olmo_sparsity.models.load import load_model
from olmo_sparsity.sources.decoys import draw_decoys, read_decoys
from olmo_sparsity.sources.losses import mean_over_decoys
from olmo_sparsity.sources.statements import HOW_TO_READ
from olmo_sparsity.sources.trials import Trials, next_round
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
    saved,
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
    trials.evaluate(next_round([0, 1], range(3), 2))
    trials.evaluate(next_round(range(3), range(3), 4))
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


def test_the_tables_are_computed_from_the_losses() -> None:
    found = asked(draws=4)
    close(found.statements.nats, found.losses.gap_T)
    least_T = found.matrix[["p_gives", "p_lost"]].min(axis=1).groupby("statement").min()
    close(found.statements.p, np.minimum(1, 2 * 3 * least_T))  # of two tests of three sources
    close(found.matrix.gives, mean_over_decoys(found.losses.gives_TSD).ravel())
    close(found.matrix.lost, mean_over_decoys(found.losses.lost_TSD).ravel())
    spread_TS = found._judged[0].spread_TS
    close(found.statements.spread, spread_TS.mean(1))
    for name in ("gives", "lost"):
        nats_TSD = getattr(found.losses, f"{name}_TSD")
        tried = found.matrix[f"tried_{name}"]
        assert tried.tolist() == [sum(np.isfinite(nats)) for nats in nats_TSD.reshape(9, -1)]
        close(found.matrix[f"se_{name}"], spread_TS.ravel() / np.sqrt(tried.where(tried > 0)))


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_sources_have_the_statements_that_rely_on_them() -> None:
    found = with_verdicts(asked())
    found = replace(found, losses=made_up(*GIVES_AND_LOST, noise=0.0))
    rows = found.sources.set_index("source")
    assert rows.statements.to_dict() == {"a": (0, 1, 2), "b": (2,), "c": (1,)}
    assert rows.nats.tolist() == [8.0, 4.5, 7.5]
    assert rows.verdict["a"].startswith("statement 1, 2, 3 relies on it (8.0")
    beyond = found.matrix[["beyond_gives", "beyond_lost"]].to_numpy().T.reshape(2, 3, 3)
    assert (beyond == np.where(np.array(GIVES_AND_LOST) > 0, 8, 0)).all(), "equal is not beyond"
    none = asked(sources=SOURCES | {"b": "w5"})
    unnamed = replace(none, losses=made_up(np.zeros((3, 3)), np.zeros((3, 3)), noise=0.0)).sources
    assert unnamed.statements.tolist() == [()] * 3
    assert not unnamed.verdict.str.contains("statement").any()


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


@pytest.mark.parametrize("stays", [False, True])
def test_the_cost_is_counted_before(stays: bool) -> None:
    changed: dict[str, Any] = {"draws": 5}
    if stays:
        changed["sources"] = ["w33 w34", *(Segment(*item) for item in SOURCES.items())]
        changed["candidates"] = ["a", "c"]
    cost = estimate_cost(attribute, model_of(), make_tokenizer(), **GIVEN | changed)
    assert cost.token_forwards >= asked(**changed).token_forwards  # prompts share beginnings
    assert f"{cost.flops:.2e}" in str(cost)


@pytest.mark.parametrize(
    ("citations", "shown"),
    [
        ("[1]", "w1 w2 w3 [1] w8 w9 [1/2] w30 [1][3] w5\n\n[1] a\n[2] c\n[3] b"),
        ("[^1]", "w1 w2 w3 [^1] w8 w9 [^1/2] w30 [^1][^3] w5\n\n[^1]: a\n[^2]: c\n[^3]: b"),
        ("(name)", "w1 w2 w3 (a) w8 w9 (a/c) w30 (a)(b) w5"),
    ],
)
def test_the_answer_is_shown_with_citations(citations: str, shown: str) -> None:
    answer = Answer("w1 w2 w3 w8 w9 w30 w5", [(0, 8), (9, 14), (15, 18)])
    found = with_verdicts(asked(answer=answer))
    assert found.text(citations=citations) == shown
    if citations == "[1]":
        assert found.text() == shown
    assert found.text(citations, references=False) == shown.split("\n")[0]
    for wrong in ("", "[]", "[11]", "[1 name]"):
        with pytest.raises(ConfigError, match="must hold 1 or name once"):
            found.text(citations=wrong)
    assert asked(answer=answer).text() == answer.text  # none is named


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


@pytest.mark.parametrize("page", ["README.md", "docs/sources.md"])
def test_samples_of_the_output_show_all_lines_that_are_printed(page: str) -> None:
    samples = re.findall(r"```text\n(.*?)```", Path(page).read_text(), re.DOTALL)
    (sample, *_) = [sample for sample in samples if "rests on" in sample]
    first, blank, *lines, last = sample.splitlines()
    found = with_verdicts(asked())
    printed = found.describe().splitlines()
    assert (first, blank) == (printed[0], printed[1]) == (HOW_TO_READ, "")
    assert lines[-1] == printed[-2] == ""
    assert len(printed) == 2 + 2 * len(found.texts) + 2  # these have no words
    for shown in (lines[:-1], printed[2:-2]):
        verdicts = [line for line in shown if line.startswith("  ")]
        assert all(line.startswith(("  rests on ", "  by word, in nats: ")) for line in verdicts)
    counts = r"statements: \d+, sources: \d+"
    assert re.sub(counts, "", last) == re.sub(counts, "", printed[-1])


def test_json_has_the_schema_that_the_page_says() -> None:
    found = with_verdicts(
        asked(answer=Answer("w1 w2 w3  w8 w9 w30 w5", [(0, 8), (10, 15), (16, 19)]))
    )
    told = json.loads(found.to_json())
    page = Path("docs/sources.md").read_text()
    objects = {"the answer": told, "a statement": told["statements"][0]}
    for name, keys in (objects | {"a row of the matrix": told["matrix"][0]}).items():
        (row,) = re.findall(rf"^\| {name} \| (.*) \|$", page, re.M)
        assert set(re.findall(r"`(\w+)`", row)) == set(keys)
    assert (told["schema"], told["version"]) == ("olmo-sparsity/attribution", 4)
    for row in told["statements"]:
        assert told["answer"][row["first"] : row["end"]] == row["text"]
    assert [row["sources"] for row in told["statements"]] == [["a"], ["a", "c"], ["a", "b"]]
    assert len(told["matrix"]) == 9


# --- from a shell ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shell_words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("shell")
    model, decoys = saved(folder)
    words = [model]
    for name, text in SOURCES.items():
        (folder / f"{name}.txt").write_text(text)
        words += ["--source", f"{name}={folder / name}.txt"]
    return [*words, "--question", GIVEN["question"], "--decoys", decoys]


def shell(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    return main(["attribute", *words]), *capsys.readouterr()


def test_a_folder_names_its_sources_and_refuses_what_is_not_text(
    shell_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    (folder / ".DS_Store").write_bytes(b"\0\1")
    words = [shell_words[0], "--source", str(folder), *shell_words[7:], "--answer", "w1"]
    code, _, err = shell(capsys, *words, "--dry-run")
    assert code == 0, err
    assert "3 files are sources: a, b, c" in err
    (folder / "d.pdf").write_bytes(b"%PDF-1.7\n\0\xff")
    code, _, err = shell(capsys, *words, "--dry-run")
    assert code == 2
    assert "d.pdf is not text in UTF-8 from byte 11 on; convert it to text" in err


def test_the_command_prints_verdicts_and_writes_a_page(
    shell_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*shell_words, "--answer", "w1 w2 w3", "--candidates", "a,c", "--draws", "5"]
    code, out, err = shell(capsys, *words, "--html", str(tmp_path / "page.html"))
    assert code == 0, err
    assert "w1 w2 w3\n  rests on " in out
    assert "statements: 1, sources: 2, decoys of each: 5 at most" in out
    assert "</html>" in (tmp_path / "page.html").read_text()


def test_the_command_prints_json_of_an_answer_and_its_reasoning(
    shell_words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*shell_words, "--answer", "w1 w2 w3", "--candidates", "a,c", "--draws", "5"]
    code, out, err = shell(capsys, *words, "--json", "--reasoning", "w5 w6 w7 w8 w9")
    assert code == 0, err
    told = json.loads(out)
    assert [cell["source"] for cell in told["matrix"]] == ["a", "c", "reasoning 1"]
    assert told["reasoning"][0]["text"] == "w5 w6 w7 w8"  # the last token stays in view


def test_a_dry_run_prints_the_cost(
    shell_words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = shell(capsys, *shell_words, "--answer", "w1 w2 w3", "--dry-run")
    assert code == 0, err
    assert out.startswith("token-forwards  ")


@pytest.mark.parametrize("pattern", ["", "*"])
def test_each_file_of_a_folder_is_a_source(
    shell_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], pattern: str
) -> None:
    for name, text in SOURCES.items():
        (tmp_path / name).write_text(text)
    words = [shell_words[0], "--source", str(tmp_path / pattern), *shell_words[7:]]
    code, out, err = shell(capsys, *words, "--answer", "w1", "--units", "words")
    assert code == 0, err
    assert "sources: 12, decoys" in out


def test_a_file_with_an_equals_sign_or_an_umlaut_in_its_name_is_a_source(
    shell_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("a=b.txt", "half \udcc3\udcbc.txt")  # the second as the locale C has an umlaut
    texts = list(SOURCES.values())
    for name, text in zip(names, texts, strict=False):
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in names]
    words = [shell_words[0], "--source", *files, *shell_words[7:], "--answer", "w1", "--json"]
    code, out, err = shell(capsys, *words)
    assert code == 0, err
    assert json.loads(out)["sources"] == ["a=b.txt", "half ü.txt"]


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
