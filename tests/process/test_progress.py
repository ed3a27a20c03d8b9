"""Lines of progress."""

from __future__ import annotations

import contextlib
import re

import pytest

from olmo_sparsity.process.progress import Progress


def test_a_stopped_line_names_no_time_that_is_left(capsys: pytest.CaptureFixture) -> None:
    with contextlib.suppress(ValueError), Progress("training", 9, "steps", log_every_s=0) as it:
        it.update(1)
        raise ValueError
    shown, last = capsys.readouterr().err.splitlines()
    assert shown.endswith(" left")
    assert re.fullmatch(r"training · 1/9 steps · \S+ steps/s · stopped in \d+ s", last)
