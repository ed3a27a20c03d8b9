"""The simulation of verdicts where no source matters, as docs/sources.md cites it."""

from __future__ import annotations

import re

from study.false_names import one_sided


def test_a_long_tail_that_lowers_the_loss_raises_the_false_names_and_no_other_does() -> None:
    shares = [float(share) for share in re.findall(r"0\.\d{3}", one_sided(200, seed=6))]
    up, down = shares
    assert 0.05 < up < 0.15
    assert down < 0.05
