"""The answer with citations of the sources that its statements rely on (citations.py)."""

from __future__ import annotations

import pytest

from olmo_sparsity import Answer
from olmo_sparsity.base.errors import ConfigError
from tests.support.sources import (
    asked,
    with_verdicts,
)

ANSWER = Answer("w1 w2 w3 w8 w9 w30 w5", [(0, 8), (9, 14), (15, 18)])
"""Its statements rest on a, on either of a and c, on a and b together."""

NUMBERED = "w1 w2 w3 [1] w8 w9 [1/2] w30 [1][3] w5\n\n[1] a\n[2] c\n[3] b"


@pytest.mark.parametrize(
    ("citations", "shown"),
    [
        ("[1]", NUMBERED),
        ("[^1]", "w1 w2 w3 [^1] w8 w9 [^1/2] w30 [^1][^3] w5\n\n[^1]: a\n[^2]: c\n[^3]: b"),
        ("(name)", "w1 w2 w3 (a) w8 w9 (a/c) w30 (a)(b) w5"),
    ],
)
def test_the_answer_is_shown_with_citations(citations: str, shown: str) -> None:
    found = with_verdicts(asked(answer=ANSWER))
    assert found.text(citations=citations) == shown
    assert found.text(citations, references=False) == shown.split("\n")[0]


def test_citations_are_numbers_in_brackets_by_default() -> None:
    assert with_verdicts(asked(answer=ANSWER)).text() == NUMBERED


@pytest.mark.parametrize("citations", ["", "[]", "[11]", "[1 name]"])
def test_a_citation_holds_its_number_or_its_name_once(citations: str) -> None:
    with pytest.raises(ConfigError, match="must hold 1 or name once"):
        with_verdicts(asked(answer=ANSWER)).text(citations=citations)


def test_an_answer_without_named_sources_has_no_citations() -> None:
    assert asked(answer=ANSWER).text() == ANSWER.text
