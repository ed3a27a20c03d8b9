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
