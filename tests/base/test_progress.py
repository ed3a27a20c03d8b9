"""The lines that show how far a task is."""

from __future__ import annotations

import contextlib
import re

import pytest

from olmo_sparsity.base.progress import Progress


def test_a_stopped_line_names_no_time_that_is_left(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "LOG_EVERY_S", 0)
    with contextlib.suppress(ValueError), Progress("training", 9, "steps") as it:
        it.update(1)
        raise ValueError
    shown, last = capsys.readouterr().err.splitlines()
    assert shown.endswith(" left")
    assert re.fullmatch(r"training · 1/9 steps · \S+ steps/s · stopped in \d+ s", last)


def test_a_log_names_each_unit_that_begins_once(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "LEAST_PAUSE_S", 0)
    with Progress("explaining", 3, "questions") as progress:
        progress.resume_at(1)
        for name in ("opening", "closing"):
            progress.begin(f"reading {name}: a, b")
            progress.update(progress.done + 1)
    *begun, last = capsys.readouterr().err.splitlines()
    assert begun == [
        "explaining · questions 2/3 · reading opening: a, b",
        "explaining · questions 3/3 · reading closing: a, b",
    ]
    assert last.startswith("explaining · 3/3 questions · ")


def test_short_units_are_not_listed_one_by_one(capsys: pytest.CaptureFixture) -> None:
    with Progress("explaining", 100, "questions") as progress:
        for number in range(100):
            progress.begin(f"reading {number}")
            progress.update(number + 1)
    assert len(capsys.readouterr().err.splitlines()) < 20


def test_steps_of_an_earlier_run_are_shown_but_not_counted_in_the_rate(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "olmo_sparsity.base.progress.time.perf_counter", iter((0.0, 2.0, 2.0)).__next__
    )
    with Progress("trials", 100, "steps") as progress:
        progress.skip(90)
        progress.update(94)
    assert "94/100 steps · 2 steps/s" in capsys.readouterr().err
