"""Which verdicts pass what a questions file expects (expectations.py, gate.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.sources.gate.gate import check
from tests.support.stored_answers import (
    RESTS_ON_A,
    RESTS_ON_NONE,
    cell,
    write_run,
    write_statement,
)


@pytest.mark.parametrize(
    ("expect", "passes"),
    [
        ("a", True),
        ("b", False),
        (["a", "none"], True),
        (["none", None], False),
        ([{"sources": ["a"], "nats": 3.5}, None], True),
        ([{"sources": ["a"], "nats": 4.5}, None], False),
        ([{"both": ["a", "b"]}, None], False),
        ([{"either": ["a", "b"]}, None], True),
        ([{"either": ["a", "dropped"]}, None], True),
        (["a", "none", "a"], False),  # there is no third statement
        ("c", False),  # a prompt builder has dropped it
        (["a"], False),  # the second statement has no entry
    ],
)
def test_a_check_passes_if_the_verdict_is_as_expected(
    questions: Callable[[Any], Path], tmp_path: Path, expect: Any, passes: bool
) -> None:
    report = check(questions(expect), write_run(tmp_path / "out", RESTS_ON_A, RESTS_ON_NONE))
    assert (not report.failures) == passes, report.describe()


CHUNKS: list[Any] = [
    {"name": "a", "text": "w1", "id": "report.pdf"},
    {"name": "b", "text": "w2", "id": ["report.pdf", "DOC-7"]},
]


LANGCHAIN: list[Any] = [
    {"page_content": "w1", "metadata": {"source": "a", "doc_id": "DOC-7"}, "type": "Document"},
    {"page_content": "w2", "metadata": {"source": "b"}, "id": None},
]


@pytest.mark.parametrize(
    ("sources", "expect", "passes"),
    [
        (CHUNKS, "report.pdf", True),  # either chunk
        (CHUNKS, "a", True),  # its name
        (CHUNKS, "DOC-7", False),  # the id of the other chunk alone
        (CHUNKS, {"either": ["DOC-7", "report.pdf"]}, True),
        (CHUNKS, {"both": ["DOC-7", "report.pdf"]}, False),
        (CHUNKS, {"sources": ["report.pdf"], "nats": 99.0}, False),
        (CHUNKS, "other.pdf", False),
        (LANGCHAIN, "DOC-7", True),
        (LANGCHAIN, "b", False),
    ],
)
def test_an_id_of_a_document_stands_for_its_chunks(
    sources: list[Any], expect: Any, passes: bool, tmp_path: Path
) -> None:
    """The first statement rests on the chunk `a`, the second on none; `b` is in the prompt."""
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"sources": sources, "question": "q", "expect": expect}))
    report = check(path, write_run(tmp_path / "out", RESTS_ON_A, RESTS_ON_NONE))
    assert (not report.failures) == passes, report.describe()


@pytest.mark.parametrize(
    ("kind", "either", "both"), [("either", True, False), ("both", True, True)]
)
def test_either_does_not_pass_for_both(
    questions: Callable[[Any], Path], tmp_path: Path, kind: str, either: bool, both: bool
) -> None:
    cells = {"a": cell(4.0, 1.0), "b": cell(4.0, 1.0)}
    out = write_statement(tmp_path / "out", cells, ["a", "b"], kind=kind, nats=8.0)
    assert bool(check(questions({"either": ["a", "b"]}), out)) == either
    assert bool(check(questions({"both": ["a", "b"]}), out)) == both


def test_a_check_of_a_missing_source_shows_the_statement(
    questions: Callable[[Any], Path], tmp_path: Path
) -> None:
    out = write_run(tmp_path / "out", RESTS_ON_A)
    (failure,) = check(questions(["dropped"]), out).failures
    assert failure.text == "text 0"


# --- margin: nats by which an effect may miss what a verdict requires -----------------------------


UNDECIDED_ABOUT_A = {"kind": "undecided", "is_undecided": True, "open": ["a"]}

KNOWN_BY_HEART = {"cells": {"a": cell(0.4, -0.2)}, "nats": 0.6}
"""As "The capital of France is Paris": 0.6 nats, near every threshold."""

MISSED_BY_0_3 = {"cells": {"a": cell(8.4, -0.3)}, "nats": 8.1} | UNDECIDED_ABOUT_A
SMALL_AND_OPEN = {"cells": {"a": cell(1.3, -0.3)}, "nats": 1.3} | UNDECIDED_ABOUT_A
SMALL_SHARE_OF_B = {"cells": {"a": cell(8.4, 2), "b": cell(1.2, -0.1)}, "nats": 9.0, "named": ["a"]}
FOUR_NATS = {"cells": {"a": cell(4.0, 0.1)}, "nats": 4.0, "named": ["a"]}
LESS_THAN_A_NAT = {"cells": {"a": cell(0.8, 0.1)}, "nats": 0.8, "named": ["a"]}


@pytest.mark.parametrize(
    ("statement", "expect", "margin", "passes"),
    [
        (KNOWN_BY_HEART, "a", 3, False),
        (KNOWN_BY_HEART, "none", 0, True),
        # Undecided is neither, and a margin decides near its threshold only.
        (MISSED_BY_0_3, "none", 0, False),
        (MISSED_BY_0_3, "none", 3, False),
        (MISSED_BY_0_3, "a", 0, False),
        (MISSED_BY_0_3, "a", 0.2, False),
        (MISSED_BY_0_3, "a", 0.5, True),
        (SMALL_AND_OPEN, "none", 1, False),
        (SMALL_AND_OPEN, "none", 1.5, True),
        # A small share of the nats is not open, so no margin names its source.
        (SMALL_SHARE_OF_B, "b", 3, False),
        # A named source passes as none if all that is lost is within the margin.
        (FOUR_NATS, "none", 3, False),
        (LESS_THAN_A_NAT, "none", 1, True),
    ],
)
def test_a_margin_bounds_an_effect(
    questions: Callable[[Any], Path],
    tmp_path: Path,
    statement: dict[str, Any],
    expect: str,
    margin: float,
    passes: bool,
) -> None:
    out = write_statement(tmp_path / "out", **statement)
    report = check(questions(expect), out, margin=margin)
    assert (not report.failures) == passes, report.describe()


@pytest.mark.parametrize(
    ("statement", "expect", "margin", "is_marked"),
    [
        (MISSED_BY_0_3, "a", 0.5, True),
        (KNOWN_BY_HEART, "none", 1, False),  # It passes without a margin, too.
        (FOUR_NATS, "none", 3, False),  # It fails.
    ],
)
def test_a_check_that_passes_only_by_the_margin_is_marked_and_noted(
    questions: Callable[[Any], Path],
    tmp_path: Path,
    statement: dict[str, Any],
    expect: str,
    margin: float,
    is_marked: bool,
) -> None:
    out = write_statement(tmp_path / "out", **statement)
    report = check(questions(expect), out, margin=margin)
    assert [item.by_margin for item in report.checks] == [is_marked]
    assert ["passes by the margin" in note for note in report.notes] == [True] * is_marked


@pytest.mark.parametrize("margin", [3.1, -1.0, float("nan")])
def test_a_margin_lies_between_0_and_several_nats(
    questions: Callable[[Any], Path], tmp_path: Path, margin: float
) -> None:
    out = write_run(tmp_path / "out", RESTS_ON_A)
    with pytest.raises(ConfigError, match="margin"):
        check(questions("a"), out, margin=margin)


# --- share of checks that must pass ---------------------------------------------------------------


def test_a_share_of_the_checks_may_be_enough(
    questions: Callable[[Any], Path], tmp_path: Path
) -> None:
    out = write_run(tmp_path / "out", *[RESTS_ON_A] * 9, RESTS_ON_NONE)
    path = questions(["a"] * 10)
    assert not check(path, out)
    assert check(path, out, must_pass=0.9)
    assert not check(path, out, must_pass=0.91)


@pytest.mark.parametrize("share", [0.0, -0.5, 90, float("nan")])
def test_a_share_lies_above_0_and_at_most_at_1(
    questions: Callable[[Any], Path], tmp_path: Path, share: float
) -> None:
    out = write_run(tmp_path / "out", RESTS_ON_A)
    with pytest.raises(ConfigError, match=r"must_pass=.* must be a share"):
        check(questions(["a"]), out, must_pass=share)
