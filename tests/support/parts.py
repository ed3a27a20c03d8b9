"""Parts of a measurement that never happened, and damage to files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from olmo_sparsity.analysis.measurement.parts import Parts
from olmo_sparsity.analysis.results.schemas import PHASES

IDENTITY = {"model": {"fingerprint": "a1"}, "windows": {"long": 64, "short": 16}, "ks": [1, 2]}


def tiny_rows(document: int) -> dict[str, dict]:
    """Of both phases. Document 3 has no rows. Rows come in no order."""
    if document == 3:
        return {phase: {} for phase in PHASES}
    rng = np.random.default_rng(document)
    targets = rng.permutation(5)
    of_units = {"units": ["tokens"] * 5, "selector": ["add_one"] * 5}
    about = {"target": targets, "distant_part": ["document"] * 5, **of_units}
    token_ids = rng.integers(9, size=5)
    drawn = {name: rng.random(5) for name in ("loss_short", "loss_long", "placebo_loss_long")}
    flags = dict.fromkeys(("bigram", "placebo_bigram"), [False] * 5)
    losses = {
        "losses": {"target": targets, "token_id": token_ids, **drawn, **flags},
        "documents": {"name": [f"{document}.txt"]},
    }
    texts = [f"{document}·{place}" for place in targets]
    costs = {"token_forwards": [2**40], "num_targets": [5]}
    recovery = {
        "tokens": {"place": targets, "token_id": token_ids, "text": texts},
        "costs": {"units": ["tokens"], "selector": ["add_one"], **costs},
        "lds": {"target": targets, **of_units, "lds": rng.uniform(-1, 1, 5)},
        "recovery": about
        | {"control": ["own"] * 5, "draw": [0] * 5, "k": [1] * 5, "num_tokens": [1] * 5}
        | {"loss_set": rng.random(5), "loss_without": [None, np.nan, 0.5, 1.0, 0.25]},
        "influence": about
        | {"control": ["unrelated"] * 5, "rank": [1] * 5, "distant_first": rng.integers(50, size=5)}
        | {"distant_end": [60] * 5, "distant_text": ["x"] * 5, "influence": rng.random(5)},
    }
    return {"losses": losses, "recovery": recovery}


def write(parts: Parts, document: int) -> None:
    for phase, tables in tiny_rows(document).items():
        parts.add(phase, document, tables)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(bytes(data))
