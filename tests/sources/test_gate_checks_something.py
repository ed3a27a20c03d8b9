"""A gate that would check nothing is refused before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.sources.gate.answers import (
    identity_in,
)
from olmo_sparsity.sources.gate.expectations import read_expectations
from olmo_sparsity.sources.gate.gate import check_has_expectations
from tests.support.stored_answers import (
    RESTS_ON_A,
    write_run,
)

GOOD = {"sources": {"a": "x"}, "question": "q", "answer": ["w1", "w2"], "expect": ["a", None]}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"expects": "a"}, "did you mean expect"),
        ({"answers": "a"}, "did you mean answer"),
        ({"expect": ["a"]}, "1 entries, and the answer 2"),
        ({"expect": []}, "checks nothing"),
        ({"expect": {"sources": ["a", "b"]}}, '{"both"'),
        ({"expect": {"sources": []}}, "expect"),
        ({"expect": {"both": ["a"], "either": ["b"]}}, "expect"),
        ({"expect": ["a", ["none", "b"]]}, "mixes none"),
        ({"expect": {"both": ["a", "a"]}}, "names a source twice"),
        ({"expect": {"sources": "none", "nats": 2}}, "has nats of no source"),
        ({"expect": {"sources": "a", "nats": float("inf")}}, "least number"),
        ({"expect": {"sources": "a", "nats": 10**400}}, "least number"),
        ({"id": ["a"]}, "id="),
        ({"expect": ""}, "must be none, a source"),
        ({"expect": {"either": ["a", ""]}}, "must be none, a source"),
    ],
)
def test_a_line_that_would_check_nothing_is_an_error(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | wrong))
    with pytest.raises(DataError, match=r"q\.jsonl:2") as caught:
        read_expectations(path)
    assert said in str(caught.value)


def test_a_request_to_a_chat_api_keeps_its_own_fields(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"messages": [], "model": "m", "tools": [], "temperature": 0}))
    assert read_expectations(path) == [[]]


def test_a_question_without_expectation_is_an_error_without_a_baseline(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    without = {key: value for key, value in GOOD.items() if key != "expect"}
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(without))
    with pytest.raises(DataError, match=r"q\.jsonl:2"):
        check_has_expectations(path, tmp_path / "out", {}, None)


def test_null_is_an_expectation_that_accepts_any_verdict(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | {"expect": None}))
    check_has_expectations(path, tmp_path / "out", {}, None)


def test_a_file_in_which_null_is_all_that_is_expected_checks_nothing(
    questions: Callable[[Any], Path], tmp_path: Path
) -> None:
    out = write_run(tmp_path / "out", RESTS_ON_A)
    with pytest.raises(ConfigError, match="expect"):
        check_has_expectations(questions([None]), out, identity_in(out), None)


def test_a_share_of_no_expectation_is_refused(
    questions: Callable[[Any], Path], tmp_path: Path
) -> None:
    earlier = write_run(tmp_path / "earlier", RESTS_ON_A)
    identity = json.loads((earlier / "identity.json").read_text())
    with pytest.raises(ConfigError, match=r"must_pass=0.9 is a share of the checks of `expect`"):
        check_has_expectations(questions(None), tmp_path / "out", identity, earlier, must_pass=0.9)
    check_has_expectations(questions("a"), tmp_path / "out", identity, earlier, must_pass=0.9)


@pytest.mark.parametrize("baseline", ["out", "x/../out", "nowhere", "."])
def test_a_folder_that_is_no_earlier_run_is_no_baseline(
    questions: Callable[[Any], Path], tmp_path: Path, baseline: str
) -> None:
    out = write_run(tmp_path / "out", RESTS_ON_A)
    with pytest.raises(ConfigError, match="baseline"):
        check_has_expectations(questions("a"), out, identity_in(out), tmp_path / baseline)


def test_an_expected_source_that_a_question_lacks_is_named_before_anything_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(
        json.dumps({"sources": {"warranty": "x"}, "question": "q", "expect": "waranty"})
    )
    check_has_expectations(path, tmp_path / "out", {}, None)
    assert "q.jsonl:1 expects waranty, which is none of its sources (warranty)" in (
        capsys.readouterr().err
    )
