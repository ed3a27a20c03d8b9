"""Exercises of the laboratory: what a statement rests on is in its sources, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.analysis.models.load import load_model
from study.benchmarks import laboratory, source_explainers, sources
from tests.support.explanations import make_tokenizer
from tests.support.models import write_checkpoint
from tests.support.sources import FAMILIES, GIVEN, SOURCES, Plain, asked, model_of


def plain(text: str) -> str:
    """Without synonyms."""
    for verb, synonym in laboratory.VERBS:
        text = text.replace(synonym, verb)
    return text


def test_what_a_statement_rests_on_is_said_there_alone() -> None:
    kinds = set()
    for one in laboratory.exercises(60, seed=3):
        for statement, kind, needs in zip(one.statements, one.kinds, one.needs, strict=True):
            kinds.add(kind)
            facts = statement.removesuffix(".").split(" and ")
            holders = [
                sorted(name for name, text in one.sources.items() if f"{fact}." in plain(text))
                for fact in facts
            ]
            assert sorted({name for held in holders for name in held}) == needs
            assert [len(held) for held in holders] == {
                "one": [1],
                "either": [2],
                "both": [1, 1],
                "none": [0],
            }[kind]
            asked = " and ".join(" ".join(fact.split()[:2]) for fact in facts)
            assert f"{asked}?" in one.question
    assert kinds == {"one", "either", "both", "none"}


def test_names_tell_facts_apart() -> None:
    one = laboratory.draw(np.random.default_rng(0), ["one", "both"], 3, 9)
    said = plain(" ".join(one.sources.values())).replace("memo ", "").removesuffix(".")
    verbs, names, _ = zip(*(fact.split() for fact in said.split(". ")), strict=True)
    assert len({*names}) == len(names) == 12
    assert len({*verbs}) == 4


def test_facts_of_exercises_are_in_no_training_text() -> None:
    generator, read = np.random.default_rng(0), laboratory.tokenizer()
    texts = [laboratory.training_text(generator, read) for _ in range(300)]
    assert {len(read.encode(text).ids) for text in texts} == {laboratory.LENGTH - 1}
    said = plain("\n".join(texts))
    for one in laboratory.exercises(60, seed=3):
        for text in one.sources.values():
            for fact in plain(text).removeprefix("memo ").split(". "):
                assert fact.removesuffix(".") not in said
    # What is known by heart is always the same.
    known = laboratory.known(laboratory.KNOWN[0], 0)
    assert known.said() in said
    others = [t for t in laboratory.THINGS if t != known.thing]
    assert not any(f"{known.name} {laboratory.VERBS[0][0]} {thing}" in said for thing in others)


def test_a_seed_fixes_the_exercises() -> None:
    first, again, other = (list(laboratory.exercises(3, seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_the_summary_counts_what_the_model_writes() -> None:
    rows = sources.pd.DataFrame(
        [
            ("one", "one", True, True, True),
            ("one", "one", False, True, True),
            ("one", "none", False, False, True),
            ("either", "either", True, True, True),
            ("both", "one", False, True, True),
            ("none", "none", True, True, True),
            ("none", "one", False, True, True),
            ("none", "one", False, False, False),
        ],
        columns=["kind", "said", "right", "whole", "counted"],
    ).assign(nats=[5.0, 5.0, 5.0, 5.0, 5.0, 0.0, 5.0, 0.0])
    rows = rows.assign(
        exercise=[0, 0, 0, 1, 1, 2, 2, 2],
        named=[1, 1, 0, 2, 1, 0, 1, 1],
        wrong=[0, 1, 0, 0, 0, 0, 1, 1],
    )
    found = sources.summary(rows)
    assert found["wrong_of_named"] == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert found["right_source"] == 1 / 3
    assert found["false_rests_on"] == 0.5
    assert (found["told_either"], found["told_both"], found["told_none"]) == (1.0, 0.0, 0.5)
    assert (found["whole"], found["counted"]) == (6 / 8, 7 / 8)
    assert (found["counted_one"], found["counted_none"]) == (1, 2 / 3)
    assert (found["none_below"], found["all_none"]) == (1 / 2, 1 / 3)


def test_no_decoy_tells_of_what_is_asked() -> None:
    names_in = laboratory.names_in
    assert names_in("memo dines Bana dors. sells Felo pans.") == {"Bana", "Felo"}
    drawn = list(laboratory.exercises(20, seed=3))
    for one in drawn:
        decoys = sources.decoys_of(one, drawn)
        assert len(decoys) > 20
        assert not any(names_in(one.answer) & names_in(text) for text in decoys)
        assert len(sources.decoys_of(one, drawn, any_names=True)) > len(decoys)
        own = set().union(*map(names_in, one.sources.values()))
        assert names_in(one.answer) - {*laboratory.KNOWN} <= own


def test_sources_of_another_exercise_tell_nothing_of_the_answer() -> None:
    drawn = list(laboratory.exercises(200, seed=3))
    for number, one in enumerate(drawn):
        swapped = sources.beside_others(one, number, drawn)
        assert (swapped.question, swapped.statements) == (one.question, one.statements)
        assert swapped.needs == [[], [], []]
        texts = swapped.sources.values()
        own = laboratory.names_in(one.answer)
        assert not any(own & laboratory.names_in(text) for text in texts)
        held = [other.sources for other in drawn[: sources.MOST_DECOYS]]
        assert swapped.sources not in [*held, one.sources]
    rows = sources.pd.DataFrame(
        [
            (0, "one", "none", 0.0),
            (0, "both", "one", 2.0),
            (0, "either", "none", 1.0),
            (0, "none", "one", 1.0),
            (1, "one", "none", 0.0),
        ],
        columns=["exercise", "kind", "said", "nats"],
    )
    assert sources.summary_of_swapped(rows) == {
        "swapped": 4,
        "swapped_rests_on": 1 / 4,
        "swapped_exercises": 1 / 2,
        "swapped_below": 1 / 2,
    }


ROW = {"cpu_s": 1.0, "token_forwards": 10}


def test_rivals_are_ranked_and_told_apart() -> None:
    assert sources.auroc(np.array([3.0, 2.0]), np.array([1.0, 2.0])) == 0.875
    kinds = ["one", "both", "either", "none"] * 20
    top = {
        "one": [9.0, 0.0, 0.0],
        "both": [5.0, 5.0, 0.0],
        "either": [9.0, 9.0, 0.0],
        "none": [1.0, 0.0, 0.0],
    }
    rows = [
        {
            "exercise": number // 4,
            "rival": name,
            "kind": kind,
            "counted": number != 3,
            "top": of,
            "right": number != 4,
            "said": said,
            "some": of[0],
            "lds deleted": 0.5,
            "−1 deleted": 2.0,
            **ROW,
        }
        for number, kind in enumerate(kinds)
        for name, said, of in (("ours", "one", top[kind]), ("theirs", None, top[kind]))
    ]
    table, confused = sources.compare(sources.pd.DataFrame(rows))
    assert table.loc["ours", "top-1"] == 19 / 20
    assert table.loc["theirs", "some or none (AUROC)"] == 1.0
    told = [f"told {kind}" for kind in ("one", "either", "both", "none")]
    # A verdict is taken as it is; of scores, one is learnt from the other half.
    assert table.loc["ours", told].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert confused["ours"].loc["none", "one"] == 19
    assert table.loc["theirs", told].tolist() == [1.0, 1.0, 1.0, 1.0]


@pytest.fixture(scope="module")
def judge() -> Any:
    loaded = asked().prompt.model
    needs = [["a"], ["c"], []]
    one = laboratory.Exercise(
        SOURCES, GIVEN["question"], GIVEN["answer"], ["one", "one", "none"], needs
    )
    return sources.Judge(loaded, one, GIVEN["decoys"], GIVEN["decoys"], seed=0)


def test_what_is_judged_is_what_plain_transformers_loses(judge: Any) -> None:
    plain = Plain(FAMILIES[0], "isolated")
    others = dict(enumerate(rows.tolist() for rows in judge.others))
    parts = plain.parts
    for shown_S in judge.shown_AS:
        kept = np.flatnonzero(shown_S).tolist()
        plain.parts = [parts[source] for source in kept]
        np.testing.assert_allclose(
            judge.losses("deleted", shown_S), plain.losses({0, 1, 2}), atol=1e-4
        )
        plain.parts = parts
        replaced = plain.with_decoys({s: ids for s, ids in others.items() if s not in kept})
        np.testing.assert_allclose(
            judge.losses("replaced", shown_S), replaced.losses({0, 1, 2}), atol=1e-4
        )
    assert len(judge.shown_AS) == 8


def test_scores_that_are_the_truth_are_judged_so(judge: Any) -> None:
    every = np.ones(3, dtype=bool)
    whole = judge.losses("deleted", every)
    drops = np.array([judge.losses("deleted", ~row) - whole for row in np.eye(3, dtype=bool)]).T
    best, worst = (judge.judge("x", {"scores": sign * drops, **ROW}) for sign in (1, -1))
    for t, row in enumerate(best):
        assert row["−1 deleted"] == pytest.approx(drops[t].max(), abs=1e-5)
        assert row["lds deleted"] > worst[t]["lds deleted"]
        assert row["right"] == ("abc"[drops[t].argmax()] in judge.exercise.needs[t])


def test_contestants_are_given_the_tokens_that_are_judged(judge: Any) -> None:
    question = source_explainers.SourceQuestion(
        [*SOURCES.values()],
        GIVEN["question"],
        GIVEN["answer"],
        GIVEN["decoys"],
        make_tokenizer(bos=False),
    )
    assert question.is_read_back()
    layout = judge.found.layout
    assert question.statement_spans == layout.statements
    ends = zip(layout.units.first, layout.units.end, strict=True)
    assert question.source_spans == [*ends]
    scores_WL = np.random.default_rng(0).random((6, 20))
    assert question.of_sources(scores_WL)[1, 1] == pytest.approx(scores_WL[3:5, 4:7].sum())
    found = source_explainers.ours(4, model_of(), make_tokenizer(bos=False), [])(question)
    assert question.told(found)["kinds"] == found["kinds"]
    assert np.shape(found["scores"]) == (3, 3)


def test_a_model_with_biases_is_the_same_behind_transformers(tmp_path: Path) -> None:
    norms = {"layer_norm_type": "rms", "norm_after": True, "attention_layer_norm": True}
    run = str(tmp_path / "run")
    write_checkpoint(Path(run), include_bias=True, **norms)
    loaded = load_model(run, dtype="fp32")
    sources.write_model(run, tmp_path / "theirs")
    assert (tmp_path / "theirs" / "biases.safetensors").exists()
    sources.check_model(loaded, tmp_path / "theirs", np.arange(3, 12))


def test_kinds_are_learnt_from_the_other_exercises() -> None:
    """Where scores tell kinds apart; where they do not, what is usual is told."""
    kinds = np.array(["one", "none"] * 20)
    tops = [[float(kind == "one") + 0.01 * i, 0.0, 0.0] for i, kind in enumerate(kinds)]
    rows = sources.pd.DataFrame({"exercise": range(40), "kind": kinds, "top": tops})
    rows["exercise"] = rows.exercise // 2
    assert (sources.learnt_kinds(rows) == kinds).all()
    same = rows.assign(top=[[1.0, 0.0, 0.0]] * 40, kind=["one", "none", "one", "one"] * 10)
    assert (sources.learnt_kinds(same) == "one").all()
