"""Exercises of the laboratory: what a statement rests on is in its sources, and nowhere else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

from tests.support.sources import FAMILIES, Plain, asked

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up; sources imports laboratory
    spec.loader.exec_module(module)
    return module


laboratory = load("laboratory")
sources = load("sources")


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
                "one": [1], "either": [2], "both": [1, 1], "none": [0],
            }[kind]  # fmt: skip
            asked = " and ".join(" ".join(fact.split()[:2]) for fact in facts)
            assert f"{asked}?" in one.question
    assert kinds == {"one", "either", "both", "none"}


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
        [("one", "one", True, True), ("one", "one", False, True), ("one", "none", False, False),
         ("either", "either", True, True), ("both", "one", False, True),
         ("none", "none", True, True), ("none", "one", False, True)],
        columns=["kind", "said", "right", "counted"],
    )  # fmt: skip
    found = sources.summary(rows)
    assert found["right_source"] == 0.5
    assert found["false_rests_on"] == 0.5
    assert (found["told_either"], found["told_both"], found["told_none"]) == (1.0, 0.0, 0.5)
    assert found["counted"] == 6 / 7


def test_rivals_are_ranked_and_told_apart() -> None:
    assert sources.auroc(np.array([3.0, 2.0]), np.array([1.0, 2.0])) == 0.875
    rows = [("a", "one", True, True, 3.0, 10), ("a", "one", True, False, 1.0, 10),
            ("a", "none", True, False, 2.0, 10), ("a", "none", False, False, 9.0, 10)]  # fmt: skip
    columns = ["rival", "kind", "counted", "right", "score", "token_forwards"]
    table = sources.compare(sources.pd.DataFrame(rows, columns=columns))
    assert table.loc["a"].tolist() == [0.5, 0.5, 10.0]


def test_scores_of_rivals_are_those_of_their_definitions() -> None:
    found = asked()
    model = found.prompt.model
    scores = sources.rivals(model, found)
    assert {name: score.shape for name, (score, _) in scores.items()} == dict.fromkeys(
        ("ours", "left out", "alone", "linear fit", "attention"), (3, 3)
    )
    plain = Plain(FAMILIES[0], "isolated")
    parts = plain.parts

    def losses(shown: list[int]) -> np.ndarray:
        """Of a text that closes up."""
        plain.parts = [parts[source] for source in shown]
        return plain.losses({0, 1, 2})

    cases: dict[str, tuple[list[list[int]], list[int], int]] = {
        "alone": ([[0], [1], [2]], [], -1),
        "left out": ([[1, 2], [0, 2], [0, 1]], [0, 1, 2], 1),
    }
    for name, (sets, base, sign) in cases.items():
        expected = [sign * (losses(shown) - losses(base)) for shown in sets]
        np.testing.assert_allclose(scores[name][0], np.array(expected).T, atol=1e-4)
    drawn = np.random.default_rng(0).random((64, 3)) < 0.5
    nats = -np.stack([losses(np.flatnonzero(row).tolist()) for row in drawn])
    fitted, *_ = np.linalg.lstsq(np.column_stack([np.ones(64), drawn]), nats, rcond=None)
    np.testing.assert_allclose(scores["linear fit"][0], fitted[1:].T, atol=1e-4)
    sums = scores["attention"][0].sum(1)
    assert ((sums > 0) & (sums < [3, 2, 1])).all()  # tokens of each statement
