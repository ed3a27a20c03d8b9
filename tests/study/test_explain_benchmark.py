"""The benchmark of `explain` asks contestants in processes of their own."""

from __future__ import annotations

import pytest

from benchmarks.explain import Contest, print_costs


def test_a_contestant_answers_what_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    contest = Contest(["random"], cpu_limit_s=60, other_python="")
    costs = print_costs(contest, length=60, shape="10m", num_questions=2)
    assert costs["random"]["cpu_s"] > 0
    assert "| random | " in capsys.readouterr().out


def test_a_contestant_of_another_environment_says_where_to_name_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    contest = Contest(["flashtrace"], cpu_limit_s=60, other_python="")
    costs = print_costs(contest, length=60, shape="10m", num_questions=1)
    assert costs == {}
    assert "name its environment by --other-python" in capsys.readouterr().out
