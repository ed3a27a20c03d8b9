from __future__ import annotations

import numpy as np

from olmo_sparsity.base.streams import stream


def test_a_stream_depends_on_seed_purpose_and_keys_alone() -> None:
    def drawn(*of: object) -> tuple[int, ...]:
        return tuple(stream(*of).integers(0, 2**40, 3).tolist())  # type: ignore[arg-type]

    assert drawn(0, "targets", np.int64(3), "gap") == drawn(0, "targets", 3, "gap")
    others = [
        drawn(0, "targets", 3, "gap"),
        drawn(1, "targets", 3, "gap"),
        drawn(0, "targets", 3, "key"),  # of the same length
        drawn(0, "targets", 4, "gap"),
        drawn(0, "placebo", 3, "gap"),
        drawn(0, "targets", 34, "gap"),
        drawn(0, "targets", 3, 4, "gap"),
        drawn(0, "targets", "3", "gap"),
    ]
    assert len(set(others)) == len(others)


def test_a_stream_is_the_same_on_every_machine() -> None:
    assert stream(0, "placebo", 1, 64).integers(0, 1000, 4).tolist() == [768, 28, 740, 735]
